//! config.json against the registry.

use std::path::Path;

use model::{Error, HEAD_DIM, KV_HEADS, RMS_EPSILON, Result, Spec};
use serde_json::{Map, Value, json};

use crate::json::{self, Object};

/// Checks that a configuration describes these dimensions and nothing that kipp does not compute.
pub(crate) fn check(path: &Path, spec: &Spec) -> Result<()> {
    let Object(pairs) = json::read(path)?;
    compare(&pairs.into_iter().collect(), spec).map_err(|error| error.in_file(path))
}

fn compare(config: &Map<String, Value>, spec: &Spec) -> Result<()> {
    let required = [
        ("model_type", json!("qwen3")),
        ("num_hidden_layers", json!(spec.layers)),
        ("hidden_size", json!(spec.hidden)),
        ("intermediate_size", json!(spec.ffn)),
        ("num_attention_heads", json!(spec.heads)),
        ("num_key_value_heads", json!(KV_HEADS)),
        ("head_dim", json!(HEAD_DIM)),
        ("vocab_size", json!(spec.vocab)),
        ("max_position_embeddings", json!(spec.context)),
        ("tie_word_embeddings", json!(spec.tied)),
        ("rms_norm_eps", json!(RMS_EPSILON)),
        ("hidden_act", json!("silu")),
        ("attention_bias", json!(false)),
    ];
    for (key, expected) in &required {
        equal(key, expected, config.get(*key).unwrap_or(&Value::Null))?;
    }
    for key in ["rope_scaling", "quantization_config"] {
        equal(key, &Value::Null, config.get(key).unwrap_or(&Value::Null))?;
    }
    equal(
        "use_sliding_window",
        &json!(false),
        config.get("use_sliding_window").unwrap_or(&json!(false)),
    )?;
    let layers = config.get("layer_types").and_then(Value::as_array);
    for layer in layers.into_iter().flatten() {
        equal("layer_types", &json!("full_attention"), layer)?;
    }

    // Older files name these at the top, newer ones elsewhere; where both do, both have to be
    // right.
    let rope = config.get("rope_parameters").and_then(Value::as_object);
    let theta = [config.get("rope_theta"), rope.and_then(|rope| rope.get("rope_theta"))];
    one_of("rope_theta", &json!(spec.theta), theta)?;
    if let Some(kind) = rope.and_then(|rope| rope.get("rope_type")) {
        equal("rope_parameters.rope_type", &json!("default"), kind)?;
    }
    one_of("dtype", &json!("bfloat16"), [config.get("dtype"), config.get("torch_dtype")])
}

/// Numbers are compared as the f32 that kipp computes with, whatever way they are written.
fn equal(key: &str, expected: &Value, found: &Value) -> Result<()> {
    let number = |value: &Value| value.as_f64().map(|value| value as f32);
    let same = match number(expected) {
        Some(expected) => number(found) == Some(expected),
        None => expected == found,
    };
    if same { Ok(()) } else { Err(Error::mismatch(format_args!("`{key}`"), expected, found)) }
}

fn one_of<const N: usize>(key: &str, expected: &Value, places: [Option<&Value>; N]) -> Result<()> {
    if places.iter().all(Option::is_none) {
        return equal(key, expected, &Value::Null);
    }
    places.into_iter().flatten().try_for_each(|found| equal(key, expected, found))
}
