//! Several answers to one prompt: the first reads it, the others wait and go on from there.

use super::Job;
use crate::batch::Batch;
use crate::engine::RequestId;
use crate::kv::KvPool;

impl Job {
    /// Makes it wait until `leader` has read the prompt that both begin with. A prompt that is to be
    /// scored is read for its own sake.
    pub fn follow(&mut self, leader: RequestId) {
        self.leader = (!self.request.score_prompt).then_some(leader);
    }

    /// Whom it waits for.
    pub fn leader(&self) -> Option<RequestId> {
        self.leader
    }

    /// Waits for nobody any more.
    pub fn go_alone(&mut self) {
        self.leader = None;
    }

    /// Whether the last batch ends its prompt: its first token is being drawn.
    pub fn draws_first(&self) -> bool {
        let mut draws = self.planned.iter().filter(|planned| planned.draws);
        self.usage.generated == 0 && draws.next().is_some() && draws.next().is_none()
    }

    /// Starts it where `leader` is at the end of the prompt: shares the leader's blocks, and draws its own
    /// first token from the row's distribution that the leader, the last in the batch, draws from.
    pub fn fork(&mut self, leader: &Job, pool: &mut KvPool, batch: &mut Batch, number: u64) {
        let Some(token) = batch.rows.last().map(|row| row.token) else { return };
        self.go_alone();
        self.sequence = leader.sequence.fork(pool);
        self.admit();
        self.usage.cached = leader.usage.cached;
        self.plan(batch, number, 0, batch.rows.len(), Some(token));
    }
}
