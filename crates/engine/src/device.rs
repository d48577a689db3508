//! What backends of devices share: things that the host works out before a batch crosses to the device, and how its
//! answers are read.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use crate::backend::BackendError;
use crate::batch::{Answer, Batch, Choice, Input, Want};
use crate::sampling::Sample;

/// How one token's logit changes before the draw.
pub struct Edit {
    /// Occurrences in the output; -1 if it is in neither prompt nor output.
    pub seen: i32,
    /// Added to the logit.
    pub bias: f32,
}

/// The tokens below `vocab` whose logits change, each once.
pub fn edits(sample: &Sample, vocab: usize) -> BTreeMap<u32, Edit> {
    let mut edits = BTreeMap::new();
    let known = |token: u32| (token as usize) < vocab;
    if sample.params.penalises() {
        for (i, &token) in sample.history.iter().enumerate().filter(|(_, t)| known(**t)) {
            let edit = edits.entry(token).or_insert(Edit { seen: 0, bias: 0.0 });
            edit.seen += i32::from(i >= sample.prompt);
        }
    }
    for &(token, bias) in sample.bias.iter().filter(|(t, _)| known(*t)) {
        edits.entry(token).or_insert(Edit { seen: -1, bias: 0.0 }).bias += bias;
    }
    edits
}

/// Refuses a batch with a token that row `i` of the last batch was to draw and `drew[i]` says it did not.
pub fn check_drawn(batch: &Batch, drew: &[bool]) -> Result<(), BackendError> {
    let missing = |input: &&Input| match input {
        Input::Sampled(row) => !drew.get(*row).is_some_and(|&drew| drew),
        Input::Token(_) => false,
    };
    match batch.tokens.iter().find(missing) {
        Some(Input::Sampled(row)) => {
            Err(BackendError::Batch(format!("row {row} of the last batch drew no token")))
        }
        _ => Ok(()),
    }
}

/// How attention's work is cut into items of about the same size.
pub struct Cuts {
    /// New tokens of a sequence up to which its context is split into chunks.
    pub few: usize,
    /// Tokens of an item of split attention.
    pub tokens: usize,
    /// Tokens of an item of prefill attention.
    pub queries: usize,
    /// Chunks of a context whose last position this is; at least one.
    pub chunks: fn(usize) -> usize,
}

/// Work items of attention.
#[derive(Default)]
pub struct Attention {
    /// Split attention: first token, tokens, chunk, and where its partial results begin; `u32::MAX` for the only chunk,
    /// which is the result. A chunk's results are those of its tokens, the chunks of an item follow each other.
    pub splits: Vec<[u32; 4]>,
    /// Tokens whose chunks have to be put together: token, first partial result, how far the next one is, chunks.
    pub merges: Vec<[u32; 4]>,
    /// Prefill attention: first token, tokens; those with the longest context first, so that none begins when the
    /// others end.
    pub flashes: Vec<[u32; 2]>,
    /// Partial results in all.
    pub partials: usize,
}

impl Attention {
    /// Cuts up a checked batch: every token of every sequence is in the items of one of the kernels.
    pub fn of(batch: &Batch, cuts: &Cuts) -> Self {
        let (mut items, mut flashes) = (Self::default(), Vec::new());
        for range in batch.offsets.windows(2) {
            let few = range[1] - range[0] <= cuts.few;
            let most = if few { cuts.tokens } else { cuts.queries };
            let chunks = |token: usize| (cuts.chunks)(batch.positions[token] as usize);
            let mut first = range[0];
            while first < range[1] {
                let mut count = most.min(range[1] - first);
                if few {
                    // A token's chunks are its own, whoever shares its item.
                    let alike = |&i: &usize| chunks(first + i) == chunks(first);
                    count = (1..count).take_while(alike).count() + 1;
                    items.split(first as u32, count as u32, chunks(first) as u32);
                } else {
                    let last = batch.positions[first + count - 1];
                    flashes.push((last, [first as u32, count as u32]));
                }
                first += count;
            }
        }
        flashes.sort_by_key(|&(last, _)| Reverse(last));
        items.flashes = flashes.into_iter().map(|(_, item)| item).collect();
        items
    }

    fn split(&mut self, first: u32, tokens: u32, chunks: u32) {
        if chunks == 1 {
            return self.splits.push([first, tokens, 0, u32::MAX]);
        }
        let base = self.partials as u32;
        self.splits.extend((0..chunks).map(|chunk| [first, tokens, chunk, base]));
        self.merges.extend((0..tokens).map(|i| [first + i, base + i, tokens, chunks]));
        self.partials += (chunks * tokens) as usize;
    }
}

/// What of a row's request matters when its answer comes back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Asked {
    /// The logits.
    Logits,
    /// A token.
    Choice {
        /// Alternatives, no more than the vocabulary holds.
        top: usize,
    },
}

impl Asked {
    /// Of a request.
    pub fn of(want: &Want, vocab: usize) -> Self {
        match want {
            Want::Logits => Asked::Logits,
            Want::Score { top, .. } => Asked::Choice { top: vocab.min(*top) },
            Want::Sample(sample) => Asked::Choice { top: vocab.min(sample.top) },
        }
    }
}

/// Reads a device's answer, four words: whether the logits were finite, the token, its log-probability; and its
/// alternatives, two words each: token and log-probability.
pub fn choice(answer: &[u8], tops: &[u8], top: usize) -> Answer {
    let word = |bytes: &[u8], i: usize| {
        u32::from_le_bytes([bytes[4 * i], bytes[4 * i + 1], bytes[4 * i + 2], bytes[4 * i + 3]])
    };
    if word(answer, 0) == 0 {
        return Answer::NotFinite;
    }
    let entry = |i| (word(tops, 2 * i), f32::from_bits(word(tops, 2 * i + 1)));
    Answer::Choice(Choice {
        token: word(answer, 1),
        logprob: f32::from_bits(word(answer, 2)),
        top: (0..top).map(entry).collect(),
    })
}
