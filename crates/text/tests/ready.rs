//! The first use builds the family's tokenizer; alone in its process so that nothing built it before.

mod common;

use std::time::Duration;

use text::{Special, Tokenizer};

#[test]
fn ready_in_under_forty_milliseconds() {
    let taken = common::time(|| {
        assert_eq!(Tokenizer::family().encode("Hello", Special::Literal), [9707]);
    });
    // Twice the promise, for slower machines and for neighbours that fight over the caches.
    assert!(taken < Duration::from_millis(80), "{taken:?}");
}
