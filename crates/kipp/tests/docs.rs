//! The documentation: complete, without dead links, and what it says of the command line true.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the workspace")
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn kipp(args: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_kipp")).args(args).output().expect("kipp runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("UTF-8")
}

/// The Markdown files of a folder, without those below it.
fn pages(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).expect("a folder").flatten().map(|entry| entry.path());
    entries.filter(|path| path.extension().is_some_and(|e| e == "md")).collect()
}

/// The targets of a page's links and pictures, without those in code.
fn links(page: &str) -> Vec<String> {
    let mut found = Vec::new();
    for (at, part) in page.split("```").enumerate() {
        if at % 2 == 1 {
            continue;
        }
        let prose: String = part.split('`').step_by(2).collect::<Vec<_>>().join("code");
        found.extend(
            prose.split("](").skip(1).filter_map(|rest| Some(rest.split_once(')')?.0.to_owned())),
        );
    }
    found
}

/// The anchors of a page's headings, as GitHub and mdBook name them.
fn anchors(page: &str) -> BTreeSet<String> {
    let headings = page.lines().filter(|line| line.starts_with('#'));
    let anchor = |heading: &str| {
        let text = heading.trim_start_matches('#').trim().to_lowercase();
        let kept = text.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
        kept.map(|c| if c == ' ' { '-' } else { c }).collect()
    };
    headings.map(anchor).collect()
}

#[test]
fn the_reference_of_commands_is_the_programs_own() {
    let written = read(&root().join("docs/commands.md"));
    let made = kipp(&["manual"]);
    assert!(written == made, "stale: cargo run -- manual > docs/commands.md");
    for verb in ["generate", "serve", "bench", "ppl", "completions"] {
        assert!(made.contains(&format!("\n## kipp {verb}\n")), "{verb}");
    }
}

#[test]
fn man_pages_and_completions_are_made() {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("man");
    kipp(&["manual", "--man", folder.to_str().expect("UTF-8")]);
    let page = read(&folder.join("kipp-serve.1"));
    assert!(page.contains(".TH") && page.contains("KIPP_API_KEY"), "{page}");
    assert!(read(&folder.join("kipp.1")).contains("bench"));
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        assert!(kipp(&["completions", shell]).contains("api-key"), "{shell}");
    }
}

#[test]
fn the_summary_names_every_page() {
    let docs = root().join("docs");
    let summary = links(&read(&docs.join("SUMMARY.md")));
    let named: BTreeSet<PathBuf> = summary.iter().map(|page| docs.join(page)).collect();
    let mut there: BTreeSet<PathBuf> = pages(&docs).into_iter().collect();
    there.remove(&docs.join("SUMMARY.md"));
    assert_eq!(named, there);
}

#[test]
fn links_and_includes_lead_somewhere() {
    let mut files = pages(&root());
    files.extend(pages(&root().join("docs")));
    assert!(files.len() > 10);
    for file in files {
        let (page, folder) = (read(&file), file.parent().expect("a folder").to_owned());
        for link in links(&page) {
            if link.contains("://") || link.starts_with("mailto:") {
                continue;
            }
            let (path, anchor) = link.split_once('#').unwrap_or((&link, ""));
            let target = if path.is_empty() { file.clone() } else { folder.join(path) };
            assert!(target.exists(), "{}: {link} leads nowhere", file.display());
            if !anchor.is_empty() {
                let found = anchors(&read(&target));
                assert!(found.contains(anchor), "{}: {link}: {found:?}", file.display());
            }
        }
        for include in page.split("{{#include ").skip(1) {
            let (path, _) = include.split_once("}}").expect("a closed include");
            // On the site its links would start from here, and lead to files that are no pages.
            let included = links(&read(&folder.join(path)));
            let relative = included.iter().find(|link| !link.contains("://"));
            assert!(relative.is_none(), "{}: {relative:?} in {path}", file.display());
        }
    }
}

/// What the first page promises for the built-in model is what comes.
#[test]
fn the_first_page_shows_what_the_program_prints() {
    let page = read(&root().join("docs/index.md"));
    let blocks: Vec<&str> = page.split("```").skip(1).step_by(2).collect();
    let at = blocks.iter().position(|block| block.contains("kipp generate")).expect("an example");
    let prompt = blocks[at].split('"').nth(1).expect("a prompt");
    let tokens = blocks[at].split("--max-tokens ").nth(1).expect("a number").trim();
    let printed = blocks[at + 1].strip_prefix("text\n").expect("what it prints");
    assert_eq!(kipp(&["generate", "--prompt", prompt, "--max-tokens", tokens]), printed);
}

/// The first page's request, put to the server with the model that is built in.
#[test]
fn the_first_page_gets_an_answer_from_the_server() {
    let page = read(&root().join("docs/index.md"));
    let request = page.split("```").find(|block| block.contains("curl")).expect("a request");
    let path = request.split("127.0.0.1:8080").nth(1).expect("an address");
    let path = path.split_whitespace().next().expect("a path");
    let body = request.split("-d '").nth(1).expect("a body").split('\'').next().expect("its end");

    let mut server = Command::new(env!("CARGO_BIN_EXE_kipp"))
        .args(["serve", "--port", "0"])
        .stderr(Stdio::piped())
        .spawn()
        .expect("kipp runs");
    let lines = BufReader::new(server.stderr.take().expect("piped")).lines();
    let told = |line: std::io::Result<String>| {
        Some(line.ok()?.strip_prefix("kipp listens on http://")?.to_owned())
    };
    let address = lines.filter_map(told).next().expect("an address");
    let length = body.len();
    let ask = || {
        let mut connection = TcpStream::connect(&address).expect("a connection");
        write!(
            connection,
            "POST {path} HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n\
             Content-Length: {length}\r\nConnection: close\r\n\r\n{body}"
        )
        .expect("sent");
        let mut answer = String::new();
        connection.read_to_string(&mut answer).expect("an answer");
        answer
    };
    // 503 while the model is being loaded.
    let answers = std::iter::repeat_with(ask);
    let answer = answers.take(600).find(|answer| {
        let waits = answer.starts_with("HTTP/1.1 503");
        std::thread::sleep(Duration::from_millis(if waits { 100 } else { 0 }));
        !waits
    });
    let answer = answer.expect("a loaded model");
    server.kill().expect("killed");
    server.wait().expect("ended");
    let (head, body) = answer.split_once("\r\n\r\n").expect("a body");
    assert!(head.starts_with("HTTP/1.1 200"), "{answer}");
    let value: serde_json::Value = serde_json::from_str(body).expect("JSON");
    let text = value["choices"][0]["message"]["content"].as_str().expect("a text");
    assert!(text.contains("Paris"), "{text}");
}

/// The dashboard and the guide speak of metrics that the server has.
#[test]
fn metrics_that_are_named_exist() {
    let source = read(&root().join("crates/server/src/metrics.rs"));
    let mut checked = 0;
    for path in ["deploy/grafana.json", "docs/serving.md"] {
        let text = read(&root().join(path));
        for rest in text.split("kipp_").skip(1) {
            let name: String =
                rest.chars().take_while(|c| matches!(c, 'a'..='z' | '0'..='9' | '_')).collect();
            let name = ["_bucket", "_sum", "_count"]
                .iter()
                .find_map(|end| name.strip_suffix(end))
                .unwrap_or(&name);
            assert!(source.contains(&format!("\"{name}\"")), "{path}: kipp_{name}");
            checked += 1;
        }
    }
    assert!(checked > 10);
    let dashboard = read(&root().join("deploy/grafana.json"));
    serde_json::from_str::<serde_json::Value>(&dashboard).expect("the dashboard is JSON");
}
