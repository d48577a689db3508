//! The tokenizer against cases made with the Hugging Face library, and its promises about time.

use serde_json::Value;
use text::{Special, Tokenizer};

#[test]
fn published_cases() {
    let tokenizer = Tokenizer::family();
    let mut count = 0;
    for line in include_str!("data/tokenizer-cases.jsonl").lines() {
        let case: Value = serde_json::from_str(line).unwrap();
        let text = case["text"].as_str().unwrap();
        let expected: Vec<u32> = serde_json::from_value(case["ids"].clone()).unwrap();
        assert_eq!(tokenizer.encode(text, Special::Recognise), expected, "{text:?}");
        count += 1;
    }
    assert_eq!(count, 2018);
}
