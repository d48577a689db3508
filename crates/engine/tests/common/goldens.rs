//! The goldens: what transformers computed in float64, with K and V rounded to bfloat16 at the cache.

use std::path::PathBuf;

use serde_json::Value;

/// One prompt of the goldens.
pub struct Golden {
    pub label: String,
    pub ids: Vec<u32>,
    /// Logits of the last positions of the prompt.
    pub logits: Vec<Vec<f32>>,
    pub argmax: Vec<u32>,
    /// Greedy continuation, and by how much each token won.
    pub greedy: Vec<(u32, f64)>,
}

/// The same from the tests of every crate.
fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../engine/tests/data/goldens")
}

/// The manifest, as JSON.
pub fn manifest() -> Value {
    let text = std::fs::read_to_string(folder().join("manifest.json")).expect("manifest.json");
    serde_json::from_str(&text).expect("manifest.json is JSON")
}

/// The cases of one list of the manifest.
pub fn goldens(cases: &Value, vocab: usize) -> Vec<Golden> {
    cases.as_array().expect("cases").iter().map(|case| golden(case, vocab)).collect()
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().expect("numbers").iter().map(|n| n.as_f64().expect("a number")).collect()
}

fn golden(case: &Value, vocab: usize) -> Golden {
    let ids = |key: &str| numbers(&case[key]).iter().map(|&n| n as u32).collect::<Vec<_>>();
    let file = case["logits"].as_str().expect("logits");
    let bytes = std::fs::read(folder().join(file)).expect("logits file");
    let floats: Vec<f32> =
        bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
    let logits: Vec<Vec<f32>> = floats.chunks_exact(vocab).map(<[f32]>::to_vec).collect();
    assert_eq!(logits.len() as u64, case["rows"].as_u64().expect("rows"));
    Golden {
        label: case["label"].as_str().expect("label").to_string(),
        ids: ids("ids"),
        logits,
        argmax: ids("argmax"),
        greedy: ids("greedy").into_iter().zip(numbers(&case["greedy_gap"])).collect(),
    }
}
