//! The repository's scripts. They need Python, which `cargo test` does not: `.ci/run` asks for them.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use serde_json::Value;

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// kipp and a peer that only claims its speed, on kipp-tiny's file.
#[test]
#[cfg(unix)]
#[ignore = "needs Python"]
fn peers_are_measured_in_turn_and_losing_rows_stay() {
    use std::os::unix::fs::PermissionsExt;

    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let peer = folder.join("llama-bench");
    let entry = |prompt: u32, generated: u32, rate: f64| {
        format!(r#"{{"n_prompt":{prompt},"n_gen":{generated},"n_depth":0,"avg_ts":{rate}}}"#)
    };
    let claims = format!("[{},{}]", entry(16, 0, 1e9), entry(0, 4, 1e-3));
    fs::write(&peer, format!("#!/bin/sh\nprintf '%s' '{claims}'\n")).expect("written");
    fs::set_permissions(&peer, fs::Permissions::from_mode(0o755)).expect("executable");

    let out = folder.join("peers.json");
    let output = Command::new("python3")
        .arg(root().join("scripts/peers.py"))
        .args(["--kipp", env!("CARGO_BIN_EXE_kipp"), "--pp", "16", "--tg", "4", "--rounds", "1"])
        .arg("--llama-bench")
        .arg(&peer)
        .arg("--files")
        .arg(root().join("crates/model/data/kipp-tiny.gguf"))
        .arg("--out")
        .arg(&out)
        .output()
        .expect("python3 runs");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let row = |test: &str| text.lines().find(|line| line.contains(&format!("| {test} |")));
    let lost = row("pp16").expect("a row");
    assert!(lost.contains("**1,000,000,000.0**") && lost.ends_with("| 0.00 |"), "{lost}");
    let won = row("tg4").expect("a row");
    assert!(won.contains("| 0.0 |") && won.matches("**").count() == 2, "{won}");
    let record = fs::read_to_string(out).expect("a record");
    let record: Value = serde_json::from_str(&record).expect("JSON");
    assert_eq!(record["results"].as_array().expect("results").len(), 2);
    assert!(record["kipp"].as_str().expect("a version").starts_with("kipp "));
    // Folders of the machine that measured are nobody's business.
    let command = record["command"].as_str().expect("a command");
    assert!(command.contains("--llama-bench llama-bench --files kipp-tiny.gguf"), "{command}");
}
