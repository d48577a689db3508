//! tokenizer.json against the compiled-in vocabulary.

use std::collections::HashMap;
use std::path::Path;

use model::vocabulary::ADDED;
use model::{Error, Result, Vocabulary};
use serde::Deserialize;

use crate::json;

#[derive(Deserialize)]
struct Tokenizer {
    model: Model,
    added_tokens: Vec<AddedToken>,
}

#[derive(Deserialize)]
struct Model {
    vocab: HashMap<String, u32>,
    merges: Vec<Merge>,
}

/// Older files write a merge as one string.
#[derive(Deserialize)]
#[serde(untagged)]
enum Merge {
    Joined(String),
    Pair(String, String),
}

#[derive(Deserialize)]
struct AddedToken {
    id: u32,
    content: String,
    special: bool,
}

/// Checks that a published tokenizer is the vocabulary.
pub(crate) fn check(path: &Path, vocabulary: &Vocabulary) -> Result<()> {
    let tokenizer = json::read(path)?;
    compare(&tokenizer, vocabulary).map_err(|error| error.in_file(path))
}

fn compare(found: &Tokenizer, vocabulary: &Vocabulary) -> Result<()> {
    let count = |what, expected: usize, found: usize| {
        if expected == found { Ok(()) } else { Err(Error::mismatch(what, expected, found)) }
    };
    count("number of tokens", vocabulary.ranks(), found.model.vocab.len())?;
    count("number of merges", vocabulary.merges().len(), found.model.merges.len())?;
    count("number of added tokens", ADDED.len(), found.added_tokens.len())?;

    let mut text = String::new();
    for id in 0..vocabulary.ranks() as u32 {
        text.clear();
        vocabulary.spell(id, &mut text);
        match found.model.vocab.get(&text) {
            Some(&other) if other == id => {}
            Some(other) => {
                return Err(Error::mismatch(format_args!("id of token {text:?}"), id, other));
            }
            None => return Err(Error::mismatch(format_args!("token {text:?}"), id, "none")),
        }
    }
    for (i, (pair, found)) in vocabulary.merges().zip(&found.model.merges).enumerate() {
        text.clear();
        vocabulary.spell_merge(pair, &mut text);
        let found = match found {
            Merge::Joined(joined) => joined.clone(),
            Merge::Pair(left, right) => format!("{left} {right}"),
        };
        if found != text {
            let (expected, found) = (format!("{text:?}"), format!("{found:?}"));
            return Err(Error::mismatch(format_args!("merge {i}"), expected, found));
        }
    }
    for (id, expected) in (vocabulary.ranks() as u32..).zip(&ADDED) {
        let found = found.added_tokens.iter().find(|added| added.id == id);
        let same =
            found.is_some_and(|a| (&*a.content, a.special) == (expected.text, expected.special));
        if !same {
            let found = found.map_or("none", |added| &added.content);
            return Err(Error::mismatch(format_args!("added token {id}"), expected.text, found));
        }
    }
    Ok(())
}
