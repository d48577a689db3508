//! Speculation over many prompts: every way to draft, beside plain decoding.

use model::{Marker, Vocabulary};

use super::rig::Rig;
use super::speculation::{Question, answers, differs};
use crate::backend::{Backend, BackendError};
use crate::engine::Settings;
use crate::load::Load;
use crate::philox::philox;
use crate::sampling::SamplingParams;
use crate::speculation::{DraftModel, Drafter, Ngram, Speculation};

/// Tokens of an answer.
const ANSWER: usize = 40;
/// Requests that run at once, and positions of each.
const RUNNING: usize = 12;
const POSITIONS: usize = 768;

/// How one way to draft fared.
#[derive(Debug)]
pub struct Drafted {
    /// Who drafted.
    pub name: &'static str,
    /// Answers that are plain decoding's, token for token.
    pub same: usize,
    /// Answers that part where two candidates are closer than the gates' bound; none on a backend that promises bits.
    pub ties: usize,
    /// Where the other answers part.
    pub wrong: Vec<String>,
    /// Forward passes, and drafts that were right.
    pub load: Load,
    /// Forward passes of plain decoding.
    pub plain: u64,
    /// Whether the drafter was made to draft whether it pays or not.
    pub always: bool,
}

/// Answers `count` prompts of the goldens' kinds made of `story`, tokens of kipp-tiny's vocabulary, by every method, and
/// compares with plain decoding. `small` builds the backend of a draft model, of a like vocabulary.
pub fn identity(
    rig: &mut Rig<'_>,
    story: &[u32],
    count: usize,
    small: &mut dyn FnMut() -> Result<Box<dyn Backend>, BackendError>,
) -> Result<Vec<Drafted>, BackendError> {
    let questions: Vec<Question> = (0..count)
        .map(|i| Question { prompt: prompt(story, i), sampling: sampling(i, rig.is_bitwise()) })
        .collect();
    let settings = Settings { max_running: RUNNING, token_budget: 512, context: POSITIONS };
    let (plain, before) = answers(rig, &questions, settings, ANSWER, None)?;
    let mut draft_model = || Ok(Box::new(DraftModel::new(small()?)));
    let methods: [(&str, Box<dyn Drafter>, Option<usize>); 4] = [
        ("ngram, always", Box::<Ngram>::default(), Some(7)),
        ("ngram", Box::<Ngram>::default(), None),
        ("draft model, always", draft_model()?, Some(5)),
        ("draft model", draft_model()?, None),
    ];
    let mut found = Vec::new();
    for (name, drafter, length) in methods {
        let mut speculation = Speculation::new(drafter);
        if let Some(length) = length {
            speculation = speculation.always(length);
        }
        let (drafted, load) = answers(rig, &questions, settings, ANSWER, Some(speculation))?;
        let (mut same, mut ties, mut wrong) = (0, 0, Vec::new());
        for ((question, expected), found) in questions.iter().zip(&plain).zip(&drafted) {
            match differs(rig, question, expected, found)? {
                Some(why) => wrong.push(why),
                None if expected == found => same += 1,
                None => ties += 1,
            }
        }
        let (plain, always) = (before.steps, length.is_some());
        found.push(Drafted { name, same, ties, wrong, load, plain, always });
    }
    Ok(found)
}

/// Prompts of the goldens' kinds: beginnings of stories, turns of a conversation, tokens of any characters, and long
/// texts, here a story said again and again.
fn prompt(text: &[u32], i: usize) -> Vec<u32> {
    let roll = |j: u32, sides: usize| philox(77, [i as u32, j, 0, 0])[0] as usize % sides;
    let marker = |marker| Vocabulary::tiny().id(marker);
    let length = 4 + roll(0, 90);
    let start = roll(1, text.len() - length);
    let story = &text[start..start + length];
    match i % 5 {
        0 => story[..length.min(40)].repeat(4),
        1 => (0..length as u32).map(|j| roll(2 + j, 8166) as u32).collect(),
        2 => [&[marker(Marker::ImStart)], story, &[marker(Marker::ImEnd)]].concat(),
        _ => story.to_vec(),
    }
}

/// Every second answer is greedy. Where ties are judged by the candidates' scores, the others are drawn from all tokens.
fn sampling(i: usize, bitwise: bool) -> SamplingParams {
    let warm = SamplingParams { temperature: 0.8, seed: i as u64, ..Default::default() };
    match i % 4 {
        0 | 1 => SamplingParams::default(),
        _ if !bitwise => warm,
        2 => SamplingParams { top_p: 0.9, top_k: 40, ..warm },
        _ => SamplingParams { repetition_penalty: 1.1, frequency_penalty: 0.1, ..warm },
    }
}
