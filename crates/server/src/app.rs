//! What all handlers share: the model's card, the engine, the counters.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use axum::http::StatusCode;
use engine::philox::random_seed;
use engine::request::{Event, Sink, SinkError};
use engine::{Refusal, SamplingParams, Service, SubmitError};
use model::Variant;
use text::Tokenizer;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{Semaphore, mpsc};

use crate::error::{ApiError, Result};
use crate::guide::Grammars;
use crate::listen::Config;
use crate::metrics::Metrics;

/// Large bodies that are in memory at once.
const LARGE_BODIES: usize = 16;

/// What clients are told about the model, and what their text is turned into tokens with.
#[derive(Clone)]
pub struct Card {
    /// Name that requests may call it by, and that answers carry.
    pub id: String,
    /// Another name that requests may use, e.g. the registry's without the scheme.
    pub alias: Option<String>,
    /// Chat behaviour.
    pub variant: Variant,
    /// Its tokenizer.
    pub tokenizer: &'static Tokenizer,
    /// Tokens that end an answer.
    pub stops: Vec<u32>,
}

impl Card {
    /// The sampling that the checkpoint's publisher recommends, for what a request leaves open.
    pub fn sampling(&self, thinking: bool) -> SamplingParams {
        SamplingParams::recommended(self.variant, thinking)
    }

    /// Whether an answer thinks first, given what a request asks for.
    pub fn thinks(&self, asked: Option<bool>) -> Result<bool> {
        let refuse = |always: &str, found: bool| {
            let found = format!("{found} for {}, which {always} thinks", self.id);
            Err(ApiError::field("enable_thinking", "what the model can do", found))
        };
        match (self.variant, asked) {
            (Variant::Instruct, asked) => Ok(asked.unwrap_or(true)),
            (Variant::Thinking2507, Some(false)) => refuse("always", false),
            (Variant::Thinking2507, _) => Ok(true),
            (Variant::Instruct2507, Some(true)) => refuse("never", true),
            (Variant::Instruct2507 | Variant::Base, _) => Ok(false),
        }
    }
}

/// A model that is ready to answer.
pub struct Loaded {
    /// Who it is.
    pub card: Card,
    /// Its engine.
    pub service: Service,
}

/// A loaded model and what goes with it.
pub struct Engine {
    pub card: Card,
    pub service: Service,
    pub metrics: Metrics,
    pub grammars: Grammars,
    /// When it was loaded, in seconds since 1970.
    pub created: u64,
}

/// State of the whole server.
pub struct App {
    engine: OnceLock<Arc<Engine>>,
    /// Largest body of a request, in bytes.
    pub max_body: usize,
    /// Turns to have a body in memory that is not small.
    pub large_bodies: Arc<Semaphore>,
    /// Longest time for one answer.
    pub request_timeout: Duration,
    /// Keys that let a request in; none are needed if empty.
    pub api_keys: Vec<String>,
    /// Web origins that may use the server from a browser, besides pages of this machine.
    pub cors_origins: Vec<String>,
    /// Whether only this machine can reach the server.
    pub local: bool,
}

impl App {
    /// A server that waits for its model.
    pub fn new(config: Config) -> Self {
        App {
            engine: OnceLock::new(),
            max_body: config.max_body,
            large_bodies: Arc::new(Semaphore::new(LARGE_BODIES)),
            request_timeout: config.request_timeout,
            api_keys: config.api_keys,
            cors_origins: config.cors_origins,
            local: config.address.ip().is_loopback(),
        }
    }

    /// Puts the model in place.
    pub fn load(&self, loaded: Loaded) {
        let Loaded { card, service } = loaded;
        let metrics = Metrics::new(&card.id, service.bounds().context);
        let grammars = Grammars::new(card.tokenizer.vocabulary(), card.stops[0]);
        let created = unix_time();
        let engine = Engine { card, service, metrics, grammars, created };
        // A second model cannot come: the caller loads once.
        let _ = self.engine.set(Arc::new(engine));
    }

    /// The model, if it is there yet.
    pub fn engine(&self) -> Result<&Arc<Engine>> {
        let loading =
            || ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "the model is being loaded");
        self.engine.get().ok_or_else(loading)
    }

    /// When an answer that is asked for now has to be finished.
    pub fn deadline(&self) -> Instant {
        Instant::now() + self.request_timeout
    }
}

impl Engine {
    /// Refuses a prompt of so many tokens if it leaves no room for an answer, before it is copied for each
    /// of its choices.
    pub fn check_prompt(&self, prompt: usize) -> Result<()> {
        let context = self.service.bounds().context;
        match prompt < context {
            true => Ok(()),
            false => Err(SubmitError::Refused(Refusal::TooLong { prompt, context }).into()),
        }
    }

    /// Refuses a name that is not the model's.
    pub fn check_model(&self, name: Option<&str>) -> Result<()> {
        match name {
            Some(name) if name != self.card.id && self.card.alias.as_deref() != Some(name) => {
                let message = format!(
                    "model: expected `{}`, which this server runs, found `{name}`",
                    self.card.id
                );
                Err(ApiError {
                    param: Some("model".into()),
                    code: Some("model_not_found"),
                    ..ApiError::new(StatusCode::NOT_FOUND, message)
                })
            }
            _ => Ok(()),
        }
    }
}

/// Carries the events of one choice to the task that answers the request.
pub struct ChoiceSink {
    pub index: usize,
    pub events: mpsc::Sender<(usize, Event)>,
}

impl Sink for ChoiceSink {
    fn send(&mut self, event: Event) -> std::result::Result<(), SinkError> {
        self.events.try_send((self.index, event)).map_err(|error| match error {
            TrySendError::Full((_, event)) => SinkError::Full(Box::new(event)),
            TrySendError::Closed(_) => SinkError::Closed,
        })
    }

    fn is_closed(&self) -> bool {
        self.events.is_closed()
    }
}

/// Seconds since 1970.
pub fn unix_time() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

/// A fresh id with a prefix, such as `cmpl-...`.
pub fn new_id(prefix: &str) -> String {
    format!("{prefix}{:016x}{:08x}", random_seed(), random_seed() as u32)
}
