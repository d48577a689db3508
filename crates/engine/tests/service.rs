//! The engine on its thread.

use std::sync::mpsc::{Receiver, sync_channel};
use std::time::Duration;

use engine::{
    Engine, Event, FinishReason, Limits, Refusal, Request, Scripted, Service, Settings, SubmitError,
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
