//! The chat templates against the reference template's output and the cases of other engines' trackers.

mod common;

use common::{case, ids};
use model::Variant;
use serde_json::{Value, json};
use text::{Conversation, Error, Special, Tokenizer};

fn parse(request: &Value) -> Conversation {
    Conversation::parse(&request.to_string()).unwrap()
}

fn render(request: &Value) -> String {
    parse(request).render(Variant::Instruct).unwrap().text().to_owned()
}

fn refused(request: &Value) -> String {
    Conversation::parse(&request.to_string()).unwrap_err().to_string()
}

#[test]
fn reference_cases() {
    // The lines themselves, since a parsed value would not keep the order of keys.
    let mut count = 0;
    for line in include_str!("data/chat-cases.jsonl").lines() {
        let expected: Value = serde_json::from_str(line).unwrap();
        let prompt = Conversation::parse(line).unwrap().render(Variant::Instruct).unwrap();
        assert_eq!(prompt.text(), expected["rendered"].as_str().unwrap(), "{line}");
        count += 1;
    }
    assert_eq!(count, 300);
}

#[test]
fn case_of_thoughts_in_the_history() {
    let (input, expected) = case("CT-01");
    for name in ["messages", "same_with_reasoning_content"] {
        let request = json!({"messages": input[name]});
        assert_eq!(render(&request), expected.as_str().unwrap());
        let prompt = parse(&request).render(Variant::Instruct).unwrap();
        assert_eq!(prompt.encode(Tokenizer::family()).len(), 24);
    }
}

#[test]
fn case_of_switching_thoughts_off() {
    let (input, expected) = case("CT-03");
    let mut request = json!({"messages": input["messages"]});
    assert_eq!(render(&request), expected["unset"].as_str().unwrap());
    for thinking in [true, false] {
        request["enable_thinking"] = json!(thinking);
        assert_eq!(render(&request), expected[thinking.to_string()].as_str().unwrap());
    }
}

#[test]
fn case_of_tools() {
    // From the text of the case: its parsed form has its keys sorted.
    let line = include_str!("data/cases.jsonl").lines().find(|line| line.contains("\"CT-04\""));
    let expected = case("CT-04").1;
    let source: &serde_json::value::RawValue = {
        let line = line.unwrap();
        let start = line.find("\"input\": ").unwrap() + "\"input\": ".len();
        serde_json::Deserializer::from_str(&line[start..]).into_iter().next().unwrap().unwrap()
    };
    let prompt = Conversation::parse(source.get()).unwrap().render(Variant::Instruct).unwrap();
    assert_eq!(prompt.text(), expected.as_str().unwrap());
}

#[test]
fn case_of_missing_content() {
    let (input, expected) = case("CT-06");
    let expected = expected.as_str().unwrap();
    let mut request = json!({"messages": input["messages"]});
    assert_eq!(render(&request), expected);
    request["messages"][1]["content"] = json!("");
    assert_eq!(render(&request), expected);
    request["messages"][1].as_object_mut().unwrap().remove("content");
    assert_eq!(render(&request), expected);
}

#[test]
fn case_of_content_parts() {
    let input = case("CT-07").0;
    let user = |text: &str| format!("<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n");
    assert_eq!(render(&json!({"messages": input["one"]})), user("hi"));
    assert_eq!(render(&json!({"messages": input["two"]})), user("Name a fruit"));
    assert_eq!(render(&json!({"messages": input["empty"]})), user(""));
    assert_eq!(
        refused(&json!({"messages": input["image"]})),
        "messages[0].content[0].type: expected \"text\", found \"image_url\""
    );
}

#[test]
fn case_of_later_system_messages() {
    let (input, expected) = case("CT-08");
    let mut request = json!({"messages": input["messages"]});
    assert_eq!(render(&request), expected["plain"].as_str().unwrap());
    request["tools"] = input["with_tools"].clone();
    let text = render(&request);
    assert!(text.starts_with(expected["with_tools_starts"].as_str().unwrap()));
    assert_eq!(text.matches(expected["with_tools_contains_once"].as_str().unwrap()).count(), 1);
}

#[test]
fn case_of_control_tokens_from_outside() {
    let (input, expected) = case("CT-10");
    let tokenizer = Tokenizer::family();
    let prompt = parse(&json!({"messages": input["messages"]})).render(Variant::Instruct).unwrap();
    assert_eq!(prompt.encode(tokenizer), ids(&expected["safe_ids"]));
    let flat = tokenizer.encode(prompt.text(), Special::Recognise);
    assert_eq!(flat, ids(&expected["hf_flat_ids"]));
}

#[test]
fn both_encodings_agree_where_nobody_spells_a_token() {
    let tokenizer = Tokenizer::family();
    for line in include_str!("data/chat-cases.jsonl").lines() {
        let line = line.replace("think>", "thought").replace("tool_response>", "result");
        let prompt = Conversation::parse(&line).unwrap().render(Variant::Instruct).unwrap();
        let flat = tokenizer.encode(prompt.text(), Special::Recognise);
        assert_eq!(prompt.encode(tokenizer), flat, "{line}");
    }
}

/// Clients send calls without arguments back in more ways than models write them.
#[test]
fn no_arguments_are_an_empty_object() {
    let prompt = |arguments: Value| {
        let request = json!({"messages": [
            {"role": "user", "content": "Q"},
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]},
        ]});
        parse(&request).render(Variant::Instruct).expect("a prompt").text().to_owned()
    };
    let written = prompt(json!({}));
    assert!(written.contains("\"arguments\": {}}"), "{written}");
    for arguments in [json!("{}"), json!(""), json!(" \n"), json!(null)] {
        assert_eq!(prompt(arguments), written);
    }
}

#[test]
fn variants_differ_in_their_thoughts() {
    let request = json!({
        "messages": [
            {"role": "user", "content": "Q"},
            {"role": "assistant", "content": "<think>\nR\n</think>\n\nA", "tool_calls": [
                {"function": {"name": "f", "arguments": "{}"}},
            ]},
            {"role": "tool", "content": "ok"},
        ],
        "enable_thinking": false,
    });
    let shared = |said: &str, end: &str| {
        format!(
            "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n{said}\n<tool_call>\n\
             {{\"name\": \"f\", \"arguments\": {{}}}}\n</tool_call><|im_end|>\n<|im_start|>user\n\
             <tool_response>\nok\n</tool_response><|im_end|>\n<|im_start|>assistant\n{end}"
        )
    };
    let render = |variant| parse(&request).render(variant);
    let thought = "<think>\nR\n</think>\n\nA";
    let expected = [
        (Variant::Instruct, shared(thought, "<think>\n\n</think>\n\n"), false),
        (Variant::Instruct2507, shared(thought, ""), false),
        (Variant::Thinking2507, shared(thought, "<think>\n"), true),
    ];
    for (variant, text, thinking) in expected {
        let prompt = render(variant).unwrap();
        assert_eq!(prompt.text(), text);
        assert_eq!(prompt.ends_thinking(), thinking);
    }
    assert_eq!(render(Variant::Base), Err(Error::NoTemplate));
    // Instruct-2507 has no thoughts, so it leaves out none and adds no empty one.
    let history = json!({"messages": [
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "<think>\nR\n</think>\n\nA"},
        {"role": "user", "content": "Q"},
    ]});
    let prompt = parse(&history).render(Variant::Instruct2507).unwrap();
    assert!(prompt.text().contains("<|im_start|>assistant\n<think>\nR\n</think>\n\nA<|im_end|>"));
    assert!(!prompt.ends_thinking());
}

#[test]
fn the_last_answer_can_be_continued() {
    let rendered = |answer: Value, variant| {
        let request = json!({
            "messages": [{"role": "user", "content": "Q"}, answer],
            "continue_final_message": true,
        });
        parse(&request).render(variant).map(|prompt| {
            let text = prompt.text().strip_prefix("<|im_start|>user\nQ<|im_end|>\n").unwrap();
            (
                text.strip_prefix("<|im_start|>assistant\n").unwrap().to_owned(),
                prompt.ends_thinking(),
            )
        })
    };
    let said = json!({"role": "assistant", "content": "A b"});
    let closed = |text: &str| Ok((text.to_owned(), false));
    let open = |text: &str| Ok((text.to_owned(), true));
    assert_eq!(rendered(said.clone(), Variant::Instruct), closed("<think>\n\n</think>\n\nA b"));
    assert_eq!(rendered(said, Variant::Instruct2507), closed("A b"));
    let thought = json!({"role": "assistant", "reasoning_content": "R "});
    assert_eq!(rendered(thought, Variant::Thinking2507), open("<think>\nR "));
    let thought = json!({"role": "assistant", "content": "<think>\nR "});
    assert_eq!(rendered(thought, Variant::Instruct), open("<think>\nR "));
    let calls = json!({"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{}"}]});
    assert!(rendered(calls, Variant::Instruct).is_err());
    assert!(rendered(json!({"role": "user", "content": "Q"}), Variant::Instruct).is_err());
}

#[test]
fn refusals_name_the_field() {
    let one = |message: Value| refused(&json!({"messages": [message]}));
    assert_eq!(
        one(json!({"role": "function", "content": ""})),
        "messages[0].role: expected system, developer, user, assistant or tool, found \"function\""
    );
    assert_eq!(one(json!({"content": ""})), "messages[0].role: expected a value, found nothing");
    assert_eq!(
        one(json!({"role": "user", "content": 5})),
        "messages[0].content: expected a string, an array of parts or null, found a number"
    );
    assert_eq!(
        one(json!({"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]})),
        "messages[0].tool_calls[0].function.arguments: expected a value, found nothing"
    );
    assert_eq!(one(json!(null)), "messages[0]: expected an object, found null");
    assert_eq!(refused(&json!({"messages": {}})), "messages: expected an array, found an object");
    assert_eq!(refused(&json!([])), "request: expected an object, found an array");
    assert_eq!(
        refused(&json!({"messages": [], "tools": ["f"]})),
        "tools[0]: expected an object, found a string"
    );
    let empty = parse(&json!({"messages": []})).render(Variant::Instruct).unwrap_err();
    assert_eq!(empty.to_string(), "messages: expected at least one message, found none");
    let twice = r#"{"messages": [{"role": "system", "role": "user", "content": "a"}]}"#;
    let error = Conversation::parse(twice).unwrap_err();
    assert_eq!(error.to_string(), "duplicate key \"role\" in a JSON object");
}
