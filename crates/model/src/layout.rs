//! The tensors that make up a checkpoint, in order of the forward pass: what each is called in a
//! GGUF and upstream, its shape and its type.

use crate::scheme::Scheme;
use crate::spec::{HEAD_DIM, Spec};
use crate::tensor::TensorType;

/// One tensor of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tensor {
    /// Name in a GGUF.
    pub name: String,
    /// Name in the published safetensors.
    pub upstream: String,
    /// What it is for, which decides the type.
    pub role: Role,
    /// Element layout.
    pub ty: TensorType,
    /// Outputs; 1 for a norm.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
}

/// What a tensor is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// The embedding, or a head of its own.
    Head,
    /// One of the seven matrices of a layer.
    Projection,
    /// Weights of an RMSNorm, always f32.
    Norm,
}

impl Tensor {
    /// Bytes of the whole tensor.
    pub fn bytes(&self) -> usize {
        self.rows * self.ty.row_bytes(self.cols)
    }

    /// Its dimensions in GGUF's order, the innermost first.
    pub fn dims(&self) -> Vec<u64> {
        match self.role {
            Role::Norm => vec![self.cols as u64],
            Role::Head | Role::Projection => vec![self.cols as u64, self.rows as u64],
        }
    }

    /// Its dimensions in the order of safetensors, the outermost first.
    pub fn shape(&self) -> Vec<u64> {
        self.dims().into_iter().rev().collect()
    }
}

/// All tensors of a checkpoint with these dimensions: projections under `scheme`, embedding and
/// head under `head`.
pub fn tensors(spec: &Spec, scheme: Scheme, head: Scheme) -> Vec<Tensor> {
    let tensor = |name: String, upstream: String, role, rows, cols| {
        let ty = match role {
            Role::Head => head.tensor_type(),
            Role::Projection => scheme.tensor_type(),
            Role::Norm => TensorType::F32,
        };
        Tensor { name: name + ".weight", upstream: upstream + ".weight", role, ty, rows, cols }
    };
    let &Spec { hidden, ffn, vocab, .. } = spec;
    let (q, kv) = (spec.q_width(), spec.kv_width());

    let mut tensors =
        vec![tensor("token_embd".into(), "model.embed_tokens".into(), Role::Head, vocab, hidden)];
    for i in 0..spec.layers {
        let layer = [
            ("attn_norm", "input_layernorm", Role::Norm, 1, hidden),
            ("attn_q", "self_attn.q_proj", Role::Projection, q, hidden),
            ("attn_k", "self_attn.k_proj", Role::Projection, kv, hidden),
            ("attn_v", "self_attn.v_proj", Role::Projection, kv, hidden),
            ("attn_q_norm", "self_attn.q_norm", Role::Norm, 1, HEAD_DIM),
            ("attn_k_norm", "self_attn.k_norm", Role::Norm, 1, HEAD_DIM),
            ("attn_output", "self_attn.o_proj", Role::Projection, hidden, q),
            ("ffn_norm", "post_attention_layernorm", Role::Norm, 1, hidden),
            ("ffn_gate", "mlp.gate_proj", Role::Projection, ffn, hidden),
            ("ffn_up", "mlp.up_proj", Role::Projection, ffn, hidden),
            ("ffn_down", "mlp.down_proj", Role::Projection, hidden, ffn),
        ];
        tensors.extend(layer.map(|(name, upstream, role, rows, cols)| {
            let (name, upstream) =
                (format!("blk.{i}.{name}"), format!("model.layers.{i}.{upstream}"));
            tensor(name, upstream, role, rows, cols)
        }));
    }
    tensors.push(tensor("output_norm".into(), "model.norm".into(), Role::Norm, 1, hidden));
    if !spec.tied {
        tensors.push(tensor("output".into(), "lm_head".into(), Role::Head, vocab, hidden));
    }
    tensors
}

/// Bytes of all those tensors: of a GGUF, all but its metadata.
pub fn bytes(spec: &Spec, scheme: Scheme, head: Scheme) -> u64 {
    tensors(spec, scheme, head).iter().map(|tensor| tensor.bytes() as u64).sum()
}
