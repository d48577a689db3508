//! The plain data that crosses the boundary to a backend. A backend sees tokens, positions and block
//! tables; it never sees a session, a request or text.

use crate::backend::{BackendError, Limits};
use crate::sampling::Sample;

/// Positions that one KV block holds, on every backend.
pub const BLOCK: usize = 32;

/// A token to evaluate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Input {
    /// A known id.
    Token(u32),
    /// The token that this row of the batch before sampled: the host need not have read it yet.
    Sampled(usize),
}

/// One forward call: some new tokens of some sequences, laid out flat.
///
/// Sequence `s` owns tokens `offsets[s]..offsets[s + 1]`, at consecutive positions; position `p` lives
/// in slot `p % 32` of KV block `tables[s][p / 32]`. Everything before a sequence's first token is
/// already in its blocks.
#[derive(Debug, Clone, Default)]
pub struct Batch {
    /// New tokens of all sequences, `[tokens]`.
    pub tokens: Vec<Input>,
    /// Position of each token in its sequence, `[tokens]`.
    pub positions: Vec<u32>,
    /// Where each sequence begins in `tokens`, and the total, `[sequences + 1]`.
    pub offsets: Vec<usize>,
    /// KV blocks of each sequence, enough to hold its last position, `[sequences]`.
    pub tables: Vec<Vec<u32>>,
    /// Blocks to duplicate, in order, before anything else (from, to): copy-on-write.
    pub copies: Vec<(u32, u32)>,
    /// Tokens whose next-token distribution is wanted, ascending.
    pub rows: Vec<Row>,
}

/// A place where an answer is wanted.
#[derive(Debug, Clone)]
pub struct Row {
    /// Index into [`Batch::tokens`].
    pub token: usize,
    /// What is wanted there.
    pub want: Want,
}

/// What a backend returns for a row.
#[derive(Debug, Clone)]
pub enum Want {
    /// The whole logits row, `[vocab]`.
    Logits,
    /// Log-probability of a token that is already known (echo, perplexity), with the best `top`.
    Score {
        /// The token to score.
        target: u32,
        /// How many alternatives to list.
        top: usize,
    },
    /// A token drawn as described.
    Sample(Box<Sample>),
}

/// Answers of one forward call, in the order of [`Batch::rows`].
#[derive(Debug, Clone, Default)]
pub struct Output {
    /// One for each row.
    pub answers: Vec<Answer>,
}

/// The answer to one row.
#[derive(Debug, Clone)]
pub enum Answer {
    /// To [`Want::Logits`].
    Logits(Vec<f32>),
    /// To [`Want::Score`] and [`Want::Sample`].
    Choice(Choice),
    /// The logits held a NaN or an infinity; the sequence cannot go on, its batch mates can.
    NotFinite,
}

/// A token with its log-probability under the model's own distribution (before temperature,
/// penalties, bias and masks).
#[derive(Debug, Clone, PartialEq)]
pub struct Choice {
    /// Drawn or scored token.
    pub token: u32,
    /// Natural logarithm of its probability.
    pub logprob: f32,
    /// The most probable tokens, best first; empty unless asked for.
    pub top: Vec<(u32, f32)>,
}

/// Whether a mask of [`Sample`] allows a token.
pub fn allows(mask: &[u32], token: u32) -> bool {
    mask.get(token as usize / 32).is_some_and(|word| word >> (token % 32) & 1 == 1)
}

impl Output {
    /// The token drawn or scored by each row, if it was.
    pub fn tokens(&self) -> Vec<Option<u32>> {
        let token = |answer: &Answer| match answer {
            Answer::Choice(choice) => Some(choice.token),
            Answer::Logits(_) | Answer::NotFinite => None,
        };
        self.answers.iter().map(token).collect()
    }
}

impl Batch {
    /// Number of sequences.
    pub fn sequences(&self) -> usize {
        self.tables.len()
    }

    /// Empties the batch and keeps its memory.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.positions.clear();
        self.offsets.clear();
        self.tables.clear();
        self.copies.clear();
        self.rows.clear();
    }

    /// Appends a sequence's next `tokens`, the first at `position`; returns the index of the first.
    pub fn push(
        &mut self,
        tokens: impl IntoIterator<Item = Input>,
        position: usize,
        table: &[u32],
    ) -> usize {
        let first = self.tokens.len();
        if self.offsets.is_empty() {
            self.offsets.push(0);
        }
        self.tokens.extend(tokens);
        let count = self.tokens.len() - first;
        self.positions.extend((position..position + count).map(|p| p as u32));
        self.offsets.push(self.tokens.len());
        self.tables.push(table.to_vec());
        first
    }

    /// Token ids, given what the rows of the batch before drew, for backends that read it on the host.
    pub fn resolve(&self, drawn: &[Option<u32>]) -> Result<Vec<u32>, BackendError> {
        let resolve = |input: &Input| match *input {
            Input::Token(id) => Ok(id),
            Input::Sampled(row) => drawn.get(row).copied().flatten().ok_or_else(|| {
                BackendError::Batch(format!("row {row} of the last batch drew no token"))
            }),
        };
        self.tokens.iter().map(resolve).collect()
    }

    /// Rejects a batch that a backend could not evaluate, naming the first fault.
    pub fn check(&self, limits: &Limits) -> Result<(), BackendError> {
        let bad = |what: String| Err(BackendError::Batch(what));
        if self.tokens.len() > limits.tokens {
            return bad(format!("{} tokens, at most {} a call", self.tokens.len(), limits.tokens));
        }
        if self.rows.len() > limits.rows {
            return bad(format!("{} rows, at most {} a call", self.rows.len(), limits.rows));
        }
        if self.positions.len() != self.tokens.len()
            || self.offsets.len() != self.tables.len() + 1
            || self.offsets.first() != Some(&0)
            || self.offsets.last() != Some(&self.tokens.len())
        {
            return bad("lengths of tokens, positions, offsets and tables disagree".into());
        }
        for (s, table) in self.tables.iter().enumerate() {
            let (start, end) = (self.offsets[s], self.offsets[s + 1]);
            if start >= end {
                return bad(format!("sequence {s} has no tokens"));
            }
            let positions = &self.positions[start..end];
            if positions.windows(2).any(|w| w[1] != w[0] + 1) {
                return bad(format!("positions of sequence {s} are not consecutive"));
            }
            let last = positions[positions.len() - 1] as usize;
            if last >= limits.context {
                return bad(format!("position {last} of sequence {s}, context {}", limits.context));
            }
            if table.len() * BLOCK <= last {
                return bad(format!(
                    "sequence {s} reaches position {last} with {} blocks",
                    table.len()
                ));
            }
            if let Some(block) = table.iter().find(|&&b| b as usize >= limits.blocks) {
                return bad(format!("block {block} of sequence {s}, {} exist", limits.blocks));
            }
        }
        let copied = self.copies.iter().flat_map(|&(from, to)| [from, to]);
        if let Some(block) = copied.into_iter().find(|&b| b as usize >= limits.blocks) {
            return bad(format!("copy names block {block}, {} exist", limits.blocks));
        }
        for input in &self.tokens {
            if let Input::Token(id) = *input
                && id as usize >= limits.vocab
            {
                return bad(format!("token {id}, vocabulary {}", limits.vocab));
            }
        }
        if let Some(row) = self.rows.iter().find(|row| row.token >= self.tokens.len()) {
            return bad(format!("row at token {}, {} in the batch", row.token, self.tokens.len()));
        }
        Ok(())
    }
}
