//! Text in and out of a model: tokens, chat prompts, streams of characters, thoughts and tool calls.

#![forbid(unsafe_code)]
