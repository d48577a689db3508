//! Speculation: tokens that are guessed cheaply and checked many a forward pass.
//!
//! A draft is evaluated behind a request's last token, and every row of that run draws the token that
//! plain decoding would draw there: the noise of a draw is a function of (seed, position, token), so the
//! row behind a right draft is the very row of plain decoding, with the same logits, penalties, mask and
//! noise. Draws are kept up to the first that differs from the draft, which is kept too. The answer is
//! therefore plain decoding's own, token for token, sampled or greedy; a draft decides how soon it
//! comes.
//!
//! [`Drafter`]s guess: [`Ngram`] from the text itself, [`DraftModel`] with a smaller model. `Gate`
//! decides how long drafts are, and whether they pay at all.

mod draft_model;
mod gate;
mod ngram;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use crate::backend::BackendError;
use crate::batch::Batch;
use crate::engine::RequestId;
use crate::job::{Job, Verified};
use crate::sampling::SamplingParams;

pub use draft_model::DraftModel;
use gate::{Chance, Gate, LONGEST, Offer};
pub use ngram::Ngram;

/// Guesses what follows the texts of requests.
pub trait Drafter: Send {
    /// How many tokens, at most `most`, it could guess to follow the text of a request.
    fn reach(&mut self, id: RequestId, tokens: &[u32], most: usize) -> usize;

    /// Whether guessing costs next to nothing, so that guesses can be looked at without being checked.
    fn is_free(&self) -> bool {
        false
    }

    /// Guesses; one draft for each ask, which may be shorter than asked.
    fn draft(&mut self, asks: &[Ask<'_>]) -> Result<Vec<Vec<u32>>, BackendError>;

    /// A request has ended.
    fn forget(&mut self, id: RequestId);
}

/// A text to guess the continuation of.
#[derive(Debug, Clone, Copy)]
pub struct Ask<'a> {
    /// Whose it is.
    pub id: RequestId,
    /// Prompt and output.
    pub tokens: &'a [u32],
    /// How many of them are the prompt.
    pub prompt: usize,
    /// Tokens that are wanted.
    pub most: usize,
    /// How the request draws.
    pub sampling: &'a SamplingParams,
    /// Added to the logits of these tokens.
    pub bias: &'a Arc<[(u32, f32)]>,
}

/// The engine's side of speculation: who guesses, how much, and what came of it.
pub struct Speculation {
    drafter: Box<dyn Drafter>,
    /// Length of drafts that does not change; measured if there is none.
    fixed: Option<usize>,
    gate: Gate,
    chances: HashMap<RequestId, Chance>,
    /// Guesses that are not checked, with their places: the answer will show whether they were right.
    watched: Vec<(RequestId, usize, u32)>,
    /// Whether the backend takes a batch before the last one was read.
    pipelined: bool,
    /// Steps that were submitted and not yet read.
    steps: VecDeque<Step>,
    /// When the last step was read, if the backend has been busy since.
    busy_since: Option<Instant>,
    /// Whether the next step took the time that guessing takes.
    guessed: bool,
}

#[derive(Debug, Clone, Copy)]
struct Step {
    tokens: usize,
    drafting: bool,
    /// Whether its time says what decoding costs.
    counts: bool,
}

impl Speculation {
    /// Drafts by `drafter`, as long as pays.
    pub fn new(drafter: Box<dyn Drafter>) -> Self {
        Speculation {
            drafter,
            fixed: None,
            gate: Gate::new(),
            chances: HashMap::new(),
            watched: Vec::new(),
            pipelined: false,
            steps: VecDeque::new(),
            busy_since: None,
            guessed: false,
        }
    }

    /// Drafts of `length` tokens wherever they can be had, whether they pay or not.
    pub fn always(self, length: usize) -> Self {
        Speculation { fixed: Some(length), ..self }
    }

    /// Tells which kind of backend it works for.
    pub(crate) fn set_queue(&mut self, batches: usize) {
        self.pipelined = batches > 1;
    }

    /// Whether every submitted step is to be read before the next is planned: a draft follows tokens
    /// that are known.
    pub(crate) fn needs_answers(&self) -> bool {
        !self.pipelined || self.fixed.is_some() || self.gate.is_open()
    }

    /// A draft for each job, most of them empty. `room` is how many tokens and rows a step has.
    pub(crate) fn drafts(
        &mut self,
        jobs: &[Job],
        room: usize,
    ) -> Result<Vec<Vec<u32>>, BackendError> {
        self.guessed = false;
        let mut drafts = vec![Vec::new(); jobs.len()];
        let ready = || jobs.iter().filter(|job| job.is_ready());
        // A step that reads prompts is bound by arithmetic: a draft would take a prompt token's place.
        if ready().any(Job::reads_prompt) {
            return Ok(drafts);
        }
        if !self.needs_answers() {
            self.gate.wait();
            return Ok(drafts);
        }
        let (mut wanted, mut offers) = (Vec::new(), Vec::new());
        for (index, job) in jobs.iter().enumerate() {
            let most = job.draftable().min(self.fixed.unwrap_or(LONGEST));
            if most == 0 {
                continue;
            }
            let reach = self.drafter.reach(job.id, job.sequence.tokens(), most);
            if reach > 0 {
                wanted.push(index);
                let chance = self.chances.entry(job.id).or_default().value();
                offers.push(Offer { chance, reach });
            }
        }
        let sequences = ready().count();
        let room = room.saturating_sub(sequences);
        let depth = match self.fixed {
            Some(length) if offers.len() * length > room => room / offers.len(),
            Some(length) => length,
            None => self.gate.depth(sequences, &offers, room),
        };
        let watch = depth == 0 && self.drafter.is_free();
        if depth == 0 && !watch {
            self.chances.values_mut().for_each(Chance::doubt);
            return Ok(drafts);
        }
        let most = |offer: &Offer| if watch { 1 } else { depth.min(offer.reach) };
        let ask = |(&index, offer): (&usize, &Offer)| jobs[index].ask(most(offer));
        let asks: Vec<Ask<'_>> = wanted.iter().zip(&offers).map(ask).collect();
        if watch {
            let guesses = self.drafter.draft(&asks)?;
            let first = |(ask, draft): (&Ask<'_>, Vec<u32>)| {
                Some((ask.id, ask.tokens.len(), *draft.first()?))
            };
            self.watched = asks.iter().zip(guesses).filter_map(first).collect();
            return Ok(drafts);
        }
        self.guessed = true;
        for (index, draft) in wanted.iter().zip(self.drafter.draft(&asks)?) {
            drafts[*index] = draft;
        }
        Ok(drafts)
    }

    /// A step was submitted.
    pub(crate) fn submitted(&mut self, batch: &Batch) {
        self.busy_since.get_or_insert_with(Instant::now);
        let (tokens, rows) = (batch.tokens.len(), batch.rows.len());
        let drafted = self.guessed && rows > batch.sequences();
        let drafting = drafted || (self.pipelined && self.needs_answers());
        // Where every token has its row, all requests decode.
        let counts = tokens == rows && (drafted || !self.guessed);
        self.steps.push_back(Step { tokens, drafting, counts });
    }

    /// The oldest step was read.
    pub(crate) fn collected(&mut self) {
        let now = Instant::now();
        let (step, since) = (self.steps.pop_front(), self.busy_since.replace(now));
        if let (Some(Step { tokens, drafting, counts: true }), Some(since)) = (step, since) {
            self.gate.learn(tokens, drafting, (now - since).as_secs_f64());
        }
    }

    /// Nothing was to be done: the time until the next step is nobody's.
    pub(crate) fn idle(&mut self) {
        self.busy_since = None;
    }

    /// What came of a request's draft, or of a guess that was only watched.
    pub(crate) fn verified(&mut self, job: &Job, verified: Verified) {
        let chance = self.chances.entry(job.id).or_default();
        if verified.proposed > 0 {
            chance.learn(verified.proposed, verified.accepted);
        }
        if let Some(found) = self.watched.iter().position(|&(id, ..)| id == job.id) {
            let (_, place, guess) = self.watched.swap_remove(found);
            let said = job.sequence.tokens().get(place);
            chance.learn(1, usize::from(said == Some(&guess)));
        }
    }

    /// A request has ended.
    pub(crate) fn forget(&mut self, id: RequestId) {
        self.chances.remove(&id);
        self.drafter.forget(id);
    }

    /// The steps that were submitted failed.
    pub(crate) fn abandon(&mut self) {
        self.steps.clear();
        self.busy_since = None;
    }
}
