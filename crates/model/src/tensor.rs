//! Tensors as they lie in a file: bytes, a type and a shape. The bytes stay in the mapping.

use std::sync::Arc;

/// Element layout of a stored tensor, in GGUF's terms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TensorType {
    /// 4-byte floats.
    F32,
    /// bfloat16.
    Bf16,
    /// Blocks of 32: f16 scale, 32 signed bytes (34 bytes).
    Q8_0,
    /// Blocks of 32: f16 scale, f16 minimum, 32 nibbles (20 bytes).
    Q4_1,
    /// Blocks of 32: f16 scale, 32 nibbles offset by 8 (18 bytes).
    Q4_0,
}

/// A byte range that keeps its owner (a mapping, a buffer or the binary itself) alive.
#[derive(Clone)]
pub struct Bytes {
    owner: Arc<dyn AsRef<[u8]> + Send + Sync>,
    start: usize,
    len: usize,
}

/// A weight matrix, row-major: `rows` outputs, each a row of `cols` inputs.
#[derive(Clone)]
pub struct Matrix {
    /// Element layout.
    pub ty: TensorType,
    /// Outputs.
    pub rows: usize,
    /// Inputs; a multiple of the type's block.
    pub cols: usize,
    bytes: Bytes,
}

/// A norm's weights, `[len]` in f32.
#[derive(Clone)]
pub struct Vector {
    bytes: Bytes,
}
