//! `POST /v1/responses`: OpenAI's newer API, as far as text, thoughts, tools and streams need it. Nothing
//! is stored, so a conversation is sent whole each time.

mod input;
mod output;

use axum::response::Response;
use serde_json::{Value, json};
use text::{Message, Role};

use crate::app::{Engine, new_id, unix_time};
use crate::chat::{Chat, Effort, Format, ToolChoice, check_choice, expect_function, flat_tool};
use crate::error::{ApiError, Result};
use crate::fields::Fields;
use crate::params::Params;
use crate::routes::{Asked, Call};

use output::Output;

/// Answers the request.
pub async fn handle(call: Call) -> Result<Response> {
    call.answer(read).await
}

fn read(engine: &Engine, body: &[u8]) -> Result<Asked<Output>> {
    let card = &engine.card;
    let mut fields = Fields::body(body)?;
    engine.check_model(fields.string("model")?.as_deref())?;
    let mut object = begun(&fields, &card.id);
    let mut messages = Vec::new();
    if let Some(instructions) = fields.string("instructions")? {
        messages.push(Message::new(Role::System, instructions));
    }
    messages.extend(input::messages(&mut fields)?);
    if messages.is_empty() {
        return Err(ApiError::field("input", "at least one message", "none"));
    }
    let (thinking, budget) = effort(&mut fields)?.resolve(card)?;
    let mut params = Params::read(&mut fields, card, card.sampling(thinking))?;
    params.max_tokens = fields.whole("max_output_tokens", 1)?.or(params.max_tokens);
    if params.choices > 1 {
        return Err(ApiError::field("n", "one answer", params.choices));
    }
    // With the digits that they are written with.
    let number = |value: f32| serde_json::from_str::<Value>(&value.to_string()).unwrap_or_default();
    object["temperature"] = number(params.sampling.temperature);
    object["top_p"] = number(params.sampling.top_p);
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
    Ok((chat.asks(engine)?, Output::new(object), streamed))
}

/// The response as it begins, with what it repeats of the request.
fn begun(fields: &Fields<'_>, model: &str) -> Value {
    let echo = |name: &str, otherwise: Value| match fields.get(name) {
        Some(value) => serde_json::from_str(value.get()).unwrap_or(otherwise),
        None => otherwise,
    };
    json!({
        "id": new_id("resp_"),
        "object": "response",
        "created_at": unix_time(),
        "status": "in_progress",
        "background": false,
        "error": null,
        "incomplete_details": null,
        "instructions": echo("instructions", Value::Null),
        "max_output_tokens": echo("max_output_tokens", Value::Null),
        "metadata": echo("metadata", json!({})),
        "model": model,
        "output": [],
        "parallel_tool_calls": echo("parallel_tool_calls", true.into()),
        "previous_response_id": null,
        "reasoning": echo("reasoning", json!({"effort": null, "summary": null})),
        "store": false,
        "text": echo("text", json!({"format": {"type": "text"}})),
        "tool_choice": echo("tool_choice", "auto".into()),
        "tools": echo("tools", json!([])),
        "truncation": "disabled",
        "usage": null,
        "user": echo("user", Value::Null),
    })
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
