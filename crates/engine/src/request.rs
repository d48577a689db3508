//! What is asked of an [`Engine`](crate::Engine), and what comes back.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, TrySendError};
use std::time::{Duration, Instant};

use text::StopStrings;

use crate::batch::Choice;
use crate::sampling::SamplingParams;

/// One completion to generate.
pub struct Request {
    /// Prompt tokens; at least one.
    pub prompt: Vec<u32>,
    /// Tokens to generate at most; the context bounds it further.
    pub max_tokens: usize,
    /// How to draw.
    pub sampling: SamplingParams,
    /// Added to the logits of these tokens.
    pub bias: Arc<[(u32, f32)]>,
    /// Tokens that end the answer; they are counted but give no text.
    pub stop_tokens: Vec<u32>,
    /// Texts that end the answer; neither they nor anything after them is emitted.
    pub stops: StopStrings,
    /// Alternatives to list beside each token.
    pub top: usize,
    /// Whether to score the prompt's own tokens first.
    pub score_prompt: bool,
    /// What the answer must look like, if it must.
    pub constraint: Option<Box<dyn Constraint>>,
    /// When to give up.
    pub deadline: Option<Instant>,
    /// Where events go.
    pub sink: Box<dyn Sink>,
}

impl Request {
    /// A greedy request without limits of its own: no stops, no alternatives, up to the context.
    pub fn new(prompt: Vec<u32>, sink: Box<dyn Sink>) -> Self {
        Request {
            prompt,
            max_tokens: usize::MAX,
            sampling: SamplingParams::default(),
            bias: Arc::new([]),
            stop_tokens: Vec::new(),
            stops: StopStrings::default(),
            top: 0,
            score_prompt: false,
            constraint: None,
            deadline: None,
            sink,
        }
    }

    /// Whether the bias leaves any of the tokens that a mask allows.
    pub(crate) fn leaves_a_token(&self, mask: &[u32]) -> bool {
        let mut left = mask.to_vec();
        for &(token, bias) in self.bias.iter() {
            if bias == f32::NEG_INFINITY
                && let Some(word) = left.get_mut(token as usize / 32)
            {
                *word &= !(1 << (token % 32));
            }
        }
        left.iter().any(|&word| word != 0)
    }
}

/// Restricts an answer token by token, e.g. to a grammar.
pub trait Constraint: Send {
    /// Tokens allowed next, as [`Sample::mask`](crate::Sample::mask) wants them; `None` allows all.
    fn mask(&mut self) -> Result<Option<Arc<[u32]>>, String>;
    /// Moves past a token that was drawn.
    fn accept(&mut self, token: u32) -> Result<(), String>;
    /// A copy that can go ahead of the answer, along a draft.
    fn fork(&self) -> Box<dyn Constraint>;
}

/// Takes events without ever blocking the engine.
pub trait Sink: Send {
    /// Hands over one event, or says why not.
    fn send(&mut self, event: Event) -> Result<(), SinkError>;

    /// Whether the reader is known to have left, so that nothing need be computed for it.
    fn is_closed(&self) -> bool {
        false
    }
}

/// Why a sink took no event.
#[derive(Debug)]
pub enum SinkError {
    /// The reader is slow: the event comes back, and the request waits until the sink takes it.
    Full(Box<Event>),
    /// Nobody reads any more: the request is cancelled.
    Closed,
}

impl Sink for SyncSender<Event> {
    fn send(&mut self, event: Event) -> Result<(), SinkError> {
        self.try_send(event).map_err(|e| match e {
            TrySendError::Full(event) => SinkError::Full(Box::new(event)),
            TrySendError::Disconnected(_) => SinkError::Closed,
        })
    }
}

/// Something that happened to a request, in order.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// Scores of the prompt's tokens from the second one on, if they were asked for.
    Prompt(Vec<Choice>),
    /// One generated token.
    Token(Token),
    /// The end; nothing follows.
    Finished(Finished),
}

/// One generated token.
#[derive(Debug, Clone, PartialEq)]
pub struct Token {
    /// The token, its log-probability and the alternatives.
    pub choice: Choice,
    /// Text that may leave because of it: empty while a character or a possible stop text is
    /// incomplete.
    pub text: String,
}

/// How an answer ended.
#[derive(Debug, Clone, PartialEq)]
pub struct Finished {
    /// Why.
    pub reason: FinishReason,
    /// Text that was held back and may leave after all.
    pub text: String,
    /// The stop text that ended it, if one did.
    pub stop_text: Option<String>,
    /// Counts.
    pub usage: Usage,
    /// Times.
    pub timings: Timings,
}

/// Why an answer ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FinishReason {
    /// A stop token or a stop text.
    Stop,
    /// `max_tokens` or the context.
    Length,
    /// The deadline passed.
    Deadline,
    /// The engine is shutting down or the caller asked for it.
    Cancelled,
    /// Bias and constraint together allow no token.
    NoToken,
    /// The constraint cannot be followed any further, for this reason.
    Constraint(String),
    /// The model failed, for this reason.
    Error(String),
}

/// Token counts of one request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Prompt tokens.
    pub prompt: usize,
    /// Prompt tokens that were in the prefix cache.
    pub cached: usize,
    /// Generated tokens, without the stop token.
    pub generated: usize,
    /// Tokens that were drafted and checked.
    pub drafted: usize,
    /// How many of those were right.
    pub accepted: usize,
}

/// Where the time of one request went.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Timings {
    /// From submission to admission.
    pub queued: Duration,
    /// From admission to the first token.
    pub prefill: Duration,
    /// From the first token to the last.
    pub decode: Duration,
}

/// Why a request was not taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refusal {
    /// The prompt has no tokens.
    Empty,
    /// The prompt leaves no room for an answer.
    TooLong {
        /// Tokens of the prompt.
        prompt: usize,
        /// Positions a request may have.
        context: usize,
    },
    /// A token is not in the vocabulary.
    Token {
        /// The token.
        id: u32,
        /// Rows of the vocabulary.
        vocab: usize,
    },
    /// A sampling field has a value without meaning.
    Sampling(String),
    /// The bias bans every token.
    NoToken,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refusal::Empty => write!(f, "prompt: expected at least one token, found none"),
            Refusal::TooLong { prompt, context } => write!(
                f,
                "prompt: expected fewer tokens than the context of {context}, found {prompt}"
            ),
            Refusal::Token { id, vocab } => {
                write!(f, "prompt: expected token ids below {vocab}, found {id}")
            }
            Refusal::Sampling(what) => f.write_str(what),
            Refusal::NoToken => {
                write!(f, "logit_bias: expected to leave at least one token, found all banned")
            }
        }
    }
}

impl std::error::Error for Refusal {}

/// What a request has to keep to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// Positions it may have, prompt and answer together.
    pub context: usize,
    /// Rows of the vocabulary.
    pub vocab: usize,
}

impl Bounds {
    /// Says what keeps a request from being answered, if anything does.
    pub fn check(&self, request: &Request) -> Result<(), Refusal> {
        let prompt = request.prompt.len();
        if prompt == 0 {
            return Err(Refusal::Empty);
        }
        if prompt >= self.context {
            return Err(Refusal::TooLong { prompt, context: self.context });
        }
        let vocab = self.vocab;
        if let Some(&id) = request.prompt.iter().find(|&&id| id as usize >= vocab) {
            return Err(Refusal::Token { id, vocab });
        }
        request.sampling.check().map_err(Refusal::Sampling)?;
        let banned = request.bias.iter().filter(|&&(_, bias)| bias == f32::NEG_INFINITY);
        let banned: BTreeSet<u32> = banned.map(|&(token, _)| token).collect();
        if (0..vocab as u32).all(|token| banned.contains(&token)) {
            return Err(Refusal::NoToken);
        }
        Ok(())
    }
}
