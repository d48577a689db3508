//! Conversations, and the prompt that a checkpoint was trained to read for one.

mod parse;
mod prompt;
mod template;

pub use parse::{messages, tools};
pub use prompt::Prompt;

/// Who speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Instructions; also `developer`.
    System,
    /// The person.
    User,
    /// The model.
    Assistant,
    /// The result of a tool call.
    Tool,
}

/// One turn, or one tool's result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// Who speaks.
    pub role: Role,
    /// What is said; empty where a message has no content.
    pub content: String,
    /// What the assistant thought before, if it is given apart from the content.
    pub reasoning: Option<String>,
    /// The assistant's calls, made after what it says.
    pub tool_calls: Vec<ToolCall>,
}

/// A call that the assistant made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToolCall {
    /// The function.
    pub name: String,
    /// Its arguments as JSON text, which enters the prompt as it is.
    pub arguments: String,
}

impl ToolCall {
    /// A call. Where nothing is passed, some write an empty text for what models write as `{}`.
    pub fn new(name: String, arguments: String) -> Self {
        let arguments = if arguments.trim().is_empty() { "{}".to_owned() } else { arguments };
        Self { name, arguments }
    }
}

/// How a prompt ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// Behind the last message.
    Closed,
    /// With the assistant's turn opened, for an answer.
    Answer,
    /// Inside the last message, an assistant's, for the rest of it.
    Continue,
}

/// What a prompt is made from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Conversation {
    /// In order; at least one.
    pub messages: Vec<Message>,
    /// The functions on offer, each as the JSON text that enters the prompt.
    pub tools: Vec<String>,
    /// How the prompt ends.
    pub ending: Ending,
    /// Whether an answer begins with a thought, where the checkpoint leaves a choice.
    pub thinking: bool,
}

impl Conversation {
    /// A conversation that waits for an answer, without tools.
    pub fn new(messages: Vec<Message>) -> Self {
        Self { messages, tools: Vec::new(), ending: Ending::Answer, thinking: true }
    }
}

impl Message {
    /// A message that is nothing but text.
    pub fn new(role: Role, content: impl Into<String>) -> Self {
        Self { role, content: content.into(), reasoning: None, tool_calls: Vec::new() }
    }
}
