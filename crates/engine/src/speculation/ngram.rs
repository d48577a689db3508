//! Drafts from the text itself: where its last tokens occurred before, what followed them then.
//!
//! An index of every run of three tokens leads to the earlier places; the one that shares the longest
//! run with the end of the text is followed. Prompt and output are one text here.

use std::collections::HashMap;

use super::{Ask, Drafter};
use crate::backend::BackendError;
use crate::engine::RequestId;

/// Tokens that have to agree before anything is proposed.
const RUN: usize = 3;
/// Earlier places that are compared, latest first.
const PLACES: usize = 32;
/// Tokens of an earlier place that are compared at most.
const COMPARED: usize = 64;

/// See the module.
#[derive(Debug, Default)]
pub struct Ngram {
    texts: HashMap<RequestId, Index>,
}

/// Where each run of a text ended last, and before that, and so on.
#[derive(Debug, Default)]
struct Index {
    last: HashMap<[u32; RUN], usize>,
    /// For each token, the end of the same run before; the end itself where there is none.
    before: Vec<usize>,
}

impl Index {
    /// Takes in what the text has grown by.
    fn grow(&mut self, tokens: &[u32]) {
        for end in self.before.len() + 1..=tokens.len() {
            let run = tokens[..end].last_chunk::<RUN>();
            let earlier = run.and_then(|&run| self.last.insert(run, end));
            self.before.push(earlier.unwrap_or(end));
        }
    }

    /// The end of the earlier place that shares most with the end of the text, and how many tokens.
    fn find(&self, tokens: &[u32]) -> Option<(usize, usize)> {
        let mut best: Option<(usize, usize)> = None;
        let mut end = tokens.len();
        for _ in 0..PLACES {
            let earlier = *self.before.get(end.checked_sub(1)?)?;
            if earlier == end {
                break;
            }
            end = earlier;
            let pairs = tokens[..end].iter().rev().zip(tokens.iter().rev());
            let shared = pairs.take(COMPARED).take_while(|(a, b)| a == b).count();
            if best.is_none_or(|(_, most)| shared > most) {
                best = Some((end, shared));
            }
        }
        best
    }
}

impl Drafter for Ngram {
    /// A long agreement is followed further than a short one.
    fn reach(&mut self, id: RequestId, tokens: &[u32], most: usize) -> usize {
        let index = self.texts.entry(id).or_default();
        index.grow(tokens);
        index.find(tokens).map_or(0, |(_, shared)| most.min(2 * shared))
    }

    fn is_free(&self) -> bool {
        true
    }

    fn draft(&mut self, asks: &[Ask<'_>]) -> Result<Vec<Vec<u32>>, BackendError> {
        let draft = |ask: &Ask<'_>| {
            let place = self.texts.get(&ask.id).and_then(|index| index.find(ask.tokens));
            let (end, _) = place.unwrap_or((ask.tokens.len(), 0));
            // A text that repeats itself goes on in the draft.
            let period = ask.tokens.len() - end;
            (0..if period > 0 { ask.most } else { 0 })
                .map(|i| ask.tokens[end + i % period])
                .collect()
        };
        Ok(asks.iter().map(draft).collect())
    }

    fn forget(&mut self, id: RequestId) {
        self.texts.remove(&id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drafted(tokens: &[u32], most: usize) -> Vec<u32> {
        let mut ngram = Ngram::default();
        let id = RequestId(1);
        // In two pieces, as a text grows.
        ngram.reach(id, &tokens[..tokens.len() / 2], most);
        let most = ngram.reach(id, tokens, most);
        let (sampling, bias) = (Default::default(), [].into());
        let ask = Ask { id, tokens, prompt: 0, most, sampling: &sampling, bias: &bias };
        ngram.draft(&[ask]).expect("a draft").remove(0)
    }

    #[test]
    fn the_longest_agreement_is_followed() {
        assert_eq!(drafted(&[9, 1, 2, 3, 4, 5, 0, 8, 1, 2, 3, 6, 7, 0, 9, 1, 2, 3], 2), [4, 5]);
        // The latest of equals.
        assert_eq!(drafted(&[0, 1, 2, 3, 4, 7, 1, 2, 3, 6, 8, 1, 2, 3], 1), [6]);
    }

    #[test]
    fn repetition_goes_on_in_the_draft() {
        assert_eq!(drafted(&[7, 1, 2, 1, 2, 1, 2], 6), [1, 2, 1, 2, 1, 2]);
        assert_eq!(drafted(&[5; 10], 15), [5; 15]);
    }

    #[test]
    fn nothing_is_made_up() {
        assert!(drafted(&[1, 2], 8).is_empty());
        assert!(drafted(&[1, 2, 3, 4, 5, 6, 7], 8).is_empty());
        assert!(drafted(&[1, 2, 9, 1, 2], 8).is_empty(), "two tokens are no run");
    }
}
