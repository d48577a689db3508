//! Tells an answer's thought from what it says.
//!
//! Where a thought begins is known from the prompt: Thinking-2507 answers inside one that the prompt
//! has opened and only writes `</think>`; the hybrid checkpoints open it themselves, and may forget to:
//! what an answer of theirs begins with is held back until it is too long for that, in case a `</think>`
//! comes. Later on, tags are text.

use model::Marker;

use crate::tag::partial_suffix;

/// Bytes at the start of an answer within which a `</think>` ends a thought that was never opened.
const UNOPENED: usize = 512;

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
    /// Nothing but white space so far; `<think>` may follow, also where the prompt has it already. Without
    /// it, this is what the answer begins in.
    Start(Begin),
    /// In what is said, or in a thought that was not opened.
    Unsure,
    /// In a thought, of which nothing but line ends was seen.
    Opened,
    /// In a thought.
    Inside,
    /// Behind a thought; line ends are not part of the answer yet.
    Closed,
    /// In what is said.
    Answer,
}

/// Where an answer begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Begin {
    /// With what it says.
    Answer,
    /// The model may open a thought, or is in one that it forgot to open.
    MayThink,
    /// Inside a thought that the prompt has opened.
    Inside,
}

impl Thinking {
    /// Starts an answer.
    pub fn new(begin: Begin) -> Self {
        Self { state: State::Start(begin), held: String::new() }
    }

    /// Whether the answer is in a thought.
    pub fn is_inside(&self) -> bool {
        match self.state {
            State::Start(begin) => begin == Begin::Inside,
            State::Opened | State::Inside => true,
            State::Unsure | State::Closed | State::Answer => false,
        }
    }

    /// Whether what has come may still turn out to be, or to open, a thought.
    pub fn may_begin(&self) -> bool {
        match self.state {
            State::Start(begin) => begin != Begin::Inside,
            State::Unsure => true,
            State::Opened | State::Inside | State::Closed | State::Answer => false,
        }
    }

    /// Whether a tag that ends the thought has begun, letter by letter.
    pub fn is_closing(&self) -> bool {
        self.is_inside() && partial_suffix(&self.held, Marker::ThinkEnd.text()) > 0
    }

    /// Whether this text would end the thought and say something behind it.
    pub fn runs_over(&self, text: &str) -> bool {
        // Most texts are told by their own letters: nothing can follow the tag's last one.
        if !self.is_inside() || text.split_once('>').is_none_or(|(_, rest)| rest.is_empty()) {
            return false;
        }
        let whole = [&self.held, text].concat();
        let behind = whole.split_once(Marker::ThinkEnd.text()).map(|(_, behind)| behind);
        behind.is_some_and(|behind| !behind.trim_start_matches('\n').is_empty())
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
            State::Start(begin) => {
                let (open, text) = (Marker::Think.text(), self.held.trim_start());
                if let Some(thought) = text.strip_prefix(open) {
                    self.held = thought.to_owned();
                    self.state = State::Opened;
                } else if open.starts_with(text) {
                    return false;
                } else {
                    self.state = match begin {
                        Begin::Inside => State::Opened,
                        Begin::MayThink => State::Unsure,
                        Begin::Answer => State::Answer,
                    };
                }
                true
            }
            State::Unsure => {
                let close = Marker::ThinkEnd.text();
                // A tag that opens something shows that this is no thought.
                let opens = [Marker::Think, Marker::ToolCall];
                let opened = opens.iter().filter_map(|open| self.held.find(open.text())).min();
                let closed = self.held.find(close).filter(|&at| {
                    at + close.len() <= UNOPENED && opened.is_none_or(|opened| at < opened)
                });
                match closed {
                    Some(at) => {
                        parts.reasoning.push_str(self.held[..at].trim_matches('\n'));
                        self.held.drain(..at + close.len());
                        self.state = State::Closed;
                    }
                    None if self.held.len() < UNOPENED && opened.is_none() => return false,
                    None => self.state = State::Answer,
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

/// Finds where what is said begins, for whoever wants an answer's text as it is, and the thought apart from it.
#[derive(Debug, Clone)]
pub struct Said {
    thinking: Thinking,
    /// Text of which it is open whether it opens a thought.
    held: String,
}

impl Said {
    /// Starts an answer. One that opens no thought is said from its beginning; nothing is held back in case that
    /// the end of one comes.
    pub fn new(begin: Begin) -> Self {
        let begin = if begin == Begin::Inside { begin } else { Begin::Answer };
        Self { thinking: Thinking::new(begin), held: String::new() }
    }

    /// Takes the next text: what belongs to the thought goes to `thought`, tags and line ends with it, what is said
    /// to `said`.
    pub fn push(&mut self, text: &str, thought: &mut String, said: &mut String) {
        let mut parts = Parts::default();
        self.thinking.push(text, &mut parts);
        self.held.push_str(text);
        if !self.thinking.may_begin() {
            let (before, behind) = self.held.split_at(self.held.len() - parts.content.len());
            thought.push_str(before);
            said.push_str(behind);
            self.held.clear();
        }
    }

    /// Ends the answer: what opened no thought is said.
    pub fn finish(&mut self, said: &mut String) {
        said.push_str(&std::mem::take(&mut self.held));
    }
}
