//! Speculation: the same tokens as without, in fewer forward passes.

#[path = "common/validation.rs"]
mod validation;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};

use engine::philox::philox;
use engine::request::{Constraint, Finished, Token};
use engine::speculation::{Ask, DraftModel, Drafter, Ngram};
use engine::{
    BackendError, Engine, Event, FinishReason, KvConfig, KvKind, Limits, Load, Oracle, Request,
    RequestId, SamplingParams, Scripted, Settings, Speculation,
};
use model::{Model, Scheme, Vocabulary};
use text::StopStrings;

const VOCAB: usize = 8192;

fn digest(context: &[u32]) -> u32 {
    let mix = |hash: u64, &token: &u32| {
        let words = philox(hash, [token, 0, 0, 0]);
        u64::from(words[0]) << 32 | u64::from(words[1])
    };
    (context.iter().fold(1, mix) % 8000) as u32
}

fn dice(seed: u64, roll: usize) -> usize {
    philox(seed, [roll as u32, 7, 7, 7])[0] as usize
}

fn prompt(seed: u64, len: usize) -> Vec<u32> {
    (0..len).map(|i| (dice(seed, i) % 8000) as u32).collect()
}

fn scripted(blocks: usize, queue: usize) -> Box<Scripted> {
    let limits = Limits { tokens: 512, rows: 256, blocks, context: 2048, vocab: VOCAB, queue };
    Box::new(Scripted::new(limits, Box::new(|context| Some(digest(context)))))
}

/// Knows the answers, and says now and then something else.
struct Planted {
    answers: Vec<Vec<u32>>,
    /// One token in so many is wrong.
    wrong: usize,
    rolls: usize,
}

impl Drafter for Planted {
    fn reach(&mut self, _: RequestId, _: &[u32], most: usize) -> usize {
        self.rolls += 1;
        dice(5, self.rolls) % (most + 1)
    }

    fn draft(&mut self, asks: &[Ask<'_>]) -> Result<Vec<Vec<u32>>, BackendError> {
        let mut drafts = Vec::new();
        for ask in asks {
            let known = self.answers.iter().find(|answer| answer.starts_with(ask.tokens));
            let next = known.map_or(&[][..], |answer| &answer[ask.tokens.len()..]);
            let mut draft: Vec<u32> = next.iter().take(ask.most).copied().collect();
            for token in &mut draft {
                self.rolls += 1;
                if dice(6, self.rolls).is_multiple_of(self.wrong) {
                    *token = (*token + 1) % 8000;
                }
            }
            drafts.push(draft);
        }
        Ok(drafts)
    }

    fn forget(&mut self, _: RequestId) {}
}

/// A constraint that allows an even or an odd token by the sum of those before, and ends after some.
struct Parity {
    sum: u32,
    left: usize,
}

impl Constraint for Parity {
    fn mask(&mut self) -> Result<Option<Arc<[u32]>>, String> {
        if self.left == 0 {
            return Err("all is said".into());
        }
        let word = if self.sum.is_multiple_of(2) { 0x5555_5555 } else { 0xaaaa_aaaa };
        Ok(Some(vec![word; VOCAB / 32].into()))
    }

    fn accept(&mut self, token: u32) -> Result<(), String> {
        assert!(token % 2 == self.sum % 2, "the mask was not kept to");
        self.sum += token / 3;
        self.left -= 1;
        Ok(())
    }

    fn fork(&self) -> Box<dyn Constraint> {
        Box::new(Parity { ..*self })
    }
}

/// A request of every kind that there is.
fn ask(kind: usize) -> Request {
    let (sink, _) = sync_channel(1);
    let warm = SamplingParams { temperature: 6.0, seed: kind as u64, ..Default::default() };
    let plain = Request::new(prompt(kind as u64 % 5, 1 + kind * 11 % 90), Box::new(sink));
    let request = Request { max_tokens: 1 + kind * 7 % 60, ..plain };
    match kind % 8 {
        0 | 1 => request,
        2 => Request { sampling: warm, ..request },
        3 => {
            let sampling = SamplingParams {
                repetition_penalty: 1.2,
                frequency_penalty: 0.5,
                presence_penalty: 0.3,
                ..warm
            };
            Request { sampling, ..request }
        }
        4 => Request { constraint: Some(Box::new(Parity { sum: 1, left: 30 })), ..request },
        5 => {
            let sampling = SamplingParams { top_k: 7, top_p: 0.9, min_p: 0.01, ..warm };
            Request { sampling, top: 3, bias: [(7, 50.0)].into(), ..request }
        }
        6 => Request { stop_tokens: (0..400).collect(), ..request },
        _ => {
            let stops = StopStrings::new(["e", "ing"].map(str::to_owned));
            Request { stops, top: 1, ..request }
        }
    }
}

/// What a client sees of an answer.
type Answer = (Vec<Token>, Finished);

fn read(events: &Receiver<Event>) -> Answer {
    let mut tokens = Vec::new();
    for event in events.try_iter() {
        match event {
            Event::Prompt(_) => panic!("nobody asked"),
            Event::Token(token) => tokens.push(token),
            Event::Finished(finished) => return (tokens, finished),
        }
    }
    panic!("the answer has no end");
}

/// Answers to `kinds`, some arriving late; what a step took; blocks are all given back.
fn answers(mut engine: Engine, kinds: usize) -> (Vec<Answer>, Load) {
    let mut events = Vec::new();
    for kind in 0..kinds {
        let (sink, receiver) = sync_channel(10_000);
        engine.submit(Request { sink: Box::new(sink), ..ask(kind) }).expect("accepted");
        events.push(receiver);
        if kind % 3 == 0 {
            engine.step().expect("step");
        }
    }
    while !engine.is_idle() {
        engine.step().expect("step");
    }
    assert_eq!(engine.load().blocks_held, 0, "blocks lost");
    (events.iter().map(read).collect(), engine.load())
}

fn ids(answer: &Answer) -> Vec<u32> {
    answer.0.iter().map(|token| token.choice.token).collect()
}

#[test]
fn every_kind_of_request_gets_the_tokens_of_plain_decoding() {
    let kinds = 32;
    for (blocks, queue, max_running) in [(400, 1, 16), (400, 2, 16), (7, 1, 8), (7, 2, 8)] {
        let settings = Settings { max_running, token_budget: 128, context: 2048 };
        let engine = || Engine::new(scripted(blocks, queue), Vocabulary::tiny(), settings);
        let (plain, before) = answers(engine(), kinds);
        let known: Vec<Vec<u32>> =
            (0..kinds).map(|kind| [ask(kind).prompt, ids(&plain[kind])].concat()).collect();
        for (wrong, length) in [(3, 15), (1_000_000, 7)] {
            let drafter = Planted { answers: known.clone(), wrong, rolls: 0 };
            let mut drafting = engine();
            drafting.speculate(Speculation::new(Box::new(drafter)).always(length));
            let (found, after) = answers(drafting, kinds);
            for (kind, ((found, end), (expected, plain_end))) in
                found.iter().zip(&plain).enumerate()
            {
                let name =
                    format!("kind {kind}, one in {wrong} wrong, {blocks} blocks, queue {queue}");
                assert_eq!(found, expected, "{name}");
                assert_eq!(end.reason, plain_end.reason, "{name}");
                assert_eq!((&end.text, &end.stop_text), (&plain_end.text, &plain_end.stop_text));
                assert_eq!(end.usage.generated, plain_end.usage.generated, "{name}");
                assert!(end.usage.accepted <= end.usage.drafted);
            }
            let drafted: usize = found.iter().map(|(_, end)| end.usage.drafted).sum();
            assert_eq!(after.drafted, drafted as u64);
            assert!(after.accepted > 100, "{after:?}");
            if blocks == 400 {
                assert!(after.steps < before.steps, "{before:?} {after:?}");
            } else {
                assert!(after.preemptions > 0, "{after:?}");
            }
        }
    }
}

/// Prompts that were read in different steps must not decode apart for ever.
#[test]
fn drafting_takes_no_more_steps_than_plain_decoding() {
    for queue in [1, 2] {
        let settings = Settings { max_running: 6, token_budget: 128, context: 2048 };
        let steps = |speculation: Option<Speculation>| {
            let mut engine = Engine::new(scripted(400, queue), Vocabulary::tiny(), settings);
            speculation.into_iter().for_each(|s| engine.speculate(s));
            let mut events = Vec::new();
            for i in 0..30 {
                let (sink, receiver) = sync_channel(100);
                let max_tokens = 10 + i % 7;
                let prompt = prompt(i as u64, 40 + i);
                let request = Request { max_tokens, ..Request::new(prompt, Box::new(sink)) };
                engine.submit(request).expect("accepted");
                events.push(receiver);
            }
            while !engine.is_idle() {
                engine.step().expect("a step");
            }
            engine.load().steps
        };
        let wrong = Planted { answers: Vec::new(), wrong: 1, rolls: 0 };
        let drafting = steps(Some(Speculation::new(Box::new(wrong)).always(3)));
        let plain = steps(None);
        assert!(drafting <= plain + 6, "queue {queue}: {drafting} steps, not {plain}");
    }
}

#[test]
fn cancelling_and_readers_that_leave_free_everything_at_any_moment() {
    for (steps, queue) in (0..8).flat_map(|steps| [(steps, 1), (steps, 2)]) {
        let settings = Settings { max_running: 4, token_budget: 64, context: 2048 };
        let mut engine = Engine::new(scripted(30, queue), Vocabulary::tiny(), settings);
        let answers = (0..4).map(|i| {
            let mut text = prompt(i, 20);
            (0..80).for_each(|_| text.push(digest(&text)));
            text
        });
        let drafter = Planted { answers: answers.collect(), wrong: 5, rolls: 0 };
        engine.speculate(Speculation::new(Box::new(drafter)).always(9));
        let mut asked = Vec::new();
        for i in 0..4 {
            let (sink, events) = sync_channel(1000);
            let request = Request::new(prompt(i, 20), Box::new(sink));
            asked.push((engine.submit(request).expect("accepted"), events));
        }
        (0..steps).for_each(|_| assert!(engine.step().expect("step")));
        for (i, (id, events)) in asked.into_iter().enumerate() {
            if i % 2 == 0 { engine.cancel(id) } else { drop(events) }
        }
        for _ in 0..3 {
            engine.step().expect("step");
        }
        assert!(engine.is_idle(), "after {steps} steps");
        assert_eq!(engine.load().blocks_held, 0, "after {steps} steps");
    }
}

/// Repetitive text: the script says the same twenty tokens over and over.
fn repeating(context: &[u32]) -> Option<u32> {
    Some(1000 + context.len() as u32 % 20)
}

#[test]
fn repetitive_text_takes_half_the_forward_passes() {
    let limits =
        Limits { tokens: 512, rows: 64, blocks: 64, context: 2048, vocab: VOCAB, queue: 1 };
    let mut engine = Engine::new(
        Box::new(Scripted::new(limits, Box::new(repeating))),
        Vocabulary::tiny(),
        Settings { max_running: 1, token_budget: 64, context: 2048 },
    );
    engine.speculate(Speculation::new(Box::<Ngram>::default()).always(15));
    let (sink, events) = sync_channel(1000);
    let request = Request { max_tokens: 200, ..Request::new(prompt(1, 9), Box::new(sink)) };
    engine.submit(request).expect("accepted");
    while !engine.is_idle() {
        engine.step().expect("step");
    }
    let (tokens, finished) = read(&events);
    let said: Vec<u32> = tokens.iter().map(|token| token.choice.token).collect();
    assert_eq!(said, (9..209).map(|position| 1000 + position % 20).collect::<Vec<_>>());
    let Load { steps, drafted, accepted, .. } = engine.load();
    assert!(steps * 2 <= 200, "{steps} steps for 200 tokens");
    assert_eq!(
        (finished.usage.drafted as u64, finished.usage.accepted as u64),
        (drafted, accepted)
    );
}

fn under(scheme: Scheme) -> Arc<Model> {
    Arc::new(Model::builtin().and_then(|tiny| tiny.requantised(scheme)).expect("kipp-tiny"))
}

fn oracle(model: &Arc<Model>, positions: usize) -> Box<Oracle> {
    let kv = KvConfig::for_positions(positions, KvKind::Bf16);
    Box::new(Oracle::new(Arc::clone(model), kv, 2))
}

#[test]
fn a_draft_model_and_the_text_itself_draft_for_kipp_tiny() {
    let (model, small) = (under(Scheme::Bf16), under(Scheme::Q4_0));
    let text = validation::text();
    let engine = || {
        let settings = Settings { max_running: 3, token_budget: 256, context: 400 };
        Engine::new(oracle(&model, 1000), Vocabulary::tiny(), settings)
    };
    let run = |mut engine: Engine| {
        let mut events = Vec::new();
        for i in 0..6 {
            let (sink, receiver) = sync_channel(1000);
            let warm =
                SamplingParams { temperature: 0.7, seed: 3, top_p: 0.9, ..Default::default() };
            let request = Request {
                max_tokens: 40,
                sampling: if i % 2 == 0 { SamplingParams::default() } else { warm },
                ..Request::new(text[i * 300..i * 300 + 40].to_vec(), Box::new(sink))
            };
            engine.submit(request).expect("accepted");
            events.push(receiver);
        }
        while !engine.is_idle() {
            engine.step().expect("step");
        }
        let answers: Vec<Vec<u32>> = events.iter().map(|events| ids(&read(events))).collect();
        (answers, engine.load())
    };
    let (plain, before) = run(engine());
    // With blocks for one draft only, the other requests do without.
    for blocks in [40, 3] {
        let mut drafting = engine();
        let drafter = DraftModel::new(oracle(&small, blocks * 32));
        drafting.speculate(Speculation::new(Box::new(drafter)).always(5));
        let (found, after) = run(drafting);
        assert_eq!(found, plain);
        let Load { drafted, accepted, .. } = after;
        println!(
            "{blocks} blocks: {accepted} of {drafted}, {} steps, {} plain",
            after.steps, before.steps
        );
        assert!(accepted * 2 > drafted, "the schemes of one model agree: {accepted} of {drafted}");
        assert!(blocks == 3 || after.steps * 2 < before.steps, "{after:?} {before:?}");
    }
    let mut drafting = engine();
    drafting.speculate(Speculation::new(Box::<Ngram>::default()).always(7));
    assert_eq!(run(drafting).0, plain);
    // The gate may do what it likes.
    let mut gated = engine();
    gated.speculate(Speculation::new(Box::<Ngram>::default()));
    assert_eq!(run(gated).0, plain);
}

/// What the script below favours after a context.
fn favoured(context: &[u32]) -> u32 {
    context.iter().sum::<u32>() % 64
}

/// Always drafts what is favoured.
struct Hopeful;

impl Drafter for Hopeful {
    fn reach(&mut self, _: RequestId, _: &[u32], most: usize) -> usize {
        most
    }

    fn draft(&mut self, asks: &[Ask<'_>]) -> Result<Vec<Vec<u32>>, BackendError> {
        let draft = |ask: &Ask<'_>| {
            let mut text = ask.tokens.to_vec();
            (0..ask.most).for_each(|_| text.push(favoured(&text)));
            text.split_off(ask.tokens.len())
        };
        Ok(asks.iter().map(draft).collect())
    }

    fn forget(&mut self, _: RequestId) {}
}

/// Sampled draws behind drafts follow the distribution, whatever is drafted: chi-square over the pairs
/// of tokens that 6,000 seeds draw, where the draft is one of them.
#[test]
fn sampled_tokens_keep_their_distribution() {
    let limits = Limits { tokens: 512, rows: 256, blocks: 512, context: 64, vocab: 64, queue: 1 };
    // After any context one token of 64 has a logit of 50: at temperature 16 it has weight 22.8.
    let script = |context: &[u32]| Some(favoured(context));
    let mut engine = Engine::new(
        Box::new(Scripted::new(limits, Box::new(script))),
        Vocabulary::tiny(),
        Settings { max_running: 32, token_budget: 512, context: 64 },
    );
    engine.speculate(Speculation::new(Box::new(Hopeful)).always(3));
    let draws: u32 = 6_000;
    let mut counts: HashMap<(u32, u32), u32> = HashMap::new();
    let mut events = Vec::new();
    for seed in 0..draws {
        let (sink, receiver) = sync_channel(8);
        let sampling =
            SamplingParams { temperature: 16.0, seed: seed.into(), ..Default::default() };
        let request =
            Request { max_tokens: 4, sampling, ..Request::new(vec![5, 5], Box::new(sink)) };
        engine.submit(request).expect("accepted");
        events.push(receiver);
    }
    while !engine.is_idle() {
        engine.step().expect("step");
    }
    assert!(engine.load().accepted > 500, "{:?}", engine.load());
    for receiver in &events {
        let said = ids(&read(receiver));
        // Second and third token, by how each stands to what the script favours there.
        let favoured = |at: usize| favoured(&[&[5, 5], &said[..at]].concat());
        let place = |at: usize| if said[at] == favoured(at) { 64 } else { said[at] / 16 };
        *counts.entry((place(1), place(2))).or_default() += 1;
    }
    let weight = (50.0f64 / 16.0).exp();
    let share = |place: u32| match place {
        64 => weight / (weight + 63.0),
        // A quarter of the tokens, less the favoured one where it is among them: on average.
        _ => 63.0 / 4.0 / (weight + 63.0),
    };
    let places = [0, 1, 2, 3, 64];
    let mut chi = 0.0;
    for a in places {
        for b in places {
            let expected = f64::from(draws) * share(a) * share(b);
            let found = f64::from(counts.get(&(a, b)).copied().unwrap_or(0));
            chi += (found - expected).powi(2) / expected;
        }
    }
    // 99.9 % quantile for 24 degrees of freedom; the seeds are fixed, so this never flickers.
    println!("chi-square {chi:.1} of 25 cells");
    assert!(chi < 51.2, "chi-square {chi}");
}

#[test]
fn a_constraint_that_leaves_nothing_ends_the_answer() {
    struct Never;
    impl Constraint for Never {
        fn mask(&mut self) -> Result<Option<Arc<[u32]>>, String> {
            let mut mask = vec![0; VOCAB / 32];
            mask[0] = 1 << 9;
            Ok(Some(mask.into()))
        }
        fn accept(&mut self, _: u32) -> Result<(), String> {
            Ok(())
        }
        fn fork(&self) -> Box<dyn Constraint> {
            Box::new(Never)
        }
    }
    let settings = Settings { max_running: 4, token_budget: 64, context: 256 };
    let mut engine = Engine::new(scripted(64, 1), Vocabulary::tiny(), settings);
    let (sink, events) = sync_channel(100);
    let request = Request {
        constraint: Some(Box::new(Never)),
        bias: [(9, f32::NEG_INFINITY)].into(),
        ..Request::new(vec![1, 2], Box::new(sink))
    };
    engine.submit(request).expect("the bias alone leaves tokens");
    while !engine.is_idle() {
        engine.step().expect("step");
    }
    assert_eq!(read(&events).1.reason, FinishReason::NoToken);
    let (sink, _events) = sync_channel(1);
    let all: Vec<(u32, f32)> = (0..VOCAB as u32).map(|token| (token, f32::NEG_INFINITY)).collect();
    let request = Request { bias: all.into(), ..Request::new(vec![1], Box::new(sink)) };
    let refusal = engine.submit(request).expect_err("refused");
    assert!(refusal.to_string().starts_with("logit_bias: expected"), "{refusal}");
}
