//! What a request of the responses API says so far: items, read into the turns that the model knows.

use serde_json::value::RawValue;
use text::chat::ToolCall;
use text::{Message, Role};

use crate::error::{ApiError, Result};
use crate::fields::{self, Fields, elements, is_string, parse};

/// Reads `input`: a text of the user, or items.
pub fn messages(fields: &mut Fields<'_>) -> Result<Vec<Message>> {
    let value = fields.require("input")?;
    if is_string(value) {
        return Ok(vec![Message::new(Role::User, parse::<String>(value, "input", "a text")?)]);
    }
    let (mut messages, mut thought) = (Vec::new(), None);
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
                let arguments = item.string("arguments")?.unwrap_or_default();
                // Calls belong to what the assistant said before them.
                if messages.last().is_none_or(|last| last.role != Role::Assistant) {
                    let reasoning = thought.take();
                    messages.push(Message { reasoning, ..Message::new(Role::Assistant, "") });
                }
                if let Some(last) = messages.last_mut() {
                    last.tool_calls.push(ToolCall::new(name, arguments));
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
        // The models know calls and their results by their order.
        item.ignore(&["id", "call_id", "status", "summary", "encrypted_content", "phase"]);
        item.finish()?;
    }
    Ok(messages)
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
    let kinds = ["input_text", "output_text", "reasoning_text", "text"];
    fields::text_of(value, at, &kinds, "input_text or output_text")
}
