//! What an answer is held to, where models and clients do other than expected: tags written letter by letter,
//! ends that are ignored, calls that nobody can read.

mod common;

use common::{Running, Setup, chat_reply, ids, pieces, serve, serve_with};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
const CALL: &str = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"n\": 1}}\n</tool_call>";

/// Ids of a text whose tags are cut into ordinary tokens.
fn spelled(text: &str) -> Vec<u32> {
    text.split_inclusive(['<', '_']).flat_map(ids).collect()
}

/// A request about `Q` with these members.
fn ask(members: Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "Q"}], "temperature": 0});
    for (key, value) in members.as_object().expect("an object") {
        body[key] = value.clone();
    }
    body
}

fn message(server: &Running, members: Value) -> Value {
    server.ok(CHAT, ask(members))["choices"][0].clone()
}

fn tools() -> Value {
    json!([{"type": "function", "function": {"name": "f"}}])
}

#[test]
fn a_format_ends_the_answer_where_the_models_end_is_ignored() {
    let schema = json!({"type": "json_schema", "json_schema": {"schema": {"const": {"a": 1}}}});
    let server = serve(Box::new(|_| None));
    let members =
        json!({"response_format": schema, "ignore_eos": true, "reasoning_effort": "none"});
    let choice = message(&server, members);
    assert_eq!(choice["message"]["content"], "{\"a\": 1}");
    assert_eq!(choice["finish_reason"], "stop");
}

#[test]
fn tags_that_are_spelled_out_open_and_close_thoughts() {
    let thought = "<think>\na b c d e f g h i j k l\n</think>\n\n";
    let server = serve(chat_reply(spelled(&format!("{thought}hello"))));
    let plain = message(&server, json!({}));
    assert_eq!(plain["message"]["reasoning_content"], "a b c d e f g h i j k l");
    assert_eq!(plain["message"]["content"], "hello");
    // The budget counts what the reader sees as a thought.
    let bounded = message(&server, json!({"thinking_budget": 4, "max_tokens": 40}));
    let reasoning = bounded["message"]["reasoning_content"].as_str().expect("a thought");
    assert!(reasoning.starts_with("a b") && reasoning.len() < 12, "{bounded}");
    assert!(!bounded["message"]["content"].as_str().expect("content").contains("<think>"));
    // A format holds from where the thought ends, whichever way it ends.
    let server =
        serve(chat_reply([ids("<think>"), spelled("\nwell\n</think>\n\nno JSON")].concat()));
    let schema = json!({"type": "json_schema", "json_schema": {"schema": {"const": {"a": 1}}}});
    let held = message(&server, json!({"response_format": schema, "max_tokens": 60}));
    assert_eq!(held["message"]["reasoning_content"], "well");
    assert_eq!(held["message"]["content"], "{\"a\": 1}");
}

/// A token that ends a spelled tag and goes on would say what the format has not seen.
#[test]
fn nothing_is_said_in_the_token_that_ends_a_thought() {
    let schema = json!({"type": "json_schema", "json_schema": {"schema": {"const": {"a": 1}}}});
    let held = |last: &str| {
        assert_eq!(ids(last).len(), 1, "{last:?}");
        let tag = pieces(&["<think>", "\nwell\n", "<", "/th", "ink", last]);
        let server = serve(chat_reply([tag, ids("no JSON")].concat()));
        let members = json!({"response_format": schema, "thinking_budget": 9, "max_tokens": 60});
        let choice = message(&server, members);
        assert_eq!(choice["message"]["content"], "{\"a\": 1}", "{last:?}: {choice}");
        choice["message"]["reasoning_content"].as_str().expect("a thought").to_owned()
    };
    for last in [">{", ">\"", "><"] {
        let thought = held(last);
        assert!(thought.starts_with("well\n</think") && !thought.contains('>'), "{thought}");
    }
    // Line ends are nobody's.
    for last in [">", ">\n", ">\n\n"] {
        assert_eq!(held(last), "well");
    }
}

/// A model that ends inside its thought has not given what was asked for.
#[test]
fn a_thought_goes_on_to_what_was_asked_for() {
    let schema = json!({"type": "json_schema", "json_schema": {"schema": {"const": {"a": 1}}}});
    let server = serve(chat_reply(ids("<think>\nwell")));
    let members = json!({"response_format": schema, "thinking_budget": 9, "max_tokens": 60});
    let choice = message(&server, members);
    assert_eq!(choice["message"]["content"], "{\"a\": 1}", "{choice}");
    assert_eq!(choice["finish_reason"], "stop");
    // Where nothing was asked for it may end.
    assert_eq!(message(&server, json!({}))["message"]["reasoning_content"], "well");
}

#[test]
fn one_call_is_one_call_however_its_tags_are_written() {
    for reply in [ids(&format!("{CALL}\n{CALL}")), spelled(&format!("{CALL}\n{CALL} and more"))] {
        let server = serve(chat_reply(reply));
        let members = json!({"tools": tools(), "parallel_tool_calls": false});
        let choice = message(&server, members.clone());
        assert_eq!(choice["message"]["tool_calls"].as_array().map(Vec::len), Some(1), "{choice}");
        assert_eq!(choice["message"]["content"], Value::Null);
        assert_eq!(choice["finish_reason"], "tool_calls");
        let mut body = ask(members);
        body["stream"] = true.into();
        let events = server.post(CHAT, &body).events();
        let calls = events
            .iter()
            .filter(|event| event["choices"][0]["delta"]["tool_calls"][0].get("id").is_some());
        assert_eq!(calls.count(), 1);
    }
}

#[test]
fn calls_that_are_required_may_be_several() {
    let server = serve(chat_reply(ids(&format!("{CALL}\n{CALL}\n{CALL}"))));
    let count = |members: Value| {
        let choice = message(&server, members);
        assert_eq!(choice["finish_reason"], "tool_calls");
        choice["message"]["tool_calls"].as_array().map_or(0, Vec::len)
    };
    let required = json!({"tools": tools(), "tool_choice": "required", "reasoning_effort": "none"});
    assert_eq!(count(required.clone()), 3);
    let mut one = required.clone();
    one["parallel_tool_calls"] = false.into();
    assert_eq!(count(one), 1);
    let mut named = required;
    named["tool_choice"] = json!({"type": "function", "function": {"name": "f"}});
    assert_eq!(count(named), 1);
}

/// Half a surrogate pair in a call's arguments: no reader could take it, so it is text in every protocol.
#[test]
fn calls_that_nobody_can_read_are_text() {
    let broken = CALL.replace("1}", "\"\\ud83d\"}");
    let server = serve(chat_reply(ids(&broken)));
    let choice = message(&server, json!({"tools": tools()}));
    assert_eq!(choice["message"]["content"], broken.as_str());
    assert_eq!(choice["finish_reason"], "stop");
    let anthropic = json!({
        "messages": [{"role": "user", "content": "Q"}], "max_tokens": 100, "temperature": 0,
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
    });
    let answer = server.ok("/v1/messages", anthropic);
    assert_eq!(answer["content"][0]["text"], broken.as_str());
}

#[test]
fn tokens_that_are_none_end_nothing() {
    let server = serve(Box::new(|_| None));
    let refused = server.refused(CHAT, ask(json!({"stop_token_ids": [5, 151_936]})));
    assert_eq!(refused, "stop_token_ids[1]: expected a token id below 151936, found 151936");
}

/// The answer without what differs from one to the next.
fn bare(mut answer: Value) -> Value {
    for name in ["id", "created", "timings"] {
        answer.as_object_mut().expect("an object").remove(name);
    }
    for choice in answer["choices"].as_array_mut().into_iter().flatten() {
        for call in choice["message"]["tool_calls"].as_array_mut().into_iter().flatten() {
            call.as_object_mut().expect("an object").remove("id");
        }
    }
    answer
}

/// Thoughts, calls, formats, stop texts, log-probabilities and choices, with the text's own drafts and without.
#[test]
fn drafts_change_no_answer_of_any_kind() {
    let call = CALL.replace("1}", "\"ab ab ab ab\"}");
    let said = format!("<think>\nso so so so so\n</think>\n\nab ab ab ab ab {call}\n{call}");
    let plain = serve(chat_reply(ids(&said)));
    let setup = Setup { speculate: true, ..Setup::default() };
    let drafting = serve_with(chat_reply(ids(&said)), setup);
    for members in [
        json!({"logprobs": true, "top_logprobs": 2}),
        json!({"stop": ["ab ab <"]}),
        json!({"thinking_budget": 4}),
        json!({"parallel_tool_calls": false}),
        json!({"response_format": {"type": "json_object"}, "max_tokens": 40}),
        json!({"frequency_penalty": 2, "max_tokens": 30}),
        json!({"n": 2, "seed": u64::MAX, "temperature": 1.5, "max_tokens": 16}),
    ] {
        let mut body = ask(members);
        body["tools"] = tools();
        let [expected, found] = [&plain, &drafting].map(|server| bare(server.ok(CHAT, &body)));
        assert_eq!(found, expected, "{body}");
    }
    assert!(drafting.metric("spec_decode_num_accepted_tokens_total") > 20.0);
}
