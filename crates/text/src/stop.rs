//! Stop texts in a stream.

/// Passes a stream of text through until one of the stop texts is complete. Text that could still grow
/// into one is held back; of several that are complete at once, the one that begins first counts.
#[derive(Debug, Clone)]
pub struct StopMatcher {
    stops: Vec<String>,
    held: String,
    matched: bool,
}

impl StopMatcher {
    /// A matcher for these texts; empty ones are ignored.
    pub fn new(stops: &[String]) -> Self {
        let stops = stops.iter().filter(|stop| !stop.is_empty()).cloned().collect();
        StopMatcher { stops, held: String::new(), matched: false }
    }

    /// Whether a stop text was seen; nothing leaves any more.
    pub fn matched(&self) -> bool {
        self.matched
    }

    /// Takes more text and returns what may leave.
    pub fn push(&mut self, text: &str) -> String {
        if self.matched {
            return String::new();
        }
        self.held.push_str(text);
        let begin = self.stops.iter().filter_map(|stop| self.held.find(stop.as_str())).min();
        self.matched = begin.is_some();
        let leave = begin.unwrap_or_else(|| self.held.len() - self.unfinished());
        let kept = self.held.split_off(leave);
        std::mem::replace(&mut self.held, kept)
    }

    /// Ends the stream and returns what was held back, unless a stop text was seen.
    pub fn finish(&mut self) -> String {
        let held = std::mem::take(&mut self.held);
        if self.matched { String::new() } else { held }
    }

    /// Length of the longest end of the held text that begins a stop text.
    fn unfinished(&self) -> usize {
        let begins = |stop: &String| {
            let longest = (stop.len() - 1).min(self.held.len());
            (1..=longest).rev().find(|&len| {
                stop.as_bytes().starts_with(&self.held.as_bytes()[self.held.len() - len..])
            })
        };
        self.stops.iter().filter_map(begins).max().unwrap_or(0)
    }
}
