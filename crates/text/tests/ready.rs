//! The first use builds the family's tokenizer; alone in its process so that nothing built it before.

use std::time::{Duration, Instant};

use text::{Special, Tokenizer};

#[test]
fn ready_in_under_forty_milliseconds() {
    let start = Instant::now();
    assert_eq!(Tokenizer::family().encode("Hello", Special::Literal), [9707]);
    // Twice the promise, since the machine may be building something else meanwhile.
    assert!(start.elapsed() < Duration::from_millis(80), "{:?}", start.elapsed());
}
