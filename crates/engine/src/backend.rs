//! What a backend is: something that evaluates batches of one model over its own KV blocks.

use std::collections::VecDeque;
use std::fmt;

use model::{HEAD_DIM, KV_HEADS};

use crate::batch::{BLOCK, Batch, Output};

/// How keys and values are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum KvKind {
    /// bfloat16, rounded to nearest even when a position is appended.
    #[default]
    Bf16,
    /// Signed bytes with one f32 scale a head row of 128.
    Q8_0,
}

/// The KV storage that a backend is built with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvConfig {
    /// Blocks of [`crate::batch::BLOCK`] positions.
    pub blocks: usize,
    /// Storage type.
    pub kind: KvKind,
}

impl KvConfig {
    /// Enough blocks for one sequence of `positions`.
    pub fn for_positions(positions: usize, kind: KvKind) -> Self {
        KvConfig { blocks: positions.div_ceil(BLOCK), kind }
    }

    /// Bytes that the cache of a model with this many layers takes.
    pub fn bytes(&self, layers: usize) -> u64 {
        let head_row = match self.kind {
            KvKind::Bf16 => 2 * HEAD_DIM,
            KvKind::Q8_0 => HEAD_DIM + size_of::<f32>(),
        };
        let block = (layers * BLOCK * 2 * KV_HEADS * head_row) as u64;
        block.saturating_mul(self.blocks as u64)
    }
}

/// What one call may hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Tokens a call.
    pub tokens: usize,
    /// Answer rows a call.
    pub rows: usize,
    /// KV blocks; valid ids are below this.
    pub blocks: usize,
    /// Positions a sequence.
    pub context: usize,
    /// Rows of the vocabulary.
    pub vocab: usize,
    /// Batches that may be submitted and not yet collected: 2 where a device computes while the host
    /// goes on, 1 where `submit` computes.
    pub queue: usize,
}

/// Evaluates batches. One thread drives it.
///
/// Submission and collection are separate so that a device can work on step N + 1 while the host reads
/// step N. A backend without a queue computes in `submit`.
pub trait Backend: Send {
    /// What one call may hold.
    fn limits(&self) -> Limits;

    /// Starts a batch. At most [`Limits::queue`] batches may be submitted and not yet collected.
    fn submit(&mut self, batch: &Batch) -> Result<(), BackendError>;

    /// Waits for the oldest submitted batch and writes its answers.
    fn collect(&mut self, out: &mut Output) -> Result<(), BackendError>;

    /// Evaluates one batch to its end.
    fn forward(&mut self, batch: &Batch, out: &mut Output) -> Result<(), BackendError> {
        self.submit(batch)?;
        self.collect(out)
    }
}

/// Answers that wait to be collected, of a backend that computes in `submit`.
#[derive(Default)]
pub struct Answered {
    waiting: VecDeque<Output>,
    drawn: Vec<Option<u32>>,
}

impl Answered {
    /// Tokens that the last batch's rows drew, for [`Batch::resolve`].
    pub fn drawn(&self) -> &[Option<u32>] {
        &self.drawn
    }

    /// Takes the answers to the batch that is being submitted.
    pub fn push(&mut self, output: Output) {
        self.drawn = output.tokens();
        self.waiting.push_back(output);
    }

    /// The oldest answers; an error where none wait.
    pub fn pop(&mut self) -> Result<Output, BackendError> {
        let nothing = || BackendError::Batch("nothing was submitted".into());
        self.waiting.pop_front().ok_or_else(nothing)
    }
}

/// Why a backend could not do what was asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BackendError {
    /// The backend cannot run on this machine.
    Unavailable(String),
    /// Not enough memory: what for, bytes needed, bytes free.
    Memory {
        /// What the memory was for.
        purpose: &'static str,
        /// Bytes needed.
        needed: u64,
        /// Bytes free.
        free: u64,
    },
    /// The batch breaks the contract of [`Batch`].
    Batch(String),
    /// The device failed.
    Device(String),
    /// The weights changed under the backend.
    Weights(String),
}

impl BackendError {
    /// What [`Weights::check`](model::Weights::check) found.
    pub fn weights(error: model::Error) -> Self {
        BackendError::Weights(error.to_string())
    }
}

impl fmt::Display for BackendError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BackendError::Unavailable(why) => write!(f, "backend unavailable: {why}"),
            BackendError::Memory { purpose, needed, free } => {
                write!(f, "{purpose} needs {needed} bytes, {free} are free")
            }
            BackendError::Batch(what) => write!(f, "invalid batch: {what}"),
            BackendError::Device(what) => write!(f, "device: {what}"),
            BackendError::Weights(what) => write!(f, "weights: {what}"),
        }
    }
}

impl std::error::Error for BackendError {}
