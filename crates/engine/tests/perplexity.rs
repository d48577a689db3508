//! Windows, saved distributions and divergence, on kipp-tiny.

#[path = "common/validation.rs"]
mod validation;

use std::io::Cursor;
use std::sync::Arc;

use engine::perplexity::divergence::{Divergence, Summary};
use engine::perplexity::saved::{Fault, Header, Reader, Writer};
use engine::perplexity::{Error, Span, Windows, log_probabilities, logits};
use engine::philox::philox;
use engine::{KvConfig, KvKind, Oracle};
use model::{Model, Scheme};

const WINDOWS: Windows = Windows { window: 48, stride: 32 };

/// The first tokens of the validation text.
fn text(count: usize) -> Vec<u32> {
    validation::text()[..count].to_vec()
}

/// kipp-tiny under a scheme, evaluated by the oracle.
fn oracle(scheme: Scheme) -> Oracle {
    let tiny = Model::builtin().expect("the built-in model");
    let schemes = (scheme, scheme.default_head());
    let model = Model::encode(tiny.identity, schemes, tiny.origin.clone(), &tiny.weights);
    let kv = KvConfig::for_positions(WINDOWS.window, KvKind::Bf16);
    Oracle::new(Arc::new(model.expect("encoded")), kv, 2)
}

/// A file with the oracle's distributions over a text.
fn saved(scheme: Scheme, tokens: &[u32]) -> Vec<u8> {
    let mut backend = oracle(scheme);
    let header = Header { vocab: 8192, windows: WINDOWS, tokens: tokens.to_vec() };
    let mut writer = Writer::new(Vec::new(), &header).expect("memory");
    for span in WINDOWS.spans(tokens.len()) {
        let row = |_, row: &[f32]| -> Result<(), Error> {
            writer.row(row).expect("memory");
            Ok(())
        };
        logits(&mut backend, tokens, &span, row).expect("logits");
    }
    let file = writer.finish().expect("memory");
    assert_eq!(file.len() as u64, header.file_bytes());
    file
}

/// A scheme against the distributions of a file.
fn divergence(scheme: Scheme, file: &[u8]) -> Summary {
    let (header, mut reader) = Reader::open(Cursor::new(file), file.len() as u64).expect("a file");
    let mut backend = oracle(scheme);
    let mut divergence = Divergence::default();
    for span in header.windows.spans(header.tokens.len()) {
        let compare = |target, row: &[f32]| -> Result<(), Error> {
            let reference = reader.row().expect("a row").expect("one more");
            divergence.add(target, &reference, row);
            Ok(())
        };
        logits(&mut backend, &header.tokens, &span, compare).expect("logits");
    }
    assert!(reader.row().expect("the end").is_none());
    divergence.summary().expect("tokens")
}

#[test]
fn every_token_but_the_first_is_scored_once_whatever_the_stride() {
    for (window, stride) in [(2, 1), (5, 3), (8, 8), (8, 7), (64, 1)] {
        for tokens in 0..40 {
            let windows = Windows { window, stride };
            let spans = windows.spans(tokens);
            let scored: Vec<usize> =
                spans.iter().flat_map(|span| span.scored..span.tokens.end).collect();
            assert_eq!(scored.len(), windows.scored(tokens));
            assert!(spans.iter().all(|span| span.tokens.len() <= window));
            assert!(spans.iter().all(|span| span.scored > span.tokens.start));
            if stride < window {
                assert_eq!(scored, (1..tokens).collect::<Vec<_>>(), "{windows:?}, {tokens}");
            } else {
                // Side by side, the first token of each window has nothing before it.
                let first = |at: &usize| !at.is_multiple_of(window);
                assert_eq!(scored, (0..tokens).filter(first).collect::<Vec<_>>());
            }
        }
    }
}

#[test]
fn a_longer_context_is_what_strides_give() {
    let tokens = text(96);
    let mut backend = oracle(Scheme::Bf16);
    let span = Span { tokens: 32..80, scored: 64 };
    let all = Span { tokens: 32..80, scored: 33 };
    let some = log_probabilities(&mut backend, &tokens, &span).expect("scores");
    let more = log_probabilities(&mut backend, &tokens, &all).expect("scores");
    assert_eq!((some.len(), more.len()), (16, 47));
    assert_eq!(some, more[31..]);
    // The same from whole rows of logits.
    let mut found = Vec::new();
    logits(&mut backend, &tokens, &span, |target, row| -> Result<(), Error> {
        let sum: f64 = row.iter().map(|&x| f64::from(x).exp()).sum();
        found.push(f64::from(row[target as usize]) - sum.ln());
        Ok(())
    })
    .expect("logits");
    let worst = some.iter().zip(&found).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    assert!(worst < 1e-4, "{worst}");
}

#[test]
fn divergence_grows_with_fewer_bits() {
    let tokens = text(160);
    let file = saved(Scheme::Bf16, &tokens);
    let schemes = [Scheme::Bf16, Scheme::Q8_0, Scheme::Q4_1, Scheme::Q4_0];
    let found = schemes.map(|scheme| divergence(scheme, &file));
    let itself = &found[0];
    assert_eq!(itself.tokens, 159);
    assert!(itself.largest < 1e-6, "{itself:?}");
    assert_eq!(itself.same_top, 1.0);
    assert!((itself.perplexity / itself.reference - 1.0).abs() < 1e-4, "{itself:?}");
    for pair in found.windows(2) {
        assert!(pair[0].mean < pair[1].mean, "{pair:?}");
    }
    let [_, q8_0, _, q4_0] = found;
    assert!(q8_0.mean < 1e-3 && q8_0.same_top > 0.95, "{q8_0:?}");
    assert!(q4_0.mean > 1e-2 && q4_0.same_top < q8_0.same_top, "{q4_0:?}");
    assert!(q4_0.median <= q4_0.percentile_99 && q4_0.percentile_99 <= q4_0.largest);
}

/// A distribution of which everything is known: 0.5, 0.25, 0.25 against 0.25, 0.25, 0.5.
#[test]
fn divergence_is_what_the_definition_says() {
    let reference = [0.5f64.ln(), 0.25f64.ln(), 0.25f64.ln()];
    let model = [0.25f32.ln() + 3.0, 0.25f32.ln() + 3.0, 0.5f32.ln() + 3.0];
    let mut divergence = Divergence::default();
    divergence.add(2, &reference, &model);
    let summary = divergence.summary().expect("a token");
    // 0.5 ln 2 - 0.25 ln 2.
    assert!((summary.mean - 0.25 * 2f64.ln()).abs() < 1e-6, "{summary:?}");
    assert_eq!(summary.same_top, 0.0);
    assert!((summary.perplexity - 2.0).abs() < 1e-5 && (summary.reference - 4.0).abs() < 1e-9);
    assert!((summary.mean_change - 0.25).abs() < 1e-6);
}

/// A small file, of three rows.
fn small() -> Vec<u8> {
    let windows = Windows { window: 4, stride: 2 };
    let header = Header { vocab: 5, windows, tokens: vec![1, 2, 3, 4] };
    let mut writer = Writer::new(Vec::new(), &header).expect("memory");
    for row in [[0.0, 1.0, 2.0, 3.0, 100.0], [7.0; 5], [-1.0, -2.0, 3.5, 0.0, 0.25]] {
        writer.row(&row).expect("memory");
    }
    writer.finish().expect("memory")
}

fn read(file: &[u8]) -> Result<Vec<Vec<f64>>, Fault> {
    let (_, mut reader) = Reader::open(Cursor::new(file), file.len() as u64)?;
    let mut rows = Vec::new();
    while let Some(row) = reader.row()? {
        rows.push(row);
    }
    Ok(rows)
}

#[test]
fn a_file_gives_back_what_was_written() {
    let rows = read(&small()).expect("a file");
    // Cut at 32 below the top.
    assert!(rows[0][4].abs() < 1e-4 && (rows[0][3] + 32.0).abs() < 1e-3, "{:?}", rows[0]);
    assert!(rows[1].iter().all(|x| (x - 0.2f64.ln()).abs() < 1e-6), "{:?}", rows[1]);
    assert!((rows[2][2] - rows[2][0] - 4.5).abs() < 1e-4, "{:?}", rows[2]);
}

#[test]
fn faults_name_the_field() {
    let with = |at: usize, bytes: &[u8]| {
        let mut file = small();
        file[at..at + bytes.len()].copy_from_slice(bytes);
        read(&file).expect_err("a fault").to_string()
    };
    assert_eq!(with(0, b"K"), "magic: expected kipplogp, found something else");
    assert_eq!(with(8, &[2]), "version: expected 1, found 2");
    assert_eq!(with(12, &[0]), "vocabulary: expected 1 to 16777216, found 0");
    assert_eq!(with(16, &[1]), "window: expected 2 to 1048576, found 1");
    assert_eq!(with(20, &[5]), "stride: expected 1 to 4, found 5");
    assert_eq!(with(24, &[0xff; 8]), format!("tokens: expected at most 25, found {}", u64::MAX));
    assert_eq!(with(32, &[5]), "token 0: expected an id below 5, found 5");
    assert_eq!(with(24, &[3]), "length: expected 80 bytes, found 102");
    assert_eq!(with(48, &f32::NAN.to_le_bytes()), "top: expected a finite number, found NaN");
    assert_eq!(with(52, &(-1f32).to_le_bytes()), "step: expected a number, 0 or more, found -1");
    assert!(with(48, &1f32.to_le_bytes()).starts_with("probabilities: expected a sum of 1, found"));
    let cut = &small()[..60];
    assert_eq!(read(cut).expect_err("a fault").to_string(), "length: expected 102 bytes, found 60");
}

/// Any damage is refused or read, and never worse.
#[test]
fn damaged_files_never_panic() {
    let whole = small();
    for length in 0..whole.len() {
        assert!(read(&whole[..length]).is_err(), "{length} bytes");
    }
    for case in 0..20_000u32 {
        let mut file = whole.clone();
        let random = philox(7, [case, 0, 0, 0]);
        for word in &random[..1 + (case % 3) as usize] {
            file[*word as usize % whole.len()] = (word >> 24) as u8;
        }
        let _ = read(&file);
    }
}

#[path = "../../../fuzz/checks/logits.rs"]
mod check;

/// Replays what the fuzzer knows.
#[test]
fn logits_corpus() {
    let corpus = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/logits");
    let files = std::fs::read_dir(corpus).expect("a corpus");
    let read = |file: std::io::Result<std::fs::DirEntry>| std::fs::read(file?.path());
    let count = files.map(|file| check::run(&read(file).expect("a file"))).count();
    assert!(count > 0, "{corpus} is empty");
}
