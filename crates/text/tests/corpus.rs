//! Replays what the fuzzers know.

use std::path::Path;

#[path = "../../../fuzz/checks/chat.rs"]
mod chat;
#[path = "../../../fuzz/checks/output.rs"]
mod output;
#[path = "../../../fuzz/checks/tokenizer.rs"]
mod tokenizer;

fn replay(target: &str, check: fn(&[u8])) {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(target);
    let files = std::fs::read_dir(&corpus).expect("a corpus");
    let count = files.map(|file| check(&std::fs::read(file.unwrap().path()).unwrap())).count();
    assert!(count > 0, "{corpus:?} is empty");
}

#[test]
fn tokenizer_corpus() {
    replay("tokenizer", tokenizer::run);
}

#[test]
fn chat_corpus() {
    replay("chat", chat::run);
}

#[test]
fn output_corpus() {
    replay("output", output::run);
}
