//! `POST /v1/responses`: OpenAI's newer API, as far as text, thoughts, tools and streams need it. Nothing
//! is stored, so a conversation is sent whole each time.

mod input;
mod output;

use axum::response::Response;
use serde_json::{Value, json};
use text::{Message, Role};

use crate::app::{Engine, new_id, unix_time};
use crate::chat::{Chat, Effort, check_choice, expect_function, flat_tool};
use crate::chat::{openai_choice, openai_format};
use crate::error::{ApiError, Result};
use crate::fields::{Fields, parse};
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
    let given = fields.clone();
    let mut messages = Vec::new();
    if let Some(instructions) = fields.string("instructions")? {
        messages.push(Message::new(Role::System, instructions));
    }
    messages.extend(input::messages(&mut fields)?);
    if messages.is_empty() {
        return Err(ApiError::field("input", "at least one message", "none"));
    }
    let (thinking, budget) = effort(&mut fields)?.resolve(card)?;
    let mut params = Params::read(&mut fields, card, card.sampling(thinking), 1)?;
    params.max_tokens = fields.whole("max_output_tokens", 1)?.or(params.max_tokens);
    if params.choices > 1 {
        return Err(ApiError::field("n", "one answer", params.choices));
    }
    let (sampling, max_tokens) = (params.sampling.clone(), params.max_tokens);
    let mut chat = Chat { budget, ..Chat::new(messages, thinking, params) };
    for (at, value) in fields.array("tools")? {
        let mut tool = Fields::read(value, at)?;
        expect_function(&mut tool)?;
        tool.ignore(&["strict"]);
        chat.tools.push(flat_tool(tool, "parameters")?);
    }
    chat.tool_choice = openai_choice(&mut fields, None)?;
    check_choice(&chat.tool_choice, &chat.tools)?;
    chat.parallel_calls = fields.boolean("parallel_tool_calls")?.unwrap_or(true);
    if let Some(mut text) = fields.object("text")? {
        chat.format = openai_format(&mut text, "format", None)?;
        text.finish()?;
    }
    for (name, only) in [("truncation", "\"disabled\""), ("background", "false")] {
        if let Some(value) = fields.take(name).filter(|value| value.get() != only) {
            return Err(ApiError::field(name, only, value.get()));
        }
    }
    for (at, value) in fields.array("include")? {
        // There is nothing encrypted here, so that nothing of it is left out.
        let only = "reasoning.encrypted_content";
        let wanted: String = parse(value, &at, &format!("{only:?}"))?;
        if wanted != only {
            return Err(ApiError::field(&at, &format!("{only:?}"), format!("{wanted:?}")));
        }
    }
    let streamed = fields.boolean("stream")?.unwrap_or(false);
    if let Some(mut options) = fields.object("stream_options")? {
        options.ignore(&["include_obfuscation"]);
        options.finish()?;
    }
    fields.finish()?;
    let mut object = begun(&given, &card.id);
    // With the digits that they are written with.
    let number = |value: f32| serde_json::from_str::<Value>(&value.to_string()).unwrap_or_default();
    object["temperature"] = number(sampling.temperature);
    object["top_p"] = number(sampling.top_p);
    object["max_output_tokens"] = max_tokens.into();
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
