//! The weights of one checkpoint by role. Shapes are checked when this is built, never afterwards.

use std::collections::HashMap;

use crate::error::{Error, Result};
use crate::layout::Tensor;
use crate::tensor::{Bytes, Matrix, Vector};

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

impl Layer {
    /// The seven matrices, in order of the forward pass.
    pub fn projections(&self) -> [&Matrix; 7] {
        [&self.q, &self.k, &self.v, &self.o, &self.gate, &self.up, &self.down]
    }
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

impl Weights {
    /// An error if the file that the weights are mapped from was cut off; see [`Bytes::check`].
    pub fn check(&self) -> Result<()> {
        // All weights come from one file.
        self.embedding.check()
    }

    /// Whether the head is the embedding's bytes.
    pub fn is_tied(&self) -> bool {
        std::ptr::eq(self.head.bytes(), self.embedding.bytes())
    }

    /// Every matrix, the embedding first; a tied head comes twice.
    pub fn matrices(&self) -> impl Iterator<Item = &Matrix> {
        let layers = self.layers.iter().flat_map(Layer::projections);
        [&self.embedding].into_iter().chain(layers).chain([&self.head])
    }

    /// Binds the tensors of a [`layout`](crate::layout) by name; `bytes` brings each tensor's.
    pub fn bind(
        tensors: &[Tensor],
        layers: usize,
        mut bytes: impl FnMut(&Tensor) -> Result<Bytes>,
    ) -> Result<Self> {
        let by_name: HashMap<_, _> = tensors.iter().map(|tensor| (&*tensor.name, tensor)).collect();
        let mut find = |name: &str| match by_name.get(name) {
            Some(tensor) => Ok((*tensor, bytes(tensor)?)),
            None => Err(Error::mismatch(format_args!("tensor `{name}`"), "to be there", "nothing")),
        };
        let embedding = matrix(find("token_embd.weight")?)?;
        let layers = (0..layers)
            .map(|i| {
                let mut find = |part: &str| find(&format!("blk.{i}.{part}.weight"));
                Ok(Layer {
                    attention_norm: vector(find("attn_norm")?)?,
                    q: matrix(find("attn_q")?)?,
                    k: matrix(find("attn_k")?)?,
                    v: matrix(find("attn_v")?)?,
                    q_norm: vector(find("attn_q_norm")?)?,
                    k_norm: vector(find("attn_k_norm")?)?,
                    o: matrix(find("attn_output")?)?,
                    ffn_norm: vector(find("ffn_norm")?)?,
                    gate: matrix(find("ffn_gate")?)?,
                    up: matrix(find("ffn_up")?)?,
                    down: matrix(find("ffn_down")?)?,
                })
            })
            .collect::<Result<_>>()?;
        let output_norm = vector(find("output_norm.weight")?)?;
        let head = match by_name.contains_key("output.weight") {
            true => matrix(find("output.weight")?)?,
            false => embedding.clone(),
        };
        Ok(Self { embedding, layers, output_norm, head })
    }

    /// Gives back all pages of a mapped file; those that are looked at again are read again.
    pub fn release(&self) {
        self.embedding.release_file();
    }
}

fn matrix((tensor, bytes): (&Tensor, Bytes)) -> Result<Matrix> {
    Matrix::new(tensor.ty, tensor.rows, tensor.cols, bytes)
}

fn vector((tensor, bytes): (&Tensor, Bytes)) -> Result<Vector> {
    Vector::new(tensor.cols, bytes)
}
