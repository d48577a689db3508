//! A request's part in speculation: what may be drafted for it, and what it puts into a batch.

use std::sync::Arc;

use super::{Job, Planned};
use crate::batch::{Batch, Row, Want, allows};
use crate::kv::KvPool;
use crate::speculation::Ask;

/// What came of the drafts in a batch.
#[derive(Debug, Clone, Copy, Default)]
pub struct Verified {
    /// Tokens that were proposed.
    pub proposed: usize,
    /// Tokens that were evaluated: none that the request could not take.
    pub drafted: usize,
    /// Tokens that were right.
    pub accepted: usize,
}

/// Tokens that a constraint allows; `None` allows all.
type Mask = Option<Arc<[u32]>>;

impl Job {
    /// Tokens that may follow its last one in a batch as a draft: as many as may be generated before the
    /// last that may, once there is an answer and nothing of it is on its way.
    pub fn draftable(&self) -> usize {
        let answering = self.usage.generated > 0 && self.planned.is_empty();
        let one_pending = self.is_ready() && self.sequence.pending() == 1;
        let left = self.request.max_tokens - self.usage.generated;
        if answering && one_pending { left.saturating_sub(1) } else { 0 }
    }

    /// What a drafter has to know of it.
    pub fn ask(&self, most: usize) -> Ask<'_> {
        Ask {
            id: self.id,
            tokens: self.sequence.tokens(),
            prompt: self.prompt,
            most,
            sampling: &self.request.sampling,
            bias: &self.request.bias,
        }
    }

    /// Puts the last token and a draft behind it into the batch, with a row that draws behind each.
    /// Returns how many, or `None` if nothing was done.
    pub(super) fn schedule_draft(
        &mut self,
        pool: &mut KvPool,
        batch: &mut Batch,
        number: u64,
        draft: &[u32],
    ) -> Option<usize> {
        let known = self.sequence.tokens().len();
        let (drafts, masks) = self.admissible(draft)?;
        let first = self.sequence.schedule_drafts(pool, batch, drafts).ok()?;
        let first_row = batch.rows.len();
        for (i, mask) in masks.into_iter().enumerate() {
            let sample = self.sample(&drafts[..i], known + i, mask);
            batch.rows.push(Row { token: first + i, want: Want::Sample(Box::new(sample)) });
        }
        self.planned.push_back(Planned {
            batch: number,
            first_row,
            scores: 0,
            draws: true,
            drafts: drafts.to_vec(),
            proposed: draft.len(),
        });
        Some(drafts.len() + 1)
    }

    /// What of a draft could become part of the answer, and the constraint's masks before its tokens and
    /// behind it; `None` if the constraint itself has failed.
    fn admissible<'a>(&self, draft: &'a [u32]) -> Option<(&'a [u32], Vec<Mask>)> {
        let stops = &self.request.stop_tokens;
        let end = draft.iter().position(|token| stops.contains(token)).unwrap_or(draft.len());
        let Some(constraint) = &self.request.constraint else {
            return Some((&draft[..end], vec![None; end + 1]));
        };
        let mut ahead = constraint.fork();
        let mut masks = vec![ahead.mask().ok()?];
        for (i, &token) in draft[..end].iter().enumerate() {
            let allowed = masks[i].as_ref().is_none_or(|mask| allows(mask, token));
            match (allowed && ahead.accept(token).is_ok()).then(|| ahead.mask()) {
                Some(Ok(mask)) => masks.push(mask),
                _ => return Some((&draft[..i], masks)),
            }
        }
        Some((&draft[..end], masks))
    }
}
