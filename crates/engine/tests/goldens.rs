//! The oracle against an independent reference.

#[path = "common/goldens.rs"]
mod goldens;

use std::sync::Arc;

use engine::conformance::nmse;
use engine::sampling::argmax;
use engine::{
    Answer, Backend, Batch, KvConfig, KvKind, KvPool, Oracle, Output, Row, Sequence, Want,
};
use goldens::{Golden, goldens, manifest};
use model::{Model, Scheme, Spec};

/// The oracle may differ from float64 by rounding alone. A key or value that lies between two bfloat16
/// numbers can round to the other side; that is what most of this is for.
const BOUND: f64 = 1e-6;

fn oracle(model: &Arc<Model>, positions: usize) -> (Oracle, KvPool) {
    let kv = KvConfig::for_positions(positions, KvKind::Bf16);
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    (Oracle::new(Arc::clone(model), kv, threads), KvPool::new(kv.blocks))
}

/// Logits of the last `rows` pending tokens.
fn logits(
    oracle: &mut Oracle,
    pool: &mut KvPool,
    sequence: &mut Sequence,
    rows: usize,
) -> Vec<Vec<f32>> {
    let mut batch = Batch::default();
    let count = sequence.pending();
    sequence.schedule(pool, &mut batch, count).expect("room");
    batch.rows = (count - rows..count).map(|token| Row { token, want: Want::Logits }).collect();
    let mut output = Output::default();
    oracle.forward(&batch, &mut output).expect("forward");
    let row = |answer| match answer {
        Answer::Logits(logits) => logits,
        other => panic!("asked for logits, got {other:?}"),
    };
    output.answers.into_iter().map(row).collect()
}

fn check(model: &Arc<Model>, golden: &Golden) {
    let name = &golden.label;
    let (mut oracle, mut pool) = oracle(model, golden.ids.len() + golden.greedy.len() + 1);
    let mut sequence = Sequence::new(golden.ids.clone());
    let found = logits(&mut oracle, &mut pool, &mut sequence, golden.logits.len());
    let mut worst: f64 = 0.0;
    for (row, (found, expected)) in found.iter().zip(&golden.logits).enumerate() {
        let error = nmse(found, expected);
        assert!(error <= BOUND, "{name}, row {row}: NMSE {error:e}");
        assert_eq!(argmax(found).unwrap().0, golden.argmax[row], "{name}, row {row}");
        worst = worst.max(error);
    }
    println!("{name}: worst NMSE {worst:.2e} of {} rows", found.len());
    // Follow the reference's own continuation, so that one near tie does not end the comparison.
    let mut last = found.last().expect("a row").clone();
    for (step, &(token, gap)) in golden.greedy.iter().enumerate() {
        let best = argmax(&last).unwrap().0;
        assert!(best == token || gap <= 1e-3, "{name}, step {step}: {best}, not {token}, by {gap}");
        sequence.append(&[token]);
        last = logits(&mut oracle, &mut pool, &mut sequence, 1).remove(0);
    }
}

#[test]
fn kipp_tiny() {
    let model = Arc::new(Model::builtin().expect("the built-in model"));
    for golden in goldens(&manifest()["tiny"], model.spec().vocab) {
        check(&model, &golden);
    }
}

#[test]
fn synthetic_five_query_heads_a_key_head_untied() {
    let spec = Spec {
        layers: 2,
        hidden: 640,
        ffn: 1760,
        heads: 40,
        vocab: 2048,
        context: 4096,
        theta: 1e6,
        tied: false,
    };
    let model = Model::synthetic(spec, (Scheme::Bf16, Scheme::Bf16), 3).expect("synthetic");
    let model = Arc::new(model);
    for golden in goldens(&manifest()["synthetic"]["synth-untied-gqa5"]["cases"], spec.vocab) {
        check(&model, &golden);
    }
}

#[test]
fn synthetic_at_the_dimensions_of_qwen3_0_6b() {
    let checkpoint = model::Checkpoint::find("qwen3-0.6b").expect("registered");
    let model = Model::synthetic(checkpoint, (Scheme::Bf16, Scheme::Bf16), 7).expect("synthetic");
    let model = Arc::new(model);
    let cases = &manifest()["synthetic"]["synth-qwen3-0.6b"]["cases"];
    for golden in goldens(cases, checkpoint.spec.vocab) {
        check(&model, &golden);
    }
}
