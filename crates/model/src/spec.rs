//! The dimensions that tell one dense Qwen3 checkpoint from another, and the constants that they
//! share.

/// Key/value heads of every checkpoint of the family.
pub const KV_HEADS: usize = 8;
/// Width of one attention head; heads x 128 is *not* the hidden width.
pub const HEAD_DIM: usize = 128;
/// Epsilon of every RMSNorm, the per-head norms of Q and K included.
pub const RMS_EPSILON: f32 = 1e-6;

/// Dimensions of one checkpoint.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Spec {
    /// Transformer blocks.
    pub layers: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of the SwiGLU feed-forward.
    pub ffn: usize,
    /// Query heads; a multiple of [`KV_HEADS`].
    pub heads: usize,
    /// Rows of the embedding and of the head.
    pub vocab: usize,
    /// Positions that the checkpoint was made for.
    pub context: usize,
    /// RoPE base frequency.
    pub theta: f32,
    /// Whether the head is the embedding, transposed.
    pub tied: bool,
}

impl Spec {
    /// Width of the attention output and of Q: heads x [`HEAD_DIM`].
    pub const fn q_width(&self) -> usize {
        self.heads * HEAD_DIM
    }

    /// Width of K and of V: [`KV_HEADS`] x [`HEAD_DIM`].
    pub const fn kv_width(&self) -> usize {
        KV_HEADS * HEAD_DIM
    }

    /// Weights of the projections of all layers.
    pub const fn projection_weights(&self) -> usize {
        let attention = 2 * self.hidden * (self.q_width() + self.kv_width());
        self.layers * (attention + 3 * self.hidden * self.ffn)
    }

    /// Weights of the projections, the embedding and a head of its own; norms are left out.
    pub const fn matrix_weights(&self) -> usize {
        let tables = if self.tied { 1 } else { 2 };
        self.projection_weights() + tables * self.vocab * self.hidden
    }

    /// Query heads that share one key/value head.
    pub const fn group(&self) -> usize {
        self.heads / KV_HEADS
    }
}
