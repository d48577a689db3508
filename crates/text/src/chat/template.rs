//! The Qwen3 chat templates. They share everything but their treatment of thoughts:
//!
//! | variant | thoughts in the current turn | an answer opens with |
//! |---|---|---|
//! | base | no template | |
//! | instruct | kept | nothing, or an empty thought if thinking is off |
//! | instruct-2507 | not known, tags are plain text | nothing |
//! | thinking-2507 | kept | `<think>` |
//!
//! The current turn begins behind the last question, so thoughts between tool calls stay. Thoughts of
//! earlier turns are left out.

use model::Variant;

use super::{Conversation, Ending, Message, Prompt, Role};
use crate::error::Error;

const TOOLS_BEFORE: &str = "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n\
    You are provided with function signatures within <tools></tools> XML tags:\n<tools>";
const TOOLS_AFTER: &str = "\n</tools>\n\nFor each function call, return a json object with function name and \
    arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n\
    {\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call><|im_end|>\n";

impl Conversation {
    /// The prompt for a checkpoint of this variant.
    pub fn render(&self, variant: Variant) -> Result<Prompt, Error> {
        if variant == Variant::Base {
            return Err(Error::NoTemplate);
        }
        if self.ending == Ending::Continue {
            self.check_continuation()?;
        }
        let mut prompt = Prompt::default();
        let rest = self.preamble(&mut prompt)?;
        let question = rest.iter().rposition(is_question);
        for (i, message) in rest.iter().enumerate() {
            match message.role {
                Role::System => turn(&mut prompt, "system", &message.content),
                Role::User => turn(&mut prompt, "user", &message.content),
                Role::Tool => {
                    let is_tool = |message: &Message| message.role == Role::Tool;
                    let follows = i > 0 && is_tool(&rest[i - 1]);
                    let followed = rest.get(i + 1).is_some_and(is_tool);
                    tool_result(&mut prompt, &message.content, !follows, !followed);
                }
                Role::Assistant => {
                    let last = i + 1 == rest.len();
                    let open = last && self.ending == Ending::Continue;
                    prompt.template("<|im_start|>assistant\n");
                    match open_thought(message).filter(|_| open && thinks(variant)) {
                        Some(thought) => {
                            prompt.template("<think>\n");
                            prompt.content(thought);
                        }
                        None if thinks(variant) => {
                            let current = question.is_some_and(|question| i > question);
                            answer(&mut prompt, message, current, last);
                        }
                        None => {
                            prompt.content(&message.content);
                            tool_calls(&mut prompt, message, &message.content);
                        }
                    }
                    if !open {
                        prompt.template("<|im_end|>\n");
                    }
                }
            }
        }
        if self.ending == Ending::Answer {
            prompt.template("<|im_start|>assistant\n");
            match variant {
                Variant::Thinking2507 => prompt.template("<think>\n"),
                Variant::Instruct if !self.thinking => prompt.template("<think>\n\n</think>\n\n"),
                _ => {}
            }
        }
        Ok(prompt)
    }

    /// Writes the tools and the first system message; returns the messages behind it.
    fn preamble(&self, prompt: &mut Prompt) -> Result<&[Message], Error> {
        let (system, rest) = match self.messages.as_slice() {
            [] => return Err(Error::field("messages", "at least one message", "none")),
            [first, rest @ ..] if first.role == Role::System => (Some(&first.content), rest),
            all => (None, all),
        };
        if self.tools.is_empty() {
            if let Some(system) = system {
                turn(prompt, "system", system);
            }
            return Ok(rest);
        }
        prompt.template("<|im_start|>system\n");
        if let Some(system) = system {
            prompt.content(system);
            prompt.template("\n\n");
        }
        prompt.template(TOOLS_BEFORE);
        for tool in &self.tools {
            prompt.template("\n");
            prompt.content(tool);
        }
        prompt.template(TOOLS_AFTER);
        Ok(rest)
    }

    fn check_continuation(&self) -> Result<(), Error> {
        let expected = "an assistant message without tool calls, to continue";
        match self.messages.last() {
            Some(Message { role: Role::Assistant, tool_calls, .. }) if tool_calls.is_empty() => {
                Ok(())
            }
            Some(Message { role: Role::Assistant, .. }) => {
                Err(Error::field("the last message", expected, "tool calls"))
            }
            _ => Err(Error::field("the last message", expected, "another role")),
        }
    }
}

/// Whether the template of this variant knows thoughts.
fn thinks(variant: Variant) -> bool {
    matches!(variant, Variant::Instruct | Variant::Thinking2507)
}

/// Whether a message opens a turn of its own; tool results may come as user messages in their tags.
fn is_question(message: &Message) -> bool {
    let text = &message.content;
    let result = text.starts_with("<tool_response>") && text.ends_with("</tool_response>");
    message.role == Role::User && !result
}

fn turn(prompt: &mut Prompt, role: &str, content: &str) {
    prompt.template("<|im_start|>");
    prompt.template(role);
    prompt.template("\n");
    prompt.content(content);
    prompt.template("<|im_end|>\n");
}

/// Results of calls made together share one turn.
fn tool_result(prompt: &mut Prompt, content: &str, first: bool, last: bool) {
    if first {
        prompt.template("<|im_start|>user");
    }
    prompt.template("\n<tool_response>\n");
    prompt.content(content);
    prompt.template("\n</tool_response>");
    if last {
        prompt.template("<|im_end|>\n");
    }
}

/// What the assistant thought, if that belongs to the current turn, then said, then called.
fn answer(prompt: &mut Prompt, message: &Message, current: bool, last: bool) {
    let (thought, content) = split_thought(message);
    if current && (last || !thought.is_empty()) {
        prompt.template("<think>\n");
        prompt.content(thought.trim_matches('\n'));
        prompt.template("\n</think>\n\n");
        prompt.content(content.trim_start_matches('\n'));
    } else {
        prompt.content(content);
    }
    tool_calls(prompt, message, content);
}

fn tool_calls(prompt: &mut Prompt, message: &Message, content: &str) {
    for (i, call) in message.tool_calls.iter().enumerate() {
        if i > 0 || !content.is_empty() {
            prompt.template("\n");
        }
        prompt.template("<tool_call>\n{\"name\": \"");
        prompt.content(&call.name);
        prompt.template("\", \"arguments\": ");
        prompt.content(&call.arguments);
        prompt.template("}\n</tool_call>");
    }
}

/// A message's thought and what is said after it, whether they come apart or in one text.
fn split_thought(message: &Message) -> (&str, &str) {
    let text = message.content.as_str();
    if let Some(thought) = &message.reasoning {
        return (thought, text);
    }
    match (text.split_once("</think>"), text.rsplit_once("</think>")) {
        (Some((before, _)), Some((_, content))) => {
            let before = before.trim_end_matches('\n');
            let thought = before.rsplit_once("<think>").map_or(before, |(_, thought)| thought);
            (thought.trim_start_matches('\n'), content.trim_start_matches('\n'))
        }
        _ => ("", text),
    }
}

/// The thought that a message breaks off in, when it is continued.
fn open_thought(message: &Message) -> Option<&str> {
    match &message.reasoning {
        Some(thought) if message.content.is_empty() => Some(thought.as_str()),
        Some(_) => None,
        None => {
            let thought = message.content.strip_prefix("<think>")?;
            (!thought.contains("</think>")).then(|| thought.trim_start_matches('\n'))
        }
    }
}
