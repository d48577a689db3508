//! OpenAI's endpoints for completions, and the shapes that they share.

pub mod chat;
pub mod completions;
pub mod models;
pub mod tokens;

use engine::Choice;
use engine::request::{Timings, Usage};
use serde_json::{Value, json};
use text::Tokenizer;

use crate::answer::{EndOfAnswer, Finish, total};
use crate::app::{new_id, unix_time};
use crate::reply::Events;

/// What all objects of one answer, whole or in chunks, begin with.
struct Head {
    id: String,
    created: u64,
    model: String,
    /// Whether the last chunk of a stream carries the usage, and the others a null.
    include_usage: bool,
}

impl Head {
    /// The head of an answer that begins now.
    fn new(prefix: &str, model: &str, include_usage: bool) -> Self {
        Head { id: new_id(prefix), created: unix_time(), model: model.to_owned(), include_usage }
    }

    fn object(&self, kind: &str, choices: Vec<Value>) -> Value {
        json!({
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        })
    }

    /// A chunk of a stream.
    fn chunk(&self, kind: &str, choice: Value) -> Value {
        let mut chunk = self.object(kind, vec![choice]);
        if self.include_usage {
            chunk["usage"] = Value::Null;
        }
        chunk
    }

    /// The end of a stream.
    fn end(&self, kind: &str, ends: &[EndOfAnswer], events: &mut Events) {
        if self.include_usage {
            let mut chunk = self.object(kind, Vec::new());
            chunk["usage"] = usage(ends);
            events.data(&chunk);
        }
        events.raw("[DONE]");
    }

    /// A complete answer.
    fn whole(&self, kind: &str, choices: Vec<Value>, ends: &[EndOfAnswer]) -> Value {
        let mut object = self.object(kind, choices);
        object["usage"] = usage(ends);
        object["timings"] = timings(ends);
        object
    }
}

/// OpenAI's word for the end of an answer.
pub fn finish_reason(finish: Finish) -> &'static str {
    match finish {
        Finish::Stop => "stop",
        Finish::Length => "length",
        Finish::Calls => "tool_calls",
    }
}

/// `usage` of all answers of a request.
pub fn usage(ends: &[EndOfAnswer]) -> Value {
    let (Usage { prompt, cached, generated, .. }, reasoning) = total(ends);
    json!({
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    })
}

/// llama.cpp's `timings`, of the answer that took longest to generate.
pub fn timings(ends: &[EndOfAnswer]) -> Value {
    let Some(end) = ends.iter().max_by_key(|end| end.timings.decode) else { return Value::Null };
    let Timings { prefill, decode, .. } = end.timings;
    let read = end.usage.prompt - end.usage.cached;
    let rate = |tokens: usize, ms: f64| if ms > 0.0 { 1000.0 * tokens as f64 / ms } else { 0.0 };
    let each = |tokens: usize, ms: f64| if tokens > 0 { ms / tokens as f64 } else { 0.0 };
    let (prompt_ms, predicted_ms) = (1000.0 * prefill.as_secs_f64(), 1000.0 * decode.as_secs_f64());
    // The first token comes with the prompt; the others are what decoding took its time for.
    let decoded = end.usage.generated.saturating_sub(1);
    let mut timings = json!({
        "cache_n": end.usage.cached,
        "prompt_n": read,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": each(read, prompt_ms),
        "prompt_per_second": rate(read, prompt_ms),
        "predicted_n": end.usage.generated,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": each(decoded, predicted_ms),
        "predicted_per_second": rate(decoded, predicted_ms),
    });
    if end.usage.drafted > 0 {
        timings["draft_n"] = end.usage.drafted.into();
        timings["draft_n_accepted"] = end.usage.accepted.into();
    }
    timings
}

/// A token on its own: its text, and its bytes, which may be a part of a character.
pub fn spell(tokenizer: &Tokenizer, id: u32) -> (String, Vec<u8>) {
    let vocabulary = tokenizer.vocabulary();
    let bytes = match vocabulary.added(id) {
        Some(added) => added.text.as_bytes(),
        None => vocabulary.bytes(id).unwrap_or_default(),
    };
    (String::from_utf8_lossy(bytes).into_owned(), bytes.to_vec())
}

/// One entry of a chat answer's `logprobs.content`.
fn scored(tokenizer: &Tokenizer, choice: &Choice) -> Value {
    let entry = |id: u32, logprob: f32| {
        let (token, bytes) = spell(tokenizer, id);
        json!({"token": token, "logprob": finite(logprob), "bytes": bytes})
    };
    let mut value = entry(choice.token, choice.logprob);
    let top: Vec<Value> = choice.top.iter().map(|&(id, logprob)| entry(id, logprob)).collect();
    value["top_logprobs"] = top.into();
    value
}

/// JSON has no infinities: OpenAI writes -9999 for what is all but impossible.
pub fn finite(logprob: f32) -> f32 {
    logprob.max(-9999.0)
}
