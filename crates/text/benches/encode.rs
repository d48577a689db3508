//! Times encoding a file on one thread and prints JSON, for `scripts/compare_tokenizer.py`:
//! `cargo bench -p text --bench encode -- FILE`.

use std::time::Instant;

use text::{Special, Tokenizer};

fn main() {
    let mut arguments = std::env::args().skip(1).filter(|argument| !argument.starts_with("--"));
    let Some(path) = arguments.next_back() else { return };
    let text = std::fs::read_to_string(path).expect("the file holds UTF-8");
    let start = Instant::now();
    let tokenizer = Tokenizer::family();
    let ready = start.elapsed();
    let mut seconds = Vec::new();
    let mut ids = Vec::new();
    for _ in 0..5 {
        let start = Instant::now();
        ids = tokenizer.encode(&text, Special::Recognise);
        seconds.push(start.elapsed().as_secs_f64());
    }
    // FNV-1a over the ids, so that the script can see that both sides did the same work.
    let digest = ids.iter().fold(0xcbf2_9ce4_8422_2325u64, |hash, &id| {
        (hash ^ u64::from(id)).wrapping_mul(0x100_0000_01b3)
    });
    println!(
        "{{\"ready\": {}, \"seconds\": {seconds:?}, \"tokens\": {}, \"digest\": \"{digest:x}\"}}",
        ready.as_secs_f64(),
        ids.len()
    );
}
