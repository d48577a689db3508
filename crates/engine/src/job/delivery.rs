//! The end of a request, and events on their way to its reader.

use std::time::{Duration, Instant};

use super::{Job, Stage};
use crate::request::{Event, FinishReason, Finished, SinkError, Timings};

/// How long a reader may leave events lying before its blocks and its place go to those who wait for some.
const PATIENCE: Duration = Duration::from_millis(200);

impl Job {
    /// Whether its reader has left events lying for longer than a busy reader would.
    pub fn is_behind(&self) -> bool {
        self.behind.is_some_and(|since| since.elapsed() >= PATIENCE)
    }

    /// Ends the job; text that was held back leaves with the last event.
    pub fn finish(&mut self, mut reason: FinishReason) {
        if self.is_over() {
            return;
        }
        let mut text = String::new();
        if self.stopped.is_none() {
            let mut decoded = String::new();
            self.decoder.finish(&mut decoded);
            self.stopped = self.stops.push(&decoded, &mut text).map(str::to_owned);
            if self.stopped.is_none() {
                self.stopped = self.stops.finish(&mut text).map(str::to_owned);
            }
            // A stop text that gave way to an earlier beginning counts, now that nothing follows.
            if self.stopped.is_some() && reason == FinishReason::Length {
                reason = FinishReason::Stop;
            }
        }
        let between = |a: Option<Instant>, b: Option<Instant>| match (a, b) {
            (Some(a), Some(b)) => b.saturating_duration_since(a),
            _ => Default::default(),
        };
        let timings = Timings {
            queued: between(Some(self.submitted), self.admitted),
            prefill: between(self.admitted, self.first_token),
            decode: between(self.first_token, self.last_token),
        };
        self.outbox.push_back(Event::Finished(Finished {
            reason,
            text,
            stop_text: self.stopped.take(),
            usage: self.usage,
            timings,
        }));
        self.stage = Stage::Over;
    }

    /// Hands events to the sink as far as it takes them, and notices a deadline or a reader that left.
    pub fn deliver(&mut self, now: Instant) {
        if self.request.sink.is_closed() {
            self.stage = Stage::Over;
            self.outbox.clear();
            return;
        }
        if self.request.deadline.is_some_and(|deadline| now >= deadline) {
            self.finish(FinishReason::Deadline);
        }
        while let Some(event) = self.outbox.pop_front() {
            match self.request.sink.send(event) {
                Ok(()) => {}
                Err(SinkError::Full(event)) => {
                    self.outbox.push_front(*event);
                    self.behind.get_or_insert(now);
                    return;
                }
                Err(SinkError::Closed) => {
                    self.stage = Stage::Over;
                    self.outbox.clear();
                }
            }
        }
        self.behind = None;
    }
}
