//! Text in and out of a model: tokens, chat prompts, streams of characters, thoughts and tool calls.

#![forbid(unsafe_code)]

mod bpe;
pub mod chat;
pub mod decode;
mod error;
pub mod json;
mod nfc;
mod split;
pub mod stop;
mod tag;
pub mod thinking;
pub mod tokenizer;
pub mod tool_calls;

pub use chat::{Conversation, Ending, Message, Prompt, Role};
pub use decode::Decoder;
pub use error::Error;
pub use stop::StopStrings;
pub use thinking::{Begin, Thinking};
pub use tokenizer::{Special, Tokenizer};
pub use tool_calls::ToolCalls;
