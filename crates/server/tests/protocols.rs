//! The other protocols, structured answers, keys, origins, tokens, models and metrics.

mod common;

use std::time::{Duration, Instant};

use common::{Running, Setup, chat_reply, ids, reply, serve, serve_digest, serve_with};
use model::Variant;
use serde_json::{Value, json};

fn hello() -> Running {
    serve(chat_reply(ids("<think>\nwell\n</think>\n\nhi there")))
}

fn weather() -> Running {
    let call = "Let me look.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"city\": \"Rome\"}}\n</tool_call>";
    serve(chat_reply(ids(call)))
}

fn named(response: &common::Response) -> Vec<(String, Value)> {
    let events = response.text().trim_end().split("\n\n");
    let event = |event: &str| {
        let (name, data) = event.split_once('\n').expect("two lines");
        let data: Value =
            serde_json::from_str(data.strip_prefix("data: ").expect("data")).expect("JSON");
        let name = name.strip_prefix("event: ").expect("a name").to_owned();
        assert_eq!(data["type"], name.as_str());
        (name, data)
    };
    events.map(event).collect()
}

#[test]
fn messages_of_anthropic() {
    let server = hello();
    let body = json!({
        "model": "scripted", "max_tokens": 50, "system": [{"type": "text", "text": "S"}],
        "messages": [
            {"role": "user", "content": "Q"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "x", "signature": ""},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "ok"}]},
                {"type": "text", "text": "and?"},
            ]},
        ],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
    });
    let answer = server.ok("/v1/messages", &body);
    assert_eq!(
        answer["content"][0],
        json!({"type": "thinking", "thinking": "well", "signature": ""})
    );
    assert_eq!(answer["content"][1], json!({"type": "text", "text": "hi there"}));
    assert_eq!(answer["stop_reason"], "end_turn");
    let mut count = body.clone();
    count.as_object_mut().expect("an object").remove("max_tokens");
    let counted = server.ok("/v1/messages/count_tokens", count);
    assert_eq!(counted["input_tokens"], answer["usage"]["input_tokens"]);

    // Also what would not fit can be counted.
    let long = json!({"messages": [{"role": "user", "content": " a".repeat(5000)}]});
    let counted = server.ok("/v1/messages/count_tokens", long);
    assert!(counted["input_tokens"].as_u64() > Some(5000));

    let mut streamed = body.clone();
    streamed["stream"] = true.into();
    let events = named(&server.post("/v1/messages", streamed));
    let names: Vec<&str> = events.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!((names[0], names[names.len() - 1]), ("message_start", "message_stop"));
    let joined = |kind: &str, key: &str| -> String {
        let deltas = events.iter().filter(|(_, data)| data["delta"]["type"] == kind);
        deltas.map(|(_, data)| data["delta"][key].as_str().expect("text")).collect()
    };
    assert_eq!(joined("thinking_delta", "thinking"), "well");
    assert_eq!(joined("text_delta", "text"), "hi there");

    let refused =
        server.post("/v1/messages", json!({"messages": [{"role": "user", "content": "Q"}]}));
    assert_eq!(refused.status, 400);
    assert_eq!(refused.json()["error"]["type"], "invalid_request_error");
    let stopped = server.ok("/v1/messages", json!({
        "max_tokens": 50, "messages": [{"role": "user", "content": "Q"}], "stop_sequences": ["there"],
        "thinking": {"type": "enabled"},
    }));
    assert_eq!(stopped["stop_reason"], "stop_sequence");
    assert_eq!(stopped["stop_sequence"], "there");
}

#[test]
fn odds_and_ends_of_anthropic() {
    let server = serve(chat_reply(ids("{\"a\": 1}")));
    let answer = server.ok("/v1/messages", json!({
        "max_tokens": 50, "metadata": {"user_id": "u"}, "service_tier": "auto", "temperature": 0,
        "messages": [
            {"role": "user", "content": "Q"},
            {"role": "assistant", "content": [
                {"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "A"},
            ]},
            {"role": "user", "content": [
                {"type": "text", "text": "Q2", "cache_control": {"type": "ephemeral"}},
            ]},
        ],
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {
            "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
        }}},
    }));
    assert_eq!(answer["content"], json!([{"type": "text", "text": "{\"a\": 1}"}]));
    for (field, value) in [
        ("mcp_servers", json!([{"type": "url"}])),
        ("output_config", json!({"format": {"type": "grammar", "schema": {}}})),
        ("messages", json!([{"role": "user", "content": [{"type": "document"}]}])),
        ("system", json!([{"type": "image"}])),
    ] {
        let mut body = json!({"max_tokens": 5, "messages": [{"role": "user", "content": "Q"}]});
        body[field] = value;
        let response = server.post("/v1/messages", body);
        assert_eq!(response.status, 400, "{}", response.text());
        let message = response.json()["error"]["message"].as_str().expect("a message").to_owned();
        assert!(message.contains(field), "{message}");
    }
}

/// What clients send back of earlier answers, and fields that say nothing new.
#[test]
fn odds_and_ends_of_openai() {
    let server = serve(chat_reply(ids("hi")));
    let answer = server.post("/v1/chat/completions", json!({
        "messages": [
            {"role": "developer", "content": "S", "name": "n"},
            {"role": "user", "content": "Q", "name": "n"},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "audio": null,
             "refusal": null, "annotations": [], "function_call": null, "tool_calls": null},
            {"role": "user", "content": [{"type": "text", "text": "Q2"}]},
        ],
        "modalities": ["text"], "response_format": {"type": "text"}, "stop": null, "n": null,
        "logit_bias": {}, "parallel_tool_calls": true, "service_tier": "auto", "store": false,
        "tool_choice": "auto", "prediction": null, "top_logprobs": 0, "logprobs": false,
    }));
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(answer.json()["choices"][0]["message"]["content"], "hi");
    let ids: Vec<String> = (0..2)
        .map(|_| server.get("/v1/models").header("x-request-id").expect("an id").to_owned())
        .collect();
    assert_ne!(ids[0], ids[1]);
    for (field, value) in [
        ("messages", json!([])),
        ("messages", json!([{"role": "function", "content": "x", "name": "f"}])),
        ("messages", json!("Q")),
        ("prediction", json!({"type": "content", "content": "x"})),
        ("modalities", json!(["audio"])),
        ("top_logprobs", json!(5)),
        ("tools", json!([{"type": "web_search"}])),
        ("response_format", json!({"type": "json_schema"})),
    ] {
        let mut body = json!({"messages": [{"role": "user", "content": "Q"}]});
        body[field] = value;
        assert!(server.refused("/v1/chat/completions", body).contains(field));
    }
    let no_json = server.send("/v1/chat/completions", "", b"");
    assert_eq!(no_json.status, 400, "{}", no_json.text());
}

#[test]
fn tools_of_anthropic() {
    let server = weather();
    let mut body = json!({
        "max_tokens": 100, "messages": [{"role": "user", "content": "Q"}],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
    });
    let answer = server.ok("/v1/messages", &body);
    assert_eq!(answer["stop_reason"], "tool_use");
    assert_eq!(answer["content"][1]["type"], "tool_use");
    assert_eq!(answer["content"][1]["input"], json!({"city": "Rome"}));
    body["stream"] = true.into();
    let events = named(&server.post("/v1/messages", body));
    let json: String =
        events.iter().filter_map(|(_, data)| data["delta"]["partial_json"].as_str()).collect();
    assert_eq!(serde_json::from_str::<Value>(&json).expect("JSON"), json!({"city": "Rome"}));
}

#[test]
fn responses_of_openai() {
    let server = hello();
    let body = json!({
        "instructions": "S", "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Q"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "ok"},
        ],
        "reasoning": {"effort": "high"},
    });
    let answer = server.ok("/v1/responses", &body);
    assert_eq!(answer["status"], "completed");
    assert_eq!(answer["output"][0]["content"][0]["text"], "well");
    assert_eq!(answer["output"][1]["content"][0]["text"], "hi there");
    let mut streamed = body.clone();
    streamed["stream"] = true.into();
    let events = named(&server.post("/v1/responses", streamed));
    for (number, (_, data)) in events.iter().enumerate() {
        assert_eq!(data["sequence_number"], number);
    }
    let (name, last) = events.last().expect("an event");
    assert_eq!(name, "response.completed");
    assert_eq!(last["response"]["output"][1]["content"][0]["text"], "hi there");
    assert_eq!((&answer["temperature"], &answer["top_p"]), (&json!(0.6), &json!(0.95)));
    let cut = server.ok("/v1/responses", json!({"input": "Q", "max_output_tokens": 3}));
    assert_eq!(cut["status"], "incomplete");
    assert_eq!(cut["output"][0]["status"], "incomplete");
    let message =
        server.refused("/v1/responses", json!({"input": "Q", "previous_response_id": "x"}));
    assert!(message.contains("previous_response_id"));

    let server = weather();
    let answer = server.ok("/v1/responses", json!({
        "input": "Q", "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
    }));
    assert_eq!(answer["output"][1]["type"], "function_call");
    assert_eq!(answer["output"][1]["arguments"], "{\"city\": \"Rome\"}");
}

/// A model that would say anything: structure must come from the masks.
fn babbling() -> Running {
    serve(Box::new(|_| None))
}

#[test]
fn structured_answers_follow_their_schema() {
    let server = babbling();
    let schema = json!({
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "c": {"enum": ["red", "blue"]}},
        "required": ["n", "c"], "additionalProperties": false,
    });
    for seed in 0..3 {
        let body = json!({
            "messages": [{"role": "user", "content": "Q"}], "seed": seed, "temperature": 1,
            "max_tokens": 200, "chat_template_kwargs": {"enable_thinking": false},
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        });
        let answer = server.ok("/v1/chat/completions", body);
        assert_eq!(answer["choices"][0]["finish_reason"], "stop");
        let content = answer["choices"][0]["message"]["content"].as_str().expect("content");
        let value: Value = serde_json::from_str(content).expect("JSON");
        assert!(value["n"].as_u64().expect("a number") <= 99);
        assert!(["red", "blue"].contains(&value["c"].as_str().expect("a colour")));
    }
    let bad = json!({
        "messages": [{"role": "user", "content": "Q"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}},
    });
    assert!(
        server.refused("/v1/chat/completions", bad).contains("response_format.json_schema.schema")
    );
}

#[test]
fn masks_wait_for_the_end_of_a_thought() {
    let server = serve(chat_reply(ids("<think>\nwell, { this } is no JSON\n</think>\n\nanything")));
    let body = json!({
        "messages": [{"role": "user", "content": "Q"}], "temperature": 0, "max_tokens": 200,
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"const": {"a": 1}}}},
    });
    let answer = server.ok("/v1/chat/completions", body);
    let message = &answer["choices"][0]["message"];
    assert_eq!(message["reasoning_content"], "well, { this } is no JSON");
    assert_eq!(message["content"], "{\"a\": 1}");
}

#[test]
fn a_thought_ends_with_its_budget() {
    let server = serve(chat_reply(ids(&format!("<think>\n{}", "so ".repeat(500)))));
    let body = json!({
        "messages": [{"role": "user", "content": "Q"}], "temperature": 0, "max_tokens": 60,
        "thinking_budget": 10,
    });
    let answer = server.ok("/v1/chat/completions", body);
    let reasoning = answer["usage"]["completion_tokens_details"]["reasoning_tokens"].as_u64();
    assert!(reasoning <= Some(12), "{reasoning:?}");
    assert!(
        answer["choices"][0]["message"]["content"].as_str().is_some_and(|text| text.len() > 20)
    );
}

#[test]
fn calls_can_be_forced() {
    let server = babbling();
    let tools = json!([
        {"type": "function", "function": {"name": "f", "parameters": {
            "type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
            "additionalProperties": false,
        }}},
        {"type": "function", "function": {"name": "g", "parameters": {
            "type": "object", "properties": {}, "additionalProperties": false,
        }}},
    ]);
    for (choice, names) in [
        (json!("required"), vec!["f", "g"]),
        (json!({"type": "function", "function": {"name": "g"}}), vec!["g"]),
    ] {
        let body = json!({
            "messages": [{"role": "user", "content": "Q"}], "tools": tools, "tool_choice": choice,
            "temperature": 1, "max_tokens": 200, "reasoning_effort": "none",
        });
        let answer = server.ok("/v1/chat/completions", body);
        let call = &answer["choices"][0]["message"]["tool_calls"][0]["function"];
        assert!(names.contains(&call["name"].as_str().expect("a name")), "{answer}");
        assert_eq!(answer["choices"][0]["finish_reason"], "tool_calls");
    }
}

#[test]
fn switches_that_the_checkpoint_lacks_are_refused() {
    let ask = |variant, kwargs: Value| {
        let setup = Setup { variant, ..Setup::default() };
        let server = serve_with(chat_reply(ids("hi")), setup);
        let body =
            json!({"messages": [{"role": "user", "content": "Q"}], "chat_template_kwargs": kwargs});
        server.post("/v1/chat/completions", body).status
    };
    assert_eq!(ask(Variant::Thinking2507, json!({"enable_thinking": false})), 400);
    assert_eq!(ask(Variant::Thinking2507, json!({"enable_thinking": true})), 200);
    assert_eq!(ask(Variant::Instruct2507, json!({"enable_thinking": true})), 400);
    assert_eq!(ask(Variant::Instruct2507, json!({"enable_thinking": false})), 200);
    assert_eq!(ask(Variant::Base, json!({})), 400);
}

#[test]
fn thinking_2507_begins_inside_a_thought() {
    let setup = Setup { variant: Variant::Thinking2507, ..Setup::default() };
    let said = ids("well\n</think>\n\nhi");
    let script = Box::new(move |context: &[u32]| {
        // Behind <|im_start|>assistant\n<think>\n.
        let start = context.iter().rposition(|&id| id == common::IM_START).expect("a turn") + 5;
        Some(said.get(context.len() - start).copied().unwrap_or(common::IM_END))
    });
    let server = serve_with(script, setup);
    let body = json!({"messages": [{"role": "user", "content": "Q"}], "temperature": 0});
    let answer = server.ok("/v1/chat/completions", body);
    assert_eq!(answer["choices"][0]["message"]["reasoning_content"], "well");
    assert_eq!(answer["choices"][0]["message"]["content"], "hi");
}

#[test]
fn keys_are_asked_for() {
    let mut setup = Setup::default();
    setup.config.api_keys = vec!["first".into(), "second".into(), "dritter Schlüssel".into()];
    let server = serve_with(reply(ids(" red")), setup);
    let body = b"{\"prompt\":\"Hello\"}";
    let status = |header: &str| server.send("/v1/completions", header, body).status;
    assert_eq!(status(""), 401);
    assert_eq!(status("Authorization: Bearer wrong\r\n"), 401);
    assert_eq!(status("Authorization: Bearer firs\r\n"), 401);
    assert_eq!(status("Authorization: Bearer \r\n"), 401);
    assert_eq!(status("Authorization: Bearer first\r\n"), 200);
    assert_eq!(status("authorization: bearer second\r\n"), 200);
    assert_eq!(status("Authorization: Bearer dritter Schlüssel\r\n"), 200);
    assert_eq!(status("x-api-key: second\r\n"), 200);
    assert_eq!(status("x-api-key: secon\r\n"), 401);
    // Anthropic's clients send both headers where both are set, and proxies theirs.
    assert_eq!(status("Authorization: Bearer other\r\nx-api-key: second\r\n"), 200);
    assert_eq!(status("Authorization: Bearer first\r\nx-api-key: other\r\n"), 200);
    assert_eq!(status("Authorization: Basic other\r\nx-api-key: first\r\n"), 200);
    assert_eq!(status("Authorization: Bearer other\r\nx-api-key: other\r\n"), 401);
    for path in server::endpoints() {
        assert_eq!(server.send(path, "", b"{}").status, 401, "{path}");
        for key in ["Authorization: Bearer first\r\n", "x-api-key: first\r\n"] {
            // The body is read, and says nothing.
            assert_eq!(server.send(path, key, b"{}").status, 400, "{path} {key}");
        }
    }
    assert_eq!(server.get("/metrics").status, 401);
    assert_eq!(server.get("/health").status, 200);
    assert_eq!(server.get("/").status, 200);
}

#[test]
fn listening_beyond_this_machine_needs_a_key() {
    let config = |keys: &[&str], allow_open| {
        let mut config = Setup::default().config;
        config.address = ([0, 0, 0, 0], 0).into();
        config.api_keys = keys.iter().map(|key| (*key).to_owned()).collect();
        config.allow_open = allow_open;
        config
    };
    assert!(server::Server::bind(config(&[], false)).is_err());
    assert!(server::Server::bind(config(&["k"], false)).is_ok());
    assert!(server::Server::bind(config(&[], true)).is_ok());
}

#[test]
fn pages_of_other_origins_are_kept_out() {
    let mut setup = Setup::default();
    setup.config.cors_origins = vec!["https://friend.example".into()];
    let server = serve_with(reply(ids(" red")), setup);
    let ask = |origin: &str| {
        server.send("/v1/completions", &format!("Origin: {origin}\r\n"), b"{\"prompt\":\"Hello\"}")
    };
    for origin in [
        "http://localhost:3000",
        "http://127.0.0.1:8080",
        "http://[::1]:1",
        "https://friend.example",
    ] {
        let response = ask(origin);
        assert_eq!(response.status, 200, "{origin}");
        assert_eq!(response.header("access-control-allow-origin"), Some(origin));
    }
    for origin in [
        "https://evil.example",
        "null",
        "http://localhost.evil.example",
        "https://friend.example.evil",
    ] {
        assert_eq!(ask(origin).status, 403, "{origin}");
    }
    let preflight = |origin: &str| {
        server.raw(
            format!(
                "OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: x\r\nOrigin: {origin}\r\n\
                 Access-Control-Request-Method: POST\r\n\
                 Access-Control-Request-Headers: x-a\r\nConnection: close\r\n\r\n"
            )
            .as_bytes(),
        )
    };
    let allowed = preflight("https://friend.example");
    assert_eq!(allowed.status, 204);
    assert_eq!(allowed.header("access-control-allow-headers"), Some("x-a"));
    assert_eq!(preflight("https://evil.example").status, 403);
}

#[test]
fn small_endpoints() {
    let server = hello();
    let models = server.get("/v1/models").json();
    assert_eq!(models["data"][0]["id"], "scripted");
    assert_eq!(server.get("/v1/models/scripted").json()["id"], "scripted");
    assert_eq!(server.get("/v1/models/other").status, 404);
    let tokens = server.ok("/tokenize", json!({"prompt": "Hello world"}))["tokens"].clone();
    assert_eq!(tokens, json!([9707, 1879]));
    let spelt = json!({"prompt": "Hello world", "return_token_strs": true});
    assert_eq!(server.ok("/tokenize", spelt)["token_strs"], json!(["Hello", " world"]));
    assert_eq!(server.ok("/detokenize", json!({"tokens": tokens}))["prompt"], "Hello world");
    server.refused("/detokenize", json!({"tokens": [999_999]}));
    let api = server.get("/openapi.json").json();
    for path in server::endpoints() {
        assert!(api["paths"][path].is_object(), "{path}");
    }
    assert_eq!(server.get("/nowhere").status, 404);
    let wrong = server.get("/v1/completions");
    assert_eq!((wrong.status, wrong.header("allow")), (405, Some("POST")));
    let wrong = server.post("/", "");
    assert_eq!((wrong.status, wrong.header("allow")), (405, Some("GET,HEAD")));
    let page = server.get("/");
    assert!(
        page.header("content-security-policy").is_some_and(|p| p.contains("default-src 'none'"))
    );
    assert_eq!(server.get("/../Cargo.toml").status, 404);
}

#[test]
fn metrics_count() {
    let server = serve_digest(Setup::default());
    let prompt: Vec<u32> = (0..100).collect();
    for _ in 0..2 {
        server.ok("/v1/completions", json!({"prompt": prompt, "max_tokens": 5}));
    }
    assert_eq!(server.metric("prompt_tokens_total"), 200.0);
    assert_eq!(server.metric("generation_tokens_total"), 10.0);
    assert_eq!(server.metric("prefix_cache_hits_total"), 96.0);
    assert_eq!(server.metric("prefix_cache_queries_total"), 200.0);
    assert_eq!(server.metric("time_to_first_token_seconds_count"), 2.0);
    assert_eq!(server.metric("inter_token_latency_seconds_count"), 8.0);
    let page = server.get("/metrics");
    let length = "kipp_request_success_total{model_name=\"scripted\",finished_reason=\"length\"} 2";
    assert!(page.text().contains(length), "{}", page.text());
}

#[test]
fn an_answer_may_take_only_so_long() {
    let mut setup = Setup::default();
    setup.config.request_timeout = Duration::from_millis(50);
    let slow = Box::new(|_: &[u32]| {
        std::thread::sleep(Duration::from_millis(5));
        Some(9707)
    });
    let server = serve_with(slow, setup);
    let whole = server.post("/v1/completions", json!({"prompt": "x", "max_tokens": 4000}));
    assert_eq!(whole.status, 504);
    let streamed =
        server.post("/v1/completions", json!({"prompt": "x", "max_tokens": 4000, "stream": true}));
    assert_eq!(streamed.status, 200);
    let last = streamed.data().pop().expect("an event");
    assert!(last.contains("\"error\""), "{last}");
}

#[test]
fn a_full_server_says_so() {
    let setup = Setup { places: 2, ..Setup::default() };
    let server = serve_digest(setup);
    let many = server.refused("/v1/completions", json!({"prompt": "x", "n": 3}));
    assert!(many.starts_with("n: expected at most 2"), "{many}");
    // Of three prompts two had a place: they are cancelled, which takes the engine a step, and counted.
    server.refused("/v1/completions", json!({"prompt": ["x", "y", "z"], "max_tokens": 3000}));
    let metrics = server.get("/metrics");
    assert!(metrics.text().contains("finished_reason=\"abort\"} 2\n"), "{}", metrics.text());
    let two = || server.post("/v1/completions", json!({"prompt": "x", "n": 2})).status;
    let deadline = Instant::now() + Duration::from_secs(5);
    while two() != 200 {
        assert!(Instant::now() < deadline, "the places are not given back");
    }
}
