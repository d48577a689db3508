//! The case files under `tests/data`, shared by the tests of this crate.
#![allow(dead_code)] // each test file uses a part

use serde_json::Value;

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
