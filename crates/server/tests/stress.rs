//! Many clients at once, of all kinds: every answer that is finished equals the one that the request would
//! get alone, and nothing is left behind.

mod common;

use std::io::{Read, Write};
use std::time::{Duration, Instant};

use common::{Running, Setup, digest, post, read_response, serve_digest};
use serde_json::json;
use text::Tokenizer;

const CLIENTS: u32 = 64;

/// A sequence of numbers that looks random.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, limit: u32) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.0 >> 33) as u32 % limit
    }
}

/// The text that follows a prompt, computed without a server.
fn expected(prompt: &[u32], count: usize) -> String {
    let mut context = prompt.to_vec();
    (0..count).for_each(|_| context.push(digest(&context)));
    Tokenizer::tiny().decode(&context[prompt.len()..], true)
}

/// What clients ask for.
#[derive(Clone, Copy)]
struct Mix {
    /// Tokens of the beginnings that prompts share, at most.
    shared: u32,
    /// Tokens of an answer, at most.
    answer: u32,
}

/// One client's requests until `end`; how many were finished.
fn client(server: &Running, number: u32, end: Instant, mix: Mix) -> usize {
    let mut numbers = Numbers(u64::from(number) + 1);
    let mut finished = 0;
    while Instant::now() < end {
        let shared = numbers.below(4);
        let mut prompt: Vec<u32> =
            (0..numbers.below(mix.shared)).map(|i| shared * 500 + i).collect();
        prompt.extend((0..=numbers.below(5)).map(|_| numbers.below(8000)));
        let max_tokens = 1 + numbers.below(mix.answer) as usize;
        let streamed = numbers.below(2) == 0;
        let body = json!({
            "prompt": prompt, "max_tokens": max_tokens, "stream": streamed, "temperature": 0,
            "seed": numbers.below(9),
        });
        let mut stream = server.connect();
        let bytes = post("/v1/completions", "", body.to_string().as_bytes());
        stream.write_all(&bytes).expect("write");
        match numbers.below(8) {
            0 => continue,
            1 => {
                let mut some = vec![0; 1 + numbers.below(400) as usize];
                let _ = stream.read(&mut some);
                continue;
            }
            _ => {}
        }
        let response = read_response(&mut stream, false);
        assert_eq!(response.status, 200, "{}", response.text());
        let text: String = if streamed {
            let events = response.events();
            events.iter().map(|event| event["choices"][0]["text"].as_str().expect("text")).collect()
        } else {
            response.json()["choices"][0]["text"].as_str().expect("text").to_owned()
        };
        assert_eq!(text, expected(&prompt, max_tokens), "{prompt:?}");
        finished += 1;
    }
    finished
}

/// How often a request lost its KV blocks for a while, with so many blocks.
fn stress(blocks: usize, mix: Mix) -> f64 {
    let seconds = std::env::var("KIPP_STRESS_SECONDS").ok().and_then(|text| text.parse().ok());
    let end = Instant::now() + Duration::from_secs(seconds.unwrap_or(3));
    let server = serve_digest(Setup { blocks, max_running: 32, ..Setup::default() });
    let finished: usize = std::thread::scope(|scope| {
        let server = &server;
        let clients: Vec<_> =
            (0..CLIENTS).map(|n| scope.spawn(move || client(server, n, end, mix))).collect();
        clients.into_iter().map(|client| client.join().expect("a client")).sum()
    });
    assert!(finished > CLIENTS as usize, "only {finished} answers");
    let deadline = Instant::now() + Duration::from_secs(10);
    while server.metric("kv_cache_usage_perc") > 0.0 || server.metric("num_requests_running") > 0.0
    {
        assert!(Instant::now() < deadline, "blocks are held although nobody is served");
        std::thread::sleep(Duration::from_millis(20));
    }
    let preemptions = server.metric("num_preemptions_total");
    println!("{finished} answers with {blocks} KV blocks, {preemptions} preemptions");
    preemptions
}

/// Long prompts and short answers: what runs was admitted with the blocks that it needs.
const READING: Mix = Mix { shared: 300, answer: 60 };
/// Short prompts and long answers: requests are admitted and then outgrow the memory.
const WRITING: Mix = Mix { shared: 40, answer: 400 };

#[test]
fn many_clients() {
    stress(600, READING);
}

#[test]
fn many_clients_with_a_tenth_of_the_memory() {
    stress(60, READING);
}

#[test]
fn requests_that_lose_their_memory_say_the_same() {
    let preemptions = stress(60, WRITING);
    assert!(preemptions > 10.0, "only {preemptions} preemptions");
}
