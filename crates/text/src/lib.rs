//! Text in and out of a model: tokens, chat prompts, streams of characters, thoughts and tool calls.

#![forbid(unsafe_code)]

mod bpe;
pub mod chat;
pub mod decode;
mod error;
pub mod json;
mod nfc;
mod split;
mod stop;
pub mod tokenizer;

pub use chat::{Conversation, Ending, Message, Prompt, Role};
pub use decode::Decoder;
pub use error::Error;
pub use stop::StopMatcher;
pub use tokenizer::{Special, Tokenizer};
