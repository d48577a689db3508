//! A server on a scripted backend, and a small HTTP client that shows what is on the wire.
#![allow(dead_code, reason = "not every test file uses all of it")]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Mutex;
use std::thread::JoinHandle;
use std::time::Duration;

use engine::scripted::Script;
use engine::speculation::Ngram;
use engine::{Backend, Engine, Limits, Scripted, Service, Settings, Speculation};
use model::Variant;
use serde_json::Value;
use server::listen::Error;
use server::{Card, Config, Ended, Loaded, Server};
use text::{Special, Tokenizer};
use tokio::sync::oneshot;

pub const IM_START: u32 = 151_644;
pub const IM_END: u32 = 151_645;
pub const CONTEXT: usize = 4096;

/// What a server is started with.
pub struct Setup {
    pub variant: Variant,
    pub tokenizer: &'static Tokenizer,
    pub blocks: usize,
    pub max_running: usize,
    pub places: usize,
    /// What stands between the engine and the script.
    pub wrap: fn(Scripted) -> Box<dyn Backend>,
    /// Whether drafts from the text are checked, seven tokens each.
    pub speculate: bool,
    /// Whether to wait until it is ready.
    pub ready: bool,
    pub config: Config,
}

impl Default for Setup {
    fn default() -> Self {
        Setup {
            variant: Variant::Instruct,
            tokenizer: Tokenizer::family(),
            blocks: 600,
            max_running: 16,
            places: 256,
            wrap: |backend| Box::new(backend),
            speculate: false,
            ready: true,
            config: Config {
                address: SocketAddr::from(([127, 0, 0, 1], 0)),
                api_keys: Vec::new(),
                cors_origins: Vec::new(),
                max_body: 1 << 20,
                max_connections: 256,
                request_timeout: Duration::from_secs(60),
                allow_open: false,
                tls: None,
            },
        }
    }
}

/// A running server; dropping it drains it.
pub struct Running {
    pub address: SocketAddr,
    stop: Mutex<Option<oneshot::Sender<()>>>,
    thread: Option<JoinHandle<Ended>>,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop();
        if let Some(thread) = self.thread.take() {
            let ended = thread.join().expect("the server's thread");
            assert_eq!(ended, Ended::Drained);
        }
    }
}

/// A server with default settings that says what the script says.
pub fn serve(script: Box<Script>) -> Running {
    serve_with(script, Setup::default())
}

pub fn serve_with(script: Box<Script>, setup: Setup) -> Running {
    let Setup { variant, tokenizer, blocks, max_running, places, wrap, speculate, ready, config } =
        setup;
    let server = Server::bind(config).expect("bind");
    let address = server.address().expect("address");
    let (stop, stopped) = oneshot::channel();
    let load = move || -> Result<Loaded, Error> {
        let vocabulary = tokenizer.vocabulary();
        let vocab = vocabulary.rows();
        let limits = Limits { tokens: 512, rows: 64, blocks, context: CONTEXT, vocab, queue: 1 };
        let backend = wrap(Scripted::new(limits, script));
        let settings = Settings { max_running, token_budget: 512, context: CONTEXT };
        let mut engine = Engine::new(backend, vocabulary, settings);
        if speculate {
            engine.speculate(Speculation::new(Box::<Ngram>::default()).always(7));
        }
        let (service, _) = Service::spawn(engine, places).map_err(Error::System)?;
        let stops = variant.stops().iter().map(|&marker| vocabulary.id(marker)).collect();
        let card = Card { id: "scripted".into(), alias: None, variant, tokenizer, stops };
        Ok(Loaded { card, service })
    };
    let stopped = async { drop(stopped.await) };
    let run = move || server.run(load, stopped, std::future::pending()).expect("run");
    let thread = Some(std::thread::spawn(run));
    let running = Running { address, stop: Mutex::new(Some(stop)), thread };
    while ready && running.get("/health").status != 200 {
        std::thread::sleep(Duration::from_millis(2));
    }
    running
}

pub fn ids(text: &str) -> Vec<u32> {
    Tokenizer::family().encode(text, Special::Recognise)
}

/// Ids of texts that become tokens one by one, as if a model had cut them so.
pub fn pieces(texts: &[&str]) -> Vec<u32> {
    texts.iter().flat_map(|text| ids(text)).collect()
}

/// Says `reply` in a chat, behind the assistant's opening, then ends.
pub fn chat_reply(reply: Vec<u32>) -> Box<Script> {
    Box::new(move |context| {
        let mut start = context.iter().rposition(|&id| id == IM_START).map_or(0, |at| at + 3);
        if context[start..].starts_with(&[151_667, 271, 151_668, 271]) {
            start += 4;
        }
        Some(reply.get(context.len() - start).copied().unwrap_or(IM_END))
    })
}

/// Says `reply` behind a prompt of one token, then ends.
pub fn reply(reply: Vec<u32>) -> Box<Script> {
    Box::new(move |context| Some(reply.get(context.len() - 1).copied().unwrap_or(IM_END)))
}

/// What comes after a context where each token depends on all before it, so that any mix-up shows. Never
/// an end, and within the small vocabulary.
pub fn digest(context: &[u32]) -> u32 {
    let mix = |hash: u64, &token: &u32| {
        (hash ^ u64::from(token)).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(23)
    };
    (context.iter().fold(7, mix) % 7000) as u32 + 1000
}

/// A server that says [`digest`], with kipp-tiny's tokenizer, whose small vocabulary makes it fast.
pub fn serve_digest(setup: Setup) -> Running {
    let setup = Setup { tokenizer: Tokenizer::tiny(), ..setup };
    serve_with(Box::new(|context| Some(digest(context))), setup)
}

/// A response as it came.
#[derive(Debug, Clone)]
pub struct Response {
    pub status: u16,
    pub head: String,
    pub body: Vec<u8>,
}

impl Response {
    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).expect("UTF-8")
    }

    pub fn json(&self) -> Value {
        serde_json::from_str(self.text()).unwrap_or_else(|error| panic!("{error}: {}", self.text()))
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| {
            let (key, value) = line.split_once(':')?;
            key.eq_ignore_ascii_case(name).then(|| value.trim())
        })
    }

    /// The data of a stream of events, read strictly; the last one must be `[DONE]`.
    pub fn events(&self) -> Vec<Value> {
        let mut data = self.data();
        assert_eq!(data.pop().as_deref(), Some("[DONE]"), "{}", self.text());
        data.iter().map(|data| serde_json::from_str(data).expect("JSON")).collect()
    }

    /// The data lines of a stream of events.
    pub fn data(&self) -> Vec<String> {
        let text = self.text();
        assert!(text.ends_with("\n\n"), "a stream ends behind an event: {text:?}");
        let events = text.trim_end_matches('\n').split("\n\n");
        let data = |event: &str| {
            let lines = event.lines().filter(|line| !line.starts_with("event: "));
            let lines: Vec<&str> = lines.collect();
            assert_eq!(lines.len(), 1, "{event:?}");
            lines[0].strip_prefix("data: ").expect("data").to_owned()
        };
        events.map(data).collect()
    }
}

impl Running {
    pub fn stop(&self) {
        if let Some(stop) = self.stop.lock().expect("lock").take() {
            let _ = stop.send(());
        }
    }

    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).expect("connect");
        stream.set_read_timeout(Some(Duration::from_secs(60))).expect("timeout");
        stream.set_nodelay(true).expect("nodelay");
        stream
    }

    /// Sends bytes as they are and reads one response.
    pub fn raw(&self, bytes: &[u8]) -> Response {
        let mut stream = self.connect();
        stream.write_all(bytes).expect("write");
        read_response(&mut stream, false)
    }

    pub fn get(&self, path: &str) -> Response {
        self.raw(
            format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                .as_bytes(),
        )
    }

    pub fn send(&self, path: &str, headers: &str, body: &[u8]) -> Response {
        let mut stream = self.connect();
        stream.write_all(&post(path, headers, body)).expect("write");
        read_response(&mut stream, false)
    }

    /// Posts a body that is JSON in text.
    pub fn post(&self, path: &str, body: impl ToString) -> Response {
        self.send(path, "", body.to_string().as_bytes())
    }

    /// Posts a body and expects success.
    pub fn ok(&self, path: &str, body: impl ToString) -> Value {
        let response = self.post(path, body);
        assert_eq!(response.status, 200, "{}", response.text());
        response.json()
    }

    /// Posts a body and expects a refusal; returns its message.
    pub fn refused(&self, path: &str, body: impl ToString) -> String {
        let body = body.to_string();
        let response = self.post(path, &body);
        assert_eq!(response.status, 400, "{body}: {}", response.text());
        let message = response.json()["error"]["message"].as_str().expect("message").to_owned();
        assert!(!message.is_empty());
        message
    }

    /// The value of a metric without labels of its own.
    pub fn metric(&self, name: &str) -> f64 {
        let page = self.get("/metrics");
        let start = format!("kipp_{name}{{model_name=\"scripted\"}} ");
        let line = page.text().lines().find_map(|line| line.strip_prefix(&start));
        line.unwrap_or_else(|| panic!("{name} in {}", page.text())).parse().expect("a number")
    }
}

/// The bytes of a POST request.
pub fn post(path: &str, headers: &str, body: &[u8]) -> Vec<u8> {
    let mut bytes = format!(
        "POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n\
         {headers}Content-Length: {}\r\n\r\n",
        body.len()
    )
    .into_bytes();
    bytes.extend_from_slice(body);
    bytes
}

/// Reads the head of a response.
pub fn read_head(stream: &mut impl Read) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        let count = stream.read(&mut byte).expect("a head");
        assert!(count > 0, "the connection ended in a head: {:?}", String::from_utf8_lossy(&head));
        head.push(byte[0]);
    }
    String::from_utf8(head).expect("UTF-8")
}

/// Reads one response, whatever frames its body.
pub fn read_response(stream: &mut impl Read, headless: bool) -> Response {
    let head = read_head(stream);
    let status = head.split(' ').nth(1).expect("status").parse().expect("a number");
    let mut response = Response { status, head, body: Vec::new() };
    if headless || status == 204 || status == 304 {
        return response;
    }
    if response.header("transfer-encoding").is_some_and(|value| value == "chunked") {
        loop {
            let mut size = Vec::new();
            while !size.ends_with(b"\r\n") {
                let mut byte = [0];
                stream.read_exact(&mut byte).expect("a chunk's size");
                size.push(byte[0]);
            }
            let size = std::str::from_utf8(&size).expect("UTF-8").trim();
            let size = usize::from_str_radix(size, 16).expect("hexadecimal");
            let mut chunk = vec![0; size + 2];
            stream.read_exact(&mut chunk).expect("a chunk");
            if size == 0 {
                return response;
            }
            response.body.extend_from_slice(&chunk[..size]);
        }
    }
    match response.header("content-length").map(|value| value.parse().expect("a number")) {
        Some(length) => {
            response.body = vec![0; length];
            stream.read_exact(&mut response.body).expect("a body");
        }
        None => {
            stream.read_to_end(&mut response.body).expect("a body");
        }
    }
    response
}
