//! The scheduler, on a backend whose answers are known.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::{Duration, Instant};

use engine::philox::philox;
use engine::request::{Constraint, Token};
use engine::{
    Engine, Event, FinishReason, Finished, Limits, Refusal, Request, SamplingParams, Scripted,
    Settings,
};
use model::Vocabulary;
use text::StopStrings;

const VOCAB: usize = 8192;
const STOP: u32 = 8168;

/// A script whose next token depends on every token before it: any mix-up of contexts shows.
fn digest(context: &[u32]) -> Option<u32> {
    let mix = |hash: u64, &token: &u32| {
        let words = philox(hash, [token, 0, 0, 0]);
        u64::from(words[0]) << 32 | u64::from(words[1])
    };
    Some((context.iter().fold(1, mix) % 8000) as u32)
}

fn engine(blocks: usize, max_running: usize, token_budget: usize) -> Engine {
    engine_with_queue(1, blocks, max_running, token_budget)
}

fn engine_with_queue(
    queue: usize,
    blocks: usize,
    max_running: usize,
    token_budget: usize,
) -> Engine {
    let limits = Limits { tokens: 512, rows: 64, blocks, context: 2048, vocab: VOCAB, queue };
    let backend = Scripted::new(limits, Box::new(digest));
    let settings = Settings { max_running, token_budget, context: 2048 };
    Engine::new(Box::new(backend), Vocabulary::tiny(), settings)
}

/// What [`digest`] says after a prompt.
fn expected(prompt: &[u32], count: usize) -> Vec<u32> {
    let mut context = prompt.to_vec();
    (0..count).for_each(|_| context.extend(digest(&context)));
    context.split_off(prompt.len())
}

fn prompt(seed: u64, len: usize) -> Vec<u32> {
    (0..len as u32).map(|i| philox(seed, [i, 1, 2, 3])[0] % 8000).collect()
}

fn submit(engine: &mut Engine, request: impl FnOnce(Request) -> Request) -> Receiver<Event> {
    let (sink, events) = sync_channel(10_000);
    engine.submit(request(Request::new(vec![1], Box::new(sink)))).expect("accepted");
    events
}

fn run(engine: &mut Engine) {
    while !engine.is_idle() {
        engine.step().expect("step");
    }
}

/// Ids, text and end of an answer.
fn answer(events: &Receiver<Event>) -> (Vec<u32>, String, Finished) {
    let (mut ids, mut text) = (Vec::new(), String::new());
    for event in events.try_iter() {
        match event {
            Event::Prompt(_) => {}
            Event::Token(Token { choice, text: more }) => {
                ids.push(choice.token);
                text += &more;
            }
            Event::Finished(finished) => return (ids, text + &finished.text, finished),
        }
    }
    panic!("the answer has no end");
}

#[test]
fn many_requests_answer_as_each_would_alone() {
    for (blocks, max_running, budget) in [(400, 16, 512), (400, 3, 40), (24, 16, 64), (12, 8, 512)]
    {
        let mut engine = engine(blocks, max_running, budget);
        let mut asked = Vec::new();
        for i in 0..40u64 {
            // Shared beginnings of several lengths, and different ends.
            let mut tokens = prompt(i % 3, (i as usize * 13) % 150 + 1);
            tokens.extend(prompt(100 + i, 1 + i as usize % 5));
            let max_tokens = 1 + (i as usize * 7) % 60;
            let request = |r| Request { prompt: tokens.clone(), max_tokens, ..r };
            let events = submit(&mut engine, request);
            asked.push((tokens, max_tokens, events));
            if i % 4 == 0 {
                engine.step().expect("step");
            }
        }
        run(&mut engine);
        for (tokens, max_tokens, events) in asked {
            let (ids, _, finished) = answer(&events);
            assert_eq!(ids, expected(&tokens, max_tokens));
            assert_eq!(finished.reason, FinishReason::Length);
            assert_eq!(finished.usage.generated, max_tokens);
            assert_eq!(finished.usage.prompt, tokens.len());
        }
        let load = engine.load();
        assert_eq!(load.blocks_held, 0, "blocks lost");
        assert_eq!(load.preemptions > 0, blocks < 100, "{load:?}");
        assert!(load.prefix_hits > 0);
    }
}

/// A pool that holds a few of many requests: those that run keep their blocks.
#[test]
fn a_full_pool_preempts_seldom() {
    let mut engine = engine(24, 32, 512);
    let requests: Vec<_> = (0..64)
        .map(|i| {
            let tokens = prompt(i, 30);
            let request = |r| Request { prompt: tokens.clone(), max_tokens: 60, ..r };
            (submit(&mut engine, request), tokens)
        })
        .collect();
    run(&mut engine);
    for (events, tokens) in requests {
        assert_eq!(answer(&events).0, expected(&tokens, 60));
    }
    println!("{} preemptions", engine.load().preemptions);
    // Admission that counts only the prompts' blocks came to 456.
    assert!(engine.load().preemptions <= 64, "{:?}", engine.load());
}

#[test]
fn a_short_request_does_not_wait_for_a_long_prompt() {
    let mut engine = engine(200, 8, 64);
    let long = submit(&mut engine, |r| Request { prompt: prompt(1, 1500), max_tokens: 1, ..r });
    let short = submit(&mut engine, |r| Request { prompt: prompt(2, 10), max_tokens: 1, ..r });
    for _ in 0..2 {
        engine.step().expect("step");
    }
    assert_eq!(answer(&short).0, expected(&prompt(2, 10), 1));
    assert!(long.try_recv().is_err(), "the long prompt is still being read");
    run(&mut engine);
    assert_eq!(answer(&long).0, expected(&prompt(1, 1500), 1));
}

#[test]
fn decoding_goes_on_while_a_prompt_is_read() {
    let mut engine = engine(200, 8, 32);
    let first = submit(&mut engine, |r| Request { prompt: prompt(1, 5), max_tokens: 30, ..r });
    engine.step().expect("step");
    let _second = submit(&mut engine, |r| Request { prompt: prompt(2, 1000), max_tokens: 1, ..r });
    for _ in 0..10 {
        engine.step().expect("step");
    }
    assert_eq!(first.try_iter().count(), 11, "a token a step");
}

#[test]
fn a_repeated_prompt_is_adopted_and_counted() {
    let mut engine = engine(100, 4, 512);
    for (round, cached) in [0, 96, 96].into_iter().enumerate() {
        let tokens = prompt(7, 100);
        let events =
            submit(&mut engine, |r| Request { prompt: tokens.clone(), max_tokens: 3, ..r });
        run(&mut engine);
        let (ids, _, finished) = answer(&events);
        assert_eq!(ids, expected(&tokens, 3));
        assert_eq!(finished.usage.cached, cached, "round {round}");
    }
}

#[test]
fn stops_end_an_answer() {
    let limits = Limits { tokens: 64, rows: 8, blocks: 64, context: 1024, vocab: VOCAB, queue: 1 };
    let vocabulary = Vocabulary::tiny();
    let id = |text: &str| {
        (0..8166).find(|&id| vocabulary.bytes(id) == Some(text.as_bytes())).expect("a token")
    };
    let script = Scripted::reply(1, vec![id(" red"), id(" go"), id(" blue"), STOP, id(" x")], STOP);
    let settings = Settings { max_running: 4, token_budget: 64, context: 1024 };
    let mut engine = Engine::new(Box::new(Scripted::new(limits, script)), vocabulary, settings);
    let by_token = submit(&mut engine, |r| Request { stop_tokens: vec![STOP], ..r });
    let stops = StopStrings::new(["o bl".to_owned()]);
    let by_text = submit(&mut engine, |r| Request { stops, ..r });
    let by_length = submit(&mut engine, |r| Request { max_tokens: 2, ..r });
    let nothing = submit(&mut engine, |r| Request { max_tokens: 0, ..r });
    let ignored = submit(&mut engine, |r| Request { max_tokens: 5, ..r });
    run(&mut engine);
    let (ids, text, finished) = answer(&by_token);
    assert_eq!((ids.len(), text.as_str()), (3, " red go blue"));
    assert_eq!((finished.reason, finished.usage.generated), (FinishReason::Stop, 3));
    let (_, text, finished) = answer(&by_text);
    assert_eq!((text.as_str(), finished.reason), (" red g", FinishReason::Stop));
    let (_, text, finished) = answer(&by_length);
    assert_eq!((text.as_str(), finished.reason), (" red go", FinishReason::Length));
    let (ids, text, finished) = answer(&nothing);
    assert_eq!((ids.len(), text.as_str(), finished.reason), (0, "", FinishReason::Length));
    assert_eq!(answer(&ignored).1, " red go blue x");
}

#[test]
fn a_prompt_can_be_scored() {
    let mut engine = engine(100, 4, 16);
    for max_tokens in [0, 2] {
        let mut tokens = prompt(3, 40);
        tokens.extend(expected(&tokens, 1));
        let events = submit(&mut engine, |r| Request {
            prompt: tokens.clone(),
            max_tokens,
            score_prompt: true,
            top: 1,
            ..r
        });
        run(&mut engine);
        let Ok(Event::Prompt(scores)) = events.recv() else { panic!("scores come first") };
        assert_eq!(scores.len(), 40);
        assert_eq!(scores.iter().map(|s| s.token).collect::<Vec<_>>(), tokens[1..]);
        assert!(scores[39].logprob > -1e-6, "the script's own token");
        assert!(scores[0].logprob < -10.0, "some other token");
        assert_eq!(scores[39].top[0].0, tokens[40]);
        let (ids, _, finished) = answer(&events);
        assert_eq!(ids, expected(&tokens, max_tokens));
        assert_eq!(finished.reason, FinishReason::Length);
    }
}

#[test]
fn impossible_requests_are_refused() {
    let mut engine = engine(8, 4, 64);
    assert_eq!(engine.context(), 256, "what the blocks can hold");
    let mut refusal = |request: Request| engine.submit(request).expect_err("refused");
    let (sink, _events) = sync_channel(1);
    let with = |prompt| Request::new(prompt, Box::new(sink.clone()));
    assert_eq!(refusal(with(vec![])), Refusal::Empty);
    assert_eq!(
        refusal(with(vec![0; 256])).to_string(),
        "prompt: expected fewer tokens than the context of 256, found 256"
    );
    assert_eq!(refusal(with(vec![8192])), Refusal::Token { id: 8192, vocab: VOCAB });
    let sampling = SamplingParams { top_p: 2.0, ..Default::default() };
    assert!(matches!(refusal(Request { sampling, ..with(vec![0]) }), Refusal::Sampling(_)));
    // One that just fits uses the context to its end.
    let events = submit(&mut engine, |r| Request { prompt: prompt(1, 255), ..r });
    run(&mut engine);
    assert_eq!(answer(&events).2.usage.generated, 1);
}

#[test]
fn cancelling_frees_everything_at_any_moment() {
    for steps in 0..12 {
        let mut engine = engine(16, 2, 16);
        let mut ids = Vec::new();
        let mut receivers = Vec::new();
        for i in 0..4 {
            let (sink, events) = sync_channel(1000);
            let request = Request::new(prompt(i, 60), Box::new(sink));
            ids.push(engine.submit(request).expect("accepted"));
            receivers.push(events);
        }
        (0..steps).for_each(|_| assert!(engine.step().expect("step")));
        ids.into_iter().for_each(|id| engine.cancel(id));
        engine.step().expect("step");
        assert!(engine.is_idle());
        assert_eq!(engine.load().blocks_held, 0);
        for events in receivers {
            assert_eq!(answer(&events).2.reason, FinishReason::Cancelled);
        }
    }
}

#[test]
fn a_reader_that_left_ends_its_request() {
    let mut engine = engine(32, 4, 64);
    let events = submit(&mut engine, |r| Request { prompt: prompt(1, 10), ..r });
    engine.step().expect("step");
    drop(events);
    for _ in 0..2 {
        engine.step().expect("step");
    }
    assert!(engine.is_idle());
    assert_eq!(engine.load().blocks_held, 0);
}

#[test]
fn a_slow_reader_stalls_only_itself_and_loses_nothing() {
    let mut engine = engine(64, 4, 64);
    let (sink, slow) = sync_channel(1);
    let tokens = prompt(1, 10);
    let request = Request { max_tokens: 20, ..Request::new(tokens.clone(), Box::new(sink)) };
    engine.submit(request).expect("accepted");
    let fast = submit(&mut engine, |r| Request { prompt: prompt(2, 10), max_tokens: 20, ..r });
    for _ in 0..30 {
        engine.step().expect("step");
    }
    assert_eq!(answer(&fast).0, expected(&prompt(2, 10), 20));
    let mut ids = Vec::new();
    loop {
        match slow.try_recv() {
            Ok(Event::Token(token)) => ids.push(token.choice.token),
            Ok(Event::Finished(_)) => break,
            Ok(Event::Prompt(_)) => panic!("not asked for"),
            Err(_) => drop(engine.step().expect("step")),
        }
    }
    assert_eq!(ids, expected(&tokens, 20));
}

#[test]
fn a_deadline_ends_a_request_wherever_it_is() {
    let mut engine = engine(64, 1, 64);
    let deadline = Some(Instant::now() + Duration::from_millis(20));
    let running = submit(&mut engine, |r| Request { deadline, ..r });
    let waiting = submit(&mut engine, |r| Request { deadline, ..r });
    engine.step().expect("step");
    std::thread::sleep(Duration::from_millis(25));
    engine.step().expect("step");
    assert!(engine.is_idle());
    assert_eq!(answer(&running).2.reason, FinishReason::Deadline);
    assert_eq!(answer(&waiting).2.reason, FinishReason::Deadline);
}

/// Allows one token after the other of a fixed list.
struct Only(Vec<u32>);

impl Constraint for Only {
    fn mask(&mut self) -> Result<Option<std::sync::Arc<[u32]>>, String> {
        let token = *self.0.first().ok_or("the list is at its end")?;
        let mut mask = vec![0; VOCAB / 32];
        mask[token as usize / 32] = 1 << (token % 32);
        Ok(Some(mask.into()))
    }

    fn accept(&mut self, token: u32) -> Result<(), String> {
        (self.0.remove(0) == token).then_some(()).ok_or_else(|| "not in the list".into())
    }

    fn fork(&self) -> Box<dyn Constraint> {
        Box::new(Only(self.0.clone()))
    }
}

#[test]
fn a_constraint_decides_and_its_failure_ends_only_its_request() {
    let mut engine = engine(64, 4, 64);
    let constraint = || Some(Box::new(Only(vec![5, 6, 7])) as Box<dyn Constraint>);
    let bound = submit(&mut engine, |r| Request { constraint: constraint(), max_tokens: 3, ..r });
    let failing = submit(&mut engine, |r| Request { constraint: constraint(), max_tokens: 9, ..r });
    let free = submit(&mut engine, |r| Request { max_tokens: 9, ..r });
    run(&mut engine);
    assert_eq!(answer(&bound).0, [5, 6, 7]);
    let (ids, _, finished) = answer(&failing);
    assert_eq!(ids, [5, 6, 7]);
    assert_eq!(finished.reason, FinishReason::Constraint("the list is at its end".into()));
    assert_eq!(answer(&free).0, expected(&[1], 9));
}

/// A request that ended while it waited sends its end once, however slow its reader is.
#[test]
fn a_request_that_ended_waiting_is_not_run_again() {
    let mut engine = engine(64, 1, 64);
    let first = submit(&mut engine, |r| Request { max_tokens: 3, ..r });
    let (sink, slow) = sync_channel(1);
    sink.send(Event::Prompt(Vec::new())).expect("room for one");
    let request = Request { max_tokens: 0, ..Request::new(prompt(1, 40), Box::new(sink)) };
    engine.submit(request).expect("accepted");
    for _ in 0..6 {
        engine.step().expect("step");
    }
    assert_eq!(answer(&first).0.len(), 3);
    assert!(matches!(slow.try_recv(), Ok(Event::Prompt(_))));
    while !engine.is_idle() {
        engine.step().expect("step");
    }
    assert!(matches!(slow.try_recv(), Ok(Event::Finished(f)) if f.reason == FinishReason::Length));
    assert!(slow.try_recv().is_err(), "one end is enough");
}

/// A backend that fails now and then; what it still answers belongs to nobody.
struct Failing {
    inner: Scripted,
    calls: usize,
}

impl engine::Backend for Failing {
    fn limits(&self) -> Limits {
        self.inner.limits()
    }

    fn submit(&mut self, batch: &engine::Batch) -> Result<(), engine::BackendError> {
        self.calls += 1;
        match self.calls % 5 {
            0 => Err(engine::BackendError::Device("planted".into())),
            _ => self.inner.submit(batch),
        }
    }

    fn collect(&mut self, out: &mut engine::Output) -> Result<(), engine::BackendError> {
        self.inner.collect(out)
    }
}

#[test]
fn a_device_fault_ends_requests_and_leaves_nothing_behind() {
    for queue in [1, 2] {
        let limits = Limits { tokens: 64, rows: 8, blocks: 64, context: 512, vocab: VOCAB, queue };
        let inner = Scripted::new(limits, Box::new(digest));
        let settings = Settings { max_running: 4, token_budget: 64, context: 512 };
        let backend = Box::new(Failing { inner, calls: 0 });
        let mut engine = Engine::new(backend, Vocabulary::tiny(), settings);
        let (mut failed, mut answered) = (0, 0);
        for seed in 0..30 {
            let tokens = prompt(seed, 20);
            let wanted = 1 + seed as usize % 4;
            let request = |r| Request { prompt: tokens.clone(), max_tokens: wanted, ..r };
            let events = submit(&mut engine, request);
            while !engine.is_idle() {
                let _ = engine.step();
            }
            let (ids, _, finished) = answer(&events);
            assert_eq!(ids, expected(&tokens, ids.len()), "the tokens of another request");
            match finished.reason {
                FinishReason::Error(why) => {
                    assert_eq!(why, "device: planted");
                    failed += 1;
                }
                _ => answered += 1,
            }
            assert_eq!(engine.load().blocks_held, 0);
        }
        assert!(failed > 3 && answered > 3, "failed {failed}, answered {answered}");
    }
}

/// Counts the tokens that are evaluated.
struct Counting {
    inner: Scripted,
    tokens: Arc<AtomicUsize>,
}

impl engine::Backend for Counting {
    fn limits(&self) -> Limits {
        self.inner.limits()
    }

    fn submit(&mut self, batch: &engine::Batch) -> Result<(), engine::BackendError> {
        self.tokens.fetch_add(batch.tokens.len(), Relaxed);
        self.inner.submit(batch)
    }

    fn collect(&mut self, out: &mut engine::Output) -> Result<(), engine::BackendError> {
        self.inner.collect(out)
    }
}

/// Several choices of one prompt, the first of which reads it for all.
fn submit_choices(
    engine: &mut Engine,
    tokens: &[u32],
    n: usize,
    max_tokens: usize,
) -> (Vec<engine::RequestId>, Vec<Receiver<Event>>) {
    let (mut requests, mut receivers) = (Vec::new(), Vec::new());
    for _ in 0..n {
        let (sink, events) = sync_channel(1000);
        let request = Request::new(tokens.to_vec(), Box::new(sink));
        requests.push(Request { max_tokens, ..request });
        receivers.push(events);
    }
    (engine.submit_choices(requests).expect("accepted"), receivers)
}

#[test]
fn the_prompt_of_several_choices_is_read_once() {
    for (queue, max_running, budget) in
        [(1, 8, 512), (2, 8, 512), (1, 8, 30), (2, 3, 64), (1, 1, 7)]
    {
        let limits =
            Limits { tokens: 512, rows: 64, blocks: 64, context: 2048, vocab: VOCAB, queue };
        let counted = Arc::new(AtomicUsize::new(0));
        let inner = Scripted::new(limits, Box::new(digest));
        let backend = Box::new(Counting { inner, tokens: Arc::clone(&counted) });
        let settings = Settings { max_running, token_budget: budget, context: 2048 };
        let mut engine = Engine::new(backend, Vocabulary::tiny(), settings);
        let tokens = prompt(9, 100);
        let (_, receivers) = submit_choices(&mut engine, &tokens, 5, 40);
        run(&mut engine);
        for events in &receivers {
            let (ids, _, finished) = answer(events);
            assert_eq!(ids, expected(&tokens, 40));
            assert_eq!(finished.usage.prompt, 100);
        }
        // Those without a place read what no full block of the cache holds.
        let late = 5usize.saturating_sub(max_running);
        assert_eq!(counted.load(Relaxed), 100 + 5 * 39 + late * 4, "{max_running} at once");
        assert_eq!(engine.load().blocks_held, 0);
    }
}

#[test]
fn choices_outlive_the_one_that_reads_their_prompt() {
    for steps in 0..8 {
        let mut engine = engine(64, 8, 16);
        let tokens = prompt(4, 70);
        let (ids, receivers) = submit_choices(&mut engine, &tokens, 3, 10);
        (0..steps).for_each(|_| assert!(engine.step().expect("step")));
        engine.cancel(ids[0]);
        run(&mut engine);
        assert_eq!(answer(&receivers[0]).2.reason, FinishReason::Cancelled);
        for events in &receivers[1..] {
            assert_eq!(answer(events).0, expected(&tokens, 10));
        }
        assert_eq!(engine.load().blocks_held, 0);
    }
}

/// A reader that stopped reading keeps neither its blocks nor its place while others wait, and gets the
/// rest of its answer all the same.
#[test]
fn a_stalled_reader_gives_way_to_those_who_wait() {
    // Blocks for one long answer; a place for one.
    for (blocks, max_running) in [(20, 4), (200, 1)] {
        let mut engine = engine(blocks, max_running, 64);
        let (sink, slow) = sync_channel(1);
        let tokens = prompt(1, 300);
        let request = Request { max_tokens: 200, ..Request::new(tokens.clone(), Box::new(sink)) };
        engine.submit(request).expect("accepted");
        for _ in 0..30 {
            engine.step().expect("step");
        }
        let other = prompt(2, 400);
        let events = submit(&mut engine, |r| Request { prompt: other.clone(), max_tokens: 9, ..r });
        let deadline = Instant::now() + Duration::from_secs(20);
        let finished = |engine: &Engine| engine.load().running == 0;
        std::thread::sleep(Duration::from_millis(250));
        while !finished(&engine) || engine.load().waiting > 1 {
            assert!(Instant::now() < deadline, "{:?}", engine.load());
            engine.step().expect("step");
        }
        assert_eq!(answer(&events).0, expected(&other, 9));
        assert_eq!(engine.load().blocks_held, 0, "the stalled one holds blocks");
        let mut ids = Vec::new();
        loop {
            match slow.try_recv() {
                Ok(Event::Token(token)) => ids.push(token.choice.token),
                Ok(Event::Finished(_)) => break,
                Ok(Event::Prompt(_)) => panic!("not asked for"),
                Err(_) => drop(engine.step().expect("step")),
            }
        }
        assert_eq!(ids, expected(&tokens, 200));
    }
}
