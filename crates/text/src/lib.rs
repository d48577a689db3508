//! Text in and out of a model: tokens, chat prompts, streams of characters, thoughts and tool calls.

#![forbid(unsafe_code)]

mod bpe;
pub mod decode;
mod nfc;
mod split;
mod stop;
pub mod tokenizer;

pub use decode::Decoder;
pub use stop::StopMatcher;
pub use tokenizer::{Special, Tokenizer};
