//! Tells an answer's thought from what it says.
//!
//! Where a thought begins is known from the prompt: Thinking-2507 answers inside one that the prompt
//! has opened and only writes `</think>`; the hybrid checkpoints open it themselves. Tags count at the
//! start of an answer and inside a thought; later on they are text.

use model::Marker;

use crate::tag::partial_suffix;

/// A stretch of an answer, told apart.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Parts {
    /// What is thought, without the tags and the line ends around them.
    pub reasoning: String,
    /// What is said.
    pub content: String,
}

/// Splits a stream of text. Every cutting of an answer gives the same parts.
#[derive(Debug, Clone)]
pub struct Thinking {
    state: State,
    /// Text that may still be a tag, or line ends before one.
    held: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Nothing but white space so far; `<think>` may follow, also where the prompt has it already.
    Start { inside: bool },
    /// In a thought, of which nothing but line ends was seen.
    Opened,
    /// In a thought.
    Inside,
    /// Behind a thought; line ends are not part of the answer yet.
    Closed,
    /// In what is said.
    Answer,
}

impl Thinking {
    /// Starts an answer; `inside` if its prompt ends in a thought.
    pub fn new(inside: bool) -> Self {
        Self { state: State::Start { inside }, held: String::new() }
    }

    /// Whether the answer is in a thought.
    pub fn is_inside(&self) -> bool {
        match self.state {
            State::Start { inside } => inside,
            State::Opened | State::Inside => true,
            State::Closed | State::Answer => false,
        }
    }

    /// Takes the next text and appends what is decided.
    pub fn push(&mut self, text: &str, parts: &mut Parts) {
        self.held.push_str(text);
        while self.step(parts) {}
    }

    /// Ends the answer. A thought that was cut off remains a thought.
    pub fn finish(&mut self, parts: &mut Parts) {
        let held = std::mem::take(&mut self.held);
        let part = if self.is_inside() { &mut parts.reasoning } else { &mut parts.content };
        part.push_str(&held);
    }

    /// Handles what is held as far as the state reaches; true if another state is to go on.
    fn step(&mut self, parts: &mut Parts) -> bool {
        match self.state {
            State::Start { inside } => {
                let (open, text) = (Marker::Think.text(), self.held.trim_start());
                if let Some(thought) = text.strip_prefix(open) {
                    self.held = thought.to_owned();
                    self.state = State::Opened;
                } else if open.starts_with(text) {
                    return false;
                } else {
                    self.state = if inside { State::Opened } else { State::Answer };
                }
                true
            }
            State::Opened | State::Closed => {
                let start = self.held.len() - self.held.trim_start_matches('\n').len();
                self.held.drain(..start);
                if self.held.is_empty() {
                    return false;
                }
                self.state =
                    if self.state == State::Opened { State::Inside } else { State::Answer };
                true
            }
            State::Inside => {
                let close = Marker::ThinkEnd.text();
                let end = self.held.find(close);
                let sure = end.unwrap_or(self.held.len() - partial_suffix(&self.held, close));
                let thought = self.held[..sure].trim_end_matches('\n');
                parts.reasoning.push_str(thought);
                let done = end.map_or(thought.len(), |end| end + close.len());
                self.held.drain(..done);
                if end.is_some() {
                    self.state = State::Closed;
                }
                end.is_some()
            }
            State::Answer => {
                parts.content.push_str(&std::mem::take(&mut self.held));
                false
            }
        }
    }
}
