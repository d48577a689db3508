//! One sequence of tokens and the KV blocks that hold it.

use crate::batch::{BLOCK, Batch, Input};
use crate::kv::{Exhausted, KvPool, ROOT, Serial};

/// Tokens, how many of them the KV blocks hold, and those blocks. Blocks are the pool's: a sequence
/// must be released into the pool that it drew from.
#[derive(Debug, Default)]
pub struct Sequence {
    tokens: Vec<u32>,
    /// Tokens whose keys and values are in the blocks, or will be once the submitted batches are
    /// through; more than `tokens` while a token is being drawn and evaluated, or drafts are checked.
    evaluated: usize,
    blocks: Vec<u32>,
    /// Serials of the leading blocks that are published.
    published: Vec<Serial>,
}

impl Sequence {
    /// A sequence that holds `tokens`, none of them evaluated.
    pub fn new(tokens: Vec<u32>) -> Self {
        Sequence { tokens, ..Sequence::default() }
    }

    /// All tokens.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// How many leading tokens are in the KV blocks.
    pub fn evaluated(&self) -> usize {
        self.evaluated
    }

    /// Known tokens that are not in the KV blocks yet.
    pub fn pending(&self) -> usize {
        self.tokens.len().saturating_sub(self.evaluated)
    }

    /// Adds tokens at the end.
    pub fn append(&mut self, tokens: &[u32]) {
        self.tokens.extend_from_slice(tokens);
    }

    /// Cuts the sequence to `len` tokens and gives back blocks that are no longer needed.
    pub fn truncate(&mut self, pool: &mut KvPool, len: usize) {
        self.tokens.truncate(len);
        self.evaluated = self.evaluated.min(len);
        self.shrink(pool, self.evaluated.div_ceil(BLOCK));
    }

    /// A second sequence with the same tokens that shares all blocks. Whoever writes to a shared block
    /// first gets a copy of its own.
    pub fn fork(&self, pool: &mut KvPool) -> Sequence {
        self.blocks.iter().for_each(|&id| pool.share(id));
        Sequence {
            tokens: self.tokens.clone(),
            evaluated: self.evaluated,
            blocks: self.blocks.clone(),
            published: self.published.clone(),
        }
    }

    /// Takes over published blocks that continue what is evaluated. The last token is always left to
    /// evaluate, because its logits are wanted. Returns the tokens gained.
    pub fn adopt(&mut self, pool: &mut KvPool) -> usize {
        let before = self.evaluated;
        while self.evaluated.is_multiple_of(BLOCK)
            && self.blocks.len() == self.evaluated / BLOCK
            && self.published.len() == self.blocks.len()
            && self.evaluated + BLOCK < self.tokens.len()
        {
            let Some(tokens) = self.block_tokens(self.blocks.len()) else { break };
            let Some((id, serial)) = pool.adopt(self.parent(), tokens) else { break };
            self.blocks.push(id);
            self.published.push(serial);
            self.evaluated += BLOCK;
        }
        self.evaluated - before
    }

    /// Puts the next `count` pending tokens into `batch`, with blocks to hold them. On exhaustion the
    /// batch and the sequence's tokens are untouched. Returns the index of the first token in the batch.
    pub fn schedule(
        &mut self,
        pool: &mut KvPool,
        batch: &mut Batch,
        count: usize,
    ) -> Result<usize, Exhausted> {
        let end = self.evaluated + count;
        self.reserve(pool, batch, end)?;
        let inputs = self.tokens[self.evaluated..end].iter().map(|&t| Input::Token(t));
        let first = batch.push(inputs, self.evaluated, &self.blocks);
        self.evaluated = end;
        Ok(first)
    }

    /// Puts the token that `row` of the batch before draws into `batch`. Append that token once it is
    /// known. Returns its index in the batch.
    pub fn schedule_drawn(
        &mut self,
        pool: &mut KvPool,
        batch: &mut Batch,
        row: usize,
    ) -> Result<usize, Exhausted> {
        assert_eq!(self.evaluated, self.tokens.len(), "the draw must come after all known tokens");
        self.reserve(pool, batch, self.evaluated + 1)?;
        let index = batch.push([Input::Sampled(row)], self.evaluated, &self.blocks);
        self.evaluated += 1;
        Ok(index)
    }

    /// Puts all pending tokens and then `drafts`, which may turn out wrong, into `batch`. Once it is known
    /// how many are right, append those and rewind. Returns the index of the first token in the batch.
    pub fn schedule_drafts(
        &mut self,
        pool: &mut KvPool,
        batch: &mut Batch,
        drafts: &[u32],
    ) -> Result<usize, Exhausted> {
        let end = self.tokens.len() + drafts.len();
        self.reserve(pool, batch, end)?;
        let inputs = self.tokens[self.evaluated..].iter().chain(drafts).map(|&t| Input::Token(t));
        let first = batch.push(inputs, self.evaluated, &self.blocks);
        self.evaluated = end;
        Ok(first)
    }

    /// Takes back what was evaluated beyond the tokens before the last, which was drawn and is pending.
    pub fn rewind(&mut self, pool: &mut KvPool) {
        self.evaluated = self.evaluated.min(self.tokens.len().saturating_sub(1));
        self.shrink(pool, self.evaluated.div_ceil(BLOCK));
    }

    /// Publishes every full block of evaluated tokens. Call it once those tokens are final.
    pub fn publish(&mut self, pool: &mut KvPool) {
        while (self.published.len() + 1) * BLOCK <= self.evaluated {
            let index = self.published.len();
            let Some(tokens) = self.block_tokens(index) else { return };
            let serial = pool.publish(self.parent(), tokens, self.blocks[index]);
            self.published.push(serial);
        }
    }

    /// Gives all blocks back and forgets that anything was evaluated; the tokens stay.
    pub fn release(&mut self, pool: &mut KvPool) {
        self.evaluated = 0;
        self.shrink(pool, 0);
    }

    /// Makes the blocks reach position `end` - 1, and those that will be written private.
    fn reserve(
        &mut self,
        pool: &mut KvPool,
        batch: &mut Batch,
        end: usize,
    ) -> Result<(), Exhausted> {
        let first_written = self.evaluated / BLOCK;
        let shared = self.blocks.get(first_written).filter(|&&id| pool.is_shared(id)).copied();
        let grow = end.div_ceil(BLOCK).saturating_sub(self.blocks.len());
        if pool.available() < grow + usize::from(shared.is_some()) {
            return Err(Exhausted);
        }
        if let Some(original) = shared {
            let copy = pool.allocate()?;
            // Only rows before `evaluated` matter; an empty block needs no copy.
            if !self.evaluated.is_multiple_of(BLOCK) {
                batch.copies.push((original, copy));
            }
            pool.release(original);
            self.blocks[first_written] = copy;
            self.published.truncate(first_written);
        }
        for _ in 0..grow {
            self.blocks.push(pool.allocate()?);
        }
        Ok(())
    }

    /// Keeps `len` blocks. The tail is released first, so that it is also evicted first: a chain is
    /// only of use from its head.
    fn shrink(&mut self, pool: &mut KvPool, len: usize) {
        while self.blocks.len() > len {
            if let Some(id) = self.blocks.pop() {
                pool.release(id);
            }
        }
        self.published.truncate(self.evaluated / BLOCK);
    }

    fn parent(&self) -> Serial {
        self.published.last().copied().unwrap_or(ROOT)
    }

    fn block_tokens(&self, index: usize) -> Option<&[u32; BLOCK]> {
        self.tokens.get(index * BLOCK..)?.first_chunk()
    }
}
