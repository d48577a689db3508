//! Known failures of other servers, as tests: values of fields, log-probabilities, usage, lengths, JSON.

mod common;

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::time::{Duration, Instant};

use common::{CONTEXT, Running, Setup, chat_reply, ids, reply, serve, serve_digest};
use engine::{Answer, Backend, BackendError, Batch, Input, Limits, Output, Scripted};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

/// All tokens equally likely.
fn blank() -> Running {
    serve(Box::new(|_| None))
}

fn text(answer: &Value) -> &str {
    answer["choices"][0]["text"].as_str().expect("text")
}

#[test]
fn sa02_sampling_values_without_meaning() {
    let server = serve(reply(ids(" red")));
    for field in [
        "\"temperature\":1e999",
        "\"temperature\":-1",
        "\"temperature\":NaN",
        "\"top_p\":1e999",
        "\"top_p\":-0.1",
        "\"top_p\":1.5",
        "\"presence_penalty\":1e999",
        "\"repetition_penalty\":0",
        "\"min_p\":-1",
        "\"temperature\":\"hot\"",
        "\"top_k\":-1",
        "\"top_k\":1.5",
        "\"n\":0",
        "\"n\":1000000",
        "\"seed\":0.5",
        "\"seed\":\"x\"",
        "\"logprobs\":99",
    ] {
        let body = format!("{{\"prompt\":\"Hello\",\"max_tokens\":4,{field}}}");
        let message = server.refused(COMPLETIONS, &body);
        let name = field.split('"').nth(1).expect("a name");
        assert!(message.contains(name) || field.contains("NaN"), "{field}: {message}");
    }
    let answer = server.ok(COMPLETIONS, json!({"prompt": "Hello", "temperature": 0}));
    assert_eq!(text(&answer), " red");
}

#[test]
fn sa03_logit_bias_keys() {
    let server = blank();
    for bias in [
        "{\"151936\":5}",
        "{\"999999\":-100}",
        "{\"-1\":5}",
        "{\"abc\":5}",
        "{\"4294967295\":1}",
        "{\"9707\":Infinity}",
        "{\"9707\":null}",
        "{\"9707\":101}",
        "[1]",
    ] {
        let body = format!("{{\"prompt\":\"x\",\"max_tokens\":1,\"logit_bias\":{bias}}}");
        server.refused(COMPLETIONS, body);
    }
    let forced = json!({"prompt": "x", "max_tokens": 3, "logit_bias": {"9707": 100}});
    assert_eq!(text(&server.ok(COMPLETIONS, forced)), "HelloHelloHello");
    let server = serve(Box::new(|_| Some(9707)));
    let banned = json!({
        "prompt": "x", "max_tokens": 3, "logit_bias": {"9707": -100}, "temperature": 0,
    });
    assert!(!text(&server.ok(COMPLETIONS, banned)).contains("Hello"));
}

#[test]
fn sa06_a_seed_reproduces_an_answer() {
    let server = blank();
    let body = |seed: Value| json!({"prompt": "x", "temperature": 1, "seed": seed, "max_tokens": 16, "top_k": 0, "top_p": 1});
    let alone = text(&server.ok(COMPLETIONS, body(json!(42)))).to_owned();
    assert_eq!(text(&server.ok(COMPLETIONS, body(json!(42)))), alone);
    std::thread::scope(|scope| {
        for seed in [json!(1), json!(2), json!(null), json!(42), json!(null), json!(43)] {
            scope.spawn(|| server.ok(COMPLETIONS, body(seed)));
        }
        assert_eq!(text(&server.ok(COMPLETIONS, body(json!(42)))), alone);
    });
    let mut streamed = body(json!(42));
    streamed["stream"] = true.into();
    let events = server.post(COMPLETIONS, streamed).events();
    let joined: String =
        events.iter().map(|event| event["choices"][0]["text"].as_str().expect("text")).collect();
    assert_eq!(joined, alone);
    assert_ne!(text(&server.ok(COMPLETIONS, body(json!(43)))), alone);
    let unseeded = || text(&server.ok(COMPLETIONS, body(Value::Null))).to_owned();
    assert_ne!(unseeded(), unseeded());
    for seed in [json!(0), json!(-1), json!(i64::MAX), json!(u64::MAX)] {
        server.ok(COMPLETIONS, body(seed));
    }
}

#[test]
fn several_choices_draw_with_different_seeds() {
    let server = blank();
    let body = json!({"prompt": "x", "n": 3, "temperature": 1, "seed": 5, "max_tokens": 8});
    let answer = server.ok(COMPLETIONS, &body);
    let texts: Vec<&str> = answer["choices"]
        .as_array()
        .expect("choices")
        .iter()
        .map(|choice| choice["text"].as_str().expect("text"))
        .collect();
    assert_eq!(texts.len(), 3);
    assert!(texts[0] != texts[1] && texts[1] != texts[2]);
    assert_eq!(answer["usage"]["prompt_tokens"], 1);
    assert_eq!(answer["usage"]["completion_tokens"], 24);
    let many = json!({"prompt": vec!["x"; 64], "n": 32, "max_tokens": 2});
    assert!(server.refused(COMPLETIONS, many).starts_with("n: expected at most 128 answers"));
    let two = json!({"prompt": ["x", "Hello world", [9707]], "n": 2, "max_tokens": 2});
    let answer = server.ok(COMPLETIONS, &two);
    assert_eq!(answer["choices"].as_array().map(Vec::len), Some(6));
    assert_eq!(answer["usage"]["prompt_tokens"], 4);
}

#[test]
fn lp01_bytes_of_parts_of_characters() {
    let server = serve(chat_reply(vec![172, 253, 246, 222]));
    let mut body = json!({
        "messages": [{"role": "user", "content": "Q"}], "logprobs": true, "top_logprobs": 2,
        "temperature": 0,
    });
    let answer = server.ok(CHAT, &body);
    let choice = &answer["choices"][0];
    assert_eq!(choice["message"]["content"], "😀");
    let whole = choice["logprobs"]["content"].as_array().expect("content").clone();
    body["stream"] = true.into();
    let events = server.post(CHAT, &body).events();
    let streamed: Vec<Value> = events
        .iter()
        .flat_map(|event| {
            event["choices"][0]["logprobs"]["content"].as_array().into_iter().flatten()
        })
        .cloned()
        .collect();
    assert_eq!(streamed, whole);
    let bytes: Vec<&Value> = whole.iter().map(|entry| &entry["bytes"]).collect();
    assert_eq!(bytes, [&json!([240]), &json!([159]), &json!([152]), &json!([128])]);
    for entry in &whole {
        let top = entry["top_logprobs"].as_array().expect("top");
        assert_eq!(top.len(), 2);
        assert_eq!(top[0]["bytes"], entry["bytes"]);
        assert!(top.iter().all(|entry| !entry["bytes"].as_array().expect("bytes").is_empty()));
    }
}

#[test]
fn lp03_echo_scores_the_prompt() {
    let server = blank();
    let body = json!({"prompt": "Hello world", "echo": true, "logprobs": 1, "max_tokens": 0});
    let answer = server.ok(COMPLETIONS, &body);
    let choice = &answer["choices"][0];
    assert_eq!(choice["text"], "Hello world");
    let logprobs = &choice["logprobs"];
    assert_eq!(logprobs["tokens"], json!(["Hello", " world"]));
    assert_eq!(logprobs["token_logprobs"][0], Value::Null);
    let second = logprobs["token_logprobs"][1].as_f64().expect("a number");
    assert!((second + 11.9312).abs() < 1e-3, "{second}");
    assert_eq!(logprobs["top_logprobs"][0], Value::Null);
    assert_eq!(logprobs["text_offset"], json!([0, 5]));
    assert_eq!(answer["usage"]["completion_tokens"], 0);
    for streamed in [false, true] {
        let body = json!({
            "prompt": "Hello world", "echo": true, "logprobs": 1, "max_tokens": 1, "stream": streamed,
        });
        let lengths = |choice: &Value| {
            ["tokens", "token_logprobs", "top_logprobs", "text_offset"]
                .map(|key| choice["logprobs"][key].as_array().map_or(0, Vec::len))
        };
        let response = server.post(COMPLETIONS, body);
        let counts = if streamed {
            let events = response.events();
            events.iter().map(|event| lengths(&event["choices"][0])).fold(
                [0; 4],
                |mut sum, counts| {
                    sum.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
                    sum
                },
            )
        } else {
            lengths(&response.json()["choices"][0])
        };
        assert_eq!(counts, [3; 4], "streamed: {streamed}");
    }
}

/// A drawn token has its place among the alternatives, also where it is none of the best.
#[test]
fn the_drawn_token_is_among_its_alternatives() {
    let server = blank();
    for top in 0..3 {
        let body = json!({
            "prompt": "Hello", "echo": true, "logprobs": top, "max_tokens": 8, "temperature": 1,
            "seed": 1, "top_k": 0, "top_p": 1,
        });
        let logprobs = server.ok(COMPLETIONS, body)["choices"][0]["logprobs"].clone();
        let list = |key: &str| logprobs[key].as_array().expect("a list").clone();
        let (tokens, own, alternatives) =
            (list("tokens"), list("token_logprobs"), list("top_logprobs"));
        assert_eq!((tokens.len(), &alternatives[0]), (9, &Value::Null));
        for i in 1..9 {
            let found = alternatives[i].as_object().expect("alternatives");
            assert_eq!(found[tokens[i].as_str().expect("a token")], own[i]);
            assert!(found.len() == top || found.len() == top + 1, "{found:?}");
        }
    }
}

/// OpenAI's API begins at 0: the best token alone.
#[test]
fn the_least_nucleus_is_the_best_token() {
    let server = serve(Box::new(|_| Some(9707)));
    for top_p in ["0", "0.0", "-0.0", "1e-40", "1e-30"] {
        let body = format!(
            "{{\"prompt\":\"x\",\"max_tokens\":4,\"temperature\":50,\"top_k\":0,\"top_p\":{top_p}}}"
        );
        assert_eq!(text(&server.ok(COMPLETIONS, body)), "HelloHelloHelloHello", "{top_p}");
    }
}

#[test]
fn ap01_usage_comes_last_and_only_if_asked_for() {
    let server = serve(Box::new(|_| Some(2518)));
    for (path, prompt) in [
        (COMPLETIONS, json!({"prompt": "Hello", "max_tokens": 3})),
        (CHAT, json!({"messages": [{"role": "user", "content": "Q"}], "max_tokens": 3})),
    ] {
        for options in
            [json!(null), json!({"include_usage": true}), json!({"include_usage": false})]
        {
            let mut body = prompt.clone();
            body["stream"] = true.into();
            body["stream_options"] = options.clone();
            let mut events = server.post(path, &body).events();
            if options["include_usage"] == true {
                let last = events.pop().expect("an event");
                assert_eq!(last["choices"], json!([]));
                assert!(last["usage"]["completion_tokens"].as_u64() > Some(0));
                assert!(events.iter().all(|event| event["usage"].is_null()));
            } else {
                assert!(events.iter().all(|event| event.get("usage").is_none()));
            }
            let filled = |event: &Value| !event["choices"].as_array().expect("choices").is_empty();
            assert!(events.iter().all(filled));
        }
    }
    let alone = json!({"prompt": "Hello", "stream_options": {"include_usage": true}});
    server.refused(COMPLETIONS, alone);
}

#[test]
fn ap02_lengths() {
    let server = serve(chat_reply(ids(&" red".repeat(40))));
    let chat = |extra: Value| {
        let mut body = json!({"messages": [{"role": "user", "content": "Q"}], "temperature": 0});
        body.as_object_mut()
            .expect("an object")
            .extend(extra.as_object().expect("an object").clone());
        body
    };
    for extra in [json!({"max_tokens": null}), json!({}), json!({"max_tokens": 1e30})] {
        let answer = server.ok(CHAT, chat(extra));
        assert_eq!(answer["usage"]["completion_tokens"], 40);
        assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    }
    let answer = server.ok(CHAT, chat(json!({"max_completion_tokens": 2})));
    assert_eq!(answer["usage"]["completion_tokens"], 2);
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    for extra in [json!({"max_tokens": 0}), json!({"max_tokens": -1}), json!({"max_tokens": 2.5})] {
        assert!(server.refused(CHAT, chat(extra)).contains("max_tokens"));
    }
    let none = server.ok(COMPLETIONS, json!({"prompt": "x", "max_tokens": 0}));
    assert_eq!(text(&none), "");
    let default = server.ok(COMPLETIONS, json!({"prompt": ids("<|im_start|>assistant\n")}));
    assert_eq!(default["usage"]["completion_tokens"], 16);
}

#[test]
fn ap04_a_prompt_that_does_not_fit() {
    let server = serve_digest(Setup::default());
    for tokens in [CONTEXT, CONTEXT + 1, 100_000] {
        for streamed in [false, true] {
            let body = json!({"prompt": vec![1; tokens], "stream": streamed});
            let message = server.refused(COMPLETIONS, body);
            assert!(message.contains("4096") && message.contains(&tokens.to_string()), "{message}");
        }
    }
    let body = json!({"prompt": vec![1; CONTEXT - 1], "max_tokens": 50, "temperature": 0});
    let answer = server.ok(COMPLETIONS, body);
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    assert_eq!(answer["usage"]["total_tokens"], CONTEXT);
}

#[test]
fn ap06_a_client_that_goes_away() {
    let setup = Setup { max_running: 1, ..Setup::default() };
    let server = serve_digest(setup);
    let started = server.metric("kv_cache_usage_perc");
    for moment in 0..100 {
        let streamed = moment % 2 == 0;
        let body = json!({"prompt": "x", "max_tokens": 4000, "stream": streamed}).to_string();
        let mut stream = server.connect();
        stream.write_all(&common::post(COMPLETIONS, "", body.as_bytes())).expect("write");
        match moment % 4 {
            0 => {
                let mut first = [0; 300];
                stream.read_exact(&mut first).expect("some events");
            }
            1 => std::thread::sleep(Duration::from_millis(5)),
            _ => {}
        }
    }
    let asked = Instant::now();
    let answer = server.ok(COMPLETIONS, json!({"prompt": "y", "max_tokens": 1}));
    assert_eq!(answer["usage"]["completion_tokens"], 1);
    assert!(asked.elapsed() < Duration::from_secs(2), "{:?}", asked.elapsed());
    // The last of the aborted ones may still be on its way.
    let deadline = Instant::now() + Duration::from_secs(5);
    while server.metric("kv_cache_usage_perc") > started
        || server.metric("num_requests_running") > 0.0
    {
        assert!(Instant::now() < deadline, "blocks are held");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn ap07_deep_nesting() {
    let server = serve(chat_reply(ids("hi")));
    let deep = |open: &str, inner: &str, close: &str, depth: usize| {
        format!("{}{inner}{}", open.repeat(depth), close.repeat(depth))
    };
    let message = "\"messages\":[{\"role\":\"user\",\"content\":\"Q\"}]";
    for body in [
        format!("{{\"x\":{}}}", deep("[", "", "]", 10_000)),
        deep("[", "", "]", 100_000),
        format!("{{{message},\"tools\":{}}}", deep("[", "", "]", 3000)),
        format!(
            "{{{message},\"tools\":[{{\"type\":\"function\",\"function\":{{\"name\":\"f\",\"parameters\":{}}}}}]}}",
            deep("{\"a\":", "1", "}", 1000)
        ),
        format!(
            "{{{message},\"response_format\":{{\"type\":\"json_schema\",\"json_schema\":{{\"schema\":{}}}}}}}",
            deep("{\"properties\":{\"a\":", "{}", "}}", 1000)
        ),
    ] {
        server.refused(CHAT, body);
    }
    assert_eq!(server.get("/health").status, 200);
}

#[test]
fn ap09_duplicate_keys_are_refused_at_every_depth() {
    let server = serve(chat_reply(ids("hi")));
    let message = "\"messages\":[{\"role\":\"user\",\"content\":\"Q\"}]";
    for body in [
        format!("{{\"model\":\"scripted\",\"model\":\"b\",{message}}}"),
        format!("{{\"temperature\":0,\"temperature\":2,{message}}}"),
        "{\"messages\":[{\"role\":\"system\",\"role\":\"user\",\"content\":\"a\"}]}".to_owned(),
        format!(
            "{{{message},\"tools\":[{{\"type\":\"function\",\"function\":{{\"name\":\"f\",\
             \"parameters\":{{\"type\":\"object\",\"type\":\"object\"}}}}}}]}}"
        ),
    ] {
        assert!(server.refused(CHAT, body).contains("duplicate key"));
    }
}

#[test]
fn tk08_text_that_is_not_unicode() {
    let server = blank();
    let raw = b"{\"model\":\"scripted\",\"prompt\":\"\xff\"}";
    let response = server.send(COMPLETIONS, "", raw);
    assert_eq!(response.status, 400);
    assert!(response.json()["error"]["message"].is_string());
    for escape in ["\\ud83d", "\\ude00\\ud83d"] {
        let message = server.refused(COMPLETIONS, format!("{{\"prompt\":\"{escape}\"}}"));
        assert!(message.contains("lone surrogate"), "{message}");
    }
    let paired = "{\"prompt\":\"ok \\ud83d\\ude00\"}";
    server.ok(COMPLETIONS, paired);
    assert_eq!(server.ok("/tokenize", paired)["tokens"], json!([562, 90_316]));
    assert_eq!(server.get("/health").status, 200);
}

/// Its logits are not finite where a sequence ends with token 13.
struct Unsound {
    inner: Scripted,
    answered: VecDeque<Output>,
}

impl Backend for Unsound {
    fn limits(&self) -> Limits {
        self.inner.limits()
    }

    fn submit(&mut self, batch: &Batch) -> Result<(), BackendError> {
        let mut output = Output::default();
        self.inner.forward(batch, &mut output)?;
        for (row, answer) in batch.rows.iter().zip(&mut output.answers) {
            if batch.tokens[row.token] == Input::Token(13) {
                *answer = Answer::NotFinite;
            }
        }
        self.answered.push_back(output);
        Ok(())
    }

    fn collect(&mut self, out: &mut Output) -> Result<(), BackendError> {
        *out = self.answered.pop_front().expect("submitted");
        Ok(())
    }
}

#[test]
fn qz03_logits_that_are_not_finite_end_one_request() {
    let wrap = |inner| Box::new(Unsound { inner, answered: VecDeque::new() }) as _;
    let setup = Setup { wrap, ..Setup::default() };
    let server = serve_digest(setup);
    let ask = |prompt: &[u32], stream: bool| {
        let body = json!({"prompt": prompt, "max_tokens": 30, "temperature": 0, "stream": stream});
        server.post(COMPLETIONS, body)
    };
    std::thread::scope(|scope| {
        let sound = scope.spawn(|| ask(&[1, 2, 3], false));
        let unsound = ask(&[1, 2, 13], false);
        assert_eq!(unsound.status, 500);
        let message = unsound.json()["error"]["message"].as_str().expect("a message").to_owned();
        assert!(message.contains("not finite"), "{message}");
        assert_eq!(sound.join().expect("an answer").status, 200);
    });
    // What has begun as a stream ends as one, with the error.
    let streamed = ask(&[1, 2, 13], true);
    let data = streamed.data();
    assert!(streamed.status == 500 || data.last().is_some_and(|last| last.contains("not finite")));
    assert_eq!(ask(&[4, 5], false).status, 200);
}

/// One huge word: refused within about a second, and others are served meanwhile.
#[test]
fn tk07_a_huge_word_holds_nobody_up() {
    let mut setup = Setup::default();
    setup.config.max_body = 8 << 20;
    let server = serve_digest(setup);
    std::thread::scope(|scope| {
        for piece in ["a", "_", " ", "你好"] {
            let server = &server;
            scope.spawn(move || {
                let body = json!({"prompt": piece.repeat(400_000)});
                assert!(server.refused(COMPLETIONS, body).contains("4096"));
            });
        }
        for _ in 0..10 {
            let asked = Instant::now();
            server.ok(COMPLETIONS, json!({"prompt": "x", "max_tokens": 1}));
            assert!(asked.elapsed() < Duration::from_secs(5), "{:?}", asked.elapsed());
        }
    });
}

#[test]
fn kv02_prompts_that_share_a_beginning() {
    let server = serve_digest(Setup::default());
    let common: Vec<u32> = (0..130).map(|i| 300 + 13 * i % 4000).collect();
    let ask = |server: &Running, length: usize, end: u32, n: usize| {
        let mut prompt = common[..length].to_vec();
        prompt.push(end);
        let body = json!({
            "prompt": prompt, "max_tokens": 4, "temperature": 0, "logprobs": 1, "n": n,
        });
        server.ok(COMPLETIONS, body)["choices"].clone()
    };
    std::thread::scope(|scope| {
        for part in 0..4 {
            let (server, ask) = (&server, &ask);
            scope.spawn(move || {
                for length in (1 + part..=130).step_by(4) {
                    let fresh = serve_digest(Setup::default());
                    for end in [1, 2] {
                        let alone = ask(&fresh, length, end, 1);
                        assert_eq!(ask(server, length, end, 1), alone);
                        let four = ask(server, length, end, 4);
                        for choice in four.as_array().expect("choices") {
                            assert_eq!(choice["text"], alone[0]["text"]);
                            assert_eq!(choice["logprobs"], alone[0]["logprobs"]);
                        }
                    }
                }
            });
        }
    });
}

#[test]
fn kv03_a_prompt_that_is_cached_whole() {
    let server = serve_digest(Setup::default());
    for length in 1..=130 {
        let prompt: Vec<u32> = (0..length).map(|i| 500 + 7 * i + length).collect();
        let body = json!({"prompt": prompt, "max_tokens": 3, "temperature": 0, "logprobs": 2});
        let first = server.ok(COMPLETIONS, &body);
        for _ in 0..2 {
            let again = server.ok(COMPLETIONS, &body);
            assert_eq!(again["choices"], first["choices"]);
            let cached = again["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
            assert!(cached < again["usage"]["prompt_tokens"].as_u64());
            assert_eq!(cached, Some(u64::from(length - 1) / 32 * 32));
        }
    }
}

#[test]
fn nu03_an_answer_does_not_depend_on_its_neighbours() {
    let server = serve_digest(Setup::default());
    let ask = |length: usize| {
        let prompt: Vec<usize> = (0..length).map(|i| 100 + i).collect();
        let body = json!({"prompt": prompt, "max_tokens": 20, "temperature": 0, "logprobs": 1});
        server.ok(COMPLETIONS, body)["choices"].clone()
    };
    let alone = ask(50);
    (0..5).for_each(|_| assert_eq!(ask(50), alone));
    std::thread::scope(|scope| {
        let others: Vec<_> = (1..8).map(|i| scope.spawn(move || ask(i * 37))).collect();
        assert_eq!(ask(50), alone);
        others.into_iter().for_each(|other| drop(other.join().expect("an answer")));
        let equal: Vec<_> = (0..8).map(|_| scope.spawn(|| ask(50))).collect();
        for answer in equal {
            assert_eq!(answer.join().expect("an answer"), alone);
        }
    });
}

#[test]
fn unknown_models_and_fields_are_named() {
    let server = serve(chat_reply(ids("hi")));
    let response = server.post(
        CHAT,
        json!({
            "model": "gpt-9", "messages": [{"role": "user", "content": "Q"}],
        }),
    );
    assert_eq!(response.status, 404);
    assert_eq!(response.json()["error"]["code"], "model_not_found");
    for field in ["functions", "audio", "web_search_options", "guided_regex", "min_tokens"] {
        let mut body = json!({"messages": [{"role": "user", "content": "Q"}]});
        body[field] = json!([1]);
        assert!(server.refused(CHAT, body).contains(field));
    }
    let harmless = json!({
        "messages": [{"role": "user", "content": "Q"}], "user": "u", "store": true,
        "metadata": {"a": "b"}, "functions": null,
    });
    server.ok(CHAT, harmless);
}
