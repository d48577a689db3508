//! What the engine underneath does, as a client sees it: drafts, faults, dead ends.

mod common;

use std::time::{Duration, Instant};

use common::{Setup, chat_reply, ids, serve, serve_digest, serve_with};
use serde_json::{Value, json};
use text::Tokenizer;

#[test]
fn drafts_show_in_timings_and_metrics_and_nowhere_else() {
    let script = |context: &[u32]| Some(1000 + context.len() as u32 % 9);
    let tokenizer = Tokenizer::tiny();
    let plain = serve_with(Box::new(script), Setup { tokenizer, ..Setup::default() });
    let setup = Setup { tokenizer, speculate: true, ..Setup::default() };
    let drafting = serve_with(Box::new(script), setup);
    let body = json!({"prompt": "a", "max_tokens": 100, "temperature": 0, "logprobs": 2});
    let (expected, found) =
        (plain.ok("/v1/completions", &body), drafting.ok("/v1/completions", &body));
    assert_eq!(expected["choices"], found["choices"]);
    assert_eq!(expected["usage"], found["usage"]);
    assert_eq!(expected["timings"]["draft_n"], Value::Null, "nothing was drafted");
    let (drafted, accepted) = (&found["timings"]["draft_n"], &found["timings"]["draft_n_accepted"]);
    assert!(accepted.as_u64() > Some(50) && drafted.as_u64() >= accepted.as_u64(), "{found}");
    let metric = |name| json!(drafting.metric(name) as u64);
    assert_eq!(&metric("spec_decode_num_draft_tokens_total"), drafted);
    assert_eq!(&metric("spec_decode_num_accepted_tokens_total"), accepted);
}

#[test]
fn drafts_keep_to_a_schema() {
    let reply = r#"{"numbers": [1, 22, 3, 1, 22, 3, 1, 22, 3, 1, 22, 3, 1, 22, 3]}"#;
    let schema = json!({"type": "object", "properties": {"numbers": {
        "type": "array", "items": {"type": "integer"}, "maxItems": 11,
    }}, "required": ["numbers"], "additionalProperties": false});
    let body = json!({
        "messages": [{"role": "user", "content": "Count."}],
        "temperature": 0,
        "chat_template_kwargs": {"enable_thinking": false},
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
    });
    let answer = |speculate| {
        let setup = Setup { speculate, ..Setup::default() };
        let server = serve_with(chat_reply(ids(reply)), setup);
        server.ok("/v1/chat/completions", &body)
    };
    let (plain, drafted) = (answer(false), answer(true));
    let content = plain["choices"][0]["message"]["content"].as_str().expect("content");
    let value: Value = serde_json::from_str(content).expect("JSON");
    assert_eq!(value["numbers"].as_array().map(Vec::len), Some(11), "the schema cuts: {content}");
    assert_eq!(plain["choices"], drafted["choices"]);
    assert!(drafted["timings"]["draft_n_accepted"].as_u64() > Some(10), "{drafted}");
}

#[test]
fn an_engine_that_died_is_seen() {
    let script = |context: &[u32]| {
        assert!(context.len() < 40, "planted");
        Some(1000)
    };
    let server = serve(Box::new(script));
    assert_eq!(server.get("/health").status, 200);
    let body = json!({"prompt": "a", "max_tokens": 100});
    let cut = server.post("/v1/completions", &body);
    assert_eq!(cut.status, 500, "{}", cut.text());
    let message = "the engine stopped before the answer was finished";
    assert_eq!(cut.json()["error"]["message"], message);
    let deadline = Instant::now() + Duration::from_secs(20);
    while server.get("/health").status == 200 {
        assert!(Instant::now() < deadline, "the server does not notice");
        std::thread::sleep(Duration::from_millis(2));
    }
    let health = server.get("/health");
    assert_eq!(health.status, 503);
    assert_eq!(health.json()["error"]["message"], "the engine has died: planted");
    assert_eq!(server.post("/v1/completions", &body).status, 503);
}

#[test]
fn a_bias_that_bans_everything_is_refused() {
    let server = serve_digest(Setup::default());
    let bias: serde_json::Map<String, Value> =
        (0..8192).map(|id| (id.to_string(), json!(-100))).collect();
    let body = json!({"prompt": "a", "max_tokens": 3, "logit_bias": bias});
    assert!(server.refused("/v1/completions", body).starts_with("logit_bias: expected"));
    server.ok("/v1/completions", json!({"prompt": "a", "max_tokens": 3}));
}
