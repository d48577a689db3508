//! The engine on a thread of its own, and handles to it.
//!
//! Requests go in through a bounded queue, events come out through the sinks that they carry. The
//! thread sleeps while there is nothing to do, polls while every request waits for a slow reader, and
//! ends once it was told to and the last request is finished.

use std::any::Any;
use std::fmt;
use std::io;
use std::panic::{self, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::engine::Engine;
use crate::load::Load;
use crate::request::{Bounds, Event, Refusal, Request, Sink, SinkError};

/// How often readers that do not keep up are looked at.
const POLL: Duration = Duration::from_millis(2);

/// Why a request was not taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SubmitError {
    /// It can never be answered.
    Refused(Refusal),
    /// As many requests as are allowed at once are being answered or wait.
    Busy(usize),
    /// The engine is ending or has ended.
    Stopped,
    /// The engine's thread died, for this reason.
    Dead(String),
}

impl fmt::Display for SubmitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SubmitError::Refused(refusal) => refusal.fmt(f),
            SubmitError::Busy(limit) => {
                write!(f, "all {limit} places for requests are taken; try again later")
            }
            SubmitError::Stopped => write!(f, "the engine is shutting down"),
            SubmitError::Dead(why) => f.write_str(why),
        }
    }
}

impl std::error::Error for SubmitError {}

enum Command {
    /// Requests with one prompt.
    Submit(Vec<Request>),
    Drain,
}

/// A handle to an engine thread.
#[derive(Clone)]
pub struct Service {
    commands: SyncSender<Command>,
    bounds: Bounds,
    places: usize,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    /// Requests that were taken and are not over.
    taken: AtomicUsize,
    draining: AtomicBool,
    load: Mutex<Load>,
    health: Mutex<Health>,
}

/// Whether the engine can be counted on.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
enum Health {
    #[default]
    Well,
    /// The last step failed, for this reason; the next one may not.
    Faulty(String),
    /// The thread is no more, for this reason.
    Dead(String),
}

impl Service {
    /// Moves `engine` to a thread. At most `places` requests are in it at once, running or waiting.
    pub fn spawn(engine: Engine, places: usize) -> io::Result<(Self, JoinHandle<()>)> {
        // Every place may hold a command, and draining needs one more.
        let (commands, inbox) = sync_channel(places + 1);
        let bounds = engine.bounds();
        let shared = Arc::new(Shared { load: Mutex::new(engine.load()), ..Shared::default() });
        let seen = Arc::clone(&shared);
        let work = move || {
            // Whoever waits for an answer learns of a panic by its sink, whoever asks later from here.
            let ended = panic::catch_unwind(AssertUnwindSafe(|| run(engine, &inbox, &seen)));
            if let Err(payload) = ended {
                seen.set_health(Health::Dead(format!(
                    "the engine has died: {}",
                    message(&*payload)
                )));
            }
        };
        let thread = thread::Builder::new().name("engine".into()).spawn(work)?;
        Ok((Service { commands, bounds, places, shared }, thread))
    }

    /// What the engine accepts.
    pub fn bounds(&self) -> Bounds {
        self.bounds
    }

    /// Why the engine cannot be counted on, if it cannot: its last step failed, or its thread has died.
    pub fn health(&self) -> Result<(), String> {
        match self.shared.health() {
            Health::Well => Ok(()),
            Health::Faulty(why) | Health::Dead(why) => Err(why),
        }
    }

    /// Hands a request over, or says why not; a refused request sends no event.
    pub fn submit(&self, request: Request) -> Result<(), SubmitError> {
        self.submit_choices(vec![request])
    }

    /// Hands over several requests with one prompt, which is evaluated once: all or none.
    pub fn submit_choices(&self, requests: Vec<Request>) -> Result<(), SubmitError> {
        for request in &requests {
            self.bounds.check(request).map_err(SubmitError::Refused)?;
        }
        if self.shared.draining.load(Ordering::Acquire) {
            return Err(SubmitError::Stopped);
        }
        if let Health::Dead(why) = self.shared.health() {
            return Err(SubmitError::Dead(why));
        }
        let place = |request: Request| {
            let place = Place::take(&self.shared, self.places);
            let _place = place.ok_or(SubmitError::Busy(self.places))?;
            Ok(Request { sink: Box::new(Placed { sink: request.sink, _place }), ..request })
        };
        let requests = requests.into_iter().map(place).collect::<Result<_, _>>()?;
        self.commands.try_send(Command::Submit(requests)).map_err(|_| SubmitError::Stopped)
    }

    /// How full the engine is, as of its last step.
    pub fn load(&self) -> Load {
        *self.shared.load.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes no more requests; the thread ends once those that it has are finished.
    pub fn drain(&self) {
        if !self.shared.draining.swap(true, Ordering::AcqRel) {
            // If the thread has ended already there is nothing to wake.
            let _ = self.commands.try_send(Command::Drain);
        }
    }
}

impl Shared {
    fn health(&self) -> Health {
        self.health.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set_health(&self, health: Health) {
        *self.health.lock().unwrap_or_else(PoisonError::into_inner) = health;
    }
}

/// What a panic said.
fn message(payload: &(dyn Any + Send)) -> &str {
    let text = payload.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or("no reason was given")
}

/// One request's place, given back when it is dropped.
struct Place(Arc<Shared>);

impl Place {
    fn take(shared: &Arc<Shared>, places: usize) -> Option<Self> {
        let free = |taken: usize| (taken < places).then_some(taken + 1);
        shared.taken.fetch_update(Ordering::AcqRel, Ordering::Acquire, free).ok()?;
        Some(Place(Arc::clone(shared)))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.taken.fetch_sub(1, Ordering::AcqRel);
    }
}

/// A sink that holds its request's place for as long as the engine holds the sink.
struct Placed {
    sink: Box<dyn Sink>,
    _place: Place,
}

impl Sink for Placed {
    fn send(&mut self, event: Event) -> Result<(), SinkError> {
        self.sink.send(event)
    }

    fn is_closed(&self) -> bool {
        self.sink.is_closed()
    }
}

/// The thread: takes commands, steps, sleeps.
fn run(mut engine: Engine, inbox: &Receiver<Command>, shared: &Shared) {
    let mut open = true;
    loop {
        let closed = loop {
            match inbox.try_recv() {
                Ok(command) => open &= obey(&mut engine, command),
                Err(error) => break error == TryRecvError::Disconnected,
            }
        };
        open &= !closed;
        // A failed step has told every request what happened; those that come may fare better.
        let progressed = match engine.step() {
            Ok(progressed) => {
                if progressed && shared.health() != Health::Well {
                    shared.set_health(Health::Well);
                }
                progressed
            }
            Err(error) => {
                shared.set_health(Health::Faulty(format!("the last step failed: {error}")));
                true
            }
        };
        *shared.load.lock().unwrap_or_else(PoisonError::into_inner) = engine.load();
        if progressed {
            continue;
        }
        let woken = match engine.is_idle() {
            true if !open => return,
            true => inbox.recv().map_err(|_| RecvTimeoutError::Disconnected),
            false => inbox.recv_timeout(POLL),
        };
        match woken {
            Ok(command) => open &= obey(&mut engine, command),
            Err(RecvTimeoutError::Disconnected) => thread::sleep(POLL),
            Err(RecvTimeoutError::Timeout) => {}
        }
    }
}

/// Carries a command out; false if it was the last one.
fn obey(engine: &mut Engine, command: Command) -> bool {
    match command {
        Command::Submit(requests) => {
            // They were checked before they were sent.
            drop(engine.submit_choices(requests));
            true
        }
        Command::Drain => false,
    }
}
