//! Takes the tool calls out of an answer.
//!
//! A call is a JSON object with a name and arguments between `<tool_call>` and `</tool_call>`. It leaves
//! when it is complete and valid; one that is cut off or broken stays what it is, text. Only then does
//! every cutting of an answer give the same result as the whole.

use std::collections::BTreeMap;

use model::Marker;
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use crate::chat::ToolCall;
use crate::tag::partial_suffix;

const OPEN: &str = Marker::ToolCall.text();
const CLOSE: &str = Marker::ToolCallEnd.text();

/// What an answer consists of, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// Text for the person.
    Text(String),
    /// A call; its arguments are the JSON text that the model wrote.
    Call(ToolCall),
}

/// Parses a stream of text.
#[derive(Debug, Clone, Default)]
pub struct ToolCalls {
    /// Text that may still turn out to belong to a call: white space, part of a tag, an open call.
    held: String,
    call: Option<OpenCall>,
    /// Whether a call has left already.
    called: bool,
}

/// How far an open call has been read; positions are bytes of the held text.
#[derive(Debug, Clone, Copy)]
struct OpenCall {
    /// Where its JSON starts.
    start: usize,
    /// Everything before this was looked at.
    seen: usize,
    /// Whether a JSON string is open there; a closing tag in it is text.
    in_string: bool,
    /// Whether the next character of that string is escaped.
    escaped: bool,
}

impl ToolCalls {
    /// Takes the next text and appends what is decided. White space around calls is dropped.
    pub fn push(&mut self, text: &str, events: &mut Vec<Event>) {
        self.held.push_str(text);
        while match self.call {
            None => self.read_text(events),
            Some(call) => self.read_call(call, events),
        } {}
    }

    /// Ends the answer: what is held is no call.
    pub fn finish(&mut self, events: &mut Vec<Event>) {
        while let Some(call) = self.call.take() {
            // A quote that was never closed hides the closing tag; behind it all may be well again.
            let end = self.held[call.start..].find(CLOSE);
            let end = end.map_or(self.held.len(), |at| call.start + at + CLOSE.len());
            self.release(end, events);
            self.push("", events);
        }
        if !(self.called && self.held.trim_start().is_empty()) {
            self.release(self.held.len(), events);
        }
    }

    /// Lets text pass up to a call, or to what could become one. True if a call is open now.
    fn read_text(&mut self, events: &mut Vec<Event>) -> bool {
        let open = self.held.find(OPEN);
        let end = open.unwrap_or(self.held.len() - partial_suffix(&self.held, OPEN));
        let end = self.held[..end].trim_end().len();
        self.release(end, events);
        self.call = open.map(|open| {
            let start = open - end + OPEN.len();
            OpenCall { start, seen: start, in_string: false, escaped: false }
        });
        open.is_some()
    }

    /// Looks for the end of the open call. True if it was found.
    fn read_call(&mut self, mut call: OpenCall, events: &mut Vec<Event>) -> bool {
        while let Some(&byte) = self.held.as_bytes().get(call.seen) {
            let rest = &self.held.as_bytes()[call.seen..];
            if byte == b'<' && !call.in_string && rest.starts_with(CLOSE.as_bytes()) {
                let end = call.seen + CLOSE.len();
                match parse(&self.held[call.start..call.seen]) {
                    Some(parsed) => {
                        self.held.drain(..end);
                        self.called = true;
                        events.push(Event::Call(parsed));
                    }
                    None => self.release(end, events),
                }
                self.call = None;
                return true;
            }
            if byte == b'<' && !call.in_string && CLOSE.as_bytes().starts_with(rest) {
                break;
            }
            call.in_string ^= byte == b'"' && !call.escaped;
            call.escaped = call.in_string && byte == b'\\' && !call.escaped;
            call.seen += 1;
        }
        self.call = Some(call);
        false
    }

    /// Lets the first `end` bytes of what is held leave as text.
    fn release(&mut self, end: usize, events: &mut Vec<Event>) {
        if end == 0 {
            return;
        }
        let text: String = self.held.drain(..end).collect();
        match events.last_mut() {
            Some(Event::Text(before)) => before.push_str(&text),
            _ => events.push(Event::Text(text)),
        }
    }
}

/// Reads the JSON of a call. Arguments may be missing, null or empty, or be JSON text in a string; some models call
/// them parameters, as the functions on offer do.
fn parse(json: &str) -> Option<ToolCall> {
    let members: BTreeMap<String, &RawValue> = serde_json::from_str(json).ok()?;
    let name = serde_json::from_str(members.get("name")?.get()).ok()?;
    let given = ["arguments", "parameters"].map(|key| members.get(key).map(|value| value.get()));
    let given = given.into_iter().flatten().find(|&value| value != "null").unwrap_or_default();
    let text = serde_json::from_str::<String>(given).unwrap_or_else(|_| given.to_owned());
    let call = ToolCall::new(name, text);
    // Read whole: half a surrogate pair deep inside is text that no reader could take.
    let is_object = serde_json::from_str::<Map<String, Value>>(&call.arguments).is_ok();
    is_object.then_some(call)
}
