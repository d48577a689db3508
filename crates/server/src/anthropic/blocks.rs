//! Writes a message as blocks of content, whole or as it grows.

use serde_json::{Value, json};
use text::chat::ToolCall;

use crate::answer::{EndOfAnswer, Finish, Step, Whole};
use crate::app::new_id;
use crate::error::ApiError;
use crate::reply::{Events, Writer};

/// Writes messages as blocks of content.
pub struct Blocks {
    id: String,
    model: String,
    prompt: usize,
    /// Kind of the block that is being written.
    open: Option<&'static str>,
    /// Number of the next block.
    next: usize,
    end: Option<EndOfAnswer>,
}

impl Blocks {
    /// A message of which nothing is written yet, in answer to so many tokens.
    pub fn new(model: String, prompt: usize) -> Self {
        Blocks { id: new_id("msg_"), model, prompt, open: None, next: 0, end: None }
    }

    fn object(&self, content: Vec<Value>) -> Value {
        let (reason, stop) = self
            .end
            .as_ref()
            .map_or((Value::Null, None), |end| (stop_reason(end).into(), end.stop_text.as_deref()));
        json!({
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": self.usage(),
        })
    }

    fn usage(&self) -> Value {
        let (cached, generated) =
            self.end.as_ref().map_or((0, 0), |end| (end.usage.cached, end.usage.generated));
        json!({
            "input_tokens": self.prompt - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": generated,
        })
    }

    fn close(&mut self, events: &mut Events) {
        if self.open.take().is_some() {
            let index = self.next - 1;
            let data = json!({"type": "content_block_stop", "index": index});
            events.named("content_block_stop", &data);
        }
    }

    /// Begins a block, unless one of this kind is open.
    fn ensure(&mut self, kind: &'static str, block: Value, events: &mut Events) {
        if self.open == Some(kind) {
            return;
        }
        self.close(events);
        let data =
            json!({"type": "content_block_start", "index": self.next, "content_block": block});
        events.named("content_block_start", &data);
        self.open = Some(kind);
        self.next += 1;
    }

    fn delta(&self, delta: Value, events: &mut Events) {
        let data = json!({"type": "content_block_delta", "index": self.next - 1, "delta": delta});
        events.named("content_block_delta", &data);
    }
}

fn stop_reason(end: &EndOfAnswer) -> &'static str {
    match end.finish {
        Finish::Stop if end.stop_text.is_some() => "stop_sequence",
        Finish::Stop => "end_turn",
        Finish::Length => "max_tokens",
        Finish::Calls => "tool_use",
    }
}

fn call_id() -> String {
    new_id("toolu_")
}

/// The input of a call as an object; the model's JSON was checked when the call was read.
fn input(call: &ToolCall) -> Value {
    serde_json::from_str(&call.arguments).unwrap_or_else(|_| json!({}))
}

impl Writer for Blocks {
    fn begin(&mut self, events: &mut Events) {
        let data = json!({"type": "message_start", "message": self.object(Vec::new())});
        events.named("message_start", &data);
    }

    fn step(&mut self, step: Step, events: &mut Events) {
        if !step.reasoning.is_empty() {
            let block = json!({"type": "thinking", "thinking": "", "signature": ""});
            self.ensure("thinking", block, events);
            self.delta(json!({"type": "thinking_delta", "thinking": step.reasoning}), events);
        }
        if !step.content.is_empty() {
            self.ensure("text", json!({"type": "text", "text": ""}), events);
            self.delta(json!({"type": "text_delta", "text": step.content}), events);
        }
        for call in &step.calls {
            self.close(events);
            let block =
                json!({"type": "tool_use", "id": call_id(), "name": call.name, "input": {}});
            self.ensure("tool_use", block, events);
            let delta = json!({"type": "input_json_delta", "partial_json": call.arguments});
            self.delta(delta, events);
            self.close(events);
        }
        self.end = step.ended.or(self.end.take());
    }

    fn end(&mut self, events: &mut Events) {
        self.close(events);
        let end = self.object(Vec::new());
        let delta = json!({
            "type": "message_delta",
            "delta": {"stop_reason": end["stop_reason"], "stop_sequence": end["stop_sequence"]},
            "usage": end["usage"],
        });
        events.named("message_delta", &delta);
        events.named("message_stop", &json!({"type": "message_stop"}));
    }

    fn fail(&mut self, error: &ApiError, events: &mut Events) {
        events.named("error", &error.anthropic());
    }

    fn whole(&mut self, answers: Vec<Whole>) -> Value {
        let mut content = Vec::new();
        for answer in answers {
            if !answer.reasoning.is_empty() {
                content.push(json!({
                    "type": "thinking", "thinking": answer.reasoning, "signature": "",
                }));
            }
            if !answer.content.is_empty() {
                content.push(json!({"type": "text", "text": answer.content}));
            }
            content.extend(answer.calls.iter().map(|call| {
                json!({"type": "tool_use", "id": call_id(), "name": call.name, "input": input(call)})
            }));
            self.end = answer.ended;
        }
        self.object(content)
    }
}
