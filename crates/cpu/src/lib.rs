//! The CPU backend: [`Cpu`] evaluates batches with vector instructions chosen when it is built.
//!
//! # One arithmetic
//!
//! Weights and activations are multiplied as integers. Every scheme's weights keep (q8_0, q4_1, q4_0) or
//! get (bf16) integer codes with a scale a block; a token's activations are rounded to i16 with one f32
//! scale a block of 128. The dot product over a block is then an exact integer, in whatever order and
//! register width a class computes it, and an output is the f32 sum of its blocks in the order of the
//! inputs. So one row, a batch and a prompt, any tile and any number of threads give the same bits, and
//! the classes with a fused multiply-add agree among themselves.
//!
//! Why 16 bits: with activations rounded to bf16 the logits of kipp-tiny miss the oracle's by an NMSE of
//! 2.5e-6 to 7.6e-6, with i8 in blocks of 32 by 2.6e-5 to 2.3e-4 (2e-3 in single rows); with i16 by less
//! than 3e-7, which is mostly K and V falling to the other side of a bf16 rounding. The pair product of i16
//! (`vpdpwssd`) is as fast as the one of bf16 (`vdpbf16ps`) and half as fast as the quadruple one of bytes
//! (`vpdpbusd`): bf16 weights lose nothing, quantised ones half of the peak in prefill and nothing in decode,
//! which waits for memory. Codes of bf16 weights use up to 15 bits, so that no partial sum overflows; an i32
//! holds any block of any scheme (`panels`). Where a processor adds vectors beside multiplying them, prompts get more products
//! than its multipliers could give, and the same integers (`matmul`).
//!
//! # Layout
//!
//! A matrix is packed once, in parallel, into panels of 16 rows whose lanes are the rows (`panels`), and the
//! pages of the mapped file are given back matrix by matrix. Activations are interleaved by tiles of up to
//! 12 tokens (`activations`), the cache holds keys transposed (`kv`), so that every inner loop is: load a
//! vector, broadcast a number, multiply and add (`matmul`, `attention`).
//!
//! # Phases
//!
//! A batch is cut into units of work once (`plan`). A step is one function that all threads run, phase by phase with a
//! barrier between (`forward`, `pool`).
//! Within a phase each thread takes units of its own range and then of others'. Nothing is allocated and
//! no lock is taken unless a thread has waited long enough to sleep.
//!
//! # Instruction classes
//!
//! Kernels are written once over sixteen lanes (`simd`) and compiled for AVX-512, AVX2, Advanced SIMD and
//! plain Rust; the backend holds one class's table of function pointers (`kernels`).

#![deny(unsafe_op_in_unsafe_fn)]

mod activations;
mod attention;
mod chains;
mod forward;
mod kernels;
mod kv;
mod matmul;
mod memory;
mod packed;
mod panels;
pub mod peaks;
mod plan;
mod pool;
mod simd;
#[cfg(test)]
mod tests;

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use engine::rope::Rope;
use engine::{Answer, Answered, Backend, BackendError, Batch, KvConfig, Limits, Output, Sampler};
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

/// A model whose weights are packed, for backends with caches of their own.
pub struct CpuModel {
    model: Arc<Model>,
    options: Options,
    kernels: &'static Kernels,
    packed: Packed,
}

impl CpuModel {
    /// Packs the model's weights; `progress` hears of the bytes done and their total.
    pub fn load(
        model: Arc<Model>,
        options: Options,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Arc<Self>, BackendError> {
        let kernels = options.class.required()?;
        let packed = Packed::new(&model, kernels, &mut Pool::new(options.threads)?, progress)?;
        Ok(Arc::new(CpuModel { model, options, kernels, packed }))
    }
}

/// The CPU backend.
pub struct Cpu {
    weights: Arc<CpuModel>,
    pool: Pool,
    kv: Kv,
    buffers: Buffers,
    rope: Rope,
    /// One a thread.
    samplers: Vec<Mutex<Sampler>>,
    answered: Answered,
}

impl Cpu {
    /// A backend with its own cache over a model's weights.
    pub fn new(weights: &Arc<CpuModel>, kv: KvConfig) -> Result<Cpu, BackendError> {
        let CpuModel { model, options, packed, .. } = weights.as_ref();
        let pool = Pool::new(options.threads)?;
        Ok(Cpu {
            buffers: Buffers::new(model.spec(), packed, pool.threads())?,
            kv: Kv::new(model.spec().layers, kv)?,
            rope: Rope::new(model.spec().theta),
            samplers: (0..pool.threads()).map(|_| Mutex::default()).collect(),
            answered: Answered::default(),
            pool,
            weights: Arc::clone(weights),
        })
    }

    /// Bytes of the packed weights.
    pub fn weight_bytes(&self) -> usize {
        self.weights.packed.bytes
    }

    /// Bytes of the KV cache.
    pub fn kv_bytes(&self) -> usize {
        self.kv.bytes()
    }

    /// The forward pass and the answers to the batch's rows.
    fn evaluate(&mut self, batch: &Batch, tokens: &[u32]) -> Result<Output, BackendError> {
        let CpuModel { model, kernels, packed, .. } = self.weights.as_ref();
        let spec = model.spec();
        let rotation = |position| self.rope.at(position);
        let threads = self.pool.threads();
        self.buffers.plan.cut(spec, batch, rotation, kernels.tile_tokens, threads);
        let step = Step {
            model,
            packed,
            kernels,
            kv: &self.kv,
            buffers: &self.buffers,
            tables: &batch.tables,
            positions: &batch.positions,
            tokens,
        };
        self.buffers.reset();
        self.pool.run(&|thread, team| step.layers(thread, team))?;
        let mut answers = Vec::with_capacity(batch.rows.len());
        let mut cut = Vec::new();
        for rows in batch.rows.chunks(HEAD_ROWS) {
            let at: Vec<usize> = rows.iter().map(|row| row.token).collect();
            tiles(at.len(), kernels.tile_tokens, &mut cut);
            self.buffers.reset();
            let drawn: Vec<OnceLock<Answer>> = rows.iter().map(|_| OnceLock::new()).collect();
            self.pool.run(&|thread, team| {
                step.head(thread, team, &at, &cut, |row, logits| {
                    let sampler = self.samplers[thread].lock();
                    let mut sampler = sampler.unwrap_or_else(PoisonError::into_inner);
                    // Every row is some thread's once.
                    let _ = drawn[row].set(sampler.answer(&rows[row].want, logits));
                });
            })?;
            answers.extend(drawn.into_iter().filter_map(OnceLock::into_inner));
        }
        Ok(Output { answers })
    }
}

impl Backend for Cpu {
    fn limits(&self) -> Limits {
        let spec = self.weights.model.spec();
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
        let tokens = batch.resolve(self.answered.drawn())?;
        for &(from, to) in &batch.copies {
            self.kv.copy_block(from, to);
        }
        let output = self.evaluate(batch, &tokens)?;
        self.weights.model.weights.check().map_err(BackendError::weights)?;
        self.answered.push(output);
        Ok(())
    }

    fn collect(&mut self, out: &mut Output) -> Result<(), BackendError> {
        *out = self.answered.pop()?;
        Ok(())
    }
}
