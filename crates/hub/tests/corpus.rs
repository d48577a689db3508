//! Replays what the fuzzer of hubs' answers knows.

use std::path::Path;

#[path = "../../../fuzz/checks/hub.rs"]
mod hub_answers;

#[test]
fn hub_corpus() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/hub");
    let files = std::fs::read_dir(&corpus).expect("a corpus");
    let check = |path: &Path| hub_answers::run(&std::fs::read(path).expect("a file"));
    let count = files.map(|file| check(&file.expect("an entry").path())).count();
    assert!(count > 10, "{corpus:?} is nearly empty");
}
