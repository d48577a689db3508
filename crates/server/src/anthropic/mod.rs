//! `POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's API, as far as text, thoughts, tools
//! and streams need it.

mod blocks;
mod message;

use axum::response::Response;
use model::Variant;
use serde_json::json;
use text::{Message, Role};

use crate::app::Engine;
use crate::chat::{Chat, Effort, Format, Tool, ToolChoice, check_choice, flat_tool};
use crate::error::{ApiError, Result};
use crate::fields::{Fields, elements};
use crate::params::{Params, stop_texts};
use crate::reply::json_body;
use crate::routes::{Asked, Call};

use blocks::Blocks;
use message::{message, text_of};

/// Stop sequences of one request.
const MAX_STOPS: usize = 64;

/// Answers a request for a message.
pub async fn handle(call: Call) -> Result<Response> {
    call.answer(read).await
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

fn read(engine: &Engine, body: &[u8]) -> Result<Asked<Blocks>> {
    let mut fields = Fields::body(body)?;
    let mut chat = conversation(engine, &mut fields)?;
    if chat.params.max_tokens.is_none() {
        return Err(ApiError::field("max_tokens", "a whole number, at least 1", "nothing"));
    }
    if chat.params.choices > 1 {
        return Err(ApiError::field("n", "one answer", chat.params.choices));
    }
    chat.params.stop_texts.extend(stop_texts(&mut fields, "stop_sequences", MAX_STOPS)?);
    let streamed = fields.boolean("stream")?.unwrap_or(false);
    fields.finish()?;
    let asks = chat.asks(engine)?;
    let prompt = asks.first().map_or(0, |ask| ask.prompt.len());
    let writer = Blocks::new(engine.card.id.clone(), prompt);
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
    let params = Params::read(fields, card, card.sampling(thinking), 1)?;
    // An answer that the client has begun is continued.
    let resume = messages
        .last()
        .is_some_and(|last| last.role == Role::Assistant && last.tool_calls.is_empty());
    let mut chat = Chat { budget, resume, ..Chat::new(messages, thinking, params) };
    for (at, value) in fields.array("tools")? {
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
