//! Replays what the fuzzer of hubs' answers knows, as it is and damaged.

use std::path::Path;

use proptest::prelude::*;

#[path = "../../../fuzz/checks/hub.rs"]
mod hub_answers;

fn corpus() -> Vec<Vec<u8>> {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/hub");
    let files = std::fs::read_dir(&corpus).expect("a corpus");
    files.map(|file| std::fs::read(file.expect("an entry").path()).expect("a file")).collect()
}

#[test]
fn hub_corpus() {
    let corpus = corpus();
    assert!(corpus.len() > 10, "nearly empty");
    corpus.iter().for_each(|data| hub_answers::run(data));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..Default::default() })]

    #[test]
    fn no_damage_makes_anything_panic(
        data in proptest::sample::select(corpus()),
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        keep in any::<prop::sample::Index>(),
    ) {
        let mut data = data;
        for (at, byte) in damage {
            let at = at.index(data.len());
            data[at] = byte;
        }
        hub_answers::run(&data);
        hub_answers::run(&data[..keep.index(data.len())]);
    }
}
