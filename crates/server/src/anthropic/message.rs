//! What a request of Anthropic's API says so far: messages of blocks, read into the turns that the model knows.

use serde_json::value::RawValue;
use text::chat::ToolCall;
use text::json::write_python;
use text::{Message, Role};

use crate::error::{ApiError, Result};
use crate::fields::{self, Fields, TEXT_MARKS, elements, is_string, parse};

/// Reads one message into the turns that the model knows: results of tools are turns of their own.
pub fn message(mut fields: Fields<'_>, messages: &mut Vec<Message>) -> Result<()> {
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
                let path = block.path("text");
                let text: String = parse(block.require("text")?, &path, "a text")?;
                turn.content.push_str(&text);
                block.ignore(TEXT_MARKS);
                said = true;
            }
            ("thinking", Role::Assistant) => {
                let thought = block.string("thinking")?.unwrap_or_default();
                turn.reasoning.get_or_insert_default().push_str(&thought);
                block.ignore(&["signature"]);
                said = true;
            }
            // Another provider's thoughts, which only it can read.
            ("redacted_thinking", Role::Assistant) => {
                block.ignore(&["data"]);
                said = true;
            }
            ("tool_use", Role::Assistant) => {
                let name = parse(block.require("name")?, &block.path("name"), "a name")?;
                let mut arguments = String::new();
                if let Some(input) = block.take("input") {
                    // As the model itself writes it, whatever spaces the client put between.
                    write_python(input, &mut arguments)?;
                }
                turn.tool_calls.push(ToolCall::new(name, arguments));
                block.ignore(&["id", "caller", "cache_control"]);
                said = true;
            }
            ("tool_result", Role::User) => {
                let path = block.path("content");
                let content = block.take("content").map(|value| text_of(value, &path));
                messages.push(Message::new(Role::Tool, content.transpose()?.unwrap_or_default()));
                // The models know results by their order, and failures by what they say.
                block.ignore(&["tool_use_id", "is_error", "cache_control"]);
            }
            (other, _) => {
                let expected =
                    "text, tool_result of the user, or thinking or tool_use of the assistant";
                return Err(ApiError::field(&kind_at, expected, format!("{other:?}")));
            }
        }
        block.finish()?;
    }
    if said || content.get() == "[]" {
        messages.push(turn);
    }
    Ok(())
}

/// A text, or blocks of text.
pub fn text_of(value: &RawValue, at: &str) -> Result<String> {
    fields::text_of(value, at, &["text"], "\"text\"")
}
