//! Drawing a token from a row of logits. This is the definition that device samplers reproduce.
//!
//! In order: penalties, bias, mask; at temperature 0 the best token; otherwise the logits are divided
//! by the temperature, filtered by top-k, top-p and min-p, and the draw takes the largest
//! `logit + gumbel(token)` among the tokens kept, which draws each with its softmax probability. The
//! Gumbel noise of a token is a function of (seed, position, token) alone. Ties go to the lower id.

use std::cmp::Ordering;
use std::sync::Arc;

use model::Variant;

use crate::batch::{Answer, Choice, Want, allows};
use crate::philox::{philox, unit};
use crate::reductions::{all_finite, largest, log_sum_exp};

/// Temperatures below this draw the most probable token: dividing by them would overflow.
pub const COLD: f32 = 1e-4;

/// How to draw. Plain data that travels with a batch, so that a device can draw by itself.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingParams {
    /// 0 takes the most probable token; so does anything below [`COLD`].
    pub temperature: f32,
    /// Keep the k most probable; 0 keeps all.
    pub top_k: u32,
    /// Keep the smallest set whose probability reaches p; 1 keeps all.
    pub top_p: f32,
    /// Keep tokens at least this likely, relative to the best; 0 keeps all.
    pub min_p: f32,
    /// Divides (multiplies, if negative) the logits of tokens seen in prompt or output; 1 is off.
    pub repetition_penalty: f32,
    /// Subtracted once for each occurrence in the output.
    pub frequency_penalty: f32,
    /// Subtracted once if it occurs in the output.
    pub presence_penalty: f32,
    /// Key of the random draws.
    pub seed: u64,
}

impl Default for SamplingParams {
    /// Greedy, nothing filtered, nothing penalised.
    fn default() -> Self {
        SamplingParams {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            seed: 0,
        }
    }
}

impl SamplingParams {
    /// What the publisher of a checkpoint recommends, for answers that think first and others.
    pub fn recommended(variant: Variant, thinking: bool) -> Self {
        let (temperature, top_p, top_k) = match variant {
            Variant::Base => (1.0, 1.0, 0),
            Variant::Thinking2507 => (0.6, 0.95, 20),
            Variant::Instruct if thinking => (0.6, 0.95, 20),
            Variant::Instruct | Variant::Instruct2507 => (0.7, 0.8, 20),
        };
        SamplingParams { temperature, top_p, top_k, ..SamplingParams::default() }
    }

    /// Whether a draw has to know which tokens came before.
    pub fn penalises(&self) -> bool {
        self.repetition_penalty != 1.0
            || self.frequency_penalty != 0.0
            || self.presence_penalty != 0.0
    }

    /// Refuses values that have no meaning, naming the field, what is allowed and what was given.
    pub fn check(&self) -> Result<(), String> {
        let within = |field: &str, value: f32, low: f32, high: f32, allowed: &str| {
            if value.is_finite() && value >= low && value <= high {
                Ok(())
            } else {
                Err(format!("{field}: expected {allowed}, found {value}"))
            }
        };
        within("temperature", self.temperature, 0.0, 100.0, "0 to 100")?;
        within("top_p", self.top_p, f32::MIN_POSITIVE, 1.0, "more than 0, at most 1")?;
        within("min_p", self.min_p, 0.0, 1.0, "0 to 1")?;
        within("repetition_penalty", self.repetition_penalty, 0.01, 100.0, "0.01 to 100")?;
        within("frequency_penalty", self.frequency_penalty, -100.0, 100.0, "-100 to 100")?;
        within("presence_penalty", self.presence_penalty, -100.0, 100.0, "-100 to 100")
    }
}

/// A draw at one row.
#[derive(Debug, Clone)]
pub struct Sample {
    /// How to draw.
    pub params: SamplingParams,
    /// Position that the drawn token will take; with the seed it fixes the random numbers.
    pub position: u32,
    /// Added to the logits of these tokens.
    pub bias: Arc<[(u32, f32)]>,
    /// Allowed tokens as a bit set of 32-bit words, token t in bit t % 32 of word t / 32; `None`
    /// allows all.
    pub mask: Option<Arc<[u32]>>,
    /// Tokens that the penalties look at: the prompt, then the output. Empty if no penalty is on.
    pub history: Vec<u32>,
    /// How many tokens of `history` are the prompt.
    pub prompt: usize,
    /// How many alternatives to return.
    pub top: usize,
}

impl Sample {
    /// A draw at `position` without bias, mask, history or alternatives.
    pub fn new(params: SamplingParams, position: u32) -> Self {
        Sample {
            params,
            position,
            bias: Arc::new([]),
            mask: None,
            history: Vec::new(),
            prompt: 0,
            top: 0,
        }
    }
}

/// Answers rows on the host. Holds scratch memory, so that a step allocates nothing once it is warm.
#[derive(Debug, Default)]
pub struct Sampler {
    adjusted: Vec<f32>,
    candidates: Vec<(u32, f32)>,
    counts: Vec<u32>,
}

/// What the Gumbel noise of [`unit`] draws can span (-2.9 to 16.7): a token this far below the best
/// can never win.
const GUMBEL_RANGE: f32 = 20.0;

impl Sampler {
    /// Answers one row; `logits` is `[vocab]`.
    pub fn answer(&mut self, want: &Want, logits: &[f32]) -> Answer {
        let sample = match want {
            Want::Logits => return Answer::Logits(logits.to_vec()),
            _ if !all_finite(logits) => return Answer::NotFinite,
            &Want::Score { target, top } => {
                let log_sum = log_sum_exp(logits);
                return Answer::Choice(Choice {
                    token: target,
                    logprob: logits[target as usize] - log_sum,
                    top: self.best(logits, log_sum, top),
                });
            }
            Want::Sample(sample) => sample,
        };
        let log_sum = log_sum_exp(logits);
        let top = self.best(logits, log_sum, sample.top);
        let token = if adjusts(sample) {
            let mut adjusted = std::mem::take(&mut self.adjusted);
            adjusted.clear();
            adjusted.extend_from_slice(logits);
            self.adjust(sample, &mut adjusted);
            let token = self.draw(sample, &adjusted);
            self.adjusted = adjusted;
            token
        } else {
            self.draw(sample, logits)
        };
        match token {
            Some(token) => {
                let logprob = logits[token as usize] - log_sum;
                Answer::Choice(Choice { token, logprob, top })
            }
            None => Answer::NotFinite,
        }
    }

    /// The `n` most probable tokens with their log-probabilities, best first.
    fn best(&mut self, logits: &[f32], log_sum: f32, n: usize) -> Vec<(u32, f32)> {
        if n == 0 {
            return Vec::new();
        }
        self.candidates.clear();
        self.candidates.extend((0..).zip(logits.iter().copied()));
        keep_best(&mut self.candidates, n);
        self.candidates.iter().map(|&(t, l)| (t, l - log_sum)).collect()
    }

    /// Applies penalties, bias and mask.
    fn adjust(&mut self, sample: &Sample, logits: &mut [f32]) {
        let p = &sample.params;
        if p.penalises() {
            let vocab = logits.len();
            self.counts.clear();
            self.counts.resize(vocab, 0);
            // Bit 31 marks "seen at all", the low bits count occurrences in the output.
            const SEEN: u32 = 1 << 31;
            for (i, &token) in sample.history.iter().enumerate() {
                if let Some(count) = self.counts.get_mut(token as usize) {
                    *count = (*count | SEEN) + u32::from(i >= sample.prompt);
                }
            }
            for (logit, &count) in logits.iter_mut().zip(&self.counts) {
                if count & SEEN == 0 {
                    continue;
                }
                *logit = if *logit > 0.0 {
                    *logit / p.repetition_penalty
                } else {
                    *logit * p.repetition_penalty
                };
                let output = count & !SEEN;
                if output > 0 {
                    *logit -= p.frequency_penalty * output as f32 + p.presence_penalty;
                }
            }
        }
        for &(token, bias) in sample.bias.iter() {
            if let Some(logit) = logits.get_mut(token as usize) {
                *logit += bias;
            }
        }
        if let Some(mask) = &sample.mask {
            for (token, logit) in (0..).zip(logits.iter_mut()) {
                if !allows(mask, token) {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
    }

    /// Draws from adjusted logits; `None` if the mask leaves nothing.
    fn draw(&mut self, sample: &Sample, logits: &[f32]) -> Option<u32> {
        let p = &sample.params;
        let (best, max) = argmax(logits)?;
        if p.temperature < COLD {
            return Some(best);
        }
        let scale = 1.0 / p.temperature;
        let scaled = (0..).zip(logits.iter().map(|&l| (l - max) * scale));
        self.candidates.clear();
        if p.top_k > 0 || p.top_p < 1.0 {
            self.candidates.extend(scaled.filter(|&(_, l)| l > f32::NEG_INFINITY));
            if p.top_k > 0 {
                keep_best(&mut self.candidates, p.top_k as usize);
            }
            if p.top_p < 1.0 {
                keep_nucleus(&mut self.candidates, p.top_p);
            }
        } else {
            self.candidates.extend(scaled.filter(|&(_, l)| l > -GUMBEL_RANGE));
        }
        let floor = if p.min_p > 0.0 { p.min_p.ln() } else { f32::NEG_INFINITY };
        self.candidates
            .iter()
            .filter(|&&(_, l)| l >= floor)
            .map(|&(t, l)| (t, l + gumbel(p.seed, sample.position, t)))
            .min_by(by_rank)
            .map(|(t, _)| t)
    }
}

/// Whether the row's logits change before the draw.
fn adjusts(sample: &Sample) -> bool {
    sample.params.penalises() || !sample.bias.is_empty() || sample.mask.is_some()
}

/// Standard Gumbel noise of one token at one position under one seed.
pub fn gumbel(seed: u64, position: u32, token: u32) -> f32 {
    let words = philox(seed, [token / 4, position, 0, 0]);
    -(-unit(words[token as usize % 4]).ln()).ln()
}

/// Larger first, then lower id.
fn by_rank(a: &(u32, f32), b: &(u32, f32)) -> Ordering {
    b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
}

/// The largest logit and the lowest id that has it; `None` if all are minus infinity.
pub fn argmax(logits: &[f32]) -> Option<(u32, f32)> {
    let max = Some(largest(logits)).filter(|&max| max > f32::NEG_INFINITY)?;
    let best = logits.iter().position(|&logit| logit == max)?;
    Some((best as u32, max))
}

/// Keeps the `n` best candidates, sorted.
fn keep_best(candidates: &mut Vec<(u32, f32)>, n: usize) {
    if n < candidates.len() {
        candidates.select_nth_unstable_by(n, by_rank);
        candidates.truncate(n);
    }
    candidates.sort_unstable_by(by_rank);
}

/// Keeps the smallest set of best candidates whose probability reaches `p`, sorted. Logits are
/// relative to the best.
fn keep_nucleus(candidates: &mut Vec<(u32, f32)>, p: f32) {
    let total: f64 = candidates.iter().map(|c| f64::from(c.1.exp())).sum();
    let target = f64::from(p) * total;
    let mut sorted = 0;
    let mut reached = 0.0;
    // The nucleus is nearly always small: sort only a head of the candidates, doubling while short.
    let mut head = 256.min(candidates.len());
    loop {
        let rest = &mut candidates[sorted..];
        let take = head - sorted;
        if take < rest.len() {
            rest.select_nth_unstable_by(take, by_rank);
        }
        rest[..take].sort_unstable_by(by_rank);
        for i in sorted..head {
            reached += f64::from(candidates[i].1.exp());
            if reached >= target {
                candidates.truncate(i + 1);
                return;
            }
        }
        if head == candidates.len() {
            return;
        }
        sorted = head;
        head = (head * 8).min(candidates.len());
    }
}
