//! Attacks on the wire: framing, slow and silent peers, floods of connections, sizes, shutdown.

mod common;

use std::io::{Read, Write};
use std::net::Shutdown;
use std::time::{Duration, Instant};

use common::{Setup, ids, post, read_head, read_response, reply, serve, serve_digest, serve_with};
use serde_json::json;

const PATH: &str = "/v1/completions";

fn body() -> String {
    json!({"prompt": "Hello", "temperature": 0, "user": "u".repeat(2000)}).to_string()
}

#[test]
fn ht01_expect_continue() {
    let server = serve(reply(ids(" red")));
    let (mut stream, body) = (server.connect(), body());
    let head = format!(
        "POST {PATH} HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).expect("write");
    assert!(read_head(&mut stream).starts_with("HTTP/1.1 100"));
    stream.write_all(body.as_bytes()).expect("write");
    let response = read_response(&mut stream, false);
    assert_eq!(response.json()["choices"][0]["text"], " red");
}

#[test]
fn ht01_chunked_bodies() {
    let server = serve(reply(ids(" red")));
    let (mut stream, body) = (server.connect(), json!({"prompt": "Hello"}).to_string());
    let head = format!("POST {PATH} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n");
    stream.write_all(head.as_bytes()).expect("write");
    for byte in body.bytes() {
        stream.write_all(&[b'1', b'\r', b'\n', byte, b'\r', b'\n']).expect("write");
    }
    stream.write_all(b"0\r\n\r\n").expect("write");
    assert_eq!(read_response(&mut stream, false).json()["choices"][0]["text"], " red");
}

#[test]
fn ht01_head_keep_alive_and_pipelining() {
    let server = serve(reply(ids(" red")));
    let mut stream = server.connect();
    stream.write_all(b"HEAD /health HTTP/1.1\r\nHost: x\r\n\r\n").expect("write");
    let head = read_response(&mut stream, true);
    stream.write_all(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n").expect("write");
    let get = read_response(&mut stream, false);
    assert_eq!((head.status, head.header("content-length")), (200, get.header("content-length")));
    // An error does not end the connection.
    let bad = format!("POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n[]");
    stream.write_all(bad.as_bytes()).expect("write");
    assert_eq!(read_response(&mut stream, false).status, 400);
    let two = "GET /health HTTP/1.1\r\nHost: x\r\n\r\n".repeat(2);
    stream.write_all(two.as_bytes()).expect("write");
    assert_eq!(read_response(&mut stream, false).status, 200);
    assert_eq!(read_response(&mut stream, false).status, 200);
}

#[test]
fn ht01_two_framings_at_once() {
    let server = serve(reply(ids(" red")));
    let both = format!(
        "POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n\
         12\r\n{{\"prompt\":\"Hello\"}}\r\n0\r\n\r\nGET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    );
    let mut stream = server.connect();
    stream.write_all(both.as_bytes()).expect("write");
    let response = read_response(&mut stream, false);
    assert!(response.status == 400 || response.json()["choices"][0]["text"] == " red");
    assert_eq!(server.get("/health").status, 200);
}

#[test]
fn huge_heads_and_bodies() {
    let server = serve(reply(ids(" red")));
    let head = format!("GET /health HTTP/1.1\r\nHost: x\r\nX-A: {}\r\n\r\n", "a".repeat(200_000));
    let mut stream = server.connect();
    // The server may close before it has read everything.
    let _ = stream.write_all(head.as_bytes());
    let mut answer = String::new();
    let _ = stream.read_to_string(&mut answer);
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 431"), "{answer}");

    let large = json!({"prompt": "a".repeat(2 << 20)}).to_string();
    let mut stream = server.connect();
    let _ = stream.write_all(&post(PATH, "", large.as_bytes())[..500_000]);
    let length = format!("POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n");
    let response = server.raw(length.as_bytes());
    assert_eq!(response.status, 413);
    assert_eq!(server.get("/health").status, 200);
}

#[test]
fn ht03_slow_readers_hold_up_only_themselves() {
    let server = serve_digest(Setup { max_running: 32, ..Setup::default() });
    let ask = |tokens: usize| {
        let body = json!({"prompt": "x", "max_tokens": tokens, "stream": true, "temperature": 0});
        let mut stream = server.connect();
        stream.write_all(&post(PATH, "", body.to_string().as_bytes())).expect("write");
        stream
    };
    let alone = Instant::now();
    let whole = read_response(&mut ask(200), false);
    let alone = alone.elapsed();
    let slow: Vec<_> = (0..20).map(|_| ask(3000)).collect();
    std::thread::sleep(Duration::from_millis(300));
    let beside = Instant::now();
    let again = read_response(&mut ask(200), false);
    assert_eq!(texts(&again), texts(&whole));
    let limit = alone * 20 + Duration::from_secs(10);
    assert!(
        beside.elapsed() < limit,
        "{:?} beside slow readers, {alone:?} alone",
        beside.elapsed()
    );
    // A slow reader gets everything in order once it reads.
    let mut first = slow.into_iter().next().expect("a stream");
    let late = texts(&read_response(&mut first, false));
    assert!(late.starts_with(&texts(&whole)));
    assert_eq!(late, texts(&read_response(&mut ask(3000), false)));
}

fn texts(response: &common::Response) -> String {
    let events = response.events();
    events.iter().map(|event| event["choices"][0]["text"].as_str().expect("text")).collect()
}

#[test]
fn idle_connections_give_way() {
    let mut setup = Setup::default();
    setup.config.max_connections = 20;
    let server = serve_with(reply(ids(" red")), setup);
    let mut idle: Vec<_> = (0..200).map(|_| server.connect()).collect();
    for stream in &mut idle {
        // Half a head.
        let _ = stream.write_all(b"POST /v1/completions HT");
    }
    let started = Instant::now();
    let answer = server.ok(PATH, json!({"prompt": "Hello", "temperature": 0}));
    assert_eq!(answer["choices"][0]["text"], " red");
    assert!(started.elapsed() < Duration::from_secs(5));
}

#[test]
fn half_open_connections_end_quietly() {
    let server = serve(reply(ids(" red")));
    for sent in ["", "G", "POST /v1/completions HTTP/1.1\r\nContent-Length: 100\r\n\r\n{"] {
        let mut stream = server.connect();
        stream.write_all(sent.as_bytes()).expect("write");
        stream.shutdown(Shutdown::Write).expect("shutdown");
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest);
    }
    assert_eq!(server.get("/health").status, 200);
}

#[test]
fn a_server_that_ends_finishes_its_answers() {
    let slow = Box::new(|context: &[u32]| {
        std::thread::sleep(Duration::from_millis(2));
        Some(context.len() as u32 + 1000)
    });
    let server = serve(slow);
    let body = json!({"prompt": "x", "max_tokens": 300, "stream": true});
    let mut stream = server.connect();
    stream.write_all(&post(PATH, "", body.to_string().as_bytes())).expect("write");
    let head = read_head(&mut stream);
    assert!(head.starts_with("HTTP/1.1 200"));
    server.stop();
    std::thread::sleep(Duration::from_millis(50));
    assert!(std::net::TcpStream::connect(server.address).is_err(), "no new connections");
    let mut rest = String::new();
    stream.read_to_string(&mut rest).expect("the rest");
    assert!(rest.contains("[DONE]"));
}
