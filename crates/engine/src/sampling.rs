//! Drawing a token from a row of logits.

use std::sync::Arc;

/// How to draw. Plain data that travels with a batch, so that a device can draw by itself.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingParams {
    /// 0 takes the most probable token.
    pub temperature: f32,
    /// Keep the k most probable; 0 keeps all.
    pub top_k: u32,
    /// Keep the smallest set whose probability reaches p.
    pub top_p: f32,
    /// Keep tokens at least this likely, relative to the best.
    pub min_p: f32,
    /// Divides (multiplies, if negative) the logits of tokens seen in prompt or output.
    pub repetition_penalty: f32,
    /// Subtracted once for each occurrence in the output.
    pub frequency_penalty: f32,
    /// Subtracted once if it occurs in the output.
    pub presence_penalty: f32,
    /// Key of the random draws.
    pub seed: u64,
}

/// A draw at one row.
#[derive(Debug, Clone)]
pub struct Sample {
    /// How to draw.
    pub params: SamplingParams,
    /// Position that the drawn token will take; with the seed it fixes the random number.
    pub position: u32,
    /// Added to the logits of these tokens.
    pub bias: Arc<[(u32, f32)]>,
    /// Allowed tokens as a bit set, little-endian words, `[vocab / 32]` rounded up; `None` allows all.
    pub mask: Option<Arc<[u32]>>,
    /// Tokens that the penalties look at: the prompt, then the output. Empty if no penalty is on.
    pub history: Vec<u32>,
    /// How many tokens of `history` are the prompt.
    pub prompt: usize,
    /// How many alternatives to return.
    pub top: usize,
}
