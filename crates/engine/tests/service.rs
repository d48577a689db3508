//! The engine on its thread.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

use engine::{
    Backend, BackendError, Batch, Engine, Event, FinishReason, Limits, Output, Refusal, Request,
    Scripted, Service, Settings, SubmitError,
};
use model::Vocabulary;

fn service(places: usize) -> (Service, std::thread::JoinHandle<()>) {
    let limits = Limits { tokens: 64, rows: 64, blocks: 64, context: 512, vocab: 8192, queue: 1 };
    let backend = Scripted::new(limits, Box::new(|context| Some(context.len() as u32)));
    let settings = Settings { max_running: 4, token_budget: 64, context: 512 };
    let engine = Engine::new(Box::new(backend), Vocabulary::tiny(), settings);
    Service::spawn(engine, places).expect("a thread")
}

fn request(prompt: usize, max_tokens: usize, room: usize) -> (Request, Receiver<Event>) {
    let (sink, events) = sync_channel(room);
    (Request { max_tokens, ..Request::new(vec![7; prompt], Box::new(sink)) }, events)
}

fn reason(events: &Receiver<Event>) -> FinishReason {
    loop {
        match events.recv_timeout(Duration::from_secs(20)).expect("an event") {
            Event::Finished(finished) => return finished.reason,
            Event::Prompt(_) | Event::Token(_) => {}
        }
    }
}

#[test]
fn requests_are_answered_and_the_thread_ends() {
    let (service, thread) = service(64);
    let asked: Vec<_> = (1..=40).map(|n| request(n, 10, 2)).collect();
    let events: Vec<_> = asked
        .into_iter()
        .map(|(request, events)| {
            service.submit(request).expect("taken");
            events
        })
        .collect();
    service.drain();
    let (late, _) = request(1, 1, 8);
    assert_eq!(service.submit(late), Err(SubmitError::Stopped));
    for events in &events {
        assert_eq!(reason(events), FinishReason::Length);
    }
    thread.join().expect("the thread ends by itself");
    assert_eq!(service.load().blocks_held, 0);
}

/// Fails or panics once it was told to.
struct Ailing {
    inner: Scripted,
    ill: Arc<AtomicU8>,
}

impl Backend for Ailing {
    fn limits(&self) -> Limits {
        self.inner.limits()
    }

    fn submit(&mut self, batch: &Batch) -> Result<(), BackendError> {
        match self.ill.load(Ordering::Acquire) {
            0 => self.inner.submit(batch),
            1 => Err(BackendError::Device("planted".into())),
            _ => panic!("planted"),
        }
    }

    fn collect(&mut self, out: &mut Output) -> Result<(), BackendError> {
        self.inner.collect(out)
    }
}

#[test]
fn faults_and_death_are_seen_and_end_requests() {
    let limits = Limits { tokens: 64, rows: 64, blocks: 64, context: 512, vocab: 8192, queue: 1 };
    let ill = Arc::new(AtomicU8::new(0));
    let inner = Scripted::new(limits, Box::new(|context| Some(context.len() as u32)));
    let backend = Ailing { inner, ill: Arc::clone(&ill) };
    let settings = Settings { max_running: 4, token_budget: 64, context: 512 };
    let engine = Engine::new(Box::new(backend), Vocabulary::tiny(), settings);
    let (service, thread) = Service::spawn(engine, 8).expect("a thread");
    let ask = || {
        let (request, events) = request(3, 4, 16);
        service.submit(request).map(|()| events)
    };
    assert_eq!(reason(&ask().expect("taken")), FinishReason::Length);
    assert_eq!(service.health(), Ok(()));

    ill.store(1, Ordering::Release);
    let failed = reason(&ask().expect("taken"));
    assert_eq!(failed, FinishReason::Error("device: planted".into()));
    let wait = |well: bool| {
        let deadline = Instant::now() + Duration::from_secs(20);
        while service.health().is_ok() != well {
            assert!(Instant::now() < deadline, "{:?}", service.health());
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    wait(false);
    assert_eq!(service.health(), Err("the last step failed: device: planted".into()));

    ill.store(0, Ordering::Release);
    assert_eq!(reason(&ask().expect("taken")), FinishReason::Length);
    wait(true);

    ill.store(2, Ordering::Release);
    let events = ask().expect("taken");
    let ended = events.recv_timeout(Duration::from_secs(20));
    assert_eq!(ended, Err(RecvTimeoutError::Disconnected), "nobody waits for ever");
    thread.join().expect("the panic went no further");
    assert_eq!(service.health(), Err("the engine has died: planted".into()));
    assert_eq!(ask().err(), Some(SubmitError::Dead("the engine has died: planted".into())));
}

#[test]
fn what_cannot_be_answered_is_refused_at_once() {
    let (service, _thread) = service(2);
    let (empty, _) = request(0, 1, 8);
    assert_eq!(service.submit(empty), Err(SubmitError::Refused(Refusal::Empty)));
    let (long, _) = request(512, 1, 8);
    let refusal = Refusal::TooLong { prompt: 512, context: 512 };
    assert_eq!(service.submit(long), Err(SubmitError::Refused(refusal)));
}

#[test]
fn places_are_bounded_and_given_back() {
    let (service, _thread) = service(2);
    // Nobody reads, so both stay.
    let (first, first_events) = request(1, 100, 1);
    let (second, second_events) = request(1, 100, 1);
    service.submit(first).expect("taken");
    service.submit(second).expect("taken");
    assert_eq!(service.submit(request(1, 1, 1).0), Err(SubmitError::Busy(2)));
    drop(first_events);
    for _ in 0..2000 {
        let (third, third_events) = request(1, 1, 8);
        match service.submit(third) {
            Ok(()) => {
                assert_eq!(reason(&third_events), FinishReason::Length);
                assert_eq!(reason(&second_events), FinishReason::Length);
                return;
            }
            Err(error) => assert_eq!(error, SubmitError::Busy(2)),
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    panic!("the place of a reader that left was never given back");
}
