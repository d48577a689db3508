//! Replays what the fuzzer of requests knows.

use std::path::Path;

#[path = "../../../fuzz/checks/requests.rs"]
mod requests;

#[test]
fn requests_corpus() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/requests");
    let files = std::fs::read_dir(&corpus).expect("a corpus");
    let check = |path: &Path| requests::run(&std::fs::read(path).expect("a file"));
    let count = files.map(|file| check(&file.expect("an entry").path())).count();
    assert!(count > 0, "{corpus:?} is empty");
}
