//! The part of a request that says how to generate, the same in all of OpenAI's endpoints.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use engine::philox::random_seed;
use engine::request::{Constraint, Sink};
use engine::{Request, SamplingParams};
use serde_json::value::RawValue;
use text::StopStrings;

use crate::app::Card;
use crate::error::{ApiError, Result};
use crate::fields::{Fields, elements, is_string, kind, parse};

/// Alternatives that may be listed beside a token.
pub const MAX_TOP: usize = 20;
/// Answers that may be asked for at once.
const MAX_CHOICES: usize = 32;
/// Stop texts of one request of OpenAI's.
const MAX_STOPS: usize = 4;
/// Bytes of a stop text: every answer to a request keeps its own.
const MAX_STOP: usize = 4096;
/// Stop tokens of one request, likewise.
const MAX_STOP_TOKENS: usize = 1024;
/// A bias of this much or less bans a token.
const BAN: f32 = -100.0;

/// How to generate.
#[derive(Debug, Clone)]
pub struct Params {
    /// How to draw; choice i of several uses the seed plus i.
    pub sampling: SamplingParams,
    /// Tokens to generate at most; the context if `None`.
    pub max_tokens: Option<usize>,
    /// Answers to each prompt.
    pub choices: usize,
    /// Texts that end an answer.
    pub stop_texts: Vec<String>,
    /// Tokens that end an answer.
    pub stop_tokens: Vec<u32>,
    /// Added to the logits of these tokens.
    pub bias: Arc<[(u32, f32)]>,
}

impl Params {
    /// Reads the sampling surface; `defaults` stand for what is left open. At least `least` tokens must be asked for.
    pub fn read(
        fields: &mut Fields<'_>,
        card: &Card,
        defaults: SamplingParams,
        least: usize,
    ) -> Result<Self> {
        let d = defaults;
        let sampling = SamplingParams {
            temperature: fields.number("temperature")?.unwrap_or(d.temperature),
            // OpenAI's API begins at 0, which keeps the best token as the least share does.
            top_p: fields.number("top_p")?.map_or(d.top_p, |p| {
                if (0.0..f32::MIN_POSITIVE).contains(&p) { f32::MIN_POSITIVE } else { p }
            }),
            top_k: fields.whole("top_k", 0)?.map_or(d.top_k, |k| k.min(u32::MAX as usize) as u32),
            min_p: fields.number("min_p")?.unwrap_or(d.min_p),
            repetition_penalty: fields
                .number("repetition_penalty")?
                .unwrap_or(d.repetition_penalty),
            frequency_penalty: fields.number("frequency_penalty")?.unwrap_or(d.frequency_penalty),
            presence_penalty: fields.number("presence_penalty")?.unwrap_or(d.presence_penalty),
            seed: seed(fields)?.unwrap_or_else(random_seed),
        };
        let max_tokens = fields.whole("max_tokens", least)?;
        let max_tokens = fields.whole("max_completion_tokens", least)?.or(max_tokens);
        let choices = fields.whole("n", 1)?.unwrap_or(1);
        if choices > MAX_CHOICES {
            return Err(ApiError::field("n", &format!("at most {MAX_CHOICES}"), choices));
        }
        let mut stop_tokens = match fields.boolean("ignore_eos")? {
            Some(true) => Vec::new(),
            _ => card.stops.clone(),
        };
        let rows = card.tokenizer.vocabulary().rows();
        for (number, (at, value)) in fields.array("stop_token_ids")?.enumerate() {
            if number == MAX_STOP_TOKENS {
                let most = format!("at most {MAX_STOP_TOKENS} token ids");
                return Err(ApiError::field("stop_token_ids", &most, "more"));
            }
            let expected = format!("a token id below {rows}");
            let id: u32 = parse(value, &at, &expected)?;
            if id as usize >= rows {
                return Err(ApiError::field(&at, &expected, id));
            }
            stop_tokens.push(id);
        }
        fields.ignore(&[
            "user",
            "store",
            "metadata",
            "service_tier",
            "safety_identifier",
            "prompt_cache_key",
            "prompt_cache_retention",
        ]);
        Ok(Params {
            sampling,
            max_tokens,
            choices,
            stop_texts: stop_texts(fields, "stop", MAX_STOPS)?,
            stop_tokens,
            bias: bias(fields, card)?,
        })
    }

    /// The engine's request for one choice.
    pub fn request(
        &self,
        choice: usize,
        prompt: Vec<u32>,
        constraint: Option<Box<dyn Constraint>>,
        deadline: Instant,
        sink: Box<dyn Sink>,
    ) -> Request {
        let seed = self.sampling.seed.wrapping_add(choice as u64);
        Request {
            max_tokens: self.max_tokens.unwrap_or(usize::MAX),
            sampling: SamplingParams { seed, ..self.sampling.clone() },
            bias: Arc::clone(&self.bias),
            stop_tokens: self.stop_tokens.clone(),
            stops: StopStrings::new(self.stop_texts.iter().cloned()),
            constraint,
            deadline: Some(deadline),
            ..Request::new(prompt, sink)
        }
    }
}

/// Reads `stream` and `stream_options`: whether to stream, and whether usage comes last.
pub fn stream_options(fields: &mut Fields<'_>) -> Result<(bool, bool)> {
    let stream = fields.boolean("stream")?.unwrap_or(false);
    let Some(mut options) = fields.object("stream_options")? else { return Ok((stream, false)) };
    if !stream {
        return Err(ApiError::field("stream_options", "nothing without stream", "an object"));
    }
    let include_usage = options.boolean("include_usage")?.unwrap_or(false);
    options.ignore(&["include_obfuscation"]);
    options.finish()?;
    Ok((stream, include_usage))
}

/// Reads texts that end an answer: one, or a list of at most `most`.
pub fn stop_texts(fields: &mut Fields<'_>, name: &str, most: usize) -> Result<Vec<String>> {
    let path = fields.path(name);
    let Some(value) = fields.take(name) else { return Ok(Vec::new()) };
    let text = |(at, value): (String, &RawValue)| {
        let text: String = parse(value, &at, "a text")?;
        match text.len() {
            0 => Err(ApiError::field(&at, "a text that is not empty", "an empty one")),
            1..=MAX_STOP => Ok(text),
            bytes => {
                let expected = format!("a text of at most {MAX_STOP} bytes");
                Err(ApiError::field(&at, &expected, format!("{bytes} bytes")))
            }
        }
    };
    if is_string(value) {
        return Ok(vec![text((path, value))?]);
    }
    let given = elements(value, &path)
        .map_err(|_| ApiError::field(&path, "a text or an array of texts", kind(value)))?;
    if given.len() > most {
        return Err(ApiError::field(&path, &format!("at most {most} texts"), given.len()));
    }
    given.map(text).collect()
}

/// Any 64-bit number, with or without a sign.
fn seed(fields: &mut Fields<'_>) -> Result<Option<u64>> {
    let Some(value) = fields.take("seed") else { return Ok(None) };
    let signed = parse::<i64>(value, "seed", "a whole number of 64 bits");
    signed
        .map(|seed| seed as u64)
        .or_else(|error| parse(value, "seed", "").map_err(|_| error))
        .map(Some)
}

fn bias(fields: &mut Fields<'_>, card: &Card) -> Result<Arc<[(u32, f32)]>> {
    let Some(value) = fields.take("logit_bias") else { return Ok(Arc::new([])) };
    let rows = card.tokenizer.vocabulary().rows();
    let given: BTreeMap<String, &RawValue> =
        parse(value, "logit_bias", "an object of token ids and numbers")?;
    let entry = |(key, value): (String, &RawValue)| {
        // One spelling a token: with two of them, two values could be meant for one.
        let id =
            key.parse::<u32>().ok().filter(|&id| (id as usize) < rows && id.to_string() == key);
        let id = id.ok_or_else(|| {
            ApiError::field("logit_bias", &format!("token ids below {rows}"), format!("{key:?}"))
        })?;
        let expected = "a number from -100 to 100";
        let bias: f32 = parse(value, &format!("logit_bias.{key}"), expected)?;
        if !(-100.0..=100.0).contains(&bias) {
            return Err(ApiError::field(&format!("logit_bias.{key}"), expected, bias));
        }
        Ok((id, if bias <= BAN { f32::NEG_INFINITY } else { bias }))
    };
    given.into_iter().map(entry).collect()
}
