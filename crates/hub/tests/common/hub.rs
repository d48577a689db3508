//! A hub of its own for a test: HTTP on loopback, with listing, redirects, ranges and entity tags, and faults on demand.
#![allow(dead_code, reason = "each test uses its part of it")]

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// The revision that the hub knows.
pub const REVISION: &str = "0123456789abcdef0123456789abcdef01234567";

/// How the hub answers one request for bytes.
#[derive(Clone, Debug, Default)]
pub struct Behaviour {
    /// A refusal instead of an answer, and what Retry-After says.
    pub status: Option<(u16, Option<u64>)>,
    /// The connection ends after this many bytes of the body.
    pub cut: Option<usize>,
    /// Ranges are not heard of.
    pub whole: bool,
    /// The answer begins this much before what was asked for, and says so.
    pub early: u64,
    /// The answer begins this much after what was asked for, and says so.
    pub late: u64,
    /// Another size of the file in Content-Range.
    pub total: Option<u64>,
    /// The size of the file is `*` in Content-Range.
    pub unsized_range: bool,
    /// A coding that the body is said to have.
    pub coding: Option<&'static str>,
    /// What follows the body of an answer that has no length.
    pub surplus: Option<&'static [u8]>,
    /// Another entity tag.
    pub etag: Option<&'static str>,
    /// Bytes are changed on the way.
    pub corrupt: bool,
    /// Something else altogether, as if it were the file.
    pub instead: Option<&'static str>,
    /// Pause after every 16 KiB.
    pub pause: Duration,
}

/// A request for a file's bytes.
pub struct Request {
    /// Its name.
    pub file: String,
    /// The range that was asked for.
    pub range: Option<Range<u64>>,
    /// How many requests for bytes came before.
    pub before: usize,
}

type Script = Box<dyn Fn(&Request) -> Behaviour + Send + Sync>;

struct State {
    files: HashMap<String, Vec<u8>>,
    /// What the listing says instead of the truth.
    listing: Option<Value>,
    token: Option<String>,
    store: String,
    entry: (&'static str, &'static str),
    script: Script,
    requests: Mutex<Vec<String>>,
}

/// A running hub. Its thread lives as long as the test.
pub struct TestHub {
    /// What HF_ENDPOINT would be.
    pub url: String,
    state: Arc<State>,
}

/// What a hub may be told.
#[derive(Default)]
pub struct Options {
    /// What the listing says instead of the truth.
    pub listing: Option<Value>,
    /// The token that has to be shown.
    pub token: Option<&'static str>,
    /// Where files are redirected to instead of to itself.
    pub store: Option<String>,
    /// Repository and revision; `test/tiny` at [`REVISION`] if left out.
    pub entry: Option<(&'static str, &'static str)>,
}

/// The truth about files, as the hub's listing tells it: hashes of the larger ones.
pub fn listing(files: &HashMap<String, Vec<u8>>) -> Value {
    let entry = |(name, bytes): (&String, &Vec<u8>)| {
        let mut entry = json!({ "type": "file", "oid": "0", "size": bytes.len(), "path": name });
        if name.ends_with(".safetensors") {
            let oid: String = Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect();
            entry["lfs"] = json!({ "oid": oid, "size": bytes.len(), "pointerSize": 134 });
        }
        entry
    };
    files.iter().map(entry).collect()
}

impl TestHub {
    /// Serves files of one repository.
    pub fn start(
        files: HashMap<String, Vec<u8>>,
        options: Options,
        script: impl Fn(&Request) -> Behaviour + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("an address"));
        let state = Arc::new(State {
            files,
            listing: options.listing,
            token: options.token.map(str::to_owned),
            store: options.store.unwrap_or_default(),
            entry: options.entry.unwrap_or(("test/tiny", REVISION)),
            script: Box::new(script),
            requests: Mutex::default(),
        });
        let served = Arc::clone(&state);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let state = Arc::clone(&served);
                thread::spawn(move || {
                    let _ = serve(stream, &state);
                });
            }
        });
        Self { url, state }
    }

    /// Path and range of every request so far, and whether a token was shown.
    pub fn requests(&self) -> Vec<String> {
        self.state.requests.lock().expect("not poisoned").clone()
    }
}

/// Answers the requests of one connection.
fn serve(stream: TcpStream, state: &State) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    loop {
        let mut head = Vec::new();
        loop {
            let mut line = String::new();
            if reader.read_line(&mut line)? == 0 {
                return Ok(());
            }
            if line.trim().is_empty() {
                break;
            }
            head.push(line.trim().to_owned());
        }
        let path = head[0].split(' ').nth(1).unwrap_or_default().to_owned();
        let header = |name: &str| {
            head.iter().skip(1).find_map(|line| {
                let (key, value) = line.split_once(": ")?;
                key.eq_ignore_ascii_case(name).then(|| value.to_owned())
            })
        };
        let range = header("range").map(|range| {
            let (start, end) = range.trim_start_matches("bytes=").split_once('-').expect("a range");
            start.parse::<u64>().expect("start")..end.parse::<u64>().expect("end") + 1
        });
        let token = if header("authorization").is_some() { " token" } else { "" };
        state.requests.lock().expect("not poisoned").push(format!("{path} {range:?}{token}"));
        let mut out = &stream;
        let (repository, revision) = state.entry;
        let listing = format!("/api/models/{repository}/tree/{revision}");
        let resolve = format!("/{repository}/resolve/{revision}/");
        let shown = header("authorization");
        if let Some(token) = &state.token
            && !path.starts_with("/store/")
            && shown != Some(format!("Bearer {token}"))
        {
            respond(out, "401 Unauthorized", "", b"")?;
        } else if path == listing {
            let body = state.listing.clone().unwrap_or_else(|| self::listing(&state.files));
            let body = body.as_str().map_or_else(|| body.to_string(), str::to_owned);
            respond(out, "200 OK", "", body.as_bytes())?;
        } else if let Some(name) = path.strip_prefix(&resolve) {
            if state.files.contains_key(name) {
                let location = format!("Location: {}/store/{name}\r\n", state.store);
                respond(out, "302 Found", &location, b"")?;
            } else {
                respond(out, "404 Not Found", "", b"")?;
            }
        } else if let Some(file) = path.strip_prefix("/store/") {
            let before = state.requests.lock().expect("not poisoned");
            let before = before.iter().filter(|line| line.starts_with("/store/")).count() - 1;
            let request = Request { file: file.to_owned(), range, before };
            let bytes = &state.files[file];
            if !send(&mut out, bytes, &request, &(state.script)(&request))? {
                return Ok(());
            }
        } else {
            respond(out, "404 Not Found", "", b"")?;
        }
    }
}

fn respond(mut out: &TcpStream, status: &str, headers: &str, body: &[u8]) -> std::io::Result<()> {
    let length = body.len();
    write!(out, "HTTP/1.1 {status}\r\n{headers}Content-Length: {length}\r\n\r\n")?;
    out.write_all(body)
}

/// Sends a file's bytes; says whether the connection goes on.
fn send(
    out: &mut &TcpStream,
    bytes: &[u8],
    request: &Request,
    behaviour: &Behaviour,
) -> std::io::Result<bool> {
    if let Some((status, wait)) = behaviour.status {
        let wait = wait.map_or(String::new(), |wait| format!("Retry-After: {wait}\r\n"));
        respond(out, &format!("{status} As told"), &wait, b"")?;
        return Ok(true);
    }
    if let Some(instead) = behaviour.instead {
        respond(out, "200 OK", "Content-Type: text/html\r\n", instead.as_bytes())?;
        return Ok(true);
    }
    let size = bytes.len() as u64;
    let range = request.range.clone().filter(|_| !behaviour.whole);
    if range.as_ref().is_some_and(|range| range.start >= size) {
        respond(out, "416 Range Not Satisfiable", "", b"")?;
        return Ok(true);
    }
    let (start, end) = match &range {
        None => (0, size),
        Some(range) => {
            let start = range.start.saturating_sub(behaviour.early) + behaviour.late;
            (start.min(size), range.end.min(size))
        }
    };
    let mut body = bytes[start as usize..(end.max(start)) as usize].to_vec();
    if behaviour.corrupt
        && let Some(byte) = body.get_mut(7)
    {
        *byte ^= 1;
    }
    let status = match range {
        None => "200 OK".to_owned(),
        Some(_) => {
            let total = behaviour.total.unwrap_or(size).to_string();
            let total = if behaviour.unsized_range { "*".to_owned() } else { total };
            let last = end.saturating_sub(1);
            format!("206 Partial Content\r\nContent-Range: bytes {start}-{last}/{total}")
        }
    };
    let etag = behaviour.etag.unwrap_or("\"first\"");
    let length = body.len();
    write!(out, "HTTP/1.1 {status}\r\nETag: {etag}\r\n")?;
    if let Some(coding) = behaviour.coding {
        write!(out, "Content-Encoding: {coding}\r\n")?;
    }
    if let Some(surplus) = behaviour.surplus {
        write!(out, "Connection: close\r\n\r\n")?;
        out.write_all(&body)?;
        out.write_all(surplus)?;
        return Ok(false);
    }
    write!(out, "Content-Length: {length}\r\n\r\n")?;
    let sent = behaviour.cut.unwrap_or(length).min(length);
    for part in body[..sent].chunks(16 << 10) {
        out.write_all(part)?;
        thread::sleep(behaviour.pause);
    }
    Ok(sent == length)
}
