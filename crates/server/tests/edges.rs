//! Neighbours of known failures: what stands beside a case that went wrong in another server.

mod common;

use std::io::{Read, Write};
use std::time::{Duration, Instant};

use common::{Running, Setup, chat_reply, ids, post, reply, serve, serve_digest, serve_with};
use serde_json::{Map, Value, json};
use text::Tokenizer;

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
const MESSAGES: &str = "/v1/messages";
const RESPONSES: &str = "/v1/responses";

fn user() -> Value {
    json!([{"role": "user", "content": "Q"}])
}

/// A chat request with further members.
fn chat(members: Value) -> Value {
    let mut body = json!({"messages": user(), "temperature": 0, "reasoning_effort": "none"});
    let object = body.as_object_mut().expect("an object");
    object.extend(members.as_object().expect("an object").clone());
    body
}

/// Adds what a chunk has to what the chunks before it had: texts and arrays grow, the rest is replaced.
fn grow(whole: &mut Value, part: &Value) {
    match (whole, part) {
        (Value::String(whole), Value::String(part)) => whole.push_str(part),
        (Value::Array(whole), Value::Array(part)) => whole.extend(part.clone()),
        (Value::Object(whole), Value::Object(part)) => {
            for (key, part) in part {
                grow(whole.entry(key.clone()).or_insert(Value::Null), part);
            }
        }
        (_, Value::Null) => {}
        (whole, part) => *whole = part.clone(),
    }
}

/// The choices of a stream, put together.
fn choices(server: &Running, path: &str, body: &Value) -> Vec<Value> {
    let mut body = body.clone();
    body["stream"] = true.into();
    let mut choices: Vec<Value> = Vec::new();
    for event in server.post(path, &body).events() {
        let part = &event["choices"][0];
        let index = part["index"].as_u64().expect("an index") as usize;
        choices.resize(choices.len().max(index + 1), json!({}));
        let ended = choices[index]["finish_reason"].is_string();
        assert!(!ended, "{index} goes on behind its end: {event}");
        grow(&mut choices[index], part);
    }
    choices
}

#[test]
fn a_stream_adds_up_to_the_answer_that_comes_whole() {
    let tokenizer = Tokenizer::tiny();
    let blank = serve_with(Box::new(|_| None), Setup { tokenizer, ..Setup::default() });
    let digest = serve_digest(Setup::default());
    let sampled = json!({"prompt": "x", "max_tokens": 24, "temperature": 1, "seed": 3, "top_k": 0});
    let plain = json!({"prompt": "x", "max_tokens": 24, "temperature": 0});
    for (server, body) in [(&blank, &sampled), (&digest, &plain)] {
        let full = server.ok(COMPLETIONS, body)["choices"][0]["text"].clone();
        let full: Vec<char> = full.as_str().expect("text").chars().collect();
        // A text that comes in the middle, and one whose beginning comes and whose end does not.
        let middle: String = full[full.len() / 2..full.len() / 2 + 3].iter().collect();
        let never: String =
            full[full.len() / 3..full.len() / 3 + 4].iter().chain(&['\0']).collect();
        for members in [
            json!({}),
            json!({"n": 3}),
            json!({"logprobs": 2}),
            json!({"logprobs": 0, "echo": true}),
            json!({"n": 2, "echo": true, "logprobs": 1, "stop": [middle, never]}),
            json!({"stop": [never, middle], "logprobs": 3}),
            json!({"stop": never}),
            json!({"max_tokens": 0, "echo": true, "n": 2}),
            json!({"max_tokens": 1, "logprobs": 1}),
            json!({"prompt": ["x", "y z", [7, 8]], "n": 2, "logprobs": 1, "stop": middle}),
        ] {
            let mut body = body.clone();
            let object = body.as_object_mut().expect("an object");
            object.extend(members.as_object().expect("an object").clone());
            let whole = server.ok(COMPLETIONS, &body);
            let streamed = choices(server, COMPLETIONS, &body);
            assert_eq!(json!(streamed), whole["choices"], "{members}");
            for choice in &streamed {
                let logprobs = &choice["logprobs"];
                let lengths = ["tokens", "token_logprobs", "top_logprobs", "text_offset"]
                    .map(|key| logprobs[key].as_array().map(Vec::len));
                assert!(lengths.iter().all(|length| *length == lengths[0]), "{logprobs}");
                assert_eq!(lengths[0].is_some(), !body["logprobs"].is_null());
            }
        }
    }
}

#[test]
fn parallel_calls_and_choices_are_told_apart_in_a_stream() {
    let call = |name: &str, n: u32| {
        format!(
            "<tool_call>\n{{\"name\": \"{name}\", \"arguments\": {{\"n\": {n}}}}}\n</tool_call>"
        )
    };
    let said = format!("Both. {}\n{}\n{}", call("f", 1), call("g", 2), call("f", 3));
    let server = serve(chat_reply(ids(&said)));
    let tools =
        json!(["f", "g"].map(|name| json!({"type": "function", "function": {"name": name}})));
    let body = chat(json!({"tools": tools, "n": 2, "stream": true, "logprobs": true}));
    let mut calls: Vec<Vec<(String, String)>> = vec![Vec::new(); 2];
    for event in server.post(CHAT, &body).events() {
        let choice = &event["choices"][0];
        let calls = &mut calls[choice["index"].as_u64().expect("an index") as usize];
        for delta in choice["delta"]["tool_calls"].as_array().into_iter().flatten() {
            let index = delta["index"].as_u64().expect("an index") as usize;
            if let Some(id) = delta["id"].as_str() {
                assert_eq!(calls.len(), index, "calls begin in order");
                calls.push((id.to_owned(), String::new()));
            }
            calls[index].1 += delta["function"]["arguments"].as_str().expect("arguments");
        }
    }
    for calls in &calls {
        let arguments: Vec<&str> = calls.iter().map(|call| call.1.as_str()).collect();
        assert_eq!(arguments, ["{\"n\": 1}", "{\"n\": 2}", "{\"n\": 3}"]);
    }
    let mut ids: Vec<&String> = calls.iter().flatten().map(|call| &call.0).collect();
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), 6, "no id twice");
    // One at a time, if that is asked for.
    let one = server.ok(CHAT, chat(json!({"tools": tools, "parallel_tool_calls": false})));
    assert_eq!(one["choices"][0]["message"]["tool_calls"].as_array().map(Vec::len), Some(1));
}

#[test]
fn a_schema_leaves_room_for_calls() {
    let format = json!({"type": "json_schema", "json_schema": {"schema": {
        "type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"],
        "additionalProperties": false,
    }}});
    let tools = json!([{"type": "function", "function": {"name": "f", "parameters": {
        "type": "object", "not": {"required": ["x"]},
    }}}]);
    let calls = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call>";
    let body = chat(json!({"tools": tools, "response_format": format}));
    let answer = |said: &str, body: &Value| {
        serve(chat_reply(ids(said))).ok(CHAT, body)["choices"][0].clone()
    };
    let called = answer(&format!("{calls}\n{calls}"), &body);
    assert_eq!(called["finish_reason"], "tool_calls", "{called}");
    assert_eq!(called["message"]["tool_calls"].as_array().map(Vec::len), Some(2));
    let said = answer("{\"n\": 7}", &body);
    assert_eq!(said["message"]["content"], "{\"n\": 7}");
    assert_eq!(said["finish_reason"], "stop");
    // Without a choice, the format alone holds.
    let mut none = body.clone();
    none["tool_choice"] = "none".into();
    none["max_tokens"] = 20.into();
    assert!(answer(calls, &none)["message"].get("tool_calls").is_none());
}

/// Schemas of arguments as programs write them: parts that are referred to, and no word of an object.
#[test]
fn forced_calls_follow_any_schema_of_an_object() {
    let city = json!({
        "$defs": {"City": {"enum": ["Rome", "Zürich"]}, "Stop": {
            "type": "object", "properties": {"city": {"$ref": "#/$defs/City"}}, "required": ["city"],
            "additionalProperties": false,
        }},
        "type": "object", "properties": {"stop": {"$ref": "#/$defs/Stop"}}, "required": ["stop"],
        "additionalProperties": false,
    });
    let tree = json!({
        "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["next"],
        "additionalProperties": false,
    });
    let open = json!({"properties": {"n": {"type": "integer"}}, "additionalProperties": false});
    let server = serve(Box::new(|_| None));
    for (name, parameters) in [
        ("trip", city.clone()),
        ("tree", tree),
        ("open", open),
        ("null", json!({"type": ["object", "null"], "maxProperties": 0})),
        ("quo\"te", json!({"anyOf": [{"type": "object", "maxProperties": 0}, {"type": "array"}]})),
    ] {
        let tool = |name: &str, parameters: &Value| json!({"type": "function", "function": {"name": name, "parameters": parameters}});
        let named = json!({"type": "function", "function": {"name": name}});
        for choice in [json!("required"), named] {
            for seed in 0..4 {
                let tools = [tool(name, &parameters), tool(name, &parameters)];
                let answer = server.ok(CHAT, chat(json!({
                    "tools": tools, "tool_choice": choice, "max_tokens": 400, "temperature": 1, "seed": seed,
                    "parallel_tool_calls": false,
                })));
                let choice = &answer["choices"][0];
                assert_eq!(choice["finish_reason"], "tool_calls", "{parameters}: {choice}");
                let function = &choice["message"]["tool_calls"][0]["function"];
                assert_eq!(function["name"], name);
                let arguments = function["arguments"].as_str().expect("a text");
                let arguments: Value = serde_json::from_str(arguments).expect("JSON");
                assert!(arguments.is_object(), "{arguments}");
                if parameters == city {
                    let city = arguments["stop"]["city"].as_str();
                    assert!(city == Some("Rome") || city == Some("Zürich"), "{arguments}");
                }
            }
        }
    }
}

#[test]
fn schemas_that_cannot_be_followed_are_the_clients_fault() {
    let server = serve(chat_reply(ids("hi")));
    for schema in [
        json!({"$ref": "#"}),
        json!({"allOf": [{"$ref": "#"}]}),
        json!({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}),
        json!({"enum": []}),
        json!({"type": "string", "pattern": "("}),
        json!({"type": "integer", "minimum": 5, "maximum": 3}),
        json!({"$ref": "http://127.0.0.1:1/x.json"}),
        json!({"not": {}}),
        json!({"type": "string", "format": "nonsense"}),
        json!({"type": "array", "uniqueItems": true}),
        json!({"type": "string", "pattern": "^(?=a)b"}),
        json!({"type": "integer", "multipleOf": 1_000_003}),
        json!({"anyOf": [{"type": "string"}, {"type": "number", "multipleOf": 0.982_451_653}]}),
        json!(false),
        json!([]),
        json!("x"),
        json!(5),
    ] {
        let format = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}});
        let message = server.refused(CHAT, chat(json!({"response_format": format})));
        assert!(message.starts_with("response_format.json_schema.schema: expected"), "{message}");
        let internals =
            ["<state>", "Parser", "failed to compile", "\n", "panic", "start:", "x-guidance"];
        assert!(!internals.iter().any(|word| message.contains(word)), "{message}");
    }
    // A field of that name is no rule.
    let named = json!({"type": "object", "properties": {"multipleOf": {"const": 1_000_003}}});
    let format = json!({"type": "json_schema", "json_schema": {"schema": named}});
    server.ok(CHAT, chat(json!({"response_format": format, "max_tokens": 4})));
    let message = server.refused(
        CHAT,
        chat(json!({"response_format": {"type": "json_schema", "json_schema": {"schema": {
            "type": "string", "pattern": "(",
        }}}})),
    );
    assert!(message.contains("unclosed group"), "{message}");
}

#[test]
fn a_token_has_one_spelling_in_a_bias() {
    let server = serve(Box::new(|_| None));
    for key in ["005", "+5", " 5", "5.0", "5e0", ""] {
        let bias: Map<String, Value> = [(key.to_owned(), json!(1))].into_iter().collect();
        let message = server.refused(COMPLETIONS, json!({"prompt": "x", "logit_bias": bias}));
        assert!(message.starts_with("logit_bias: expected token ids"), "{message}");
    }
}

#[test]
fn refusals_name_the_element() {
    let server = serve(reply(ids(" red")));
    for (path, body, expected) in [
        (COMPLETIONS, json!({"prompt": [1, 2.5]}), "prompt[1]: expected a token id, found 2.5"),
        (
            COMPLETIONS,
            json!({"prompt": [1, "a"]}),
            "prompt[1]: expected a token id, found a string",
        ),
        (
            COMPLETIONS,
            json!({"prompt": ["a", [-1]]}),
            "prompt[1][0]: expected a token id, found -1",
        ),
        (
            COMPLETIONS,
            json!({"prompt": {}}),
            "prompt: expected a text, token ids, or a list of either",
        ),
        (
            COMPLETIONS,
            json!({"prompt": "x", "stop": {}}),
            "stop: expected a text or an array of texts",
        ),
        ("/detokenize", json!({"tokens": [1, null]}), "tokens[1]: expected a token id, found null"),
        (
            CHAT,
            json!({"messages": user(), "tools": [{"function": {"name": "f"}}]}),
            "tools[0].type: expected \"function\", found nothing",
        ),
        (
            CHAT,
            json!({"messages": user(), "tools": [{"type": "custom"}]}),
            "tools[0].type: expected \"function\", found \"custom\"",
        ),
    ] {
        let message = server.refused(path, body);
        assert!(message.starts_with(expected), "{message}");
    }
}

/// What would be lost is refused; what means nothing to the answer is not.
#[test]
fn nothing_that_was_said_is_lost() {
    let server = serve(chat_reply(ids("hi")));
    let body = |message: Value| json!({"messages": [{"role": "user", "content": "Q"}, message]});
    for (member, value) in [
        ("function_call", json!({"name": "f", "arguments": "{}"})),
        ("audio", json!({"id": "a"})),
        ("prefix", json!(true)),
        ("partial", json!(true)),
    ] {
        let mut message = json!({"role": "assistant", "content": "a"});
        message[member] = value;
        let refusal = server.refused(CHAT, body(message));
        assert!(refusal.starts_with(&format!("messages[1].{member}: expected")), "{refusal}");
    }
    // As the clients' own libraries send an answer back.
    server.ok(CHAT, body(json!({
        "role": "assistant", "content": "a", "refusal": null, "audio": null, "function_call": null,
        "annotations": [], "tool_calls": null, "reasoning_content": null, "name": "n",
    })));
}

#[test]
fn anthropic_calls_enter_the_prompt_as_the_model_wrote_them() {
    let server = serve(chat_reply(ids("hi")));
    let tokens = |input: &str| {
        let body = format!(
            r#"{{"messages":[{{"role":"user","content":"Q"}},
            {{"role":"assistant","content":[{{"type":"tool_use","id":"t","name":"f","input":{input}}}]}},
            {{"role":"user","content":[{{"type":"tool_result","tool_use_id":"t","content":"ok"}}]}}]}}"#
        );
        server.ok("/v1/messages/count_tokens", body)["input_tokens"].clone()
    };
    let written = tokens(r#"{"city": "Z\u00fcrich", "days": [1, 2]}"#);
    assert_eq!(tokens(r#"{"city":"Zürich","days":[1,2]}"#), written);
    assert_eq!(tokens("{\n  \"city\" : \"Zürich\",\n  \"days\" : [\n 1,\n 2 ]\n}"), written);
    let unnamed = json!({"max_tokens": 3, "messages": [
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "input": {}}]},
    ]});
    let message = server.refused(MESSAGES, unnamed);
    assert!(message.starts_with("messages[1].content[0].name: expected a value"), "{message}");
}

#[test]
fn an_answer_that_a_client_of_anthropic_began_goes_on() {
    // Says "went on" behind whatever there is.
    let server = serve(Box::new(|context: &[u32]| {
        let said = ids(" went on");
        let started = context.iter().rposition(|&id| id == said[0]);
        match started {
            None => Some(said[0]),
            Some(at) => Some(said.get(context.len() - at).copied().unwrap_or(common::IM_END)),
        }
    }));
    let body = |content: Value| {
        json!({"max_tokens": 20, "temperature": 0, "messages": [
            {"role": "user", "content": "Q"}, {"role": "assistant", "content": content},
        ]})
    };
    for content in [json!("The story"), json!([{"type": "text", "text": "The story"}])] {
        let answer = server.ok(MESSAGES, body(content));
        assert_eq!(answer["content"], json!([{"type": "text", "text": " went on"}]));
        // The turn is open: behind the text comes neither its end nor another beginning.
        let spelled = ids(
            "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nThe story",
        );
        assert_eq!(answer["usage"]["input_tokens"], spelled.len());
    }
}

/// Clients that leave are counted, with the tokens that were generated for them.
#[test]
fn who_leaves_early_is_counted() {
    let server = serve_digest(Setup { max_running: 1, ..Setup::default() });
    let ask = |stream: bool| {
        let body = json!({"prompt": "x", "max_tokens": 4000, "stream": stream});
        let mut client = server.connect();
        client.write_all(&post(COMPLETIONS, "", body.to_string().as_bytes())).expect("write");
        client
    };
    let mut reading = ask(true);
    reading.read_exact(&mut [0; 2000]).expect("some events");
    let waiting = ask(false);
    let deadline = Instant::now() + Duration::from_secs(10);
    while server.metric("num_requests_waiting") < 1.0 {
        assert!(Instant::now() < deadline, "the second request does not wait");
        std::thread::sleep(Duration::from_millis(5));
    }
    drop((reading, waiting));
    let aborted = "kipp_request_success_total{model_name=\"scripted\",finished_reason=\"abort\"} 2";
    while !server.get("/metrics").text().contains(aborted) {
        assert!(Instant::now() < deadline, "{}", server.get("/metrics").text());
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(server.metric("generation_tokens_total") > 5.0);
    // One prompt was read, the other never was.
    assert_eq!(server.metric("prompt_tokens_total"), 1.0);
}

/// What stands inside a message is refused as what stands beside it is, and what clients send back of earlier
/// answers is taken.
#[test]
fn members_inside_messages_are_not_dropped() {
    let server = serve(chat_reply(ids("hi")));
    let messages = |block: serde_json::Value, member: &str| {
        let mut block = block;
        block[member] = true.into();
        let role = if block["type"] == "tool_use" { "assistant" } else { "user" };
        json!({"max_tokens": 5, "messages": [
            {"role": role, "content": [block]}, {"role": "user", "content": "Q"},
        ]})
    };
    let text = json!({"type": "text", "text": "a"});
    let used = json!({"type": "tool_use", "id": "t", "name": "f", "input": {}});
    let result = json!({"type": "tool_result", "tool_use_id": "t", "content": "c"});
    server.ok(MESSAGES, messages(text.clone(), "cache_control"));
    server.ok(MESSAGES, messages(used.clone(), "cache_control"));
    server.ok(MESSAGES, messages(result.clone(), "is_error"));
    for block in [text, used, result] {
        let refusal = server.refused(MESSAGES, messages(block, "foo"));
        assert!(refusal.starts_with("messages[0].content[0].foo: "), "{refusal}");
    }
    let refusal = server.refused(MESSAGES, messages(json!({"type": "text"}), "cache_control"));
    assert!(refusal.starts_with("messages[0].content[0].text: expected"), "{refusal}");

    let answer = server.ok(RESPONSES, json!({"input": "Q"}));
    let mut input = answer["output"].as_array().expect("items").clone();
    input.push(json!({"role": "user", "content": [{"type": "input_text", "text": "Q"}]}));
    server.ok(RESPONSES, json!({"input": input}));
    let last = input.len() - 1;
    input[last]["foo"] = 1.into();
    let refusal = server.refused(RESPONSES, json!({"input": input}));
    assert!(refusal.starts_with(&format!("input[{last}].foo: ")), "{refusal}");
    let refusal = server.refused(
        RESPONSES,
        json!({"input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Q", "foo": 1}]},
        ]}),
    );
    assert!(refusal.starts_with("input[0].content[0].foo: "), "{refusal}");
}

#[test]
fn what_responses_cannot_give_is_refused() {
    let server = serve(chat_reply(ids("hi there")));
    server.ok(RESPONSES, json!({"input": "Q", "include": ["reasoning.encrypted_content"]}));
    for (field, value) in [
        ("include[0]", json!(["message.output_text.logprobs"])),
        ("max_tokens", json!(0)),
        ("max_output_tokens", json!(0)),
    ] {
        let mut body = json!({"input": "Q"});
        body[field.trim_end_matches("[0]")] = value;
        let refusal = server.refused(RESPONSES, body);
        assert!(refusal.starts_with(&format!("{field}: expected")), "{refusal}");
    }
    let cut = server.ok(RESPONSES, json!({"input": "Q", "max_tokens": 1}));
    assert_eq!(cut["max_output_tokens"], 1);
    // Words are what they say, however they are written.
    server.ok(RESPONSES, r#"{"input": "Q", "tool_choice": "\u0061uto"}"#);
    let chat = r#"{"messages": [{"role": "user", "content": "Q"}], "modalities": ["\u0074ext"]}"#;
    server.ok(CHAT, chat);
}

/// Every answer keeps its own stop texts and tokens.
#[test]
fn stops_are_small() {
    let server = serve(reply(ids(" red")));
    let body = |field: &str, value: serde_json::Value| {
        let mut body = json!({"prompt": "Hello"});
        body[field] = value;
        body
    };
    server.ok(COMPLETIONS, body("stop", json!("a".repeat(4096))));
    server.ok(COMPLETIONS, body("stop_token_ids", json!(vec![1; 1024])));
    let refusal = server.refused(COMPLETIONS, body("stop", json!(["a", "a".repeat(4097)])));
    assert_eq!(refusal, "stop[1]: expected a text of at most 4096 bytes, found 4097 bytes");
    let refusal = server.refused(COMPLETIONS, body("stop_token_ids", json!(vec![1; 1025])));
    assert!(refusal.starts_with("stop_token_ids: expected at most 1024"), "{refusal}");
}

/// A format is of the whole answer, of which a part would already be there.
#[test]
fn a_begun_answer_is_not_held_to_a_format() {
    let server = serve(chat_reply(ids("{}")));
    let begun = json!([{"role": "user", "content": "Q"}, {"role": "assistant", "content": "{"}]);
    let refusal = server.refused(
        CHAT,
        json!({
            "messages": begun, "continue_final_message": true,
            "response_format": {"type": "json_object"},
        }),
    );
    assert!(refusal.starts_with("response_format: expected"), "{refusal}");
    let refusal = server.refused(
        MESSAGES,
        json!({
            "max_tokens": 5, "messages": begun,
            "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
        }),
    );
    assert!(refusal.starts_with("output_config.format.schema: expected"), "{refusal}");
}

#[test]
fn refusals_are_short_and_say_what_was_meant() {
    let server = serve(reply(ids(" red")));
    let response = server.post(COMPLETIONS, json!({"prompt": "x", "a".repeat(100_000): 1}));
    assert_eq!(response.status, 400);
    assert!(response.body.len() < 5_000, "{} bytes", response.body.len());
    let refusal = server.refused("/tokenize", json!({"text": "hi"}));
    assert_eq!(refusal, "text: this field is not supported here");
}

/// Offsets are of the text as it is shown, without special tokens.
#[test]
fn hidden_tokens_take_no_room() {
    let server = serve(reply(ids("<|endoftext|> red")));
    let answer = server.ok(
        COMPLETIONS,
        json!({
            "prompt": "Hello", "max_tokens": 2, "ignore_eos": true, "logprobs": 0, "temperature": 0,
        }),
    );
    assert_eq!(answer["choices"][0]["text"], " red");
    assert_eq!(answer["choices"][0]["logprobs"]["text_offset"], json!([0, 0]));
}

/// Some schemas turn out to be too large only behind the first token.
#[test]
fn a_format_that_fails_late_is_named() {
    let server = serve(Box::new(|_| None));
    let properties: Map<String, Value> =
        (0..5000).map(|i| (format!("p{i}"), json!({"type": "integer"}))).collect();
    let response = server.post(CHAT, json!({
        "messages": [{"role": "user", "content": "Q"}], "enable_thinking": false,
        "max_tokens": 20, "seed": 0,
        // An empty object is the one answer that is over before the schema is.
        "logit_bias": {ids("{}")[0].to_string(): -100},
        "response_format": {"type": "json_schema", "json_schema": {
            "schema": {"type": "object", "properties": properties, "additionalProperties": false},
        }},
    }));
    assert_eq!(response.status, 400, "{}", response.text());
    assert_eq!(response.json()["error"]["param"], "response_format.json_schema.schema");
}
