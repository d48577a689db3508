//! The one place that turns the engine's events into answers, streamed or whole.

use std::sync::Arc;
use std::time::Instant;

use axum::http::StatusCode;
use engine::request::{Event, FinishReason, Finished, Timings, Usage};
use engine::{Choice, SubmitError};
use text::chat::ToolCall;
use text::thinking::Parts;
use text::tool_calls::Event as Said;
use text::{Begin, Thinking, ToolCalls};
use tokio::sync::mpsc;

use crate::app::{App, ChoiceSink, Engine};
use crate::error::{ApiError, Result};
use crate::guide::{Guide, Rules};
use crate::params::Params;
use crate::record::Record;

/// Events that may wait between the engine and a reader; a slower reader holds up its own request only.
const QUEUE: usize = 64;

/// One answer to generate.
pub struct Ask {
    /// Which of several answers to the same prompt.
    pub choice: usize,
    /// Prompt tokens.
    pub prompt: Vec<u32>,
    /// How to generate.
    pub params: Params,
    /// Alternatives to list beside each token.
    pub top: usize,
    /// Whether to score the prompt's tokens.
    pub score_prompt: bool,
    /// What the answer is held to.
    pub rules: Rules,
    /// Where the answer begins.
    pub begin: Begin,
    /// What its text is taken apart with.
    pub splitter: Splitter,
}

/// Takes the text of an answer apart.
#[derive(Clone, Default)]
pub struct Splitter {
    /// Tells thoughts from what is said, where the model thinks.
    pub thinking: Option<Thinking>,
    /// Takes calls out, where tools are on offer.
    pub calls: Option<ToolCalls>,
    /// Whether nothing behind the first call counts.
    pub one_call: bool,
    /// Whether there was a call.
    pub called: bool,
}

impl Splitter {
    /// Takes more text; `last` if none will follow.
    fn push(&mut self, text: &str, last: bool, step: &mut Step) {
        let mut parts = Parts::default();
        match &mut self.thinking {
            Some(thinking) => {
                thinking.push(text, &mut parts);
                if last {
                    thinking.finish(&mut parts);
                }
            }
            None => parts.content.push_str(text),
        }
        step.reasoning.push_str(&parts.reasoning);
        let mut said = Vec::new();
        match &mut self.calls {
            Some(calls) => {
                calls.push(&parts.content, &mut said);
                if last {
                    calls.finish(&mut said);
                }
            }
            None => said.push(Said::Text(parts.content)),
        }
        for event in said {
            if self.one_call && self.called {
                break;
            }
            match event {
                Said::Text(text) => step.content.push_str(&text),
                Said::Call(call) => {
                    self.called = true;
                    step.calls.push(call);
                }
            }
        }
    }

    fn is_thinking(&self) -> bool {
        self.thinking.as_ref().is_some_and(Thinking::is_inside)
    }
}

/// What one event adds to an answer.
#[derive(Debug, Default)]
pub struct Step {
    /// Which answer.
    pub index: usize,
    /// Scores of the prompt's tokens from the second one on.
    pub prompt: Option<Vec<Choice>>,
    /// The generated token, if there is one.
    pub token: Option<Choice>,
    /// What was thought.
    pub reasoning: String,
    /// What was said, before any calls.
    pub content: String,
    /// Calls that were completed.
    pub calls: Vec<ToolCall>,
    /// The end.
    pub ended: Option<EndOfAnswer>,
}

/// How an answer ended.
#[derive(Debug, Clone)]
pub struct EndOfAnswer {
    /// Which of several answers to the same prompt.
    pub choice: usize,
    /// Why.
    pub finish: Finish,
    /// The stop text that did it.
    pub stop_text: Option<String>,
    /// Counts.
    pub usage: Usage,
    /// How many of the generated tokens were thought.
    pub reasoning_tokens: usize,
    /// Times.
    pub timings: Timings,
}

/// Why an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// The model was done, or a stop text came.
    Stop,
    /// No tokens were left.
    Length,
    /// The model calls functions.
    Calls,
}

/// The answers to one HTTP request as they grow. Dropping it cancels what is unfinished.
pub struct Answers {
    engine: Arc<Engine>,
    record: Arc<Record>,
    events: mpsc::Receiver<(usize, Event)>,
    readers: Vec<Reader>,
    open: usize,
}

/// What is known of one answer.
struct Reader {
    choice: usize,
    /// The field that asked for a format.
    format: Option<String>,
    splitter: Splitter,
    started: Instant,
    last_token: Option<Instant>,
    /// Counts until the engine's own come with the end.
    usage: Usage,
    reasoning_tokens: usize,
    ended: bool,
}

impl Answers {
    /// Hands all asks to the engine.
    pub fn start(
        app: &App,
        engine: &Arc<Engine>,
        record: &Arc<Record>,
        asks: Vec<Ask>,
    ) -> Result<Self> {
        let (sender, events) = mpsc::channel(QUEUE);
        let deadline = app.deadline();
        let wanted = asks.len();
        let refused = |error| match error {
            // Which no waiting would change.
            SubmitError::Busy(places) if places < wanted => {
                ApiError::field("n", &format!("at most {places} answers at once"), wanted)
            }
            error => error.into(),
        };
        // Dropped, should the engine refuse a later prompt, it counts what was handed over before as aborted.
        let mut answers = Answers {
            engine: Arc::clone(engine),
            record: Arc::clone(record),
            events,
            readers: Vec::with_capacity(wanted),
            open: wanted,
        };
        let (mut choices, mut readers) = (Vec::new(), Vec::new());
        let mut asks = asks.into_iter().enumerate().peekable();
        while let Some((index, ask)) = asks.next() {
            let Rules { grammar, budget, one_call } = &ask.rules;
            let guided = grammar.is_some() || budget.is_some() || *one_call;
            let format = grammar.as_ref().map(|grammar| grammar.field.clone());
            let tokenizer = engine.card.tokenizer;
            let end = engine.card.stops[0];
            let guide = guided.then(|| Guide::new(ask.rules, ask.begin, tokenizer, end));
            let constraint = guide.map(|guide| Box::new(guide) as _);
            let sink = Box::new(ChoiceSink { index, events: sender.clone() });
            let usage = Usage { prompt: ask.prompt.len(), ..Usage::default() };
            let mut request =
                ask.params.request(ask.choice, ask.prompt, constraint, deadline, sink);
            if ask.splitter.thinking.is_some() {
                request.stops = request.stops.behind_thought(ask.begin);
            }
            request.top = ask.top;
            request.score_prompt = ask.score_prompt;
            choices.push(request);
            readers.push(Reader {
                choice: ask.choice,
                format,
                splitter: ask.splitter,
                started: Instant::now(),
                last_token: None,
                usage,
                reasoning_tokens: 0,
                ended: false,
            });
            // Choice 0 begins the next prompt.
            if asks.peek().is_none_or(|(_, next)| next.choice == 0) {
                let submitted = engine.service.submit_choices(std::mem::take(&mut choices));
                submitted.map_err(refused)?;
                answers.readers.append(&mut readers);
            }
        }
        Ok(answers)
    }

    /// What happens next; `None` once every answer has ended.
    pub async fn next(&mut self) -> Option<Result<Step>> {
        if self.open == 0 {
            return None;
        }
        let stopped = || ApiError::internal("the engine stopped before the answer was finished");
        match self.events.recv().await {
            Some((index, event)) => Some(self.step(index, event)),
            None => Some(Err(stopped())),
        }
    }

    /// What has already happened, if anything has.
    pub fn ready(&mut self) -> Option<Result<Step>> {
        let (index, event) = self.events.try_recv().ok()?;
        Some(self.step(index, event))
    }

    fn step(&mut self, index: usize, event: Event) -> Result<Step> {
        let mut step = Step { index, ..Step::default() };
        let reader = &mut self.readers[index];
        match event {
            Event::Prompt(scores) => step.prompt = Some(scores),
            Event::Token(token) => {
                let now = Instant::now();
                match reader.last_token.replace(now) {
                    None => self.engine.metrics.first_token(now - reader.started),
                    Some(before) => self.engine.metrics.next_token(now - before),
                }
                reader.usage.generated += 1;
                reader.splitter.push(&token.text, false, &mut step);
                reader.reasoning_tokens += usize::from(reader.splitter.is_thinking());
                step.token = Some(token.choice);
            }
            Event::Finished(finished) => {
                reader.splitter.push(&finished.text, true, &mut step);
                self.open -= 1;
                reader.ended = true;
                let ended = reader.end(finished, &self.engine, &self.record)?;
                step.ended = Some(ended);
            }
        }
        Ok(step)
    }
}

impl Drop for Answers {
    /// Whoever asked has left, or learnt that another answer failed: what is not finished counts as aborted.
    fn drop(&mut self) {
        for reader in self.readers.iter().filter(|reader| !reader.ended) {
            self.engine.metrics.aborted(reader.usage);
            self.record.finished("abort", counted(reader.choice, reader.usage));
        }
    }
}

impl Reader {
    /// Notes the end of an answer, or says why there is none.
    fn end(&self, finished: Finished, engine: &Engine, record: &Record) -> Result<EndOfAnswer> {
        let reason = match &finished.reason {
            FinishReason::Stop if self.splitter.called => "tool_calls",
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
            FinishReason::Deadline => "deadline",
            FinishReason::Cancelled => "abort",
            FinishReason::NoToken | FinishReason::Constraint(_) | FinishReason::Error(_) => "error",
        };
        engine.metrics.finished(reason, &finished, self.started.elapsed());
        record.finished(reason, counted(self.choice, finished.usage));
        let finish = match finished.reason {
            FinishReason::Stop if self.splitter.called => Finish::Calls,
            FinishReason::Stop => Finish::Stop,
            FinishReason::Length => Finish::Length,
            FinishReason::Deadline => {
                let message = "the answer was not finished within the time for one request";
                return Err(ApiError::new(StatusCode::GATEWAY_TIMEOUT, message));
            }
            FinishReason::Cancelled => {
                let message = "the server is shutting down";
                return Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, message));
            }
            FinishReason::NoToken => {
                let message = "logit_bias: expected to leave a token that the required format \
                               allows, found none left to go on with";
                return Err(ApiError {
                    param: Some("logit_bias".into()),
                    ..ApiError::invalid(message)
                });
            }
            FinishReason::Constraint(why) => {
                let message = format!("the required format cannot be followed further: {why}");
                return Err(ApiError { param: self.format.clone(), ..ApiError::invalid(message) });
            }
            FinishReason::Error(why) => return Err(ApiError::internal(why)),
        };
        Ok(EndOfAnswer {
            choice: self.choice,
            finish,
            stop_text: finished.stop_text,
            usage: finished.usage,
            reasoning_tokens: self.reasoning_tokens,
            timings: finished.timings,
        })
    }
}

/// A whole answer.
#[derive(Debug, Default)]
pub struct Whole {
    /// Scores of the prompt's tokens from the second one on.
    pub prompt: Vec<Choice>,
    /// The generated tokens.
    pub tokens: Vec<Choice>,
    /// What was thought.
    pub reasoning: String,
    /// What was said.
    pub content: String,
    /// Calls.
    pub calls: Vec<ToolCall>,
    /// How it ended; always there once the answer is complete.
    pub ended: Option<EndOfAnswer>,
}

impl Whole {
    fn add(&mut self, step: Step) {
        self.prompt.extend(step.prompt.unwrap_or_default());
        self.tokens.extend(step.token);
        self.reasoning.push_str(&step.reasoning);
        self.content.push_str(&step.content);
        self.calls.extend(step.calls);
        self.ended = step.ended.or(self.ended.take());
    }
}

impl Answers {
    /// Waits for all answers.
    pub async fn whole(mut self) -> Result<Vec<Whole>> {
        let mut answers: Vec<Whole> = self.readers.iter().map(|_| Whole::default()).collect();
        while let Some(step) = self.next().await {
            let step = step?;
            answers[step.index].add(step);
        }
        Ok(answers)
    }
}

/// What an answer adds to its request's counts: the prompt of several choices counts once.
fn counted(choice: usize, usage: Usage) -> Usage {
    if choice == 0 { usage } else { Usage { prompt: 0, cached: 0, ..usage } }
}

/// Counts of several answers.
pub fn total(ends: &[EndOfAnswer]) -> (Usage, usize) {
    let mut usage = Usage::default();
    for end in ends {
        let more = counted(end.choice, end.usage);
        usage.prompt += more.prompt;
        usage.cached += more.cached;
        usage.generated += more.generated;
    }
    (usage, ends.iter().map(|end| end.reasoning_tokens).sum())
}
