//! A request on its way through the engine: its tokens, its text and what it still has to deliver.

mod choices;
mod delivery;
mod drafts;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use model::Vocabulary;
use text::{Decoder, StopStrings};

use crate::batch::{Answer, Batch, Choice, Output, Row, Want};
use crate::engine::RequestId;
use crate::kv::{Exhausted, KvPool};
use crate::request::{Event, FinishReason, Request, Token, Usage};
use crate::sampling::Sample;
use crate::sequence::Sequence;

pub use drafts::Verified;

/// See the module.
pub struct Job {
    pub id: RequestId,
    pub sequence: Sequence,
    request: Request,
    prompt: usize,
    usage: Usage,
    decoder: Decoder,
    stops: StopStrings,
    /// The stop text that ended the answer; nothing leaves any more.
    stopped: Option<String>,
    prompt_scores: Vec<Choice>,
    /// What the submitted batches hold of the job, oldest first.
    planned: VecDeque<Planned>,
    /// Events that the sink has not taken yet.
    outbox: VecDeque<Event>,
    stage: Stage,
    /// Whose prompt it shares and waits for, as another choice of the same request.
    leader: Option<RequestId>,
    /// Since when its reader has left events lying.
    behind: Option<Instant>,
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

/// What a batch still has room for.
#[derive(Debug, Clone, Copy)]
pub struct Room {
    /// Number of the batch.
    pub number: u64,
    /// Tokens.
    pub budget: usize,
    /// Rows.
    pub max_rows: usize,
}

#[derive(Debug)]
struct Planned {
    /// Number of the batch.
    batch: u64,
    first_row: usize,
    /// Rows that score the prompt; a row that draws may follow.
    scores: usize,
    draws: bool,
    /// Tokens behind the last known one; behind each is another row that draws.
    drafts: Vec<u32>,
    /// How many there were before some were cut off.
    proposed: usize,
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
            stops: std::mem::take(&mut request.stops),
            stopped: None,
            prompt_scores: Vec::new(),
            planned: VecDeque::new(),
            outbox: VecDeque::new(),
            stage: Stage::Active,
            leader: None,
            behind: None,
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

    /// Whether the next batch may hold tokens of it: it has not ended, its reader keeps up, and there is
    /// a token to evaluate or one that the device is drawing.
    pub fn is_ready(&self) -> bool {
        self.stage == Stage::Active
            && self.outbox.is_empty()
            && (self.sequence.pending() > 0 || self.drawing().is_some())
    }

    /// The row of the last submitted batch that draws the next token, if the host need not see that
    /// token before the one after it can be drawn.
    fn drawing(&self) -> Option<usize> {
        let last = self.planned.back().filter(|p| p.draws && p.drafts.is_empty())?;
        let draws = self.planned.iter().filter(|planned| planned.draws).count();
        let blind = self.request.constraint.is_none() && !self.request.sampling.penalises();
        let wanted = self.usage.generated + draws < self.request.max_tokens;
        (blind && wanted).then_some(last.first_row + last.scores)
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
        self.stage == Stage::Active && self.planned.is_empty()
    }

    /// Whether it lost its blocks in this plan.
    pub fn is_preempted(&self) -> bool {
        self.stage == Stage::Preempted
    }

    /// Counts so far.
    pub fn usage(&self) -> Usage {
        self.usage
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

    /// Puts tokens and rows into the batch, `draft` among them if there are blocks for it; returns how
    /// many of each.
    pub fn schedule(
        &mut self,
        pool: &mut KvPool,
        batch: &mut Batch,
        room: Room,
        draft: &[u32],
    ) -> Result<(usize, usize), Exhausted> {
        let Room { number, budget, max_rows } = room;
        if !draft.is_empty()
            && let Some(count) = self.schedule_draft(pool, batch, number, draft)
        {
            return Ok((count, count));
        }
        if self.sequence.pending() == 0
            && let Some(row) = self.drawing()
        {
            let token = self.sequence.schedule_drawn(pool, batch, row)?;
            return Ok(self.plan(batch, number, 1, batch.rows.len(), Some(token)));
        }
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
        let draws = self.sequence.pending() == 0 && self.request.max_tokens > 0;
        let last = draws.then_some(first + count - 1);
        Ok(self.plan(batch, number, count, first_row, last))
    }

    /// Adds the row that draws, if there is to be one, and notes what the batch holds.
    fn plan(
        &mut self,
        batch: &mut Batch,
        number: u64,
        tokens: usize,
        first_row: usize,
        draw_at: Option<usize>,
    ) -> (usize, usize) {
        let scores = batch.rows.len() - first_row;
        if let Some(token) = draw_at {
            let mask = match self.request.constraint.as_mut().map(|constraint| constraint.mask()) {
                None => None,
                Some(Ok(mask)) => mask,
                Some(Err(why)) => {
                    self.finish(FinishReason::Constraint(why));
                    None
                }
            };
            if mask.as_ref().is_some_and(|mask| !self.request.leaves_a_token(mask)) {
                self.finish(FinishReason::NoToken);
            }
            let sample = self.sample(&[], self.sequence.evaluated(), mask);
            batch.rows.push(Row { token, want: Want::Sample(Box::new(sample)) });
        }
        self.planned.push_back(Planned {
            batch: number,
            first_row,
            scores,
            draws: draw_at.is_some(),
            drafts: Vec::new(),
            proposed: 0,
        });
        (tokens, batch.rows.len() - first_row)
    }

    /// The draw at `position`, behind the known tokens and `drafts`.
    fn sample(&self, drafts: &[u32], position: usize, mask: Option<Arc<[u32]>>) -> Sample {
        let params = self.request.sampling.clone();
        let history = || [self.sequence.tokens(), drafts].concat();
        Sample {
            history: if params.penalises() { history() } else { Vec::new() },
            params,
            position: position as u32,
            bias: Arc::clone(&self.request.bias),
            mask,
            prompt: self.prompt,
            top: self.request.top,
        }
    }

    /// Forgets what was submitted: the batches failed.
    pub fn abandon(&mut self, why: String) {
        self.planned.clear();
        self.finish(FinishReason::Error(why));
    }

    /// Takes its answers of batch `number`, which is the oldest that was submitted.
    pub fn apply(&mut self, number: u64, output: &Output, pool: &mut KvPool) -> Verified {
        let Some(planned) = self.planned.pop_front_if(|planned| planned.batch == number) else {
            return Verified::default();
        };
        let draws = if planned.draws { planned.drafts.len() + 1 } else { 0 };
        let answers = output.answers.get(planned.first_row..).unwrap_or_default();
        let drafted = planned.drafts.len();
        self.usage.drafted += drafted;
        let mut accepted = 0;
        for (row, answer) in answers.iter().take(planned.scores + draws).enumerate() {
            // A token drawn after the answer ended, or behind a wrong draft, is nobody's.
            if self.is_over() || row > planned.scores + accepted {
                break;
            }
            match answer {
                Answer::Choice(choice) if row < planned.scores => {
                    self.prompt_scores.push(choice.clone());
                }
                Answer::Choice(choice) => {
                    let right = planned.drafts.get(accepted) == Some(&choice.token);
                    accepted += usize::from(right);
                    self.usage.accepted += usize::from(right);
                    self.take_token(choice.clone());
                }
                Answer::Logits(_) | Answer::NotFinite => {
                    let why = "the model's output is not finite".to_string();
                    self.finish(FinishReason::Error(why));
                }
            }
        }
        if drafted > 0 {
            self.sequence.rewind(pool);
        }
        let read = self.sequence.pending() == 0 && self.planned.is_empty();
        if self.request.max_tokens == 0 && read && !self.is_over() {
            self.deliver_scores();
            self.finish(FinishReason::Length);
        }
        Verified { proposed: planned.proposed, drafted, accepted }
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
            return self.finish(FinishReason::Constraint(why));
        }
        self.usage.generated += 1;
        self.sequence.append(&[token]);
        let (mut decoded, mut text) = (String::new(), String::new());
        self.decoder.push(token, &mut decoded);
        self.stopped = self.stops.push(&decoded, &mut text).map(str::to_owned);
        self.outbox.push_back(Event::Token(Token { choice, text }));
        if self.stopped.is_some() {
            self.finish(FinishReason::Stop);
        } else if self.usage.generated == self.request.max_tokens {
            self.finish(FinishReason::Length);
        }
    }
}
