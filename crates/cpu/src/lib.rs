//! The CPU backend.

#![deny(unsafe_op_in_unsafe_fn)]

mod activations;
mod attention;
mod forward;
mod kernels;
mod kv;
mod matmul;
mod memory;
mod packed;
mod panels;
pub mod peaks;
mod pool;
mod simd;

use std::collections::VecDeque;
use std::sync::Arc;

use engine::rope::Rope;
use engine::{Backend, BackendError, Batch, Input, KvConfig, Limits, Output, Sampler};
use model::Model;

use crate::activations::tiles;
use crate::forward::{Buffers, HEAD_ROWS, Step, TOKENS};
use crate::kernels::Kernels;
use crate::kv::Kv;
use crate::packed::Packed;
use crate::pool::Pool;
pub use crate::pool::default_threads;
pub use crate::simd::Class;

/// How to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// Threads, the caller's included.
    pub threads: usize,
    /// Which instructions to use.
    pub class: Class,
}

impl Default for Options {
    /// The machine's best instructions on its physical cores.
    fn default() -> Self {
        Options { threads: default_threads(), class: Class::best() }
    }
}

/// The CPU backend.
pub struct Cpu {
    model: Arc<Model>,
    kernels: &'static Kernels,
    pool: Pool,
    packed: Packed,
    kv: Kv,
    buffers: Buffers,
    rope: Rope,
    sampler: Sampler,
    answered: VecDeque<Output>,
    /// Tokens that the last submitted batch sampled, by row.
    sampled: Vec<Option<u32>>,
}

impl Cpu {
    /// Packs the model's weights; `progress` hears of the bytes done and their total.
    pub fn new(
        model: Arc<Model>,
        kv: KvConfig,
        options: Options,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Cpu, BackendError> {
        let missing = || BackendError::Unavailable(format!("no {:?} on this machine", options.class));
        let kernels = options.class.kernels().ok_or_else(missing)?;
        let mut pool = Pool::new(options.threads)
            .map_err(|error| BackendError::Unavailable(format!("threads: {error}")))?;
        let packed = Packed::new(&model, kernels, &mut pool, progress)?;
        Ok(Cpu {
            kernels,
            buffers: Buffers::new(model.spec(), &packed, pool.threads()),
            kv: Kv::new(model.spec().layers, kv),
            rope: Rope::new(model.spec().theta),
            sampler: Sampler::default(),
            answered: VecDeque::new(),
            sampled: Vec::new(),
            packed,
            pool,
            model,
        })
    }

    /// Bytes of the packed weights.
    pub fn weight_bytes(&self) -> usize {
        self.packed.bytes
    }

    /// Bytes of the KV cache.
    pub fn kv_bytes(&self) -> usize {
        self.kv.bytes()
    }

    /// Token ids of a batch, with references to the batch before it resolved.
    fn resolve(&self, batch: &Batch) -> Result<Vec<u32>, BackendError> {
        let resolve = |input: &Input| match *input {
            Input::Token(id) => Ok(id),
            Input::Sampled(row) => self.sampled.get(row).copied().flatten().ok_or_else(|| {
                BackendError::Batch(format!("row {row} of the last batch drew no token"))
            }),
        };
        batch.tokens.iter().map(resolve).collect()
    }

    /// The forward pass and the answers to the batch's rows.
    fn evaluate(&mut self, batch: &Batch, tokens: &[u32]) -> Output {
        let spec = self.model.spec();
        let rotation = |position| self.rope.at(position);
        self.buffers.plan(spec, batch, rotation, self.kernels.tile_tokens);
        let step = Step {
            model: &self.model,
            packed: &self.packed,
            kernels: self.kernels,
            kv: &self.kv,
            buffers: &self.buffers,
            tables: &batch.tables,
            positions: &batch.positions,
            tokens,
        };
        self.buffers.reset();
        self.pool.run(&|thread, team| step.layers(thread, team));
        let mut answers = Vec::with_capacity(batch.rows.len());
        let mut cut = Vec::new();
        for rows in batch.rows.chunks(HEAD_ROWS) {
            let at: Vec<usize> = rows.iter().map(|row| row.token).collect();
            tiles(at.len(), self.kernels.tile_tokens, &mut cut);
            self.buffers.reset();
            self.pool.run(&|thread, team| step.head(thread, team, &at, &cut));
            for (i, row) in rows.iter().enumerate() {
                let start = self.buffers.logits.at(i * spec.vocab);
                // SAFETY: the row is complete, and no thread is running.
                let logits = unsafe { std::slice::from_raw_parts(start, spec.vocab) };
                answers.push(self.sampler.answer(&row.want, logits));
            }
        }
        Output { answers }
    }
}

impl Backend for Cpu {
    fn limits(&self) -> Limits {
        let spec = self.model.spec();
        Limits {
            tokens: TOKENS,
            rows: TOKENS,
            blocks: self.kv.blocks(),
            context: spec.context,
            vocab: spec.vocab,
            queue: 1,
        }
    }

    fn submit(&mut self, batch: &Batch) -> Result<(), BackendError> {
        batch.check(&self.limits())?;
        let tokens = self.resolve(batch)?;
        for &(from, to) in &batch.copies {
            self.kv.copy_block(from, to);
        }
        let output = self.evaluate(batch, &tokens);
        self.sampled = output.tokens();
        self.answered.push_back(output);
        Ok(())
    }

    fn collect(&mut self, out: &mut Output) -> Result<(), BackendError> {
        let nothing = || BackendError::Batch("nothing was submitted".into());
        *out = self.answered.pop_front().ok_or_else(nothing)?;
        Ok(())
    }
}
