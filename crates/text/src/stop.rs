//! Stop strings: an answer ends before the first of them, however tokens cut it.

use crate::thinking::{Begin, Said};

/// Finds the earliest of some stop strings in a stream of text.
///
/// Of the text, what could still be the beginning of a stop string is held back and the rest let
/// through at once. The string that starts first wins, also when another one is complete before it,
/// so a stream ends where a search in the whole text would end it.
#[derive(Debug, Clone, Default)]
pub struct StopStrings {
    stops: Vec<String>,
    held: String,
    said: Option<Said>,
}

impl StopStrings {
    /// Watches for these strings. An empty one occurs everywhere and is left out.
    pub fn new(stops: impl IntoIterator<Item = String>) -> Self {
        let stops = stops.into_iter().filter(|stop| !stop.is_empty()).collect();
        Self { stops, ..Self::default() }
    }

    /// Lets the thought pass that an answer may begin with: only what is said ends it.
    pub fn behind_thought(self, begin: Begin) -> Self {
        Self { said: Some(Said::new(begin)), ..self }
    }

    /// Takes the next text and appends to `out` what may leave. Returns the stop string that ends the
    /// answer, if it is decided; nothing more may be pushed then.
    pub fn push(&mut self, text: &str, out: &mut String) -> Option<&str> {
        if self.stops.is_empty() {
            out.push_str(text);
            return None;
        }
        match &mut self.said {
            Some(said) => said.push(text, out, &mut self.held),
            None => self.held.push_str(text),
        }
        let undecided = |rest: &str| self.stops.iter().any(|stop| stop.starts_with(rest));
        let positions = self.held.char_indices().map(|(at, _)| at);
        let found = positions.into_iter().find_map(|at| {
            let rest = &self.held[at..];
            let stop = self.complete(rest);
            (stop.is_some() || undecided(rest)).then_some((at, stop))
        });
        let (at, stop) = found.unwrap_or((self.held.len(), None));
        out.push_str(&self.held[..at]);
        self.held.drain(..at);
        stop.map(|i| self.stops[i].as_str())
    }

    /// Ends the answer. What was held back for a string that never came leaves; a complete one that
    /// gave way to an earlier beginning now counts.
    pub fn finish(&mut self, out: &mut String) -> Option<&str> {
        let mut held = std::mem::take(&mut self.held);
        self.said.iter_mut().for_each(|said| said.finish(&mut held));
        let mut positions = held.char_indices().map(|(at, _)| at);
        let found = positions.find_map(|at| Some((at, self.complete(&held[at..])?)));
        let (at, stop) = found.map_or((held.len(), None), |(at, stop)| (at, Some(stop)));
        out.push_str(&held[..at]);
        stop.map(|i| self.stops[i].as_str())
    }

    /// The shortest stop string at the start of `text`, by its index.
    fn complete(&self, text: &str) -> Option<usize> {
        let complete = (0..self.stops.len()).filter(|&i| text.starts_with(&self.stops[i]));
        complete.min_by_key(|&i| self.stops[i].len())
    }
}
