//! Writes a response: an object with items, whole or as it grows.

use serde_json::{Value, json};
use text::chat::ToolCall;

use crate::answer::{EndOfAnswer, Finish, Step, Whole};
use crate::app::new_id;
use crate::error::ApiError;
use crate::reply::{Events, Writer};

/// Writes response objects as items of output.
pub struct Output {
    /// The response without its items.
    object: Value,
    /// Items that are complete.
    items: Vec<Value>,
    open: Option<Open>,
    sequence: usize,
    end: Option<EndOfAnswer>,
}

/// An item of text that is being written.
struct Open {
    kind: Kind,
    id: String,
    text: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Reasoning,
    Message,
}

impl Open {
    fn new(kind: Kind) -> Self {
        let prefix = if kind == Kind::Message { "msg_" } else { "rs_" };
        Open { kind, id: new_id(prefix), text: String::new() }
    }

    fn part(&self, text: &str) -> Value {
        match self.kind {
            Kind::Reasoning => json!({"type": "reasoning_text", "text": text}),
            Kind::Message => json!({
                "type": "output_text", "text": text, "annotations": [], "logprobs": [],
            }),
        }
    }

    fn item(&self, status: &str, content: Vec<Value>) -> Value {
        match self.kind {
            Kind::Reasoning => json!({
                "id": self.id, "type": "reasoning", "summary": [], "content": content,
                "status": status,
            }),
            Kind::Message => json!({
                "id": self.id, "type": "message", "role": "assistant", "content": content,
                "status": status,
            }),
        }
    }

    /// The stem of its events' names.
    fn events(&self) -> &'static str {
        match self.kind {
            Kind::Reasoning => "response.reasoning_text",
            Kind::Message => "response.output_text",
        }
    }
}

fn call_item(id: &str, call_id: &str, name: &str, arguments: &str, status: &str) -> Value {
    json!({
        "id": id, "type": "function_call", "call_id": call_id, "name": name,
        "arguments": arguments, "status": status,
    })
}

impl Output {
    /// A response of which only `object` is known: all but its items and its end.
    pub fn new(object: Value) -> Self {
        Output { object, items: Vec::new(), open: None, sequence: 0, end: None }
    }

    fn emit(&mut self, name: &str, mut data: Value, events: &mut Events) {
        data["type"] = name.into();
        data["sequence_number"] = self.sequence.into();
        self.sequence += 1;
        events.named(name, &data);
    }

    fn grow(&mut self, kind: Kind, text: &str, events: &mut Events) {
        if text.is_empty() {
            return;
        }
        let mut open = match self.open.take() {
            Some(open) if open.kind == kind => open,
            other => {
                self.open = other;
                self.close(events);
                let open = Open::new(kind);
                let index = self.items.len();
                let item = open.item("in_progress", Vec::new());
                let added = json!({"output_index": index, "item": item});
                self.emit("response.output_item.added", added, events);
                let part = json!({
                    "item_id": open.id, "output_index": index, "content_index": 0,
                    "part": open.part(""),
                });
                self.emit("response.content_part.added", part, events);
                open
            }
        };
        open.text.push_str(text);
        let mut delta = json!({
            "item_id": open.id, "output_index": self.items.len(), "content_index": 0, "delta": text,
        });
        if kind == Kind::Message {
            delta["logprobs"] = json!([]);
        }
        self.emit(&format!("{}.delta", open.events()), delta, events);
        self.open = Some(open);
    }

    fn close(&mut self, events: &mut Events) {
        let Some(open) = self.open.take() else { return };
        let index = self.items.len();
        let at = json!({"item_id": open.id, "output_index": index, "content_index": 0});
        let mut done = at.clone();
        done["text"] = open.text.as_str().into();
        if open.kind == Kind::Message {
            done["logprobs"] = json!([]);
        }
        self.emit(&format!("{}.done", open.events()), done, events);
        let part = open.part(&open.text);
        let mut done = at;
        done["part"] = part.clone();
        self.emit("response.content_part.done", done, events);
        // What the end cut off is the last item.
        let item = open.item(self.status(), vec![part]);
        let done = json!({"output_index": index, "item": item});
        self.emit("response.output_item.done", done, events);
        self.items.push(item);
    }

    fn call(&mut self, call: &ToolCall, events: &mut Events) {
        self.close(events);
        let (id, call_id, index) = (new_id("fc_"), new_id("call_"), self.items.len());
        let item =
            |arguments: &str, status| call_item(&id, &call_id, &call.name, arguments, status);
        let added = json!({"output_index": index, "item": item("", "in_progress")});
        self.emit("response.output_item.added", added, events);
        let at = |key: &str| json!({"item_id": id, "output_index": index, "name": call.name, key: call.arguments});
        self.emit("response.function_call_arguments.delta", at("delta"), events);
        self.emit("response.function_call_arguments.done", at("arguments"), events);
        let whole = item(&call.arguments, "completed");
        let done = json!({"output_index": index, "item": whole});
        self.emit("response.output_item.done", done, events);
        self.items.push(whole);
    }

    /// The response as it stands.
    fn response(&self, status: &str) -> Value {
        let mut object = self.object.clone();
        object["status"] = status.into();
        object["output"] = self.items.clone().into();
        if let Some(end) = &self.end {
            if end.finish == Finish::Length {
                object["incomplete_details"] = json!({"reason": "max_output_tokens"});
            }
            let usage = end.usage;
            object["usage"] = json!({
                "input_tokens": usage.prompt,
                "input_tokens_details": {"cached_tokens": usage.cached},
                "output_tokens": usage.generated,
                "output_tokens_details": {"reasoning_tokens": end.reasoning_tokens},
                "total_tokens": usage.prompt + usage.generated,
            });
        }
        object
    }

    fn status(&self) -> &'static str {
        match self.end.as_ref().map(|end| end.finish) {
            Some(Finish::Length) => "incomplete",
            _ => "completed",
        }
    }
}

impl Writer for Output {
    fn begin(&mut self, events: &mut Events) {
        for name in ["response.created", "response.in_progress"] {
            let response = self.response("in_progress");
            self.emit(name, json!({"response": response}), events);
        }
    }

    fn step(&mut self, step: Step, events: &mut Events) {
        self.grow(Kind::Reasoning, &step.reasoning, events);
        self.grow(Kind::Message, &step.content, events);
        step.calls.iter().for_each(|call| self.call(call, events));
        self.end = step.ended.or(self.end.take());
    }

    fn end(&mut self, events: &mut Events) {
        self.close(events);
        let status = self.status();
        let response = self.response(status);
        self.emit(&format!("response.{status}"), json!({"response": response}), events);
    }

    fn fail(&mut self, error: &ApiError, events: &mut Events) {
        let mut response = self.response("failed");
        response["error"] = json!({"code": "server_error", "message": error.message});
        self.emit("response.failed", json!({"response": response}), events);
    }

    fn whole(&mut self, answers: Vec<Whole>) -> Value {
        // The items are put together as in a stream that nobody reads.
        let mut unread = Events::default();
        for answer in answers {
            self.grow(Kind::Reasoning, &answer.reasoning, &mut unread);
            self.grow(Kind::Message, &answer.content, &mut unread);
            answer.calls.iter().for_each(|call| self.call(call, &mut unread));
            self.end = answer.ended;
        }
        self.close(&mut unread);
        self.response(self.status())
    }
}
