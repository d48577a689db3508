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
fn one_host_is_named() {
    let server = serve(reply(ids(" red")));
    for (hosts, status) in [("", 400), ("Host: a\r\n", 200), ("Host: a\r\nHost: b\r\n", 400)] {
        let request = format!("GET /health HTTP/1.1\r\n{hosts}Connection: close\r\n\r\n");
        assert_eq!(server.raw(request.as_bytes()).status, status, "{hosts}");
    }
    assert_eq!(server.raw(b"GET /health HTTP/1.0\r\n\r\n").status, 200);
}

#[test]
fn huge_bodies() {
    let server = serve(reply(ids(" red")));
    let large = json!({"prompt": "a".repeat(2 << 20)}).to_string();
    let mut stream = server.connect();
    let _ = stream.write_all(&post(PATH, "", large.as_bytes())[..500_000]);
    let length = format!("POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n");
    let response = server.raw(length.as_bytes());
    assert_eq!(response.status, 413);
    assert_eq!(server.get("/health").status, 200);
}

/// A client that sends all before it reads learns why its request was not taken.
#[test]
fn a_refusal_is_read_by_who_is_still_sending() {
    let mut setup = Setup::default();
    setup.config.api_keys = vec!["key".into()];
    let server = serve_with(reply(ids(" red")), setup);
    let large = vec![b'a'; 24 << 20];
    let length = format!("Content-Length: {}\r\n", large.len());
    let chunked = "Transfer-Encoding: chunked\r\n".to_owned();
    let key = "Authorization: Bearer key\r\n";
    for (path, headers, status) in [
        (PATH, format!("{key}{length}"), 413),
        (PATH, format!("{key}{chunked}"), 413),
        (PATH, length.clone(), 401),
        ("/nowhere", format!("{key}{length}"), 404),
    ] {
        let mut stream = server.connect();
        let head = format!("POST {path} HTTP/1.1\r\nHost: x\r\n{headers}\r\n");
        stream.write_all(head.as_bytes()).expect("write");
        for part in large.chunks(1 << 20) {
            if headers.contains("chunked") {
                stream.write_all(b"100000\r\n").expect("write");
                stream.write_all(part).expect("write");
                stream.write_all(b"\r\n").expect("write");
            } else {
                stream.write_all(part).expect("write");
            }
        }
        assert_eq!(read_response(&mut stream, false).status, status, "{path} {headers}");
    }
    // A head that is too large, the first of a connection or not.
    let head = format!("GET /health HTTP/1.1\r\nHost: x\r\nX-A: {}\r\n\r\n", "a".repeat(24 << 20));
    for before in [0, 1] {
        let mut stream = server.connect();
        for _ in 0..before {
            stream.write_all(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n").expect("write");
            assert_eq!(read_response(&mut stream, false).status, 200);
        }
        stream.write_all(head.as_bytes()).expect("write");
        assert_eq!(read_response(&mut stream, false).status, 431, "{before}");
    }
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
    for (number, stream) in idle.iter_mut().enumerate() {
        // Nothing, half a head, or half a body.
        let part: &[u8] = match number % 3 {
            0 => b"",
            1 => b"POST /v1/completions HT",
            _ => b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{",
        };
        let _ = stream.write_all(part);
    }
    // All of them are looked at before the one that means it.
    std::thread::sleep(Duration::from_millis(300));
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

/// Requests that are odd, broken or meant for something else: each is answered or its connection closed,
/// never with a fault of the server's own.
#[test]
fn odd_requests_do_no_harm() {
    let server = serve(reply(ids(" red")));
    let json = "{\"prompt\":\"Hello\"}";
    let post =
        |headers: &str| format!("POST {PATH} HTTP/1.1\r\nHost: x\r\n{headers}\r\n\r\n{json}");
    let headers: String = (0..500).map(|i| format!("X-{i}: a\r\n")).collect();
    for request in [
        "OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n".to_owned(),
        "CONNECT a:1 HTTP/1.1\r\nHost: x\r\n\r\n".to_owned(),
        "TRACE /health HTTP/1.1\r\nHost: x\r\n\r\n".to_owned(),
        "DELETE /v1/completions HTTP/1.1\r\nHost: x\r\n\r\n".to_owned(),
        "HEAD /v1/completions HTTP/1.1\r\nHost: x\r\n\r\n".to_owned(),
        "FROB /health HTTP/1.1\r\nHost: x\r\n\r\n".to_owned(),
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_owned(),
        "GET /health HTTP/3.9\r\nHost: x\r\n\r\n".to_owned(),
        "GET /v1/models/%ff%00 HTTP/1.1\r\nHost: x\r\n\r\n".to_owned(),
        "GET /../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n".to_owned(),
        "GET /%2e%2e/%2e%2e/etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n".to_owned(),
        format!("GET /{} HTTP/1.1\r\nHost: x\r\n\r\n", "a".repeat(40_000)),
        format!("GET /health HTTP/1.1\r\nHost: x\r\n{headers}\r\n"),
        "GET /health HTTP/1.1\r\nHost: x\r\nA: b\r\n folded\r\n\r\n".to_owned(),
        "GET /health HTTP/1.1\r\nHost: x\r\nA b: c\r\n\r\n".to_owned(),
        "GET /health HTTP/1.1\r\nHost: x\r\nAuthorization: \u{e9}\u{ff}\r\n\r\n".to_owned(),
        post("Content-Length: -1"),
        post("Content-Length: 18, 18"),
        post("Content-Length: 18\r\nContent-Length: 5"),
        post("Content-Length: 99999999999999999999999"),
        post("Transfer-Encoding: gzip, chunked"),
        post("Transfer-Encoding: identity"),
        post("Content-Length: 18\r\nContent-Encoding: gzip"),
        format!(
            "POST {PATH} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n{json}"
        ),
        format!(
            "POST {PATH} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\n{json}"
        ),
        format!(
            "POST {PATH} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5;{}\r\n{json}",
            "e".repeat(100_000)
        ),
        "\x16\x03\x01\x02\x00\x01\x00\x01\u{fc}\x03\x03".to_owned(),
        "\0".repeat(1000),
        "\r\n".repeat(1000),
    ] {
        let mut stream = server.connect();
        // The server may answer and close before it has read everything.
        let _ = stream.write_all(request.as_bytes());
        let _ = stream.shutdown(Shutdown::Write);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        let answer = String::from_utf8_lossy(&answer);
        let status = answer.strip_prefix("HTTP/1.1 ").or(answer.strip_prefix("HTTP/1.0 "));
        let status: Option<u16> = status.and_then(|rest| rest.get(..3)?.parse().ok());
        let start = request.get(..60).unwrap_or(&request);
        assert!(answer.is_empty() || status.is_some_and(|s| s < 500), "{start:?}: {answer}");
        assert_ne!((status, start.starts_with("GET /..")), (Some(200), true));
    }
    let coded = server.send(PATH, "Content-Encoding: gzip\r\n", json.as_bytes());
    assert_eq!(coded.status, 415, "{}", coded.text());
    let unknown = server.get("/v1/models/%ff%00");
    assert_eq!(
        (unknown.status, unknown.json()["error"]["code"].as_str()),
        (404, Some("model_not_found"))
    );
    for (request, status) in [
        ("GET http://localhost/health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 200),
        ("GET /health HTTP/1.0\r\n\r\n", 200),
    ] {
        assert_eq!(server.raw(request.as_bytes()).status, status);
    }
}

#[test]
fn pipelined_requests_are_answered_in_order() {
    let server = serve_digest(Setup::default());
    let mut stream = server.connect();
    let ask = |i: u32| json!({"prompt": [i, 7], "max_tokens": 3, "temperature": 0}).to_string();
    let request = |body: String| {
        format!("POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n{body}", body.len())
    };
    let all: String = (0..50).map(|i| request(ask(i))).collect();
    stream.write_all(all.as_bytes()).expect("write");
    for i in 0..50 {
        let text = read_response(&mut stream, false).json()["choices"][0]["text"].clone();
        assert_eq!(text, server.ok(PATH, ask(i))["choices"][0]["text"], "{i}");
    }
}

/// Large bodies wait for their turn and hold up only one another.
#[test]
fn large_bodies_take_turns() {
    let server = serve_digest(Setup::default());
    let large = json!({"prompt": "a".repeat(900_000)}).to_string();
    let bytes = post(PATH, "", large.as_bytes());
    // All but the end.
    let mut slow: Vec<_> = (0..40)
        .map(|_| {
            let mut stream = server.connect();
            let part = &bytes[..100_000];
            let mut sent = 0;
            stream.set_write_timeout(Some(Duration::from_millis(500))).expect("timeout");
            while let Ok(count @ 1..) = stream.write(&part[sent..]) {
                sent += count;
            }
            (stream, sent)
        })
        .collect();
    let started = Instant::now();
    server.ok(PATH, json!({"prompt": "x", "max_tokens": 1}));
    assert!(started.elapsed() < Duration::from_secs(5), "small requests wait for large ones");
    // Each is answered once it is there: with the reason why such a prompt does not fit.
    slow.truncate(20);
    for (stream, sent) in &mut slow {
        stream.set_write_timeout(None).expect("no timeout");
        stream.write_all(&bytes[*sent..]).expect("write");
    }
    for (mut stream, _) in slow {
        let response = read_response(&mut stream, false);
        assert_eq!(response.status, 400, "{}", response.text());
        assert!(response.text().contains("4096"), "{}", response.text());
    }
}
