//! `POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's API, as far as text, thoughts, tools
//! and streams need it.

use axum::response::Response;
use model::Variant;
use serde_json::value::RawValue;
use serde_json::{Value, json};
use text::chat::ToolCall;
use text::json::write_python;
use text::{Message, Role};

use crate::answer::{Answers, Ask, EndOfAnswer, Finish, Step, Whole};
use crate::app::{Engine, new_id};
use crate::chat::{Chat, Effort, Format, Tool, ToolChoice, check_choice, flat_tool};
use crate::error::{ApiError, Result};
use crate::fields::{Fields, elements, is_string, parse};
use crate::params::{Params, stop_texts};
use crate::reply::{Events, Writer, json_body, send};
use crate::routes::Call;

/// Stop sequences of one request.
const MAX_STOPS: usize = 64;

/// Answers a request for a message.
pub async fn handle(mut call: Call) -> Result<Response> {
    let (asks, writer, streamed) = call.prepare(read).await?;
    let answers = Answers::start(&call.app, &call.engine, &call.record, asks)?;
    send(answers, writer, streamed).await
}

/// Counts the prompt tokens of a request.
pub async fn count(mut call: Call) -> Result<Response> {
    let tokens = call.prepare(|engine, body| {
        let mut fields = Fields::body(body)?;
        let chat = conversation(engine, &mut fields)?;
        fields.finish()?;
        Ok(chat.asks(engine)?.first().map_or(0, |ask| ask.prompt.len()))
    });
    Ok(json_body(&json!({"input_tokens": tokens.await?})))
}

fn read(engine: &Engine, body: &[u8]) -> Result<(Vec<Ask>, Blocks, bool)> {
    let mut fields = Fields::body(body)?;
    let mut chat = conversation(engine, &mut fields)?;
    if chat.params.max_tokens.is_none_or(|tokens| tokens == 0) {
        let found = chat.params.max_tokens.map_or("nothing", |_| "0");
        return Err(ApiError::field("max_tokens", "a whole number, at least 1", found));
    }
    if chat.params.choices > 1 {
        return Err(ApiError::field("n", "one answer", chat.params.choices));
    }
    chat.params.stop_texts.extend(stop_texts(&mut fields, "stop_sequences", MAX_STOPS)?);
    let streamed = fields.boolean("stream")?.unwrap_or(false);
    fields.finish()?;
    let asks = chat.asks(engine)?;
    let writer = Blocks {
        id: new_id("msg_"),
        model: engine.card.id.clone(),
        prompt: asks.first().map_or(0, |ask| ask.prompt.len()),
        open: None,
        next: 0,
        end: None,
    };
    Ok((asks, writer, streamed))
}

/// What both endpoints read: model, system, messages, tools, thinking, sampling.
fn conversation(engine: &Engine, fields: &mut Fields<'_>) -> Result<Chat> {
    let card = &engine.card;
    engine.check_model(fields.string("model")?.as_deref())?;
    let mut messages = Vec::new();
    if let Some(system) = fields.take("system") {
        messages.push(Message::new(Role::System, text_of(system, "system")?));
    }
    for (at, value) in elements(fields.require("messages")?, "messages")? {
        message(Fields::read(value, at)?, &mut messages)?;
    }
    if messages.iter().all(|message| message.role == Role::System) {
        return Err(ApiError::field("messages", "at least one message", "none"));
    }
    let (thinking, budget) = effort(fields, card.variant)?.resolve(card)?;
    let params = Params::read(fields, card, card.sampling(thinking))?;
    // An answer that the client has begun is continued.
    let resume = messages
        .last()
        .is_some_and(|last| last.role == Role::Assistant && last.tool_calls.is_empty());
    let mut chat = Chat { budget, resume, ..Chat::new(messages, thinking, params) };
    for (at, value) in fields.array("tools")?.unwrap_or_default() {
        chat.tools.push(tool(Fields::read(value, at)?)?);
    }
    if let Some(mut choice) = fields.object("tool_choice")? {
        chat.tool_choice = match choice.string("type")?.as_deref() {
            Some("auto") => ToolChoice::Auto,
            Some("any") => ToolChoice::Required,
            Some("none") => ToolChoice::None,
            Some("tool") => ToolChoice::Named(choice.string("name")?.unwrap_or_default()),
            other => {
                let found = other.unwrap_or("nothing");
                return Err(ApiError::field("tool_choice.type", "auto, any, tool or none", found));
            }
        };
        chat.parallel_calls = !choice.boolean("disable_parallel_tool_use")?.unwrap_or(false);
        choice.finish()?;
    }
    check_choice(&chat.tool_choice, &chat.tools)?;
    if let Some(mut config) = fields.object("output_config")? {
        // How much to think is said by `thinking`.
        config.ignore(&["effort"]);
        if let Some(mut format) = config.object("format")? {
            let path = format.path("type");
            if let Some(other) = format.string("type")?.filter(|kind| kind != "json_schema") {
                return Err(ApiError::field(&path, "\"json_schema\"", format!("{other:?}")));
            }
            let at = format.path("schema");
            chat.format = Format::fits(format.require("schema")?, at)?;
            format.finish()?;
        }
        config.finish()?;
    }
    Ok(chat)
}

/// Thinks only where asked to, as this API's clients expect, or where the model cannot help it.
fn effort(fields: &mut Fields<'_>, variant: Variant) -> Result<Effort> {
    let silent = Effort { thinking: (variant == Variant::Instruct).then_some(false), budget: None };
    let Some(mut thinking) = fields.object("thinking")? else { return Ok(silent) };
    let effort = match thinking.string("type")?.as_deref() {
        Some("enabled" | "adaptive") => {
            Effort { thinking: Some(true), budget: thinking.whole("budget_tokens", 1)? }
        }
        Some("disabled") => Effort { thinking: Some(false), budget: None },
        other => {
            let found = other.unwrap_or("nothing");
            return Err(ApiError::field("thinking.type", "enabled, adaptive or disabled", found));
        }
    };
    thinking.ignore(&["display"]);
    thinking.finish()?;
    Ok(effort)
}

fn tool(mut fields: Fields<'_>) -> Result<Tool> {
    let path = fields.path("type");
    if let Some(kind) = fields.string("type")?.filter(|kind| kind != "custom") {
        return Err(ApiError::field(&path, "\"custom\"", format!("{kind:?}")));
    }
    fields.ignore(&["cache_control", "strict", "eager_input_streaming"]);
    flat_tool(fields, "input_schema")
}

/// Reads one message into the turns that the model knows: results of tools are turns of their own.
fn message(mut fields: Fields<'_>, messages: &mut Vec<Message>) -> Result<()> {
    let path = fields.path("role");
    let role = match fields.string("role")?.as_deref() {
        Some("user") => Role::User,
        Some("assistant") => Role::Assistant,
        Some("system") => Role::System,
        other => {
            let found = format!("{:?}", other.unwrap_or_default());
            return Err(ApiError::field(&path, "user, assistant or system", found));
        }
    };
    let path = fields.path("content");
    let content = fields.require("content")?;
    fields.finish()?;
    let mut turn = Message::new(role, "");
    let mut said = false;
    if is_string(content) {
        turn.content = parse(content, &path, "a text")?;
        messages.push(turn);
        return Ok(());
    }
    for (at, value) in elements(content, &path)? {
        let mut block = Fields::read(value, at)?;
        let kind_at = block.path("type");
        let kind = block.string("type")?.unwrap_or_default();
        match (kind.as_str(), role) {
            ("text", _) => {
                turn.content.push_str(&block.string("text")?.unwrap_or_default());
                said = true;
            }
            ("thinking", Role::Assistant) => {
                turn.reasoning = block.string("thinking")?;
                said = true;
            }
            // Another provider's thoughts, which only it can read.
            ("redacted_thinking", Role::Assistant) => said = true,
            ("tool_use", Role::Assistant) => {
                let name = parse(block.require("name")?, &block.path("name"), "a name")?;
                let mut arguments = String::new();
                match block.take("input") {
                    // As the model itself writes it, whatever spaces the client put between.
                    Some(input) => write_python(input, &mut arguments)?,
                    None => arguments.push_str("{}"),
                }
                turn.tool_calls.push(ToolCall { name, arguments });
                said = true;
            }
            ("tool_result", Role::User) => {
                let path = block.path("content");
                let content = block.take("content").map(|value| text_of(value, &path));
                messages.push(Message::new(Role::Tool, content.transpose()?.unwrap_or_default()));
            }
            (other, _) => {
                let expected =
                    "text, tool_result of the user, or thinking or tool_use of the assistant";
                return Err(ApiError::field(&kind_at, expected, format!("{other:?}")));
            }
        }
    }
    if said || content.get() == "[]" {
        messages.push(turn);
    }
    Ok(())
}

/// A text, or blocks of text.
fn text_of(value: &RawValue, at: &str) -> Result<String> {
    if is_string(value) {
        return parse(value, at, "a text");
    }
    let mut text = String::new();
    for (at, value) in elements(value, at)? {
        let mut block = Fields::read(value, at)?;
        let path = block.path("type");
        match block.string("type")?.as_deref() {
            Some("text") => text.push_str(&block.string("text")?.unwrap_or_default()),
            other => {
                let found = format!("{:?}", other.unwrap_or_default());
                return Err(ApiError::field(&path, "\"text\"", found));
            }
        }
    }
    Ok(text)
}

/// Writes messages as blocks of content.
struct Blocks {
    id: String,
    model: String,
    prompt: usize,
    /// Kind of the block that is being written.
    open: Option<&'static str>,
    /// Number of the next block.
    next: usize,
    end: Option<EndOfAnswer>,
}

impl Blocks {
    fn object(&self, content: Vec<Value>) -> Value {
        let (reason, stop) = self
            .end
            .as_ref()
            .map_or((Value::Null, None), |end| (stop_reason(end).into(), end.stop_text.as_deref()));
        json!({
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": self.usage(),
        })
    }

    fn usage(&self) -> Value {
        let (cached, generated) =
            self.end.as_ref().map_or((0, 0), |end| (end.usage.cached, end.usage.generated));
        json!({
            "input_tokens": self.prompt - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": generated,
        })
    }

    fn close(&mut self, events: &mut Events) {
        if self.open.take().is_some() {
            let index = self.next - 1;
            let data = json!({"type": "content_block_stop", "index": index});
            events.named("content_block_stop", &data);
        }
    }

    /// Begins a block, unless one of this kind is open.
    fn ensure(&mut self, kind: &'static str, block: Value, events: &mut Events) {
        if self.open == Some(kind) {
            return;
        }
        self.close(events);
        let data =
            json!({"type": "content_block_start", "index": self.next, "content_block": block});
        events.named("content_block_start", &data);
        self.open = Some(kind);
        self.next += 1;
    }

    fn delta(&self, delta: Value, events: &mut Events) {
        let data = json!({"type": "content_block_delta", "index": self.next - 1, "delta": delta});
        events.named("content_block_delta", &data);
    }
}

fn stop_reason(end: &EndOfAnswer) -> &'static str {
    match end.finish {
        Finish::Stop if end.stop_text.is_some() => "stop_sequence",
        Finish::Stop => "end_turn",
        Finish::Length => "max_tokens",
        Finish::Calls => "tool_use",
    }
}

fn call_id() -> String {
    new_id("toolu_")
}

/// The input of a call as an object; the model's JSON was checked when the call was read.
fn input(call: &ToolCall) -> Value {
    serde_json::from_str(&call.arguments).unwrap_or_else(|_| json!({}))
}

impl Writer for Blocks {
    fn begin(&mut self, events: &mut Events) {
        let data = json!({"type": "message_start", "message": self.object(Vec::new())});
        events.named("message_start", &data);
    }

    fn step(&mut self, step: Step, events: &mut Events) {
        if !step.reasoning.is_empty() {
            let block = json!({"type": "thinking", "thinking": "", "signature": ""});
            self.ensure("thinking", block, events);
            self.delta(json!({"type": "thinking_delta", "thinking": step.reasoning}), events);
        }
        if !step.content.is_empty() {
            self.ensure("text", json!({"type": "text", "text": ""}), events);
            self.delta(json!({"type": "text_delta", "text": step.content}), events);
        }
        for call in &step.calls {
            self.close(events);
            let block =
                json!({"type": "tool_use", "id": call_id(), "name": call.name, "input": {}});
            self.ensure("tool_use", block, events);
            let delta = json!({"type": "input_json_delta", "partial_json": call.arguments});
            self.delta(delta, events);
            self.close(events);
        }
        self.end = step.ended.or(self.end.take());
    }

    fn end(&mut self, events: &mut Events) {
        self.close(events);
        let end = self.object(Vec::new());
        let delta = json!({
            "type": "message_delta",
            "delta": {"stop_reason": end["stop_reason"], "stop_sequence": end["stop_sequence"]},
            "usage": end["usage"],
        });
        events.named("message_delta", &delta);
        events.named("message_stop", &json!({"type": "message_stop"}));
    }

    fn fail(&mut self, error: &ApiError, events: &mut Events) {
        events.named("error", &error.anthropic());
    }

    fn whole(&mut self, answers: Vec<Whole>) -> Value {
        let mut content = Vec::new();
        for answer in answers {
            if !answer.reasoning.is_empty() {
                content.push(json!({
                    "type": "thinking", "thinking": answer.reasoning, "signature": "",
                }));
            }
            if !answer.content.is_empty() {
                content.push(json!({"type": "text", "text": answer.content}));
            }
            content.extend(answer.calls.iter().map(|call| {
                json!({"type": "tool_use", "id": call_id(), "name": call.name, "input": input(call)})
            }));
            self.end = answer.ended;
        }
        self.object(content)
    }
}
