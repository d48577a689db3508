//! `kipp verify` and `--spec` as a user meets them.

use std::path::PathBuf;
use std::process::{Command, Output};

use serde_json::Value;

fn run(args: &[&str]) -> Output {
    let none = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("no-models");
    let mut command = Command::new(env!("CARGO_BIN_EXE_kipp"));
    command.args(args).env("KIPP_MODELS", none).output().expect("kipp starts")
}

fn stdout(output: &Output) -> &str {
    std::str::from_utf8(&output.stdout).expect("UTF-8")
}

fn stderr(output: &Output) -> &str {
    std::str::from_utf8(&output.stderr).expect("UTF-8")
}

/// Where a file may be written: nothing has left one there.
fn free(name: &str) -> PathBuf {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_file(&path);
    path
}

/// Runs `kipp verify` with a record, and reads it.
fn verify(name: &str, args: &[&str]) -> (Output, Value) {
    let path = free(name);
    let all = [&["verify", "--json", path.to_str().expect("UTF-8")], args].concat();
    let output = run(&all);
    let text =
        std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{e}: {}", stderr(&output)));
    (output, serde_json::from_str(&text).expect("JSON"))
}

#[test]
fn gates_make_a_table_and_a_record() {
    let (output, record) = verify("verify-rows.json", &["--gate", "rows"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(stdout(&output).contains("backend cpu\nholds  rows"), "{}", stdout(&output));
    assert_eq!((&record["checkpoint"], &record["held"]), (&"kipp-tiny".into(), &true.into()));
    let cpu = &record["backends"][0];
    assert_eq!((&cpu["backend"], &cpu["ran"]), (&"cpu".into(), &true.into()));
    assert_eq!(cpu["gates"][0]["gate"], "rows");
    assert!(cpu["kernels"].is_array());
    // Files are named, this machine's folders are not.
    let command = &record["made"]["command"];
    assert_eq!(command, "kipp verify --json verify-rows.json --gate rows");
}

/// A file of made-up weights is no checkpoint, whatever it is called.
#[test]
fn a_record_says_whose_weights_were_checked() {
    let file = free("made-up.gguf");
    let file = file.to_str().expect("UTF-8");
    let made = ["convert", "--synthetic", "--checkpoint", "kipp-tiny", "--scheme", "q8_0", "--out"];
    let output = run(&[&made[..], &[file]].concat());
    assert!(output.status.success(), "{}", stderr(&output));
    let (_, record) = verify("verify-made-up.json", &[file, "--gate", "rows", "--backend", "cpu"]);
    assert_eq!(record["weights"], "synthetic");
    let (_, record) = verify("verify-own.json", &["--gate", "rows", "--backend", "cpu"]);
    assert_eq!(record["weights"], "checkpoint's");
}

#[test]
fn a_gate_that_fails_is_told_and_the_others_run() {
    let args = ["--gate", "o", "--bound", "1e-30", "--backend", "cpu", "--ctx", "200"];
    let (output, record) = verify("verify-bound.json", &args);
    assert_eq!(output.status.code(), Some(1));
    assert!(stdout(&output).contains("FAILS  logits"), "{}", stdout(&output));
    assert!(stdout(&output).contains("holds  rows"), "the gates behind it were run");
    assert!(stderr(&output).contains("logits on cpu"), "{}", stderr(&output));
    assert_eq!(record["held"], false);
}

#[test]
fn quantised_weights_and_8_bit_keys_and_values_have_bounds_of_their_own() {
    for scheme in ["kipp-tiny:q8_0", "kipp-tiny:q4_1", "kipp-tiny:q4_0"] {
        let (output, record) = verify("verify-q.json", &[scheme, "--gate", "quantised"]);
        assert!(output.status.success(), "{scheme}: {}{}", stdout(&output), stderr(&output));
        let gate = &record["backends"][0]["gates"][0];
        assert!(gate["figure"].as_f64() > Some(0.0), "{gate}");
        println!("{scheme}: {} <= {}", gate["figure"], gate["bound"]);
    }
    let (output, record) = verify("verify-kv.json", &["--kv", "q8_0", "--gate", "logits"]);
    assert!(output.status.success(), "{}", stdout(&output));
    assert_eq!(record["kv"], "q8_0");
}

#[test]
fn wrong_usage_is_told() {
    let args = ["verify", "--ctx", "4096"];
    assert!(stderr(&run(&args)).contains("--ctx: expected 1 to 2048"), "{}", stderr(&run(&args)));
    let output = run(&["verify", "--gate", "nothing"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("--gate: expected"), "{}", stderr(&output));
    let output = run(&["generate", "--prompt", "a", "--spec", "draft"]);
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
}

#[test]
fn drafts_change_no_token() {
    let base = ["generate", "--json", "--max-tokens", "60", "--prompt"];
    let story = "Once upon a time there was a cat. Once upon a time there was a cat. Once upon a";
    for more in [&[][..], &["--temperature", "0.8", "--seed", "5"]] {
        let answer = |spec: &[&str]| -> Value {
            let output = run(&[&base, &[story][..], more, spec].concat());
            serde_json::from_str(stdout(&output)).unwrap_or_else(|_| panic!("{}", stderr(&output)))
        };
        let plain = answer(&[]);
        assert_eq!(plain["drafted_tokens"], 0);
        for spec in
            [&["--spec", "ngram"][..], &["--spec", "draft", "--draft-model", "kipp-tiny:q4_0"]]
        {
            let drafted = answer(spec);
            assert_eq!(drafted["ids"], plain["ids"], "{spec:?}");
            assert!(drafted["accepted_tokens"].as_u64() <= drafted["drafted_tokens"].as_u64());
            assert!(drafted["forward_passes"].as_u64() <= plain["forward_passes"].as_u64());
        }
    }
}
