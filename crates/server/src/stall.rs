//! A stream whose peer can neither hold it up nor lose its answer: it fails when the peer takes nothing for too
//! long, so that a reader that stopped reading does not hold its request for ever, and it ends only when a peer
//! that is still sending has had the time to read.

use std::future::Future;
use std::io::{Error, ErrorKind, Result};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep};

/// How long what a peer still sends is thrown away. Were it left unread, the system would reset the connection,
/// and with it an answer that the peer has not read: why its request was not taken.
const LINGER: Duration = Duration::from_secs(2);

/// See the module.
pub struct Stall<S> {
    stream: S,
    limit: Duration,
    /// Whether the peer may still be sending what nobody wants: from what it sends until somebody notes that it
    /// makes a whole request.
    unwanted: Arc<AtomicBool>,
    /// Runs from the first write that had to wait, and from the end of what is written.
    timer: Pin<Box<Sleep>>,
    waiting: bool,
    closed: bool,
}

impl<S> Stall<S> {
    /// Gives the peer `limit` for each write.
    pub fn new(stream: S, limit: Duration, unwanted: Arc<AtomicBool>) -> Self {
        let timer = Box::pin(sleep(limit));
        Stall { stream, limit, unwanted, timer, waiting: false, closed: false }
    }

    /// Passes a write's outcome on, unless it has been waiting too long.
    fn watch<T>(&mut self, cx: &mut Context<'_>, outcome: Poll<Result<T>>) -> Poll<Result<T>> {
        if outcome.is_ready() {
            self.waiting = false;
            return outcome;
        }
        if !self.waiting {
            self.waiting = true;
            self.timer.as_mut().reset(Instant::now() + self.limit);
        }
        ready!(self.timer.as_mut().poll(cx));
        Poll::Ready(Err(Error::new(ErrorKind::TimedOut, "the peer takes nothing")))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Stall<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<Result<()>> {
        let before = buffer.filled().len();
        let outcome = Pin::new(&mut self.stream).poll_read(cx, buffer);
        if buffer.filled().len() > before {
            self.unwanted.store(true, Ordering::Release);
        }
        outcome
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Stall<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<Result<usize>> {
        let outcome = Pin::new(&mut self.stream).poll_write(cx, data);
        self.watch(cx, outcome)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        let outcome = Pin::new(&mut self.stream).poll_flush(cx);
        self.watch(cx, outcome)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        if !self.closed {
            let outcome = Pin::new(&mut self.stream).poll_shutdown(cx);
            ready!(self.watch(cx, outcome))?;
            self.closed = true;
            self.timer.as_mut().reset(Instant::now() + LINGER);
        }
        let mut space = [0; 8 << 10];
        while self.unwanted.load(Ordering::Acquire) && self.timer.as_mut().poll(cx).is_pending() {
            let mut unread = ReadBuf::new(&mut space);
            match ready!(Pin::new(&mut self.stream).poll_read(cx, &mut unread)) {
                Ok(()) if !unread.filled().is_empty() => {}
                _ => break,
            }
        }
        Poll::Ready(Ok(()))
    }
}
