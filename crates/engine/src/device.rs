//! What backends of devices share: things that the host works out before a batch crosses to the device.

use std::collections::BTreeMap;

use crate::backend::BackendError;
use crate::batch::{Batch, Input};
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
