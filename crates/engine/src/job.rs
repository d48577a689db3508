//! A request on its way through the engine: its tokens, its text and what it still has to deliver.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use model::Vocabulary;
use text::{Decoder, StopMatcher};

use crate::batch::{Answer, Batch, Choice, Output, Row, Want};
use crate::engine::RequestId;
use crate::kv::{Exhausted, KvPool};
use crate::request::{Event, FinishReason, Finished, Request, SinkError, Timings, Token, Usage};
use crate::sampling::Sample;
use crate::sequence::Sequence;

/// See the module.
pub struct Job {
    pub id: RequestId,
    pub sequence: Sequence,
    request: Request,
    prompt: usize,
    usage: Usage,
    decoder: Decoder,
    stops: StopMatcher,
    prompt_scores: Vec<Choice>,
    /// What this step's batch holds of the job.
    planned: Option<Planned>,
    /// Events that the sink has not taken yet.
    outbox: VecDeque<Event>,
    stage: Stage,
    submitted: Instant,
    admitted: Option<Instant>,
    first_token: Option<Instant>,
    last_token: Option<Instant>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Has work to do.
    Active,
    /// Gave its blocks back; goes to the waiting ones after this plan.
    Preempted,
    /// Only its events are left.
    Over,
}

#[derive(Debug, Clone, Copy)]
struct Planned {
    tokens: usize,
    first_row: usize,
    /// Rows that score the prompt; a row that draws may follow.
    scores: usize,
    draws: bool,
}

impl Job {
    /// A job that has not run yet.
    pub fn new(id: RequestId, mut request: Request, vocabulary: &'static Vocabulary) -> Self {
        let prompt = std::mem::take(&mut request.prompt);
        let mut job = Job {
            id,
            prompt: prompt.len(),
            usage: Usage { prompt: prompt.len(), ..Usage::default() },
            sequence: Sequence::new(prompt),
            decoder: Decoder::new(vocabulary, true),
            stops: StopMatcher::new(&request.stop_texts),
            prompt_scores: Vec::new(),
            planned: None,
            outbox: VecDeque::new(),
            stage: Stage::Active,
            submitted: Instant::now(),
            admitted: None,
            first_token: None,
            last_token: None,
            request,
        };
        if job.request.max_tokens == 0 && !job.request.score_prompt {
            job.finish(FinishReason::Length);
        }
        job
    }

    /// Whether the next step may evaluate tokens of it: it has not ended and its reader keeps up.
    pub fn is_ready(&self) -> bool {
        self.stage == Stage::Active && self.outbox.is_empty()
    }

    /// Whether several tokens are pending, a prompt as a rule.
    pub fn reads_prompt(&self) -> bool {
        self.sequence.pending() > 1
    }

    /// Whether it has ended; events may still be undelivered.
    pub fn is_over(&self) -> bool {
        self.stage == Stage::Over
    }

    /// Whether it has ended and everything was delivered.
    pub fn is_gone(&self) -> bool {
        self.is_over() && self.outbox.is_empty()
    }

    /// Whether its blocks can be taken away now.
    pub fn can_be_preempted(&self) -> bool {
        self.stage == Stage::Active && self.planned.is_none()
    }

    /// Whether it lost its blocks in this plan.
    pub fn is_preempted(&self) -> bool {
        self.stage == Stage::Preempted
    }

    /// Counts so far.
    pub fn usage(&self) -> Usage {
        self.usage
    }

    /// Tokens in this step's batch.
    pub fn planned_tokens(&self) -> usize {
        self.planned.map_or(0, |p| p.tokens)
    }

    /// Answer rows in this step's batch.
    pub fn planned_rows(&self) -> usize {
        self.planned.map_or(0, |p| p.scores + usize::from(p.draws))
    }

    /// Takes over what the prefix cache has of its tokens. A prompt that is to be scored needs its
    /// logits, so it is evaluated whole.
    pub fn adopt(&mut self, pool: &mut KvPool) {
        if !self.request.score_prompt {
            self.sequence.adopt(pool);
        }
    }

    /// Starts it, or starts it again after a preemption. Returns whether this is the first time.
    pub fn admit(&mut self) -> bool {
        self.stage = Stage::Active;
        let first = self.admitted.is_none();
        if first {
            self.admitted = Some(Instant::now());
            self.usage.cached = self.sequence.evaluated();
        }
        first
    }

    /// Gives all blocks back; the tokens stay and are evaluated again later.
    pub fn preempt(&mut self, pool: &mut KvPool) {
        self.sequence.release(pool);
        self.prompt_scores.clear();
        self.stage = Stage::Preempted;
    }

    /// Puts at most `budget` pending tokens and `max_rows` rows into the batch.
    pub fn schedule(
        &mut self,
        pool: &mut KvPool,
        batch: &mut Batch,
        budget: usize,
        max_rows: usize,
    ) -> Result<(), Exhausted> {
        // Another request may have published what comes next since the last step.
        self.adopt(pool);
        let scoring = self.request.score_prompt && self.usage.generated == 0;
        let limit = if scoring { budget.min(max_rows) } else { budget };
        let count = self.sequence.pending().min(limit);
        let start = self.sequence.evaluated();
        let first = self.sequence.schedule(pool, batch, count)?;
        let first_row = batch.rows.len();
        if scoring {
            let top = self.request.top;
            let targets = self.sequence.tokens()[start + 1..].iter().take(count);
            batch.rows.extend(
                targets.enumerate().map(|(i, &target)| Row {
                    token: first + i,
                    want: Want::Score { target, top },
                }),
            );
        }
        let scores = batch.rows.len() - first_row;
        let draws = self.sequence.pending() == 0 && self.request.max_tokens > 0;
        if draws {
            let sample = self.sample()?;
            batch.rows.push(Row { token: first + count - 1, want: Want::Sample(sample) });
        }
        self.planned = Some(Planned { tokens: count, first_row, scores, draws });
        Ok(())
    }

    /// The draw that follows the last token.
    fn sample(&mut self) -> Result<Box<Sample>, Exhausted> {
        let params = self.request.sampling.clone();
        let mask = match self.request.constraint.as_mut().map(|c| c.mask()) {
            None => None,
            Some(Ok(mask)) => mask,
            Some(Err(why)) => {
                self.finish(FinishReason::Error(why));
                None
            }
        };
        let tokens = self.sequence.tokens();
        Ok(Box::new(Sample {
            history: if params.penalises() { tokens.to_vec() } else { Vec::new() },
            params,
            position: tokens.len() as u32,
            bias: Arc::clone(&self.request.bias),
            mask,
            prompt: self.prompt,
            top: self.request.top,
        }))
    }

    /// Takes this step's answers.
    pub fn apply(&mut self, output: &Output) {
        let Some(planned) = self.planned.take() else { return };
        let answers = output.answers.get(planned.first_row..).unwrap_or_default();
        for answer in answers.iter().take(planned.scores + usize::from(planned.draws)) {
            if self.is_over() {
                return;
            }
            match answer {
                Answer::Choice(choice) if self.prompt_scores.len() < self.unscored() => {
                    self.prompt_scores.push(choice.clone());
                }
                Answer::Choice(choice) => self.take_token(choice.clone()),
                Answer::Logits(_) | Answer::NotFinite => {
                    let why = "the model's output is not finite".to_string();
                    self.finish(FinishReason::Error(why));
                }
            }
        }
        if self.request.score_prompt && self.sequence.pending() == 0 && !self.is_over() {
            self.deliver_scores();
            self.finish(FinishReason::Length);
        }
    }

    /// Prompt tokens that are to be scored.
    fn unscored(&self) -> usize {
        if self.request.score_prompt && self.usage.generated == 0 { self.prompt - 1 } else { 0 }
    }

    fn deliver_scores(&mut self) {
        if self.usage.generated == 0 && self.request.score_prompt {
            self.outbox.push_back(Event::Prompt(std::mem::take(&mut self.prompt_scores)));
        }
    }

    /// Handles one drawn token: stop, text, length.
    fn take_token(&mut self, choice: Choice) {
        self.deliver_scores();
        let now = Instant::now();
        self.first_token.get_or_insert(now);
        self.last_token = Some(now);
        let token = choice.token;
        if self.request.stop_tokens.contains(&token) {
            return self.finish(FinishReason::Stop);
        }
        if let Some(Err(why)) = self.request.constraint.as_mut().map(|c| c.accept(token)) {
            return self.finish(FinishReason::Error(why));
        }
        self.usage.generated += 1;
        self.sequence.append(&[token]);
        let mut text = String::new();
        self.decoder.push(token, &mut text);
        let text = self.stops.push(&text);
        self.outbox.push_back(Event::Token(Token { choice, text }));
        if self.stops.matched() {
            self.finish(FinishReason::Stop);
        } else if self.usage.generated == self.request.max_tokens {
            self.finish(FinishReason::Length);
        }
    }

    /// Ends the job; text that was held back leaves with the last event.
    pub fn finish(&mut self, reason: FinishReason) {
        if self.is_over() {
            return;
        }
        let mut text = String::new();
        if !self.stops.matched() {
            self.decoder.finish(&mut text);
            text = self.stops.push(&text) + &self.stops.finish();
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
                    self.outbox.push_front(event);
                    return;
                }
                Err(SinkError::Closed) => {
                    self.stage = Stage::Over;
                    self.outbox.clear();
                }
            }
        }
    }
}
