//! Conversations from the JSON of OpenAI's chat requests.

use std::collections::BTreeMap;

use serde_json::value::RawValue;

use super::{Conversation, Ending, Message, Role, ToolCall};
use crate::error::Error;
use crate::json::{strict, write_python};

impl Conversation {
    /// Reads `{"messages", "tools", "add_generation_prompt", "continue_final_message", "enable_thinking"}`;
    /// all but the messages may be missing or null. An answer is expected and may begin with a thought
    /// unless told otherwise. Other members are ignored.
    pub fn parse(json: &str) -> Result<Self, Error> {
        let request = Object::read(strict(json)?, "request".into())?;
        let mut conversation = Self::new(messages(request.member("messages")?)?);
        if let Some(list) = request.get("tools") {
            conversation.tools = tools(list)?;
        }
        if let Some(thinking) = request.boolean("enable_thinking")? {
            conversation.thinking = thinking;
        }
        let answer = request.boolean("add_generation_prompt")?;
        conversation.ending = match (request.boolean("continue_final_message")?, answer) {
            (Some(true), Some(true)) => {
                let expected = "not both add_generation_prompt and continue_final_message";
                return Err(Error::field("request", expected, "both"));
            }
            (Some(true), _) => Ending::Continue,
            (_, Some(false)) => Ending::Closed,
            _ => Ending::Answer,
        };
        Ok(conversation)
    }
}

/// Reads the array of messages of a request; see [`strict`].
pub fn messages(value: &RawValue) -> Result<Vec<Message>, Error> {
    let each = |(i, value)| message(value, format!("messages[{i}]"));
    array(value, "messages")?.into_iter().enumerate().map(each).collect()
}

/// Reads the array of tools of a request into the texts that enter the prompt.
pub fn tools(value: &RawValue) -> Result<Vec<String>, Error> {
    let each = |(i, value): (usize, &RawValue)| {
        Object::read(value, format!("tools[{i}]"))?;
        python(value)
    };
    array(value, "tools")?.into_iter().enumerate().map(each).collect()
}

fn message(value: &RawValue, at: String) -> Result<Message, Error> {
    let object = Object::read(value, at)?;
    let role = match object.string("role")?.as_str() {
        "system" | "developer" => Role::System,
        "user" => Role::User,
        "assistant" => Role::Assistant,
        "tool" => Role::Tool,
        other => {
            let expected = "system, developer, user, assistant or tool";
            return Err(Error::field(object.path("role"), expected, format!("{other:?}")));
        }
    };
    // Members that other servers give a meaning that would be lost here; what means nothing to the answer, a
    // name or a cache mark, may stand beside them.
    for unknown in ["function_call", "audio", "prefix", "partial"] {
        if let Some(value) = object.get(unknown).filter(|value| value.get() != "false") {
            return Err(Error::field(object.path(unknown), "nothing", kind(value)));
        }
    }
    let mut message = Message::new(role, content(&object)?);
    if role == Role::Assistant {
        message.reasoning = match object.optional_string("reasoning_content")? {
            None => object.optional_string("reasoning")?,
            given => given,
        };
        if let Some(calls) = object.get("tool_calls") {
            let at = object.path("tool_calls");
            for (i, call) in array(calls, &at)?.into_iter().enumerate() {
                message.tool_calls.push(tool_call(call, format!("{at}[{i}]"))?);
            }
        }
    }
    Ok(message)
}

/// A message's content: a string, an array of text parts, which are joined, or nothing at all.
fn content(message: &Object<'_>) -> Result<String, Error> {
    let at = message.path("content");
    match message.get("content") {
        None => Ok(String::new()),
        Some(value) if value.get().starts_with('"') => read(value, &at, "a string"),
        Some(value) => {
            let mut text = String::new();
            let parts: Vec<&RawValue> = read(value, &at, "a string, an array of parts or null")?;
            for (i, part) in parts.into_iter().enumerate() {
                let part = Object::read(part, format!("{at}[{i}]"))?;
                match part.string("type")?.as_str() {
                    "text" => text.push_str(&part.string("text")?),
                    // What an assistant said instead of an answer.
                    "refusal" => text.push_str(&part.string("refusal")?),
                    other => {
                        let field = part.path("type");
                        return Err(Error::field(field, "\"text\"", format!("{other:?}")));
                    }
                }
            }
            Ok(text)
        }
    }
}

/// A call, with or without the `function` wrapper; arguments may be JSON text, a value or null.
fn tool_call(value: &RawValue, at: String) -> Result<ToolCall, Error> {
    let mut call = Object::read(value, at)?;
    if let Some(function) = call.get("function") {
        call = Object::read(function, call.path("function"))?;
    }
    let arguments = match call.member("arguments")? {
        text if text.get().starts_with('"') => call.string("arguments")?,
        value if value.get() == "null" => String::new(),
        value => python(value)?,
    };
    Ok(ToolCall::new(call.string("name")?, arguments))
}

fn python(value: &RawValue) -> Result<String, Error> {
    let mut out = String::new();
    write_python(value, &mut out)?;
    Ok(out)
}

fn array<'a>(value: &'a RawValue, at: &str) -> Result<Vec<&'a RawValue>, Error> {
    read(value, at, "an array")
}

fn read<'a, T: serde_core::Deserialize<'a>>(
    value: &'a RawValue,
    at: &str,
    expected: &'static str,
) -> Result<T, Error> {
    serde_json::from_str(value.get()).map_err(|_| Error::field(at, expected, kind(value)))
}

/// What a value is, for messages.
fn kind(value: &RawValue) -> &'static str {
    match value.get().bytes().next() {
        Some(b'{') => "an object",
        Some(b'[') => "an array",
        Some(b'"') => "a string",
        Some(b't' | b'f') => "a boolean",
        Some(b'n') => "null",
        _ => "a number",
    }
}

/// An object and where it stands.
struct Object<'a> {
    at: String,
    members: BTreeMap<String, &'a RawValue>,
}

impl<'a> Object<'a> {
    fn read(value: &'a RawValue, at: String) -> Result<Self, Error> {
        let members = read(value, &at, "an object")?;
        Ok(Self { at, members })
    }

    fn path(&self, name: &str) -> String {
        format!("{}.{name}", self.at)
    }

    /// A member that is neither missing nor null.
    fn get(&self, name: &str) -> Option<&'a RawValue> {
        self.members.get(name).copied().filter(|value| value.get() != "null")
    }

    /// A member that must be there.
    fn member(&self, name: &str) -> Result<&'a RawValue, Error> {
        let value = self.members.get(name).copied();
        value.ok_or_else(|| Error::field(self.path(name), "a value", "nothing"))
    }

    fn string(&self, name: &str) -> Result<String, Error> {
        read(self.member(name)?, &self.path(name), "a string")
    }

    fn optional_string(&self, name: &str) -> Result<Option<String>, Error> {
        self.get(name).map(|value| read(value, &self.path(name), "a string or null")).transpose()
    }

    fn boolean(&self, name: &str) -> Result<Option<bool>, Error> {
        self.get(name).map(|value| read(value, &self.path(name), "a boolean or null")).transpose()
    }
}
