//! Answers of kipp-tiny: those of the reference on every instruction class, the same bits in any company, any
//! chunking and on any number of threads, and all but the same ones from an 8-bit cache.

#[path = "../../engine/tests/common/goldens.rs"]
mod goldens;

use std::sync::Arc;
use std::sync::mpsc::sync_channel;

use cpu::{Class, Cpu, CpuModel, Options};
use engine::conformance::nmse;
use engine::sampling::argmax;
use engine::{
    Backend, Batch, Engine, Event, Input, KvConfig, KvKind, Output, Request, Row, Settings, Want,
};
use goldens::{Golden, goldens, manifest};
use model::{Model, Vocabulary};

fn cases() -> Vec<Golden> {
    goldens(&manifest()["tiny"], Vocabulary::tiny().rows())
}

fn engine(model: &Arc<CpuModel>, max_running: usize, token_budget: usize) -> Engine {
    engine_with(model, KvKind::Bf16, max_running, token_budget)
}

fn engine_with(
    model: &Arc<CpuModel>,
    kind: KvKind,
    max_running: usize,
    token_budget: usize,
) -> Engine {
    let backend = Cpu::new(model, KvConfig { blocks: 96, kind }).expect("a backend");
    let settings = Settings { max_running, token_budget, context: 1024 };
    Engine::new(Box::new(backend), Vocabulary::tiny(), settings)
}

fn load(options: Options) -> Arc<CpuModel> {
    let model = Arc::new(Model::builtin().expect("the built-in model"));
    CpuModel::load(model, options, &mut |_, _| ()).expect("weights")
}

/// A token and the bits of its log-probability.
type Answer = Vec<(u32, u32)>;

/// The greedy continuations of all prompts, submitted together.
fn answers(engine: &mut Engine, prompts: &[Vec<u32>], tokens: usize) -> Vec<Answer> {
    let submit = |prompt: &Vec<u32>| {
        let (sink, events) = sync_channel(tokens + 1);
        let request = Request::new(prompt.clone(), Box::new(sink));
        engine.submit(Request { max_tokens: tokens, ..request }).expect("accepted");
        events
    };
    let asked: Vec<_> = prompts.iter().map(submit).collect();
    while !engine.is_idle() {
        engine.step().expect("a step");
    }
    let answer = |events: std::sync::mpsc::Receiver<Event>| {
        let token = |event| match event {
            Event::Token(token) => Some((token.choice.token, token.choice.logprob.to_bits())),
            Event::Prompt(_) | Event::Finished(_) => None,
        };
        events.try_iter().filter_map(token).collect()
    };
    asked.into_iter().map(answer).collect()
}

/// Logits of the last positions of the prompt.
fn check_logits(model: &Arc<CpuModel>, golden: &Golden) {
    let kv = KvConfig::for_positions(golden.ids.len(), KvKind::Bf16);
    let mut cpu = Cpu::new(model, kv).expect("a backend");
    let mut batch = Batch::default();
    let table: Vec<u32> = (0..kv.blocks as u32).collect();
    batch.push(golden.ids.iter().map(|&id| Input::Token(id)), 0, &table);
    let rows = golden.ids.len() - golden.logits.len()..golden.ids.len();
    batch.rows = rows.map(|token| Row { token, want: Want::Logits }).collect();
    let mut output = Output::default();
    cpu.forward(&batch, &mut output).expect("a batch");
    let answers = output.answers.iter().zip(&golden.logits).zip(&golden.argmax);
    for (row, ((found, expected), &best)) in answers.enumerate() {
        let engine::Answer::Logits(found) = found else { panic!("asked for logits") };
        let (name, error) = (&golden.label, nmse(found, expected));
        assert!(error <= 5e-5, "{name}, row {row}: NMSE {error:e}");
        assert_eq!(argmax(found).map(|(token, _)| token), Some(best), "{name}, row {row}");
    }
}

/// Follows the reference's own continuation, so that one near tie does not end the comparison.
#[test]
fn every_class_continues_as_the_reference_does() {
    for class in Class::available() {
        let model = load(Options { threads: 2, class });
        for golden in cases() {
            check_logits(&model, &golden);
            let mut engine = engine(&model, 1, 512);
            let mut prompt = golden.ids.clone();
            for (step, &(token, gap)) in golden.greedy.iter().enumerate() {
                let found = answers(&mut engine, std::slice::from_ref(&prompt), 1)[0][0].0;
                let name = &golden.label;
                assert!(
                    found == token || gap <= 1e-3,
                    "{class:?}, {name}, step {step}: {found}, not {token}, by {gap}"
                );
                prompt.push(token);
            }
        }
    }
}

#[test]
fn the_same_bits_alone_batched_chunked_and_on_any_number_of_threads() {
    let prompts: Vec<Vec<u32>> = cases().into_iter().map(|golden| golden.ids).collect();
    let model = load(Options { threads: 1, ..Options::default() });
    let alone: Vec<Answer> = prompts
        .iter()
        .map(|prompt| {
            answers(&mut engine(&model, 1, 512), std::slice::from_ref(prompt), 24).remove(0)
        })
        .collect();
    assert!(alone.iter().all(|answer| answer.len() == 24));
    for budget in [1, 7, 100] {
        for together in [1, 4] {
            let found = answers(&mut engine(&model, together, budget), &prompts, 24);
            assert_eq!(found, alone, "{together} together, {budget} tokens a step");
        }
    }
    // Four of each, which share blocks.
    let many: Vec<Vec<u32>> = prompts.iter().cycle().take(16).cloned().collect();
    let found = answers(&mut engine(&model, 16, 200), &many, 24);
    assert!(found.iter().zip(alone.iter().cycle()).all(|(found, alone)| found == alone));
    for threads in [2, 3, 8, 64] {
        let model = load(Options { threads, ..Options::default() });
        // Many threads on few cores take their time.
        let tokens = if threads > 8 { 2 } else { 24 };
        let found = answers(&mut engine(&model, 4, 64), &prompts, tokens);
        let alone: Vec<Answer> = alone.iter().map(|answer| answer[..tokens].to_vec()).collect();
        assert_eq!(found, alone, "{threads} threads");
    }
}

/// Case KV-05: near the answers of the wide cache at every length, and the same with and without reuse.
#[test]
fn an_8_bit_cache_answers_all_but_the_same() {
    let ids: Vec<u32> = cases().into_iter().flat_map(|golden| golden.ids).collect();
    let model = load(Options { threads: 2, ..Options::default() });
    for length in [1, 31, 32, 33, 1000] {
        let prompt: Vec<u32> = ids.iter().cycle().take(length).copied().collect();
        let choice = |engine: &mut Engine| {
            let (sink, events) = sync_channel(2);
            let request = Request::new(prompt.clone(), Box::new(sink));
            engine.submit(Request { max_tokens: 1, top: 10, ..request }).expect("accepted");
            while !engine.is_idle() {
                engine.step().expect("a step");
            }
            let Ok(Event::Token(token)) = events.recv() else { panic!("no token") };
            let Ok(Event::Finished(end)) = events.recv() else { panic!("no end") };
            (token.choice, end.usage.cached)
        };
        let wide = choice(&mut engine(&model, 1, 512)).0;
        let mut narrow = engine_with(&model, KvKind::Q8_0, 1, 512);
        let (first, cached) = choice(&mut narrow);
        assert_eq!((first.token, cached), (wide.token, 0), "{length}");
        for (id, logprob) in &wide.top {
            let Some((_, found)) = first.top.iter().find(|(found, _)| found == id) else {
                continue;
            };
            // What 8 bits cost so small a model; a scale that was forgotten costs all.
            assert!((found - logprob).abs() < 0.25, "{length}: {found}, not {logprob}");
        }
        let (again, cached) = choice(&mut narrow);
        assert_eq!((again, cached), (first, (length - 1) / 32 * 32), "{length}");
    }
}
