//! Text in and out of a model: tokens, chat prompts, streams of characters, thoughts and tool calls.

#![forbid(unsafe_code)]

mod bpe;
pub mod decode;
mod nfc;
mod split;
pub mod tokenizer;

pub use decode::Decoder;
pub use tokenizer::{Special, Tokenizer};
