//! A published checkpoint as its files: made-up weights in the published form.
#![allow(dead_code, reason = "each test uses its part of it")]

use std::fmt::Write as _;

use model::layout::Tensor;
use model::source::Source;
use model::synthetic::Synthetic;
use model::vocabulary::ADDED;
use model::{HEAD_DIM, KV_HEADS, Spec, Vocabulary};
use serde_json::{Value, json};

/// A config.json.
pub fn config(spec: &Spec) -> Value {
    json!({
        "model_type": "qwen3", "num_hidden_layers": spec.layers, "hidden_size": spec.hidden,
        "intermediate_size": spec.ffn, "num_attention_heads": spec.heads, "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM, "vocab_size": spec.vocab, "max_position_embeddings": spec.context,
        "tie_word_embeddings": spec.tied, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "attention_bias": false, "rope_theta": 1000000, "rope_scaling": null,
        "torch_dtype": "bfloat16", "use_sliding_window": false, "sliding_window": null,
    })
}

/// A vocabulary's tokenizer.json, with merges in the older form or the newer one.
pub fn tokenizer(vocabulary: &Vocabulary, joined: bool) -> Value {
    let spell = |id| {
        let mut text = String::new();
        vocabulary.spell(id, &mut text);
        text
    };
    let vocab: serde_json::Map<_, _> =
        (0..vocabulary.ranks() as u32).map(|id| (spell(id), json!(id))).collect();
    let merges: Vec<Value> = vocabulary
        .merges()
        .map(|(a, b)| {
            if joined {
                json!(format!("{} {}", spell(a), spell(b)))
            } else {
                json!([spell(a), spell(b)])
            }
        })
        .collect();
    let added: Vec<Value> = (0..ADDED.len())
        .map(|i| json!({"id": vocabulary.ranks() + i, "content": ADDED[i].text, "special": ADDED[i].special}))
        .collect();
    json!({"model": {"type": "BPE", "vocab": vocab, "merges": merges}, "added_tokens": added})
}

/// Length and header of a safetensors file, and the bytes of data that have to follow.
pub fn header(tensors: &[&Tensor]) -> (Vec<u8>, usize) {
    let (mut header, mut end) = ("{".to_owned(), 0);
    for tensor in tensors {
        let begin = end;
        end += tensor.rows * tensor.cols * 2;
        let comma = if begin == 0 { "" } else { "," };
        let (name, shape) = (&tensor.upstream, tensor.shape());
        write!(
            header,
            r#"{comma}"{name}":{{"dtype":"BF16","shape":{shape:?},"data_offsets":[{begin},{end}]}}"#
        )
        .unwrap();
    }
    header.push('}');
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    (bytes, end)
}

/// The published bytes of a tensor.
pub fn values(tensor: &Tensor) -> Vec<u8> {
    let mut row = vec![0.0; tensor.cols];
    let mut bytes = Vec::new();
    for i in 0..tensor.rows {
        Synthetic { seed: 5 }.row(tensor, i, &mut row);
        bytes.extend(row.iter().flat_map(|x| ((x.to_bits() >> 16) as u16).to_le_bytes()));
    }
    bytes
}
