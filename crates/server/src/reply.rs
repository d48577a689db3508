//! Sends answers: one JSON body, or server-sent events as they come.

use std::convert::Infallible;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use serde_json::Value;
use tokio::time::{Instant, timeout_at};

use crate::answer::{Answers, Step, Whole};
use crate::error::{ApiError, Result};

/// How long a stream may be silent before a comment shows that it lives.
const SILENCE: Duration = Duration::from_secs(15);
/// Bytes that are gathered before they leave together, if more events wait.
const GATHER: usize = 16 << 10;

/// Writes answers in the format of one protocol.
pub trait Writer: Send + 'static {
    /// Begins a stream.
    fn begin(&mut self, events: &mut Events);
    /// Continues a stream.
    fn step(&mut self, step: Step, events: &mut Events);
    /// Ends a stream whose answers are all complete.
    fn end(&mut self, events: &mut Events);
    /// Ends a stream that failed.
    fn fail(&mut self, error: &ApiError, events: &mut Events);
    /// The body for complete answers.
    fn whole(&mut self, answers: Vec<Whole>) -> Value;
}

/// Server-sent events that are ready to leave.
#[derive(Default)]
pub struct Events(Vec<u8>);

impl Events {
    /// An event without a name.
    pub fn data(&mut self, data: &Value) {
        self.raw(&data.to_string());
    }

    /// An event with a name.
    pub fn named(&mut self, name: &str, data: &Value) {
        self.0.extend_from_slice(format!("event: {name}\n").as_bytes());
        self.data(data);
    }

    /// An event whose data, one line, is given as it is.
    pub fn raw(&mut self, data: &str) {
        for part in ["data: ", data, "\n\n"] {
            self.0.extend_from_slice(part.as_bytes());
        }
    }
}

/// A response with a JSON body.
pub fn json_body(value: &Value) -> Response {
    json_text(value.to_string())
}

/// A response with a body that is JSON already.
pub fn json_text(text: String) -> Response {
    ([(CONTENT_TYPE, "application/json")], text).into_response()
}

/// Sends the answers as the request wants them.
pub async fn send(answers: Answers, mut writer: impl Writer, streamed: bool) -> Result<Response> {
    if streamed {
        return Ok(stream_of(answers, writer));
    }
    let whole = answers.whole().await?;
    Ok(json_body(&writer.whole(whole)))
}

struct Streaming<W> {
    answers: Answers,
    writer: W,
    begun: bool,
    over: bool,
}

fn stream_of(answers: Answers, writer: impl Writer) -> Response {
    let state = Streaming { answers, writer, begun: false, over: false };
    let frames = stream::unfold(state, |mut state| async move {
        let bytes = state.frame().await?;
        Some((Ok::<_, Infallible>(Bytes::from(bytes)), state))
    });
    let headers = [(CONTENT_TYPE, "text/event-stream; charset=utf-8"), (CACHE_CONTROL, "no-cache")];
    (headers, Body::from_stream(frames)).into_response()
}

impl<W: Writer> Streaming<W> {
    /// The next bytes of the stream: all events that are there, or the first one that comes.
    async fn frame(&mut self) -> Option<Vec<u8>> {
        if self.over {
            return None;
        }
        let mut events = Events::default();
        if !std::mem::replace(&mut self.begun, true) {
            self.writer.begin(&mut events);
            if !events.0.is_empty() {
                return Some(events.0);
            }
        }
        // Tokens that say nothing yet, such as those of a call, do not break the silence.
        let silent_until = Instant::now() + SILENCE;
        while events.0.is_empty() {
            match timeout_at(silent_until, self.answers.next()).await {
                Ok(step) => self.write(step, &mut events),
                Err(_) => events.0.extend_from_slice(b": waiting\n\n"),
            }
        }
        while !self.over
            && events.0.len() < GATHER
            && let Some(step) = self.answers.ready()
        {
            self.write(Some(step), &mut events);
        }
        Some(events.0)
    }

    fn write(&mut self, step: Option<Result<Step>>, events: &mut Events) {
        match step {
            Some(Ok(step)) => self.writer.step(step, events),
            Some(Err(error)) => {
                self.over = true;
                self.writer.fail(&error, events);
            }
            None => {
                self.over = true;
                self.writer.end(events);
            }
        }
    }
}
