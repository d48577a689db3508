//! OpenAI-compatible HTTP over the engine.

#![forbid(unsafe_code)]
