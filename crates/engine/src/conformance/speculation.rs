//! The gate for speculation: requests are answered with and without drafts, side by side.

use std::sync::mpsc::{Receiver, sync_channel};

use model::Vocabulary;

use super::rig::Rig;
use super::{Finding, Unit};
use crate::backend::BackendError;
use crate::engine::{Engine, RequestId, Settings};
use crate::load::Load;
use crate::request::{Event, Request};
use crate::sampling::{SamplingParams, gumbel};
use crate::sequence::Sequence;
use crate::speculation::{Ask, Drafter, Speculation};

/// Tokens of an answer.
const ANSWER: usize = 24;

/// Knows the answers, and is wrong at places of its own choice: drafts of every length are taken whole,
/// cut and thrown away.
struct Prompter {
    texts: Vec<Vec<u32>>,
    vocab: u32,
}

impl Drafter for Prompter {
    fn reach(&mut self, _: RequestId, tokens: &[u32], most: usize) -> usize {
        most.min(1 + tokens.len() * 7 % 15)
    }

    fn draft(&mut self, asks: &[Ask<'_>]) -> Result<Vec<Vec<u32>>, BackendError> {
        let draft = |ask: &Ask<'_>| {
            let text = self.texts.iter().find(|text| text.starts_with(ask.tokens));
            let next = text.map_or(&[][..], |text| &text[ask.tokens.len()..]);
            let spoil = |(i, &token): (usize, &u32)| {
                let wrong = (ask.tokens.len() * 5 + i) % 8 == 7;
                (token + u32::from(wrong)) % self.vocab
            };
            next.iter().take(ask.most).enumerate().map(spoil).collect()
        };
        Ok(asks.iter().map(draft).collect())
    }

    fn forget(&mut self, _: RequestId) {}
}

/// What is asked.
pub struct Question {
    pub prompt: Vec<u32>,
    pub sampling: SamplingParams,
}

pub fn speculation(rig: &mut Rig<'_>) -> Result<Finding, BackendError> {
    let warm = |seed| SamplingParams { temperature: 0.9, seed, ..Default::default() };
    let mut kinds = vec![SamplingParams::default(), warm(1), SamplingParams::default(), warm(2)];
    if rig.is_bitwise() {
        kinds.push(SamplingParams { top_k: 40, top_p: 0.9, min_p: 0.01, ..warm(3) });
        let penalties = (1.3, 0.2, 0.1);
        kinds.push(SamplingParams {
            repetition_penalty: penalties.0,
            frequency_penalty: penalties.1,
            presence_penalty: penalties.2,
            ..warm(4)
        });
    }
    let lengths = [3, 17, 31, 32, 40, 64];
    let mut questions = Vec::new();
    for (sampling, length) in kinds.into_iter().zip(lengths) {
        questions.push(Question { prompt: rig.tokens(length), sampling });
    }
    let settings = Settings { max_running: questions.len(), token_budget: 256, context: 128 };
    let (plain, _) = answers(rig, &questions, settings, ANSWER, None)?;
    let texts = questions.iter().zip(&plain).map(|(q, answer)| [&*q.prompt, answer].concat());
    let drafter = Prompter { texts: texts.collect(), vocab: rig.model().spec().vocab as u32 };
    let always = Speculation::new(Box::new(drafter)).always(15);
    let (drafted, _) = answers(rig, &questions, settings, ANSWER, Some(always))?;

    let (mut differing, mut detail) = (0, format!("{} answers", plain.len()));
    for ((question, expected), found) in questions.iter().zip(&plain).zip(&drafted) {
        if let Some(why) = differs(rig, question, expected, found)? {
            differing += 1;
            detail = why;
        }
    }
    Ok(Finding { figure: f64::from(differing), bound: 0.0, unit: Unit::DifferingAnswers, detail })
}

/// Tokens of every answer, `most` at most, as many generated side by side as the settings say.
pub fn answers(
    rig: &mut Rig<'_>,
    questions: &[Question],
    settings: Settings,
    most: usize,
    speculation: Option<Speculation>,
) -> Result<(Vec<Vec<u32>>, Load), BackendError> {
    let vocabulary = match rig.model().spec().vocab {
        vocab if vocab <= Vocabulary::tiny().rows() => Vocabulary::tiny(),
        _ => Vocabulary::family(),
    };
    let backend = rig.subject(settings.max_running * settings.context)?.into_backend();
    let mut engine = Engine::new(backend, vocabulary, settings);
    speculation.into_iter().for_each(|speculation| engine.speculate(speculation));
    let mut events = Vec::new();
    for question in questions {
        let (sink, receiver) = sync_channel(most + 1);
        let request = Request {
            max_tokens: most,
            sampling: question.sampling.clone(),
            ..Request::new(question.prompt.clone(), Box::new(sink))
        };
        let refused = |why: crate::Refusal| BackendError::Batch(why.to_string());
        engine.submit(request).map_err(refused)?;
        events.push(receiver);
    }
    while !engine.is_idle() {
        engine.step()?;
    }
    Ok((events.iter().map(tokens).collect(), engine.load()))
}

fn tokens(events: &Receiver<Event>) -> Vec<u32> {
    let token = |event| match event {
        Event::Token(token) => Some(token.choice.token),
        Event::Prompt(_) | Event::Finished(_) => None,
    };
    events.try_iter().filter_map(token).collect()
}

/// Says where two answers part, unless a backend whose kernel classes differ in their last bits may well
/// do so: what follows is then another text.
pub fn differs(
    rig: &mut Rig<'_>,
    question: &Question,
    expected: &[u32],
    found: &[u32],
) -> Result<Option<String>, BackendError> {
    let same = expected.iter().zip(found).take_while(|(a, b)| a == b).count();
    if same == expected.len() && same == found.len() {
        return Ok(None);
    }
    let (Some(&a), Some(&b)) = (expected.get(same), found.get(same)) else {
        return Ok(Some(format!("{} tokens, not {}", found.len(), expected.len())));
    };
    let context = [&*question.prompt, &expected[..same]].concat();
    if !rig.is_bitwise() {
        let logits = rig.subject(context.len())?.read(&mut Sequence::new(context.clone()))?;
        let row = logits.last().map_or(&[][..], Vec::as_slice);
        let SamplingParams { temperature, seed, .. } = question.sampling;
        let noise = |token| f64::from(temperature * gumbel(seed, context.len() as u32, token));
        let score =
            |token: u32| row.get(token as usize).map_or(0.0, |&l| f64::from(l)) + noise(token);
        if (score(a) - score(b)).abs() <= rig.blur(row)? {
            return Ok(None);
        }
    }
    Ok(Some(format!("token {same} behind {} is {b}, not {a}", question.prompt.len())))
}
