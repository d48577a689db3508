//! `POST /v1/responses`: OpenAI's newer API, as far as text, thoughts, tools and streams need it. Nothing
//! is stored, so a conversation is sent whole each time.

use axum::response::Response;
use serde_json::value::RawValue;
use serde_json::{Value, json};
use text::chat::ToolCall;
use text::{Message, Role};

use crate::answer::{Answers, Ask, EndOfAnswer, Finish, Step, Whole};
use crate::app::{Engine, new_id, unix_time};
use crate::chat::{Chat, Effort, Format, ToolChoice, check_choice, expect_function, flat_tool};
use crate::error::{ApiError, Result};
use crate::fields::{Fields, elements, is_string, parse};
use crate::params::Params;
use crate::reply::{Events, Writer, send};
use crate::routes::Call;

/// Answers the request.
pub async fn handle(mut call: Call) -> Result<Response> {
    let (asks, writer, streamed) = call.prepare(read).await?;
    let answers = Answers::start(&call.app, &call.engine, &call.record, asks)?;
    send(answers, writer, streamed).await
}

fn read(engine: &Engine, body: &[u8]) -> Result<(Vec<Ask>, Output, bool)> {
    let card = &engine.card;
    let mut fields = Fields::body(body)?;
    engine.check_model(fields.string("model")?.as_deref())?;
    let echo = |fields: &Fields<'_>, name: &str, otherwise: Value| match fields.get(name) {
        Some(value) => serde_json::from_str(value.get()).unwrap_or(otherwise),
        None => otherwise,
    };
    let mut object = json!({
        "id": new_id("resp_"),
        "object": "response",
        "created_at": unix_time(),
        "status": "in_progress",
        "background": false,
        "error": null,
        "incomplete_details": null,
        "instructions": echo(&fields, "instructions", Value::Null),
        "max_output_tokens": echo(&fields, "max_output_tokens", Value::Null),
        "metadata": echo(&fields, "metadata", json!({})),
        "model": card.id,
        "output": [],
        "parallel_tool_calls": echo(&fields, "parallel_tool_calls", true.into()),
        "previous_response_id": null,
        "reasoning": echo(&fields, "reasoning", json!({"effort": null, "summary": null})),
        "store": false,
        "text": echo(&fields, "text", json!({"format": {"type": "text"}})),
        "tool_choice": echo(&fields, "tool_choice", "auto".into()),
        "tools": echo(&fields, "tools", json!([])),
        "truncation": "disabled",
        "usage": null,
        "user": echo(&fields, "user", Value::Null),
    });
    let mut messages = Vec::new();
    if let Some(instructions) = fields.string("instructions")? {
        messages.push(Message::new(Role::System, instructions));
    }
    input(&mut fields, &mut messages)?;
    if messages.is_empty() {
        return Err(ApiError::field("input", "at least one message", "none"));
    }
    let (thinking, budget) = effort(&mut fields)?.resolve(card)?;
    let mut params = Params::read(&mut fields, card, card.sampling(thinking))?;
    params.max_tokens = fields.whole("max_output_tokens", 1)?.or(params.max_tokens);
    if params.choices > 1 {
        return Err(ApiError::field("n", "one answer", params.choices));
    }
    object["temperature"] = params.sampling.temperature.into();
    object["top_p"] = params.sampling.top_p.into();
    let mut chat = Chat { budget, ..Chat::new(messages, thinking, params) };
    for (at, value) in fields.array("tools")?.unwrap_or_default() {
        let mut tool = Fields::read(value, at)?;
        expect_function(&mut tool)?;
        tool.ignore(&["strict"]);
        chat.tools.push(flat_tool(tool, "parameters")?);
    }
    chat.tool_choice = tool_choice(&mut fields)?;
    check_choice(&chat.tool_choice, &chat.tools)?;
    chat.parallel_calls = fields.boolean("parallel_tool_calls")?.unwrap_or(true);
    chat.format = format(&mut fields)?;
    for (name, only) in [("truncation", "\"disabled\""), ("background", "false")] {
        if let Some(value) = fields.take(name).filter(|value| value.get() != only) {
            return Err(ApiError::field(name, only, value.get()));
        }
    }
    fields.ignore(&["include"]);
    let streamed = fields.boolean("stream")?.unwrap_or(false);
    if let Some(mut options) = fields.object("stream_options")? {
        options.ignore(&["include_obfuscation"]);
        options.finish()?;
    }
    fields.finish()?;
    let writer = Output { object, items: Vec::new(), open: None, sequence: 0, end: None };
    Ok((chat.asks(engine)?, writer, streamed))
}

fn effort(fields: &mut Fields<'_>) -> Result<Effort> {
    let Some(mut reasoning) = fields.object("reasoning")? else { return Ok(Effort::default()) };
    reasoning.ignore(&["summary", "generate_summary"]);
    let word = reasoning.string("effort")?;
    reasoning.finish()?;
    word.map_or(Ok(Effort::default()), |word| Effort::from_word(&word, "reasoning.effort"))
}

fn tool_choice(fields: &mut Fields<'_>) -> Result<ToolChoice> {
    let Some(value) = fields.take("tool_choice") else { return Ok(ToolChoice::Auto) };
    match value.get() {
        "\"none\"" => Ok(ToolChoice::None),
        "\"auto\"" => Ok(ToolChoice::Auto),
        "\"required\"" => Ok(ToolChoice::Required),
        other if other.starts_with('{') => {
            let mut choice = Fields::read(value, "tool_choice".into())?;
            expect_function(&mut choice)?;
            let name = choice.string("name")?.unwrap_or_default();
            choice.finish()?;
            Ok(ToolChoice::Named(name))
        }
        other => Err(ApiError::field("tool_choice", "none, auto, required or a function", other)),
    }
}

fn format(fields: &mut Fields<'_>) -> Result<Format> {
    let Some(mut text) = fields.object("text")? else { return Ok(Format::Text) };
    let format = text.object("format")?;
    text.finish()?;
    let Some(mut format) = format else { return Ok(Format::Text) };
    let read = match format.string("type")?.as_deref() {
        Some("text") => Format::Text,
        Some("json_object") => Format::Json(json!({"type": "object"}), "text.format".into()),
        Some("json_schema") => {
            format.ignore(&["name", "description", "strict"]);
            let at = format.path("schema");
            Format::fits(format.require("schema")?, at)?
        }
        other => {
            let found = other.unwrap_or("nothing");
            let expected = "text, json_object or json_schema";
            return Err(ApiError::field("text.format.type", expected, found));
        }
    };
    format.finish()?;
    Ok(read)
}

/// Reads `input`: a text of the user, or items.
fn input(fields: &mut Fields<'_>, messages: &mut Vec<Message>) -> Result<()> {
    let value = fields.require("input")?;
    if is_string(value) {
        messages.push(Message::new(Role::User, parse::<String>(value, "input", "a text")?));
        return Ok(());
    }
    let mut thought = None;
    for (at, item) in elements(value, "input")? {
        let mut item = Fields::read(item, at)?;
        let path = item.path("type");
        match item.string("type")?.as_deref().unwrap_or("message") {
            "message" => {
                let role = role(&mut item)?;
                let path = item.path("content");
                let content = text_of(item.require("content")?, &path)?;
                let reasoning = if role == Role::Assistant { thought.take() } else { None };
                messages.push(Message { reasoning, ..Message::new(role, content) });
            }
            "reasoning" => {
                let path = item.path("content");
                thought = item.take("content").map(|value| text_of(value, &path)).transpose()?;
            }
            "function_call" => {
                let name = parse(item.require("name")?, &item.path("name"), "a name")?;
                let arguments = item.string("arguments")?.unwrap_or_else(|| "{}".into());
                // Calls belong to what the assistant said before them.
                if messages.last().is_none_or(|last| last.role != Role::Assistant) {
                    let reasoning = thought.take();
                    messages.push(Message { reasoning, ..Message::new(Role::Assistant, "") });
                }
                if let Some(last) = messages.last_mut() {
                    last.tool_calls.push(ToolCall { name, arguments });
                }
            }
            "function_call_output" => {
                let path = item.path("output");
                let output = text_of(item.require("output")?, &path)?;
                messages.push(Message::new(Role::Tool, output));
            }
            other => {
                let expected = "message, reasoning, function_call or function_call_output";
                return Err(ApiError::field(&path, expected, format!("{other:?}")));
            }
        }
    }
    Ok(())
}

fn role(item: &mut Fields<'_>) -> Result<Role> {
    let path = item.path("role");
    match item.string("role")?.as_deref() {
        Some("system" | "developer") => Ok(Role::System),
        Some("user") => Ok(Role::User),
        Some("assistant") => Ok(Role::Assistant),
        other => {
            let found = format!("{:?}", other.unwrap_or_default());
            Err(ApiError::field(&path, "system, developer, user or assistant", found))
        }
    }
}

/// A text, or parts of text.
fn text_of(value: &RawValue, at: &str) -> Result<String> {
    if is_string(value) {
        return parse(value, at, "a text");
    }
    let mut text = String::new();
    for (at, value) in elements(value, at)? {
        let mut part = Fields::read(value, at)?;
        let path = part.path("type");
        match part.string("type")?.as_deref() {
            Some("input_text" | "output_text" | "reasoning_text" | "text") => {
                text.push_str(&part.string("text")?.unwrap_or_default());
            }
            other => {
                let found = format!("{:?}", other.unwrap_or_default());
                return Err(ApiError::field(&path, "input_text or output_text", found));
            }
        }
    }
    Ok(text)
}

/// Writes response objects as items of output.
struct Output {
    /// The response without its items.
    object: Value,
    /// Items that are complete.
    items: Vec<Value>,
    open: Option<Open>,
    sequence: usize,
    end: Option<EndOfAnswer>,
}

/// An item of text that is being written.
struct Open {
    kind: Kind,
    id: String,
    text: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Reasoning,
    Message,
}

impl Open {
    fn new(kind: Kind) -> Self {
        let prefix = if kind == Kind::Message { "msg_" } else { "rs_" };
        Open { kind, id: new_id(prefix), text: String::new() }
    }

    fn part(&self, text: &str) -> Value {
        match self.kind {
            Kind::Reasoning => json!({"type": "reasoning_text", "text": text}),
            Kind::Message => json!({
                "type": "output_text", "text": text, "annotations": [], "logprobs": [],
            }),
        }
    }

    fn item(&self, status: &str, content: Vec<Value>) -> Value {
        match self.kind {
            Kind::Reasoning => json!({
                "id": self.id, "type": "reasoning", "summary": [], "content": content,
                "status": status,
            }),
            Kind::Message => json!({
                "id": self.id, "type": "message", "role": "assistant", "content": content,
                "status": status,
            }),
        }
    }

    /// The stem of its events' names.
    fn events(&self) -> &'static str {
        match self.kind {
            Kind::Reasoning => "response.reasoning_text",
            Kind::Message => "response.output_text",
        }
    }
}

fn call_item(id: &str, call_id: &str, name: &str, arguments: &str, status: &str) -> Value {
    json!({
        "id": id, "type": "function_call", "call_id": call_id, "name": name,
        "arguments": arguments, "status": status,
    })
}

impl Output {
    fn emit(&mut self, name: &str, mut data: Value, events: &mut Events) {
        data["type"] = name.into();
        data["sequence_number"] = self.sequence.into();
        self.sequence += 1;
        events.named(name, &data);
    }

    fn grow(&mut self, kind: Kind, text: &str, events: &mut Events) {
        if text.is_empty() {
            return;
        }
        let mut open = match self.open.take() {
            Some(open) if open.kind == kind => open,
            other => {
                self.open = other;
                self.close(events);
                let open = Open::new(kind);
                let index = self.items.len();
                let item = open.item("in_progress", Vec::new());
                let added = json!({"output_index": index, "item": item});
                self.emit("response.output_item.added", added, events);
                let part = json!({
                    "item_id": open.id, "output_index": index, "content_index": 0,
                    "part": open.part(""),
                });
                self.emit("response.content_part.added", part, events);
                open
            }
        };
        open.text.push_str(text);
        let mut delta = json!({
            "item_id": open.id, "output_index": self.items.len(), "content_index": 0, "delta": text,
        });
        if kind == Kind::Message {
            delta["logprobs"] = json!([]);
        }
        self.emit(&format!("{}.delta", open.events()), delta, events);
        self.open = Some(open);
    }

    fn close(&mut self, events: &mut Events) {
        let Some(open) = self.open.take() else { return };
        let index = self.items.len();
        let at = json!({"item_id": open.id, "output_index": index, "content_index": 0});
        let mut done = at.clone();
        done["text"] = open.text.as_str().into();
        if open.kind == Kind::Message {
            done["logprobs"] = json!([]);
        }
        self.emit(&format!("{}.done", open.events()), done, events);
        let part = open.part(&open.text);
        let mut done = at;
        done["part"] = part.clone();
        self.emit("response.content_part.done", done, events);
        let item = open.item("completed", vec![part]);
        let done = json!({"output_index": index, "item": item});
        self.emit("response.output_item.done", done, events);
        self.items.push(item);
    }

    fn call(&mut self, call: &ToolCall, events: &mut Events) {
        self.close(events);
        let (id, call_id, index) = (new_id("fc_"), new_id("call_"), self.items.len());
        let item =
            |arguments: &str, status| call_item(&id, &call_id, &call.name, arguments, status);
        let added = json!({"output_index": index, "item": item("", "in_progress")});
        self.emit("response.output_item.added", added, events);
        let at = |key: &str| json!({"item_id": id, "output_index": index, "name": call.name, key: call.arguments});
        self.emit("response.function_call_arguments.delta", at("delta"), events);
        self.emit("response.function_call_arguments.done", at("arguments"), events);
        let whole = item(&call.arguments, "completed");
        let done = json!({"output_index": index, "item": whole});
        self.emit("response.output_item.done", done, events);
        self.items.push(whole);
    }

    /// The response as it stands.
    fn response(&self, status: &str) -> Value {
        let mut object = self.object.clone();
        object["status"] = status.into();
        object["output"] = self.items.clone().into();
        if let Some(end) = &self.end {
            if end.finish == Finish::Length {
                object["incomplete_details"] = json!({"reason": "max_output_tokens"});
            }
            let usage = end.usage;
            object["usage"] = json!({
                "input_tokens": usage.prompt,
                "input_tokens_details": {"cached_tokens": usage.cached},
                "output_tokens": usage.generated,
                "output_tokens_details": {"reasoning_tokens": end.reasoning_tokens},
                "total_tokens": usage.prompt + usage.generated,
            });
        }
        object
    }

    fn status(&self) -> &'static str {
        match self.end.as_ref().map(|end| end.finish) {
            Some(Finish::Length) => "incomplete",
            _ => "completed",
        }
    }
}

impl Writer for Output {
    fn begin(&mut self, events: &mut Events) {
        for name in ["response.created", "response.in_progress"] {
            let response = self.response("in_progress");
            self.emit(name, json!({"response": response}), events);
        }
    }

    fn step(&mut self, step: Step, events: &mut Events) {
        self.grow(Kind::Reasoning, &step.reasoning, events);
        self.grow(Kind::Message, &step.content, events);
        step.calls.iter().for_each(|call| self.call(call, events));
        self.end = step.ended.or(self.end.take());
    }

    fn end(&mut self, events: &mut Events) {
        self.close(events);
        let status = self.status();
        let response = self.response(status);
        self.emit(&format!("response.{status}"), json!({"response": response}), events);
    }

    fn fail(&mut self, error: &ApiError, events: &mut Events) {
        let mut response = self.response("failed");
        response["error"] = json!({"code": "server_error", "message": error.message});
        self.emit("response.failed", json!({"response": response}), events);
    }

    fn whole(&mut self, answers: Vec<Whole>) -> Value {
        // The items are put together as in a stream that nobody reads.
        let mut unread = Events::default();
        for answer in answers {
            self.grow(Kind::Reasoning, &answer.reasoning, &mut unread);
            self.grow(Kind::Message, &answer.content, &mut unread);
            answer.calls.iter().for_each(|call| self.call(call, &mut unread));
            self.end = answer.ended;
        }
        self.close(&mut unread);
        self.response(self.status())
    }
}
