//! The weights of one checkpoint by role. Shapes are checked when this is built, never afterwards.

use std::collections::HashMap;

use crate::error::{Error, Result};
use crate::layout::Tensor;
use crate::source::Source;
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

/// The weights once more, to be stored under another scheme. A tensor that is not of this checkpoint's layout is
/// a fault of the caller.
impl Source for Weights {
    fn row(&self, tensor: &Tensor, row: usize, out: &mut [f32]) {
        let name = tensor.name.trim_end_matches(".weight");
        let layer = || {
            let (number, part) = name.strip_prefix("blk.")?.split_once('.')?;
            Some((self.layers.get(number.parse::<usize>().ok()?)?, part))
        };
        match (name, layer()) {
            ("token_embd", _) => self.embedding.row_f32(row, out),
            ("output_norm", _) => out.copy_from_slice(self.output_norm.as_f32()),
            ("output", _) => self.head.row_f32(row, out),
            (_, Some((layer, part))) => layer.row(part, row, out),
            (_, None) => panic!("no tensor `{}` in this checkpoint", tensor.name),
        }
    }
}

impl Layer {
    fn row(&self, part: &str, row: usize, out: &mut [f32]) {
        let matrix = match part {
            "attn_norm" => return out.copy_from_slice(self.attention_norm.as_f32()),
            "attn_q_norm" => return out.copy_from_slice(self.q_norm.as_f32()),
            "attn_k_norm" => return out.copy_from_slice(self.k_norm.as_f32()),
            "ffn_norm" => return out.copy_from_slice(self.ffn_norm.as_f32()),
            "attn_q" => &self.q,
            "attn_k" => &self.k,
            "attn_v" => &self.v,
            "attn_output" => &self.o,
            "ffn_gate" => &self.gate,
            "ffn_up" => &self.up,
            "ffn_down" => &self.down,
            other => panic!("no tensor `{other}` in a layer"),
        };
        matrix.row_f32(row, out);
    }
}

fn matrix((tensor, bytes): (&Tensor, Bytes)) -> Result<Matrix> {
    Matrix::new(tensor.ty, tensor.rows, tensor.cols, bytes)
}

fn vector((tensor, bytes): (&Tensor, Bytes)) -> Result<Vector> {
    Vector::new(tensor.cols, bytes)
}
