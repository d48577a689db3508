//! The case files under `tests/data` and a clock, shared by the tests of this crate.
#![allow(dead_code)] // each test file uses a part

use std::time::{Duration, Instant};

use serde_json::Value;

/// The processor time that `work` takes on this thread, so that a busy machine does not count; elapsed
/// time where the system does not tell.
pub fn time(work: impl FnOnce()) -> Duration {
    let on_processor = || {
        let stat = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
        stat.split(' ').next()?.parse().ok().map(Duration::from_nanos)
    };
    let (start, clock) = (on_processor(), Instant::now());
    work();
    match (start, on_processor()) {
        (Some(start), Some(end)) => end - start,
        _ => clock.elapsed(),
    }
}

/// Input and expectation of a case collected from the trackers of other engines.
pub fn case(id: &str) -> (Value, Value) {
    let cases = lines(include_str!("../data/cases.jsonl"));
    let case = cases.into_iter().find(|case| case["id"] == id).expect("a known case");
    (case["input"].clone(), case["expected"].clone())
}

/// The values of a file of JSON lines.
pub fn lines(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).expect("a JSON line")).collect()
}

/// A JSON array of ids.
pub fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).expect("an array of ids")
}
