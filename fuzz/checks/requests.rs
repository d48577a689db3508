//! Any body, sent to any endpoint of a server whose model ends at once.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::OnceLock;
use std::time::Duration;

use engine::{Engine, Limits, Scripted, Service, Settings};
use model::{Checkpoint, Variant};
use server::{Card, Config, Loaded, Server};
use text::Tokenizer;

const CONTEXT: usize = 256;

/// Input: a digit that names the endpoint, then the body.
pub fn run(data: &[u8]) {
    let Some((first, body)) = data.split_first() else { return };
    let paths = server::endpoints();
    let path = paths[usize::from(first.wrapping_sub(b'0')) % paths.len()];
    let mut stream = TcpStream::connect(address()).expect("connect");
    let head = format!(
        "POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    // In one piece, or the second one waits for the first to be acknowledged. The server may refuse before it
    // has read everything.
    let _ = stream.write_all(&[head.as_bytes(), body].concat());
    let mut response = String::new();
    stream.read_to_string(&mut response).expect("UTF-8");
    let status = response.split(' ').nth(1).expect("a status");
    assert!(["200", "400", "404", "413"].contains(&status), "{path}: {response}");
    let (head, body) = response.split_once("\r\n\r\n").expect("a head");
    if head.contains("application/json") {
        serde_json::from_str::<serde_json::Value>(body).expect("JSON");
    } else {
        assert!(head.contains("text/event-stream"), "{head}");
    }
}

/// One server for all inputs.
fn address() -> SocketAddr {
    static ADDRESS: OnceLock<SocketAddr> = OnceLock::new();
    *ADDRESS.get_or_init(|| {
        let config = Config {
            address: SocketAddr::from(([127, 0, 0, 1], 0)),
            api_keys: Vec::new(),
            cors_origins: Vec::new(),
            max_body: 1 << 20,
            max_connections: 64,
            request_timeout: Duration::from_secs(60),
            allow_open: false,
            tls: None,
        };
        let server = Server::bind(config).expect("bind");
        let address = server.address().expect("address");
        std::thread::spawn(|| {
            let load = || Ok::<_, server::listen::Error>(loaded());
            server.run(load, std::future::pending(), std::future::pending())
        });
        while !is_ready(address) {
            std::thread::sleep(Duration::from_millis(5));
        }
        address
    })
}

fn is_ready(address: SocketAddr) -> bool {
    let mut stream = TcpStream::connect(address).expect("connect");
    stream
        .write_all(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        .expect("write");
    let mut response = String::new();
    stream.read_to_string(&mut response).expect("UTF-8");
    response.starts_with("HTTP/1.1 200")
}

fn loaded() -> Loaded {
    let tokenizer = Tokenizer::tiny();
    let vocabulary = tokenizer.vocabulary();
    let stops = Checkpoint::find("kipp-tiny").expect("an entry").stops();
    let vocab = vocabulary.rows();
    let limits = Limits { tokens: 64, rows: 64, blocks: 512, context: CONTEXT, vocab, queue: 1 };
    let end = stops[0];
    let backend = Box::new(Scripted::new(limits, Box::new(move |_| Some(end))));
    let settings = Settings { max_running: 32, token_budget: 64, context: CONTEXT };
    let engine = Engine::new(backend, vocabulary, settings);
    let (service, _) = Service::spawn(engine, 4096).expect("a thread");
    let card =
        Card { id: "scripted".into(), alias: None, variant: Variant::Instruct, tokenizer, stops };
    Loaded { card, service }
}
