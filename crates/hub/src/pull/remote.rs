//! A hub in the layout of Hugging Face's: the listing of a revision, and its files, which it may redirect elsewhere.

use std::env;
use std::fmt::Write as _;
use std::hash::{BuildHasher, RandomState};
use std::io::Read;
use std::ops::Range;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use model::Checkpoint;
use ureq::config::RedirectAuthHeaders;
use ureq::http::Response;
use ureq::{Agent, Body};

use crate::error::{Error, Result};
use crate::pull::listing::{Listing, Remote};

/// The hub that is asked unless HF_ENDPOINT names another.
const ENDPOINT: &str = "https://huggingface.co";
/// Longest listing that is read.
const MAX_LISTING: u64 = 16 << 20;
/// How often in a row something may fail.
const ATTEMPTS: u32 = 6;
/// Longest pause between two attempts; a hub that asks for more is not waited for so long.
const LONGEST_WAIT: Duration = Duration::from_secs(60);
/// How often somebody who waits looks whether to stop.
const LOOK: Duration = Duration::from_millis(50);
/// Silence after which a connection counts as broken.
const SILENCE: Duration = Duration::from_secs(30);

/// Where checkpoints come from, and how to ask.
pub struct Hub {
    endpoint: String,
    token: Option<String>,
    agent: Agent,
    /// The folder in which Hugging Face's own programs keep what they fetched.
    pub cache: Option<PathBuf>,
    /// Requests at the same time.
    pub connections: usize,
    /// Bytes a request asks for at most.
    pub piece: u64,
    /// The pause after a first failure; it doubles with each further one.
    pub first_wait: Duration,
}

impl Hub {
    /// A hub at an address such as `https://huggingface.co`, and the token to show it.
    pub fn new(endpoint: &str, token: Option<String>) -> Self {
        let agent = Agent::config_builder()
            .https_only(endpoint.starts_with("https:"))
            .http_status_as_error(false)
            // The token is the hub's alone, not of the servers that it redirects to.
            .redirect_auth_headers(RedirectAuthHeaders::SameHost)
            .user_agent(concat!("kipp/", env!("CARGO_PKG_VERSION")))
            .accept_encoding("identity")
            .timeout_connect(Some(SILENCE))
            .timeout_recv_response(Some(SILENCE))
            .timeout_per_read(Some(SILENCE))
            .build()
            .into();
        Self {
            endpoint: endpoint.trim_end_matches('/').to_owned(),
            token,
            agent,
            cache: None,
            connections: 8,
            piece: 16 << 20,
            first_wait: Duration::from_millis(500),
        }
    }

    /// The hub, token and cache that the environment names: HF_ENDPOINT, HF_TOKEN, HF_HUB_CACHE or HF_HOME.
    pub fn from_env() -> Self {
        let text = |name| env::var(name).ok().filter(|value: &String| !value.trim().is_empty());
        let folder = |name| env::var_os(name).filter(|f| !f.is_empty()).map(PathBuf::from);
        let home = folder("HF_HOME")
            .or_else(|| Some(folder("XDG_CACHE_HOME")?.join("huggingface")))
            .or_else(|| Some(folder("HOME")?.join(".cache/huggingface")));
        let endpoint = text("HF_ENDPOINT");
        let mut hub = Self::new(
            endpoint.as_deref().map_or(ENDPOINT, str::trim),
            text("HF_TOKEN").map(|token| token.trim().to_owned()),
        );
        hub.cache = folder("HF_HUB_CACHE").or_else(|| Some(home?.join("hub")));
        hub
    }

    /// The address of a file of a checkpoint's pinned revision.
    pub(super) fn url(&self, checkpoint: &Checkpoint, file: &str) -> String {
        let Checkpoint { repository, revision, .. } = checkpoint;
        let mut url = format!("{}/{repository}/resolve/{revision}/", self.endpoint);
        for byte in file.bytes() {
            match byte {
                b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'.' | b'-' | b'_' => {
                    url.push(byte.into())
                }
                _ => write!(url, "%{byte:02X}").expect("writing to a string cannot fail"),
            }
        }
        url
    }

    /// The files of a checkpoint's pinned revision.
    pub(super) fn list(
        &self,
        checkpoint: &Checkpoint,
        patience: &mut Patience<'_>,
    ) -> Result<Listing> {
        let Checkpoint { repository, revision, .. } = checkpoint;
        let url = format!("{}/api/models/{repository}/tree/{revision}", self.endpoint);
        loop {
            let attempt = self.get(&url, None).and_then(|response| {
                let mut text = Vec::new();
                let mut body = response.into_body().into_reader().take(MAX_LISTING);
                body.read_to_end(&mut text).map_err(|error| broken(&url, &error))?;
                Listing::parse(&text).map_err(|error| Error::Answer {
                    url: url.clone(),
                    field: "listing",
                    expected: "the files of the repository".into(),
                    found: error.to_string(),
                })
            });
            match attempt {
                Ok(listing) => return Ok(listing),
                Err(error) => patience.wait(error)?,
            }
        }
    }

    /// The bytes of a file from `range.start` on, up to `range.end` or further.
    pub(super) fn read(&self, url: &str, remote: &Remote, range: Range<u64>) -> Result<Stream> {
        let whole = range == (0..remote.size);
        let response = self.get(url, (!whole).then(|| range.clone()))?;
        let header = |name| response.headers().get(name)?.to_str().ok().map(str::to_owned);
        let wrong = |field, expected: String, found: String| {
            Err(Error::Answer { url: url.to_owned(), field, expected, found })
        };
        // Offsets and sizes are those of the file as it is.
        if let Some(coding) = header("content-encoding").filter(|coding| coding != "identity") {
            return wrong("Content-Encoding", "identity, as asked for".into(), coding);
        }
        // A server that weakens the tag of a content has not changed its bytes.
        let etag = header("etag").map(|tag| tag.trim_start_matches("W/").to_owned());
        let length = header("content-length").and_then(|length| length.parse().ok());
        let skip = if response.status() == 206 {
            let found = header("content-range").unwrap_or_default();
            match content_range(&found) {
                Some((start, total))
                    if total.is_none_or(|total| total == remote.size) && start <= range.start =>
                {
                    range.start - start
                }
                _ => {
                    let expected =
                        format!("bytes {}-{}/{}", range.start, range.end - 1, remote.size);
                    return wrong("Content-Range", expected, found);
                }
            }
        } else {
            // The whole file, whatever was asked for.
            if let Some(length) = length.filter(|&length: &u64| length != remote.size) {
                return wrong("Content-Length", remote.size.to_string(), length.to_string());
            }
            range.start
        };
        let ranged = whole || response.status() == 206;
        let mut stream =
            Stream { body: Box::new(response.into_body().into_reader()), etag, ranged };
        let skipped = std::io::copy(&mut stream.body.by_ref().take(skip), &mut std::io::sink())
            .map_err(|error| broken(url, &error))?;
        if skipped < skip {
            return wrong("bytes", format!("{skip} before those asked for"), skipped.to_string());
        }
        Ok(stream)
    }

    fn get(&self, url: &str, range: Option<Range<u64>>) -> Result<Response<Body>> {
        let mut request = self.agent.get(url);
        if let Some(token) = &self.token {
            request = request.header("Authorization", format!("Bearer {token}"));
        }
        if let Some(Range { start, end }) = range {
            request = request.header("Range", format!("bytes={start}-{}", end - 1));
        }
        let response = request.call().map_err(|error| failed(url, &error))?;
        match response.status().as_u16() {
            200 | 206 => Ok(response),
            status => {
                let wait = response.headers().get("retry-after");
                let wait = wait.and_then(|wait| wait.to_str().ok()?.trim().parse().ok());
                let wait = wait.map(Duration::from_secs);
                Err(Error::Status { url: url.to_owned(), status, wait })
            }
        }
    }
}

/// A body on its way.
pub(super) struct Stream {
    /// From the first byte that was asked for on.
    pub body: Box<dyn Read>,
    /// The server's name of the content.
    pub etag: Option<String>,
    /// Whether the server sends what it is asked for, and not the whole file each time.
    pub ranged: bool,
}

/// First byte and size of the file, from `bytes 0-99/1000`; `*` for a size that the server does not know.
fn content_range(text: &str) -> Option<(u64, Option<u64>)> {
    let (range, total) = text.strip_prefix("bytes ")?.split_once('/')?;
    let total = if total == "*" { None } else { Some(total.parse().ok()?) };
    Some((range.split_once('-')?.0.parse().ok()?, total))
}

/// A connection's failure. What the library says names no header, and so no token.
pub(super) fn broken(url: &str, why: &dyn std::fmt::Display) -> Error {
    Error::Connection { url: url.to_owned(), why: why.to_string() }
}

/// A request's failure: one that cannot be made fails the next time as well.
fn failed(url: &str, why: &ureq::Error) -> Error {
    match why {
        ureq::Error::Http(_) | ureq::Error::BadUri(_) | ureq::Error::RequireHttpsOnly(_) => {
            Error::Request { url: url.to_owned(), why: why.to_string() }
        }
        _ => broken(url, why),
    }
}

/// How long to go on after failures: pauses that double, and an end.
pub(super) struct Patience<'a> {
    failures: u32,
    first_wait: Duration,
    stopped: &'a (dyn Fn() -> bool + Sync),
}

impl<'a> Patience<'a> {
    pub fn new(hub: &Hub, stopped: &'a (dyn Fn() -> bool + Sync)) -> Self {
        Self { failures: 0, first_wait: hub.first_wait, stopped }
    }

    /// Something worked.
    pub fn restore(&mut self) {
        self.failures = 0;
    }

    /// Waits before the next attempt, or gives the failure back if there is to be none.
    pub fn wait(&mut self, failure: Error) -> Result<()> {
        self.failures += 1;
        if self.failures == ATTEMPTS || !failure.is_passing() || (self.stopped)() {
            return Err(failure);
        }
        let asked = if let Error::Status { wait, .. } = failure { wait } else { None };
        // Spread out, so that connections that failed together do not come back together.
        let spread = 0.5 + RandomState::new().hash_one(0) as f64 / u64::MAX as f64;
        let own = self.first_wait.mul_f64(f64::from(1 << self.failures) / 2.0 * spread);
        let mut left = asked.unwrap_or_default().max(own).min(LONGEST_WAIT);
        while !left.is_zero() {
            if (self.stopped)() {
                return Err(failure);
            }
            let nap = left.min(LOOK);
            thread::sleep(nap);
            left -= nap;
        }
        Ok(())
    }
}
