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
/// Modules in which `unsafe` may stand, and does: `folder/name.rs` or all of `folder/name/`.
const UNSAFE: &[(&str, &str)] = &[
    ("crates/model/src", "mapping"),
    (
        "crates/cpu/src",
        "activations attention chains forward kernels kv matmul memory packed panels peaks pool simd \
         tests",
    ),
    ("crates/cpu/tests", "allocations"),
    ("crates/cuda/src", "backend decode driver kernels peaks weights"),
    ("crates/metal/src", "bridge device emulator weights"),
];
/// External crates that speak HTTP as a server does.
const HTTP: &[&str] =
    &["axum", "http", "http-body-util", "hyper", "hyper-util", "tokio-rustls", "tower"];
/// What a backend must not know of: it is given batches.
const ABOVE_BACKENDS: &[&str] = &["Engine", "Request", "Sequence", "Service"];

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

/// Paths and texts of the libraries' sources, without what is compiled for tests alone.
fn library_code() -> Vec<(String, String)> {
    let library = |path: &String| path.contains("/src/") && !path.starts_with("crates/kipp/");
    let mut code: Vec<_> =
        sources().into_iter().filter(library).map(|path| (read(&path), path)).collect();
    let mut for_tests = BTreeSet::new();
    for (text, path) in &code {
        let folder = path.rsplit_once('/').expect("a folder").0;
        for declared in text.split("#[cfg(test)]\nmod ").skip(1) {
            let name = declared.split(';').next().unwrap_or_default();
            for_tests.insert(format!("{folder}/{name}.rs"));
        }
    }
    assert!(for_tests.contains("crates/cpu/src/tests.rs"), "{for_tests:?}");
    code.retain(|(_, path)| !for_tests.contains(path));
    let without_tests = |(text, path): (String, String)| {
        let end = text.find("#[cfg(test)]\nmod tests {").unwrap_or(text.len());
        (path, text[..end].to_string())
    };
    code.into_iter().map(without_tests).collect()
}

/// Names of the crates that a crate is built on, those of a system only included.
fn dependencies(name: &str) -> Vec<String> {
    let manifest = read(&format!("crates/{name}/Cargo.toml"));
    let mut found = Vec::new();
    let mut inside = false;
    for line in manifest.lines() {
        if line.starts_with('[') {
            inside = line.ends_with("dependencies]") && !line.ends_with("-dependencies]");
        } else if inside && line.starts_with(|c: char| c.is_ascii_lowercase()) {
            found.extend(line.split(['.', ' ', '=']).next().map(str::to_string));
        }
    }
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
        for dependency in dependencies(&name).iter().filter(|d| present.contains(*d)) {
            let may = allowed.contains("all") || allowed.contains(dependency.as_str());
            assert!(may, "{name} depends on {dependency}");
        }
    }
}

#[test]
fn only_the_server_knows_http() {
    for row in table("Crates") {
        let name = without_ticks(&row[0]);
        let speaks = dependencies(&name).iter().any(|d| HTTP.contains(&d.as_str()));
        assert_eq!(speaks, name == "server", "{name}");
    }
}

#[test]
fn a_backend_is_given_batches() {
    let mut files = 0;
    for (path, code) in library_code() {
        if ["crates/cpu/", "crates/cuda/", "crates/metal/"].iter().any(|b| path.starts_with(b)) {
            files += 1;
            for line in code.lines().filter(|line| !line.trim_start().starts_with("//")) {
                let known = ABOVE_BACKENDS.iter().find(|name| line.contains(*name));
                assert!(known.is_none(), "{path} knows of {known:?}: {line}");
            }
        }
    }
    assert!(files > 30, "only {files} sources found");
}

#[test]
fn unsafe_stands_only_where_it_may() {
    let mut places: BTreeSet<String> = BTreeSet::new();
    for (folder, modules) in UNSAFE {
        places.extend(modules.split(' ').map(|module| format!("{folder}/{module}")));
    }
    let mut used = BTreeSet::new();
    for path in sources() {
        let text = read(&path);
        let mut code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
        if code.any(|line| line.contains(concat!("unsafe", " "))) {
            let mut holding = places.iter().filter(|place| {
                path.strip_prefix(place.as_str()).is_some_and(|rest| rest.starts_with(['.', '/']))
            });
            used.insert(holding.next().unwrap_or_else(|| panic!("{path} uses unsafe")).clone());
        }
    }
    assert_eq!(used, places, "places that use unsafe, and those that may");
    for name in ["text", "engine", "hub", "server", "kipp"] {
        let file = if name == "kipp" { "main.rs" } else { "lib.rs" };
        let text = read(&format!("crates/{name}/src/{file}"));
        assert!(text.contains("#![forbid(unsafe_code)]"), "{name} does not forbid it");
    }
}

#[test]
fn only_the_binary_prints_or_exits() {
    for (path, code) in library_code() {
        for forbidden in
            ["print!(", "println!(", "dbg!(", "stdout()", "stderr()", "process::exit", "anyhow"]
        {
            assert!(!code.contains(forbidden), "{path} has {forbidden}");
        }
    }
}

/// The macros panic where nobody reads any more.
#[test]
fn the_binary_prints_without_macros() {
    for path in sources().iter().filter(|path| path.starts_with("crates/kipp/src/")) {
        let code = read(path);
        for forbidden in ["print!(", "println!(", "dbg!("] {
            assert!(!code.contains(forbidden), "{path} has {forbidden}");
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
