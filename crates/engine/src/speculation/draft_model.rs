//! Drafts by a smaller model of the family, on a backend of its own.
//!
//! It draws as the request does, with the same noise at the same positions: where the two models agree
//! on the distribution they draw the same token, at any temperature.

use std::collections::HashMap;
use std::sync::Arc;

use super::{Ask, Drafter};
use crate::backend::{Backend, BackendError};
use crate::batch::{Answer, Batch, Output, Row, Want};
use crate::engine::RequestId;
use crate::kv::KvPool;
use crate::sampling::Sample;
use crate::sequence::Sequence;

/// See the module.
pub struct DraftModel {
    backend: Box<dyn Backend>,
    pool: KvPool,
    sequences: HashMap<RequestId, Sequence>,
    batch: Batch,
    output: Output,
}

impl DraftModel {
    /// Drafts by the model of `backend`, whose vocabulary must be the large model's.
    pub fn new(backend: Box<dyn Backend>) -> Self {
        DraftModel {
            pool: KvPool::new(backend.limits().blocks),
            backend,
            sequences: HashMap::new(),
            batch: Batch::default(),
            output: Output::default(),
        }
    }

    /// Makes the model's sequence hold the request's text, as far as it does not already.
    fn follow(&mut self, ask: &Ask<'_>) {
        let sequence = self.sequences.entry(ask.id).or_default();
        let pairs = sequence.tokens().iter().zip(ask.tokens);
        let common = pairs.take_while(|(a, b)| a == b).count();
        sequence.truncate(&mut self.pool, common);
        sequence.append(&ask.tokens[common..]);
        sequence.adopt(&mut self.pool);
    }

    /// Evaluates what is pending of the sequences whose drafts are not complete, and draws behind
    /// each that is then up to date. Returns false if there was nothing to evaluate.
    fn step(&mut self, asks: &[Ask<'_>], drafts: &mut [Vec<u32>]) -> Result<bool, BackendError> {
        let limits = self.backend.limits();
        let mut room = limits.tokens;
        let mut drawing = Vec::new();
        self.batch.clear();
        for (index, ask) in asks.iter().enumerate() {
            let Some(sequence) = self.sequences.get_mut(&ask.id) else { continue };
            let wanted = drafts[index].len() < ask.most && drawing.len() < limits.rows;
            let count = sequence.pending().min(room);
            let fits = sequence.tokens().len() < limits.context;
            if !wanted || !fits || count == 0 {
                continue;
            }
            // Without a block there is no draft, and nobody waits for one.
            let scheduled = sequence.schedule(&mut self.pool, &mut self.batch, count);
            let Ok(first) = scheduled else { continue };
            room -= count;
            if sequence.pending() == 0 {
                let sample = sample(ask, sequence.tokens());
                let want = Want::Sample(Box::new(sample));
                self.batch.rows.push(Row { token: first + count - 1, want });
                drawing.push(index);
            }
        }
        if self.batch.tokens.is_empty() {
            return Ok(false);
        }
        self.backend.forward(&self.batch, &mut self.output)?;
        for (&index, answer) in drawing.iter().zip(&self.output.answers) {
            let sequence = self.sequences.entry(asks[index].id).or_default();
            if drafts[index].is_empty() {
                sequence.publish(&mut self.pool);
            }
            if let Answer::Choice(choice) = answer {
                sequence.append(&[choice.token]);
                drafts[index].push(choice.token);
            }
        }
        Ok(true)
    }
}

/// The request's own draw behind `tokens`, which end with its text and what is drafted so far.
fn sample(ask: &Ask<'_>, tokens: &[u32]) -> Sample {
    let history = if ask.sampling.penalises() { tokens.to_vec() } else { Vec::new() };
    Sample {
        bias: Arc::clone(ask.bias),
        history,
        prompt: ask.prompt,
        ..Sample::new(ask.sampling.clone(), tokens.len() as u32)
    }
}

impl Drafter for DraftModel {
    fn reach(&mut self, _: RequestId, tokens: &[u32], most: usize) -> usize {
        most.min(self.backend.limits().context.saturating_sub(tokens.len()))
    }

    /// A text that is new to the model, or that it was not asked about for long, is read over several
    /// steps, so that nobody waits for the whole of it.
    fn draft(&mut self, asks: &[Ask<'_>]) -> Result<Vec<Vec<u32>>, BackendError> {
        asks.iter().for_each(|ask| self.follow(ask));
        let mut drafts = vec![Vec::new(); asks.len()];
        let longest = asks.iter().map(|ask| ask.most).max().unwrap_or(0);
        for _ in 0..longest {
            if !self.step(asks, &mut drafts)? {
                break;
            }
        }
        Ok(drafts)
    }

    fn forget(&mut self, id: RequestId) {
        if let Some(mut sequence) = self.sequences.remove(&id) {
            sequence.release(&mut self.pool);
        }
    }
}
