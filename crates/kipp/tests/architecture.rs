//! What ARCHITECTURE.md promises about the shape of the project, checked.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Lines of the reading path at most.
const READING_PATH: usize = 3_100;
/// External crates under each of model, text and engine at most.
const CORE_CRATES: usize = 15;
/// External crates under the default binary at most.
const BINARY_CRATES: usize = 160;
/// Modules in which `unsafe` may stand: a file, or a folder with all that is in it.
const UNSAFE: &[&str] =
    &["crates/model/src/mapping", "crates/cpu/src/", "crates/cuda/src/", "crates/metal/src/"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the workspace")
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

/// Rows of the table under a heading of ARCHITECTURE.md, as cells.
fn table(heading: &str) -> Vec<Vec<String>> {
    let text = read("ARCHITECTURE.md");
    let section = text.split(&format!("\n## {heading}\n")).nth(1).expect("the heading");
    let section = section.split("\n## ").next().unwrap_or_default();
    let rows = section.lines().filter(|line| line.starts_with("| `"));
    let cells =
        |row: &str| row.trim_matches('|').split('|').map(|c| c.trim().to_string()).collect();
    rows.map(cells).collect()
}

fn without_ticks(cell: &str) -> String {
    cell.replace('`', "")
}

/// All Rust sources of the workspace, relative to its root.
fn sources() -> Vec<String> {
    let mut found = Vec::new();
    let mut folders = vec![root().join("crates")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).expect("a folder").flatten() {
            let path = entry.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| e == "rs") {
                let relative = path.strip_prefix(root()).expect("inside").to_path_buf();
                found.push(relative.to_string_lossy().replace('\\', "/"));
            }
        }
    }
    assert!(found.len() > 30, "only {} sources found", found.len());
    found
}

#[test]
fn the_reading_path_stays_readable() {
    let rows = table("The reading path");
    assert!(rows.len() > 10);
    let lines: usize = rows.iter().map(|row| read(&without_ticks(&row[0])).lines().count()).sum();
    assert!(lines <= READING_PATH, "{lines} lines");
}

#[test]
fn crates_depend_only_as_the_table_says() {
    let rows = table("Crates");
    let named: BTreeSet<String> = rows.iter().map(|row| without_ticks(&row[0])).collect();
    let folders = fs::read_dir(root().join("crates")).expect("crates").flatten();
    let present: BTreeSet<String> =
        folders.map(|f| f.file_name().to_string_lossy().into_owned()).collect();
    assert_eq!(named, present, "the table and the folders");
    for row in &rows {
        let name = without_ticks(&row[0]);
        let allowed = without_ticks(&row[2]);
        let allowed: BTreeSet<&str> = allowed.split(", ").collect();
        let manifest = read(&format!("crates/{name}/Cargo.toml"));
        let normal = manifest.split("[dependencies]").nth(1).unwrap_or_default();
        let normal = normal.split("\n[").next().unwrap_or_default();
        for line in normal.lines() {
            let dependency = line.split(['.', ' ', '=']).next().unwrap_or_default();
            if present.contains(dependency) && !allowed.contains("all") {
                assert!(allowed.contains(dependency), "{name} depends on {dependency}");
            }
        }
    }
}

#[test]
fn unsafe_stands_only_where_it_may() {
    for path in sources() {
        let allowed = UNSAFE.iter().any(|place| path.starts_with(place));
        let text = read(&path);
        let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
        let uses = code.filter(|line| line.contains(concat!("unsafe", " "))).count();
        assert!(allowed || uses == 0, "{path} uses unsafe");
    }
    for name in ["text", "engine", "hub", "kipp"] {
        let file = if name == "kipp" { "main.rs" } else { "lib.rs" };
        let text = read(&format!("crates/{name}/src/{file}"));
        assert!(text.contains("#![forbid(unsafe_code)]"), "{name} does not forbid it");
    }
}

#[test]
fn only_the_binary_prints_or_exits() {
    for path in sources() {
        if !path.contains("/src/") || path.starts_with("crates/kipp/") {
            continue;
        }
        for forbidden in ["println!(", "eprintln!(", "print!(", "process::exit", "anyhow"] {
            let text = read(&path);
            let library = text.split("#[cfg(test)]").next().unwrap_or_default();
            assert!(!library.contains(forbidden), "{path} has {forbidden}");
        }
    }
}

/// Crates that a package is built on, itself and those of the workspace left out.
fn external_crates(package: &str) -> BTreeSet<String> {
    let output = Command::new(env!("CARGO"))
        .args(["tree", "-p", package, "-e", "normal", "--prefix", "none", "--offline"])
        .current_dir(root())
        .output()
        .expect("cargo tree");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let tree = String::from_utf8_lossy(&output.stdout).into_owned();
    let external = tree.lines().filter(|line| !line.is_empty() && !line.contains("(/"));
    external.map(|line| line.trim_end_matches(" (*)").to_string()).collect()
}

#[test]
fn the_project_stands_on_few_crates() {
    for package in ["model", "text", "engine"] {
        let crates = external_crates(package);
        assert!(crates.len() <= CORE_CRATES, "{package}: {} crates, {crates:?}", crates.len());
    }
    let crates = external_crates("kipp");
    assert!(crates.len() <= BINARY_CRATES, "kipp: {} crates", crates.len());
}
