//! Continuous batching: which tokens of which requests the next forward pass evaluates.
//!
//! A step is admit, plan, forward, apply. Every running request has pending tokens: one after it drew a
//! token, many while its prompt is read. Requests with one pending token go first, so that decoding
//! never waits for a long prompt; what is left of the token budget is shared out among prompts in order
//! of arrival. When KV blocks run out, the youngest request gives its blocks back and waits; its tokens
//! are kept, so it loses time and nothing else.

use std::collections::VecDeque;
use std::time::Instant;

use model::Vocabulary;

use crate::backend::{Backend, BackendError, Limits};
use crate::batch::{BLOCK, Batch, Output};
use crate::job::{Job, Room};
use crate::kv::KvPool;
use crate::load::Load;
use crate::request::{Bounds, FinishReason, Refusal, Request};
use crate::speculation::Speculation;

/// Bounds of the scheduler.
#[derive(Debug, Clone, Copy)]
pub struct Settings {
    /// Requests that run at once.
    pub max_running: usize,
    /// Tokens a step.
    pub token_budget: usize,
    /// Positions a request, prompt and answer together.
    pub context: usize,
}

/// Names a request to [`Engine::cancel`]; later requests have larger ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub(crate) u64);

/// Runs requests on one backend. Drive it with [`Engine::step`] from one thread.
pub struct Engine {
    backend: Box<dyn Backend>,
    vocabulary: &'static Vocabulary,
    limits: Limits,
    settings: Settings,
    pool: KvPool,
    waiting: VecDeque<Job>,
    running: Vec<Job>,
    next_id: u64,
    /// Batches so far; the difference is what the backend still works on.
    submitted: u64,
    collected: u64,
    /// Counts; the rest is filled in when it is asked for.
    load: Load,
    speculation: Option<Speculation>,
    batch: Batch,
    output: Output,
}

impl Engine {
    /// An engine that owns all of the backend's KV blocks.
    pub fn new(
        backend: Box<dyn Backend>,
        vocabulary: &'static Vocabulary,
        settings: Settings,
    ) -> Self {
        let limits = backend.limits();
        let reachable = limits.context.min(limits.blocks * BLOCK);
        Engine {
            settings: Settings {
                max_running: settings.max_running.clamp(1, limits.rows),
                token_budget: settings.token_budget.clamp(1, limits.tokens),
                context: settings.context.min(reachable),
            },
            pool: KvPool::new(limits.blocks),
            backend,
            vocabulary,
            limits,
            waiting: VecDeque::new(),
            running: Vec::new(),
            next_id: 0,
            submitted: 0,
            collected: 0,
            load: Load::default(),
            speculation: None,
            batch: Batch::default(),
            output: Output::default(),
        }
    }

    /// Lets drafts be checked beside plain decoding. Answers stay the same.
    pub fn speculate(&mut self, mut speculation: Speculation) {
        speculation.set_queue(self.limits.queue);
        self.speculation = Some(speculation);
    }

    /// Positions a request may have.
    pub fn context(&self) -> usize {
        self.settings.context
    }

    /// What a request has to keep to.
    pub fn bounds(&self) -> Bounds {
        Bounds { context: self.settings.context, vocab: self.limits.vocab }
    }

    /// Takes several requests with one prompt, of which the first reads it for all, or says why not and
    /// takes none.
    pub fn submit_choices(&mut self, requests: Vec<Request>) -> Result<Vec<RequestId>, Refusal> {
        requests.iter().try_for_each(|request| self.bounds().check(request))?;
        let mut ids = Vec::with_capacity(requests.len());
        for request in requests {
            let id = self.submit(request)?;
            if let (Some(&leader), Some(job)) = (ids.first(), self.waiting.back_mut()) {
                job.follow(leader);
            }
            ids.push(id);
        }
        Ok(ids)
    }

    /// Takes a request, or says why not; a refused request sends no event.
    pub fn submit(&mut self, mut request: Request) -> Result<RequestId, Refusal> {
        self.bounds().check(&request)?;
        request.max_tokens = request.max_tokens.min(self.settings.context - request.prompt.len());
        self.next_id += 1;
        let id = RequestId(self.next_id);
        self.waiting.push_back(Job::new(id, request, self.vocabulary));
        Ok(id)
    }

    /// Ends a request early; unknown ids are ignored, because it may just have ended by itself.
    pub fn cancel(&mut self, id: RequestId) {
        let jobs = self.running.iter_mut().chain(&mut self.waiting);
        jobs.filter(|job| job.id == id).for_each(|job| job.finish(FinishReason::Cancelled));
    }

    /// Whether there is nothing left to do.
    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty() && self.submitted == self.collected
    }

    /// How full the engine is.
    pub fn load(&self) -> Load {
        Load {
            running: self.running.len(),
            waiting: self.waiting.len(),
            blocks_held: self.pool.held(),
            blocks: self.pool.capacity(),
            steps: self.submitted,
            ..self.load
        }
    }

    /// Submits the next batch and takes the answers of the oldest one. Returns whether there was any:
    /// `false` means that the engine is idle or that every request waits for a slow reader.
    ///
    /// Where the backend queues, a step submits batch N + 1 before it reads batch N: a request whose
    /// next token is still being drawn takes part with a reference to that draw.
    pub fn step(&mut self) -> Result<bool, BackendError> {
        self.sweep();
        self.admit();
        let result = self.advance();
        if let Err(error) = &result {
            self.abandon(error);
        }
        self.sweep();
        result
    }

    fn advance(&mut self) -> Result<bool, BackendError> {
        let mut read = false;
        // A draft follows tokens that are known.
        while self.speculation.as_ref().is_some_and(Speculation::needs_answers) && self.behind() > 0
        {
            self.collect()?;
            read = true;
        }
        if read {
            // Who is owed a token is not planned for: all would sit out, but for those that just came.
            self.sweep();
        }
        self.plan()?;
        let submit = !self.batch.tokens.is_empty();
        if submit {
            self.backend.submit(&self.batch)?;
            self.submitted += 1;
            self.speculation.iter_mut().for_each(|s| s.submitted(&self.batch));
        }
        if self.behind() > 0 && (!submit || self.behind() >= self.limits.queue as u64) {
            self.collect()?;
            read = true;
        }
        if let Some(speculation) = self.speculation.as_mut().filter(|_| !submit && !read) {
            speculation.idle();
        }
        Ok(submit || read)
    }

    /// Batches that were submitted and not read.
    fn behind(&self) -> u64 {
        self.submitted - self.collected
    }

    /// Reads the oldest batch.
    fn collect(&mut self) -> Result<(), BackendError> {
        self.backend.collect(&mut self.output)?;
        self.speculation.iter_mut().for_each(Speculation::collected);
        for job in &mut self.running {
            let verified = job.apply(self.collected, &self.output, &mut self.pool);
            job.sequence.publish(&mut self.pool);
            self.load.drafted += verified.drafted as u64;
            self.load.accepted += verified.accepted as u64;
            self.speculation.iter_mut().for_each(|s| s.verified(job, verified));
        }
        self.collected += 1;
        Ok(())
    }

    /// Delivers what sinks will take, and lets go of jobs that ended.
    fn sweep(&mut self) {
        let now = Instant::now();
        let (pool, speculation) = (&mut self.pool, &mut self.speculation);
        let mut ended = Vec::new();
        let mut keep = |job: &mut Job| {
            job.deliver(now);
            if job.is_over() {
                job.sequence.release(pool);
                ended.push(job.id);
                speculation.iter_mut().for_each(|speculation| speculation.forget(job.id));
            }
            !job.is_gone()
        };
        self.running.retain_mut(&mut keep);
        self.waiting.retain_mut(&mut keep);
        // Those that waited for the prompt of one that ended read it themselves.
        let orphans = self.waiting.iter_mut().filter(|job| job.leader().is_some());
        orphans
            .filter(|job| job.leader().is_some_and(|id| ended.contains(&id)))
            .for_each(Job::go_alone);
    }

    /// Moves waiting requests to the running ones while there are places and blocks, with one block to
    /// spare for each that runs: they grow, and a request that is admitted only to be preempted is read
    /// twice.
    fn admit(&mut self) {
        let ready = |job: &Job| !job.is_over() && !job.is_behind() && job.leader().is_none();
        while let Some(place) = self.waiting.iter().position(ready) {
            if self.running.len() >= self.settings.max_running {
                match self.set_aside() {
                    true => continue,
                    false => return,
                }
            }
            let job = &mut self.waiting[place];
            job.adopt(&mut self.pool);
            let needed = job.sequence.pending().div_ceil(BLOCK) + self.running.len();
            if needed > self.pool.available() && !self.running.is_empty() {
                job.sequence.release(&mut self.pool);
                match self.set_aside() {
                    true => continue,
                    false => return,
                }
            }
            if job.admit() {
                self.load.prefix_queries += job.usage().prompt as u64;
                self.load.prefix_hits += job.usage().cached as u64;
            }
            self.running.extend(self.waiting.remove(place));
        }
    }

    /// Takes blocks and place of a running request whose reader does not keep up, for one that waits. It
    /// goes on, first in the row, once its events are taken. Returns whether there was one.
    fn set_aside(&mut self) -> bool {
        let idle = |job: &Job| job.is_behind() && job.can_be_preempted();
        let Some(index) = self.running.iter().rposition(idle) else { return false };
        let mut job = self.running.remove(index);
        job.preempt(&mut self.pool);
        self.load.preemptions += 1;
        self.waiting.push_front(job);
        true
    }

    /// Fills the batch: requests that decode first, then prompts, each in order of arrival.
    fn plan(&mut self) -> Result<(), BackendError> {
        self.batch.clear();
        let (mut budget, mut rows) = (self.settings.token_budget, self.limits.rows);
        let ready = |&i: &usize| self.running[i].is_ready();
        let mut order: Vec<usize> = (0..self.running.len()).filter(ready).collect();
        order.sort_by_key(|&i| (self.running[i].reads_prompt(), self.running[i].id));
        let drafts = match &mut self.speculation {
            Some(speculation) => speculation.drafts(&self.running, budget.min(rows))?,
            None => Vec::new(),
        };
        for (place, &index) in order.iter().enumerate() {
            // A prompt leaves half of the budget to the ones behind it, so that a short request need
            // not wait until a long one was read.
            let alone = place + 1 == order.len() || !self.running[index].reads_prompt();
            let share = if alone { budget } else { budget.div_ceil(2) };
            while share > 0 && rows > 0 && self.running[index].is_ready() {
                let room = Room { number: self.submitted, budget: share, max_rows: rows };
                let draft = drafts.get(index).map_or(&[][..], Vec::as_slice);
                let job = &mut self.running[index];
                if let Ok((tokens, taken)) =
                    job.schedule(&mut self.pool, &mut self.batch, room, draft)
                {
                    budget -= tokens;
                    rows -= taken + self.fork(index, rows - taken);
                    break;
                }
                if !self.preempt(index) {
                    break;
                }
            }
        }
        for index in (0..self.running.len()).rev() {
            if self.running[index].is_preempted() {
                self.waiting.push_front(self.running.remove(index));
            }
        }
        Ok(())
    }

    /// Starts the choices that waited for the running request at `index` to read their prompt, if it just
    /// did, as far as there are rows and places; the others go on from what the prefix cache has of it.
    /// Returns how many rows they took.
    fn fork(&mut self, index: usize, rows: usize) -> usize {
        let leader = self.running[index].id;
        if !self.running[index].draws_first() {
            return 0;
        }
        let mut taken = 0;
        while let Some(place) = self.waiting.iter().position(|job| job.leader() == Some(leader)) {
            let free = taken < rows && self.running.len() < self.settings.max_running;
            if !free || self.waiting[place].is_over() {
                self.waiting[place].go_alone();
            } else if let Some(mut job) = self.waiting.remove(place) {
                let from = &self.running[index];
                job.fork(from, &mut self.pool, &mut self.batch, self.submitted);
                self.running.push(job);
                taken += 1;
            }
        }
        taken
    }

    /// Takes the blocks of a running request that no batch holds, so that the one at `index` can go on: one
    /// whose reader is behind, or the youngest, which may be that one itself. Returns whether there was one.
    fn preempt(&mut self, index: usize) -> bool {
        let id = self.running[index].id;
        let candidates = self
            .running
            .iter_mut()
            .filter(|job| job.can_be_preempted() && (job.id >= id || job.is_behind()));
        let Some(victim) = candidates.max_by_key(|job| (job.is_behind(), job.id)) else {
            return false;
        };
        victim.preempt(&mut self.pool);
        self.load.preemptions += 1;
        true
    }

    /// After a device fault nothing in the KV blocks can be trusted: every request ends with the error,
    /// and what the backend still answers is thrown away.
    fn abandon(&mut self, error: &BackendError) {
        while self.collected < self.submitted {
            let _ = self.backend.collect(&mut self.output);
            self.collected += 1;
        }
        self.speculation.iter_mut().for_each(Speculation::abandon);
        for job in self.running.iter_mut().chain(&mut self.waiting) {
            job.abandon(error.to_string());
        }
        self.sweep();
        self.pool.forget();
    }
}
