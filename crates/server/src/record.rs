//! The log line of a request: who asked for what, how it went, how long it took. Nothing of a prompt or
//! an answer is in it.

use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Instant;

use axum::body::{Body, Bytes};
use axum::http::StatusCode;
use engine::request::Usage;
use hyper::body::{Frame, SizeHint};

use crate::app::new_id;
use crate::connections::Busy;

/// Gathers what is to be said about one request, and says it when the last of it is dropped.
pub struct Record {
    id: String,
    method: String,
    path: String,
    started: Instant,
    status: Mutex<StatusCode>,
    answers: AtomicUsize,
    prompt: AtomicUsize,
    cached: AtomicUsize,
    generated: AtomicUsize,
    reason: Mutex<&'static str>,
}

impl Record {
    /// A record of a request that has just come in.
    pub fn new(method: &str, path: &str) -> Arc<Self> {
        Arc::new(Record {
            id: new_id("req_"),
            method: method.to_owned(),
            path: path.to_owned(),
            started: Instant::now(),
            // What is logged if the client leaves before there is an answer.
            status: Mutex::new(StatusCode::from_u16(499).unwrap_or_default()),
            answers: AtomicUsize::new(0),
            prompt: AtomicUsize::new(0),
            cached: AtomicUsize::new(0),
            generated: AtomicUsize::new(0),
            reason: Mutex::new("none"),
        })
    }

    /// What the request is called in its answer and in the log.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Notes the status of the response.
    pub fn status(&self, status: StatusCode) {
        *self.status.lock().unwrap_or_else(PoisonError::into_inner) = status;
    }

    /// Notes the end of one answer.
    pub fn finished(&self, reason: &'static str, usage: Usage) {
        self.answers.fetch_add(1, Ordering::Relaxed);
        self.prompt.fetch_add(usage.prompt, Ordering::Relaxed);
        self.cached.fetch_add(usage.cached, Ordering::Relaxed);
        self.generated.fetch_add(usage.generated, Ordering::Relaxed);
        *self.reason.lock().unwrap_or_else(PoisonError::into_inner) = reason;
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        let status = *self.status.lock().unwrap_or_else(PoisonError::into_inner);
        let reason = *self.reason.lock().unwrap_or_else(PoisonError::into_inner);
        let count = |counter: &AtomicUsize| counter.load(Ordering::Relaxed);
        tracing::info!(
            id = %self.id,
            method = %self.method,
            path = %self.path,
            status = status.as_u16(),
            ms = self.started.elapsed().as_millis() as u64,
            answers = count(&self.answers),
            prompt_tokens = count(&self.prompt),
            cached_tokens = count(&self.cached),
            generated_tokens = count(&self.generated),
            finish = reason,
            "request"
        );
    }
}

/// A response body that keeps its request's record until it is sent or given up.
pub struct Recorded {
    pub body: Body,
    pub _record: Arc<Record>,
    /// Keeps its connection from being taken for an idle one.
    pub _busy: Option<Arc<Busy>>,
}

impl hyper::body::Body for Recorded {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
