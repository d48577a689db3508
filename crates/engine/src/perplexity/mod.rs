//! How well a model predicts a text: perplexity over windows, and its divergence from a reference model
//! whose distributions were saved.

pub mod divergence;
pub mod saved;

use std::fmt;
use std::ops::Range;

use crate::backend::{Backend, BackendError};
use crate::batch::{Answer, Batch, Output, Row, Want};
use crate::kv::KvPool;
use crate::sequence::Sequence;

/// Rows of logits that are held at once: 64 of the family's vocabulary are 39 MB.
const LOGITS_ROWS: usize = 64;

/// How a text is cut. Windows begin every `stride` tokens; each scores the tokens that none before it
/// has scored, except its first, which nothing comes before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Windows {
    /// Tokens of a window, at least 2.
    pub window: usize,
    /// Tokens from one window's begin to the next one's, 1 to `window`. As long as the window: windows side
    /// by side. Shorter: every scored token has at least `window - stride` tokens before it.
    pub stride: usize,
}

/// One window.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Span {
    /// Its tokens, as a range of the text.
    pub tokens: Range<usize>,
    /// The first token that it scores; it scores all from there on.
    pub scored: usize,
}

/// The natural logarithm of the sum of e^x: what turns a logit into a log-probability when it is taken off. In f64
/// throughout, unlike the sampler's: two schemes may differ by less than f32 can tell.
pub fn log_sum_exp(logits: &[f32]) -> f64 {
    let largest = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = logits.iter().map(|&x| (f64::from(x) - largest).exp()).sum();
    largest + sum.ln()
}

impl Windows {
    /// The windows of a text of `tokens` tokens that score anything.
    pub fn spans(self, tokens: usize) -> Vec<Span> {
        let Windows { window, stride } = self;
        let mut spans = Vec::new();
        let (mut start, mut end) = (0, 0);
        while end < tokens {
            let scored = end.max(start + 1);
            end = tokens.min(start + window);
            if scored < end {
                spans.push(Span { tokens: start..end, scored });
            }
            start += stride;
        }
        spans
    }

    /// How many tokens the windows of a text score.
    pub fn scored(self, tokens: usize) -> usize {
        self.spans(tokens).iter().map(|span| span.tokens.end - span.scored).sum()
    }
}

/// Natural logarithms of the probabilities of a span's scored tokens.
pub fn log_probabilities(
    backend: &mut dyn Backend,
    text: &[u32],
    span: &Span,
) -> Result<Vec<f64>, Error> {
    let mut found = Vec::new();
    let score = |target| Want::Score { target, top: 0 };
    evaluate(backend, text, span, usize::MAX, score, |_, answer| match answer {
        Answer::Choice(choice) => {
            found.push(f64::from(choice.logprob));
            Ok(())
        }
        Answer::Logits(_) | Answer::NotFinite => Err(Error::NotFinite),
    })?;
    Ok(found)
}

/// Hands `each` every scored token of a span and the logits, `[vocab]`, that predict it.
pub fn logits<E: From<Error>>(
    backend: &mut dyn Backend,
    text: &[u32],
    span: &Span,
    mut each: impl FnMut(u32, &[f32]) -> Result<(), E>,
) -> Result<(), E> {
    evaluate(
        backend,
        text,
        span,
        LOGITS_ROWS,
        |_| Want::Logits,
        |target, answer| match answer {
            Answer::Logits(logits) if logits.iter().all(|x| x.is_finite()) => each(target, logits),
            Answer::Logits(_) | Answer::Choice(_) | Answer::NotFinite => {
                Err(Error::NotFinite.into())
            }
        },
    )
}

/// Evaluates a span, asking for what `want` makes of each scored token where that token is predicted.
fn evaluate<E: From<Error>>(
    backend: &mut dyn Backend,
    text: &[u32],
    span: &Span,
    most_rows: usize,
    want: impl Fn(u32) -> Want,
    mut each: impl FnMut(u32, &Answer) -> Result<(), E>,
) -> Result<(), E> {
    let limits = backend.limits();
    let most_rows = most_rows.min(limits.rows);
    // The last token predicts nothing that is scored.
    let window = &text[span.tokens.start..span.tokens.end - 1];
    let mut pool = KvPool::new(limits.blocks);
    let mut sequence = Sequence::new(window.to_vec());
    let mut batch = Batch::default();
    let mut output = Output::default();
    while sequence.pending() > 0 {
        batch.clear();
        let first = span.tokens.start + sequence.evaluated();
        let silent = (span.scored - 1).saturating_sub(first);
        let count = sequence.pending().min(limits.tokens).min(silent.saturating_add(most_rows));
        sequence.schedule(&mut pool, &mut batch, count).map_err(|_| Error::Full)?;
        let targets = &text[first + silent.min(count) + 1..first + count + 1];
        batch.rows.extend(
            targets
                .iter()
                .enumerate()
                .map(|(row, &target)| Row { token: silent + row, want: want(target) }),
        );
        backend.forward(&batch, &mut output).map_err(Error::from)?;
        for (&target, answer) in targets.iter().zip(&output.answers) {
            each(target, answer)?;
        }
    }
    Ok(())
}

/// Why a text could not be scored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Error {
    /// The backend failed.
    Backend(BackendError),
    /// The logits held a NaN or an infinity.
    NotFinite,
    /// The backend's KV cache is smaller than the window.
    Full,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Backend(error) => error.fmt(f),
            Error::NotFinite => f.write_str("logits: expected finite numbers, found another"),
            Error::Full => f.write_str("the window does not fit the KV cache"),
        }
    }
}

impl std::error::Error for Error {}

impl From<BackendError> for Error {
    fn from(error: BackendError) -> Self {
        Error::Backend(error)
    }
}
