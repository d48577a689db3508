//! Speculation on the CPU backend: the very tokens of plain decoding, over many prompts.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};

use cpu::{Cpu, CpuModel, Options};
use engine::philox::philox;
use engine::speculation::{DraftModel, Drafter, Ngram, Speculation};
use engine::{Backend, Engine, Event, KvConfig, KvKind, Load, Request, SamplingParams, Settings};
use model::{Marker, Model, Scheme, Vocabulary};

/// Tokens of an answer.
const ANSWER: usize = 40;

fn backend(model: &Arc<Model>) -> Box<dyn Backend> {
    let kv = KvConfig { blocks: 300, kind: KvKind::Bf16 };
    let options = Options { threads: 2, ..Options::default() };
    let packed = CpuModel::load(Arc::clone(model), options, &mut |_, _| ()).expect("packed");
    Box::new(Cpu::new(&packed, kv).expect("a backend"))
}

/// Prompts of the goldens' kinds: beginnings of stories, turns of a conversation, tokens of any
/// characters, and long texts, here a story said again and again.
fn prompts(count: usize) -> Vec<Vec<u32>> {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../engine/tests/data/goldens/valid.u16");
    let bytes = std::fs::read(file).expect("valid.u16");
    let text: Vec<u32> =
        bytes.chunks_exact(2).map(|b| u32::from(u16::from_le_bytes([b[0], b[1]]))).collect();
    let roll = |i: usize, j: u32, sides: usize| philox(77, [i as u32, j, 0, 0])[0] as usize % sides;
    let marker = |marker| Vocabulary::tiny().id(marker);
    let prompt = |i: usize| {
        let length = 4 + roll(i, 0, 90);
        let start = roll(i, 1, text.len() - length);
        let story = &text[start..start + length];
        match i % 5 {
            0 => story[..length.min(40)].repeat(4),
            1 => (0..length as u32).map(|j| roll(i, 2 + j, 8166) as u32).collect(),
            2 => [&[marker(Marker::ImStart)], story, &[marker(Marker::ImEnd)]].concat(),
            _ => story.to_vec(),
        }
    };
    (0..count).map(prompt).collect()
}

fn sampling(i: usize) -> SamplingParams {
    let warm = SamplingParams { temperature: 0.8, seed: i as u64, ..Default::default() };
    match i % 4 {
        0 | 1 => SamplingParams::default(),
        2 => SamplingParams { top_p: 0.9, top_k: 40, ..warm },
        _ => SamplingParams { repetition_penalty: 1.1, frequency_penalty: 0.1, ..warm },
    }
}

fn tokens(events: &Receiver<Event>) -> Vec<u32> {
    let token = |event| match event {
        Event::Token(token) => Some(token.choice.token),
        Event::Prompt(_) | Event::Finished(_) => None,
    };
    events.try_iter().filter_map(token).collect()
}

fn answers(
    model: &Arc<Model>,
    prompts: &[Vec<u32>],
    speculation: Option<Speculation>,
) -> (Vec<Vec<u32>>, Load) {
    let settings = Settings { max_running: 12, token_budget: 512, context: 1024 };
    let mut engine = Engine::new(backend(model), Vocabulary::tiny(), settings);
    speculation.into_iter().for_each(|speculation| engine.speculate(speculation));
    let mut events = Vec::new();
    for (i, prompt) in prompts.iter().enumerate() {
        let (sink, receiver) = sync_channel(ANSWER + 1);
        let request = Request {
            max_tokens: ANSWER,
            sampling: sampling(i),
            ..Request::new(prompt.clone(), Box::new(sink))
        };
        engine.submit(request).expect("accepted");
        events.push(receiver);
    }
    while !engine.is_idle() {
        engine.step().expect("a step");
    }
    (events.iter().map(tokens).collect(), engine.load())
}

/// Compares all answers by every method with those of plain decoding.
fn identical(count: usize) {
    let model = Arc::new(Model::builtin().expect("the built-in model"));
    let small = Arc::new(model.requantised(Scheme::Q4_0).expect("another scheme"));
    let prompts = prompts(count);
    let (plain, before) = answers(&model, &prompts, None);
    let draft_model = || DraftModel::new(backend(&small));
    let methods: [(&str, Box<dyn Drafter>, Option<usize>); 4] = [
        ("ngram, always", Box::<Ngram>::default(), Some(7)),
        ("ngram", Box::<Ngram>::default(), None),
        ("draft model, always", Box::new(draft_model()), Some(5)),
        ("draft model", Box::new(draft_model()), None),
    ];
    for (name, drafter, length) in methods {
        let speculation = Speculation::new(drafter);
        let speculation = match length {
            Some(length) => speculation.always(length),
            None => speculation,
        };
        let (found, load) = answers(&model, &prompts, Some(speculation));
        let same = found.iter().zip(&plain).filter(|(a, b)| a == b).count();
        println!(
            "{name}: {same} of {count} answers; {} of {} drafted tokens right; {} passes, {} plain",
            load.accepted, load.drafted, load.steps, before.steps
        );
        assert_eq!(same, count, "{name}");
        assert!(length.is_none() || load.accepted > count as u64, "{name}: {load:?}");
    }
}

#[test]
fn answers_are_those_of_plain_decoding() {
    identical(40);
}

/// `cargo test -p cpu --test speculation -- --ignored --nocapture`
#[test]
#[ignore = "1,000 prompts take minutes"]
fn answers_to_a_thousand_prompts_are_those_of_plain_decoding() {
    identical(1000);
}
