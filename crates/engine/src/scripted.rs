//! A backend that follows a script instead of a model, for exact tests of everything above it.
//!
//! Its KV blocks hold the tokens themselves, read back through the block tables: a block that was
//! shared, copied or reused wrongly shows as a wrong context.

use crate::backend::{Answered, Backend, BackendError, Limits};
use crate::batch::{BLOCK, Batch, Input, Output};
use crate::sampling::Sampler;

/// What comes after a context: the token that is all but certain, or `None` for "all equally likely".
pub type Script = dyn FnMut(&[u32]) -> Option<u32> + Send;

/// See the module.
pub struct Scripted {
    limits: Limits,
    script: Box<Script>,
    blocks: Vec<[Option<u32>; BLOCK]>,
    sampler: Sampler,
    answered: Answered,
}

/// Logit of the script's token; all others have 0.
const CERTAIN: f32 = 50.0;

impl Scripted {
    /// A backend within these limits that follows `script`.
    pub fn new(limits: Limits, script: Box<Script>) -> Self {
        Scripted {
            blocks: vec![[None; BLOCK]; limits.blocks],
            limits,
            script,
            sampler: Sampler::default(),
            answered: Answered::default(),
        }
    }

    /// A script that says `reply` after the prompt and then `end` for ever. The prompt ends with the
    /// last occurrence of `trigger`.
    pub fn reply(trigger: u32, reply: Vec<u32>, end: u32) -> Box<Script> {
        Box::new(move |context| {
            let said = context.iter().rev().take_while(|&&token| token != trigger).count();
            Some(reply.get(said).copied().unwrap_or(end))
        })
    }

    /// The tokens of a sequence up to a position, as its blocks hold them.
    fn context(&self, table: &[u32], len: usize) -> Result<Vec<u32>, BackendError> {
        let slot = |p: usize| self.blocks[table[p / BLOCK] as usize][p % BLOCK];
        let missing = |p| BackendError::Batch(format!("position {p} was never written"));
        (0..len).map(|p| slot(p).ok_or_else(|| missing(p))).collect()
    }
}

impl Backend for Scripted {
    fn limits(&self) -> Limits {
        self.limits
    }

    fn submit(&mut self, batch: &Batch) -> Result<(), BackendError> {
        batch.check(&self.limits)?;
        for &(from, to) in &batch.copies {
            self.blocks[to as usize] = self.blocks[from as usize];
        }
        for s in 0..batch.sequences() {
            for t in batch.offsets[s]..batch.offsets[s + 1] {
                let token = match batch.tokens[t] {
                    Input::Token(token) => Some(token),
                    Input::Sampled(row) => self.answered.drawn().get(row).copied().flatten(),
                };
                let position = batch.positions[t] as usize;
                self.blocks[batch.tables[s][position / BLOCK] as usize][position % BLOCK] = token;
            }
        }
        let mut output = Output::default();
        for row in &batch.rows {
            let sequence = batch.offsets.partition_point(|&offset| offset <= row.token) - 1;
            let length = batch.positions[row.token] as usize + 1;
            let context = self.context(&batch.tables[sequence], length)?;
            let mut logits = vec![0.0; self.limits.vocab];
            if let Some(token) = (self.script)(&context) {
                logits[token as usize] = CERTAIN;
            }
            output.answers.push(self.sampler.answer(&row.want, &logits));
        }
        self.answered.push(output);
        Ok(())
    }

    fn collect(&mut self, out: &mut Output) -> Result<(), BackendError> {
        *out = self.answered.pop()?;
        Ok(())
    }
}
