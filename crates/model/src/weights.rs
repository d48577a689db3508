//! The weights of one checkpoint by role. Shapes are checked when this is built, never afterwards.

use crate::tensor::{Matrix, TensorType, Vector};

/// How the seven projections of every layer are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scheme {
    /// bfloat16, as published.
    Bf16,
    /// 8 bits, a scale a block of 32.
    Q8_0,
    /// 4 bits, a scale and a minimum a block of 32.
    Q4_1,
    /// 4 bits, a scale a block of 32.
    Q4_0,
}

/// One transformer block. Shapes as [out, in]; q = heads x 128, kv = 8 x 128.
pub struct Layer {
    /// `[hidden]`
    pub attention_norm: Vector,
    /// `[q, hidden]`
    pub q: Matrix,
    /// `[kv, hidden]`
    pub k: Matrix,
    /// `[kv, hidden]`
    pub v: Matrix,
    /// `[128]`, one for all query heads
    pub q_norm: Vector,
    /// `[128]`, one for all key heads
    pub k_norm: Vector,
    /// `[hidden, q]`
    pub o: Matrix,
    /// `[hidden]`
    pub ffn_norm: Vector,
    /// `[ffn, hidden]`
    pub gate: Matrix,
    /// `[ffn, hidden]`
    pub up: Matrix,
    /// `[hidden, ffn]`
    pub down: Matrix,
}

/// All weights of a checkpoint.
pub struct Weights {
    /// `[vocab, hidden]`
    pub embedding: Matrix,
    /// In order of the forward pass.
    pub layers: Vec<Layer>,
    /// `[hidden]`
    pub output_norm: Vector,
    /// `[vocab, hidden]`; the embedding itself where the checkpoint is tied.
    pub head: Matrix,
}

impl Scheme {
    /// The tensor type of a projection under this scheme.
    pub const fn tensor_type(self) -> TensorType {
        match self {
            Scheme::Bf16 => TensorType::Bf16,
            Scheme::Q8_0 => TensorType::Q8_0,
            Scheme::Q4_1 => TensorType::Q4_1,
            Scheme::Q4_0 => TensorType::Q4_0,
        }
    }
}
