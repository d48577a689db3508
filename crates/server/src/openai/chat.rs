//! `POST /v1/chat/completions`.

use axum::response::Response;
use engine::Choice;
use serde_json::{Value, json};
use text::Tokenizer;
use text::chat::{ToolCall, messages};

use super::{Head, finish_reason, scored, timings};
use crate::answer::{EndOfAnswer, Step, Whole};
use crate::app::{Engine, new_id};
use crate::chat::{Chat, Effort, check_choice, openai_choice, openai_format, openai_tools};
use crate::error::{ApiError, Result};
use crate::fields::{Fields, parse};
use crate::params::{MAX_TOP, Params, stream_options};
use crate::reply::{Events, Writer};
use crate::routes::{Asked, Call};

/// What a chunk of a stream calls itself.
const CHUNK: &str = "chat.completion.chunk";

/// Answers the request.
pub async fn handle(call: Call) -> Result<Response> {
    call.answer(read).await
}

/// Reads the request.
fn read(engine: &Engine, body: &[u8]) -> Result<Asked<Completion>> {
    let card = &engine.card;
    let mut fields = Fields::body(body)?;
    engine.check_model(fields.string("model")?.as_deref())?;
    let messages = messages(fields.require("messages")?)?;
    if messages.is_empty() {
        return Err(ApiError::field("messages", "at least one message", "none"));
    }
    let (thinking, budget) = effort(&mut fields)?.resolve(card)?;
    let params = Params::read(&mut fields, card, card.sampling(thinking), 1)?;
    let choices = params.choices;
    let mut chat = Chat { budget, ..Chat::new(messages, thinking, params) };
    if let Some(tools) = fields.take("tools") {
        chat.tools = openai_tools(tools)?;
    }
    chat.tool_choice = openai_choice(&mut fields, Some("function"))?;
    check_choice(&chat.tool_choice, &chat.tools)?;
    chat.parallel_calls = fields.boolean("parallel_tool_calls")?.unwrap_or(true);
    chat.format = openai_format(&mut fields, "response_format", Some("json_schema"))?;
    let resume = fields.boolean("continue_final_message")?.unwrap_or(false);
    let open = fields.boolean("add_generation_prompt")?.unwrap_or(!resume);
    if resume == open {
        let expected = "the opposite of continue_final_message";
        return Err(ApiError::field("add_generation_prompt", expected, open));
    }
    chat.resume = resume;
    let logprobs = fields.boolean("logprobs")?.unwrap_or(false);
    let top = fields.whole("top_logprobs", 0)?;
    if top.is_some_and(|top| top > MAX_TOP) {
        let most = format!("at most {MAX_TOP}");
        return Err(ApiError::field("top_logprobs", &most, top.unwrap_or(0)));
    }
    if top.is_some_and(|top| top > 0) && !logprobs {
        return Err(ApiError::field("top_logprobs", "nothing without logprobs", "a number"));
    }
    chat.top = top.unwrap_or(0);
    let (streamed, include_usage) = stream_options(&mut fields)?;
    modalities(&mut fields)?;
    fields.finish()?;
    let writer = Completion {
        head: Head::new("chatcmpl-", &card.id, include_usage),
        tokenizer: card.tokenizer,
        logprobs,
        calls: vec![0; choices],
        ends: Vec::new(),
    };
    Ok((chat.asks(engine)?, writer, streamed))
}

/// How much to think: by OpenAI's word, by the template's switch, or by a number of tokens.
fn effort(fields: &mut Fields<'_>) -> Result<Effort> {
    let mut effort = Effort::default();
    if let Some(word) = fields.string("reasoning_effort")? {
        effort = Effort::from_word(&word, "reasoning_effort")?;
    }
    let mut switches = |fields: &mut Fields<'_>| -> Result<()> {
        effort.thinking = fields.boolean("enable_thinking")?.or(effort.thinking);
        effort.budget = fields.whole("thinking_budget", 0)?.or(effort.budget);
        Ok(())
    };
    switches(fields)?;
    if let Some(mut arguments) = fields.object("chat_template_kwargs")? {
        switches(&mut arguments)?;
        arguments.finish()?;
    }
    Ok(effort)
}

/// Accepts `modalities` if they are what this server has: text.
fn modalities(fields: &mut Fields<'_>) -> Result<()> {
    for (at, value) in fields.array("modalities")? {
        let modality: String = parse(value, &at, "\"text\"")?;
        if modality != "text" {
            return Err(ApiError::field(&at, "\"text\"", format!("{modality:?}")));
        }
    }
    Ok(())
}

/// Writes `chat.completion` objects and their chunks.
struct Completion {
    head: Head,
    tokenizer: &'static Tokenizer,
    logprobs: bool,
    /// Calls so far, of each answer.
    calls: Vec<usize>,
    ends: Vec<EndOfAnswer>,
}

impl Completion {
    fn chunk(&self, index: usize, delta: Value, logprobs: Value, finish: Option<&str>) -> Value {
        let choice = json!({
            "index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish,
        });
        self.head.chunk(CHUNK, choice)
    }

    fn scores<'a>(&self, tokens: impl Iterator<Item = &'a Choice>) -> Value {
        if !self.logprobs {
            return Value::Null;
        }
        let content: Vec<Value> = tokens.map(|choice| scored(self.tokenizer, choice)).collect();
        json!({"content": content, "refusal": null})
    }
}

fn function(call: &ToolCall) -> Value {
    json!({"name": call.name, "arguments": call.arguments})
}

impl Writer for Completion {
    fn begin(&mut self, events: &mut Events) {
        for index in 0..self.calls.len() {
            let delta = json!({"role": "assistant", "content": ""});
            events.data(&self.chunk(index, delta, Value::Null, None));
        }
    }

    fn step(&mut self, step: Step, events: &mut Events) {
        let index = step.index;
        let mut deltas = Vec::new();
        if !step.reasoning.is_empty() {
            deltas.push(json!({"reasoning_content": step.reasoning, "reasoning": step.reasoning}));
        }
        if !step.content.is_empty() {
            deltas.push(json!({"content": step.content}));
        }
        for call in &step.calls {
            let number = self.calls[index];
            self.calls[index] += 1;
            let mut first = function(call);
            first["arguments"] = "".into();
            let id = new_id("call_");
            deltas.push(json!({"tool_calls": [
                {"index": number, "id": id, "type": "function", "function": first},
            ]}));
            deltas.push(json!({"tool_calls": [
                {"index": number, "function": {"arguments": call.arguments}},
            ]}));
        }
        let mut logprobs = Value::Null;
        if self.logprobs && step.token.is_some() {
            logprobs = self.scores(step.token.iter());
            if deltas.is_empty() {
                deltas.push(json!({"content": ""}));
            }
        }
        for delta in deltas {
            events.data(&self.chunk(index, delta, logprobs.take(), None));
        }
        if let Some(end) = step.ended {
            let finish = finish_reason(end.finish);
            let mut chunk = self.chunk(index, json!({}), Value::Null, Some(finish));
            chunk["timings"] = timings(std::slice::from_ref(&end));
            events.data(&chunk);
            self.ends.push(end);
        }
    }

    fn end(&mut self, events: &mut Events) {
        self.head.end(CHUNK, &self.ends, events);
    }

    fn fail(&mut self, error: &ApiError, events: &mut Events) {
        events.data(&error.openai());
    }

    fn whole(&mut self, answers: Vec<Whole>) -> Value {
        let mut choices = Vec::new();
        for (index, answer) in answers.into_iter().enumerate() {
            let mut message =
                json!({"role": "assistant", "content": answer.content, "refusal": null});
            if !answer.reasoning.is_empty() {
                message["reasoning_content"] = answer.reasoning.as_str().into();
                message["reasoning"] = answer.reasoning.into();
            }
            if !answer.calls.is_empty() {
                if answer.content.is_empty() {
                    message["content"] = Value::Null;
                }
                let call = |call: &ToolCall| json!({"id": new_id("call_"), "type": "function", "function": function(call)});
                message["tool_calls"] = answer.calls.iter().map(call).collect();
            }
            choices.push(json!({
                "index": index,
                "message": message,
                "logprobs": self.scores(answer.tokens.iter()),
                "finish_reason": answer.ended.as_ref().map(|end| finish_reason(end.finish)),
            }));
            self.ends.extend(answer.ended);
        }
        self.head.whole("chat.completion", choices, &self.ends)
    }
}
