//! MODEL-SUPPORT.md says what was verified, and is made from the records in bench/results/verify:
//!
//!     KIPP_WRITE=1 cargo test -p kipp --test model_support

use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use model::registry::CHECKPOINTS;
use serde_json::Value;

const HEAD: &str = "\
# Model support

What `kipp verify` has shown, from the records in `bench/results/verify`. A checkpoint without a record loads and was never checked by it. Made by
`KIPP_WRITE=1 cargo test -p kipp --test model_support`; a test says when it is stale.

Synthetic weights are made up, with the checkpoint's dimensions; KV is how keys and values were stored. There are 17 gates, 16 where weights have 16 bits: the last
is about what quantised ones cost. The cache holds keys and values in blocks of positions, which were all different up to the context in the table; contexts up to
32,768 positions are gated with tables that name the same blocks again and again (`far-context`, docs/gates.md).

| checkpoint | weights | scheme | KV | layers | backend | gates that hold | longest context of distinct blocks | machine, commit | record |
|---|---|---|---|---|---|---|---|---|---|
";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// File names and contents of all records, by name.
fn records() -> Vec<(String, Value)> {
    let mut found = Vec::new();
    // Without a record there is no folder.
    let entries = fs::read_dir(root().join("bench/results/verify")).into_iter().flatten();
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let text = fs::read_to_string(entry.path()).expect("a record");
        let record: Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!(record["kind"], "verify", "{name}");
        found.push((name, record));
    }
    found.sort_by(|a, b| a.0.cmp(&b.0));
    found
}

fn text<'a>(value: &'a Value, field: &str) -> &'a str {
    value[field].as_str().unwrap_or("unknown")
}

/// One line for each backend that a record is about.
fn rows(id: &str, name: &str, record: &Value) -> String {
    let mut rows = String::new();
    for backend in record["backends"].as_array().expect("backends") {
        let gates = match backend["gates"].as_array() {
            None => format!("not run: {}", text(backend, "why")),
            Some(gates) => {
                let fails = |gate: &&Value| gate["holds"] != true;
                let failing: Vec<&str> =
                    gates.iter().filter(fails).map(|g| text(g, "gate")).collect();
                match failing.len() {
                    0 => format!("all {}", gates.len()),
                    n => format!(
                        "{} of {}, not {}",
                        gates.len() - n,
                        gates.len(),
                        failing.join(", ")
                    ),
                }
            }
        };
        let made = &record["made"];
        let machine = backend["device"].as_str().unwrap_or(text(&made["machine"], "processor"));
        writeln!(
            rows,
            "| {id} | {} | {} | {} | {} | {} | {gates} | {} | {}, {} | {name} |",
            text(record, "weights"),
            text(record, "scheme"),
            text(record, "kv"),
            record["layers"],
            text(backend, "backend"),
            backend["longest"],
            machine,
            text(made, "commit"),
        )
        .expect("a string");
    }
    rows
}

fn document() -> String {
    let records = records();
    let mut document = HEAD.to_string();
    for checkpoint in &CHECKPOINTS {
        let mine = records.iter().filter(|(_, record)| record["checkpoint"] == checkpoint.id);
        let rows: String = mine.map(|(name, record)| rows(checkpoint.id, name, record)).collect();
        if rows.is_empty() {
            writeln!(document, "| {} | | | | | | no record | | | |", checkpoint.id)
                .expect("a string");
        }
        document += &rows;
    }
    document
}

#[test]
fn model_support_is_what_the_records_say() {
    let path = root().join("MODEL-SUPPORT.md");
    let expected = document();
    if std::env::var_os("KIPP_WRITE").is_some() {
        fs::write(&path, &expected).expect("written");
    }
    let found = fs::read_to_string(&path).unwrap_or_default();
    assert!(found == expected, "MODEL-SUPPORT.md is stale; KIPP_WRITE=1 makes it anew");
}

#[test]
fn every_record_is_of_a_registered_checkpoint() {
    for (name, record) in records() {
        let known = CHECKPOINTS.iter().any(|c| record["checkpoint"] == c.id);
        assert!(known, "{name}: {}", record["checkpoint"]);
    }
}
