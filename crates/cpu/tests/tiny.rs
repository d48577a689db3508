//! kipp-tiny on text against the oracle, and against llama.cpp: what a user of the model would notice.

#[path = "../../engine/tests/common/validation.rs"]
mod validation;

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use cpu::{Cpu, CpuModel, Options};
use engine::conformance::nmse;
use engine::sampling::argmax;
use engine::{Answer, Backend, Batch, Input, KvConfig, KvKind, Oracle, Output, Row, Want};
use model::{Model, Scheme};

/// Tokens of the validation text that the reference perplexity was measured on.
const TOKENS: usize = 1024;

fn under(scheme: Scheme) -> Model {
    let bf16 = Model::builtin().expect("the built-in model");
    bf16.requantised(scheme).expect("an encoded model")
}

/// Logits of every position.
fn logits(backend: &mut dyn Backend, tokens: &[u32]) -> Vec<Vec<f32>> {
    let table: Vec<u32> = (0..tokens.len().div_ceil(32) as u32).collect();
    let mut all = Vec::new();
    for (i, chunk) in tokens.chunks(500).enumerate() {
        let mut batch = Batch::default();
        batch.push(chunk.iter().map(|&t| Input::Token(t)), i * 500, &table);
        let rows = 0..chunk.len();
        batch.rows.extend(rows.map(|token| Row { token, want: Want::Logits }));
        let mut out = Output::default();
        backend.forward(&batch, &mut out).expect("a batch");
        all.extend(out.answers.into_iter().map(|answer| match answer {
            Answer::Logits(logits) => logits,
            other => panic!("asked for logits, got {other:?}"),
        }));
    }
    all
}

fn perplexity(logits: &[Vec<f32>], tokens: &[u32]) -> f64 {
    let surprise = |(row, &next): (&Vec<f32>, &u32)| {
        let max = f64::from(argmax(row).expect("a best token").1);
        let sum: f64 = row.iter().map(|&x| (f64::from(x) - max).exp()).sum();
        max + sum.ln() - f64::from(row[next as usize])
    };
    let total: f64 = logits.iter().zip(&tokens[1..]).map(surprise).sum();
    (total / (tokens.len() - 1) as f64).exp()
}

#[test]
fn text_reads_as_the_oracle_reads_it() {
    let tokens = &validation::text()[..TOKENS];
    let kv = KvConfig { blocks: TOKENS / 32, kind: KvKind::Bf16 };
    for scheme in [Scheme::Bf16, Scheme::Q8_0, Scheme::Q4_1, Scheme::Q4_0] {
        let model = Arc::new(under(scheme));
        let mut oracle = Oracle::new(Arc::clone(&model), kv, 2);
        let options = Options { threads: 2, ..Options::default() };
        let weights = CpuModel::load(model, options, &mut |_, _| ()).expect("weights");
        let mut cpu = Cpu::new(&weights, kv).expect("a backend");
        let (found, expected) = (logits(&mut cpu, tokens), logits(&mut oracle, tokens));
        let error = nmse(&found.concat(), &expected.concat());
        let worst = found.iter().zip(&expected).map(|(a, b)| nmse(a, b)).fold(0.0, f64::max);
        let (a, b) = (perplexity(&found, tokens), perplexity(&expected, tokens));
        println!(
            "{scheme:?}: NMSE {error:.2e}, worst row {worst:.2e}, perplexity {a:.5} against {b:.5}"
        );
        assert!(error <= 1e-6, "{scheme:?}: NMSE {error:e}");
        assert!((a / b - 1.0).abs() <= 1e-3, "{scheme:?}: perplexity {a}, oracle {b}");
    }
}

/// Files of either program, each with the logits that llama.cpp computed from it: `NAME.gguf` and `NAME.logits` for the
/// tokens of `ids.u32`, as tests/llama_cpp/run.sh makes them.
#[test]
#[ignore = "wants a folder that tests/llama_cpp/run.sh made"]
fn files_read_as_llama_cpp_reads_them() {
    let folder = PathBuf::from(std::env::var_os("KIPP_LLAMA_CPP").expect("a folder"));
    let words = |name: &str| {
        let bytes = fs::read(folder.join(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
        bytes.as_chunks().0.iter().map(|b| u32::from_le_bytes(*b)).collect::<Vec<_>>()
    };
    let tokens = words("ids.u32");
    let kv = KvConfig { blocks: tokens.len().div_ceil(32), kind: KvKind::Bf16 };
    let mut names: Vec<String> = fs::read_dir(&folder)
        .expect("a folder")
        .filter_map(|entry| {
            Some(entry.ok()?.file_name().to_str()?.strip_suffix(".logits")?.to_owned())
        })
        .collect();
    names.sort();
    assert!(!names.is_empty());
    println!(
        "| file | of | weights | cpu against llama.cpp | oracle against llama.cpp | cpu against oracle |"
    );
    for name in names {
        let path = folder.join(format!("{name}.gguf"));
        let model = Arc::new(Model::open(&path).expect("a model"));
        let theirs: Vec<f32> =
            words(&format!("{name}.logits")).into_iter().map(f32::from_bits).collect();
        let options = Options { threads: 2, ..Options::default() };
        let weights = CpuModel::load(Arc::clone(&model), options, &mut |_, _| ()).expect("weights");
        let mut cpu = Cpu::new(&weights, kv).expect("a backend");
        let mut oracle = Oracle::new(Arc::clone(&model), kv, 2);
        let (cpu, oracle) =
            (logits(&mut cpu, &tokens).concat(), logits(&mut oracle, &tokens).concat());
        println!(
            "| {name} | {:?} | {} | {:.1e} | {:.1e} | {:.1e} |",
            model.checkpoint().map(|c| c.id),
            model.scheme.name(),
            nmse(&cpu, &theirs),
            nmse(&oracle, &theirs),
            nmse(&cpu, &oracle)
        );
        assert!(nmse(&cpu, &oracle) <= 1e-6, "{name}");
    }
}
