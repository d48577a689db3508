//! From text to tokens: added tokens are cut out, the rest is normalised, split and merged.

use std::sync::OnceLock;

use model::vocabulary::ADDED;
use model::{Spec, Vocabulary};

use crate::bpe::{Bpe, Scratch};
use crate::nfc::normalise;
use crate::split::Pieces;

/// What to make of the spelling of an added token, such as `<|im_end|>`, in a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Special {
    /// It is that token, as in the reference library. For text that the caller vouches for.
    Recognise,
    /// It is text like any other. For text from outside.
    Literal,
}

/// The tokenizer of one vocabulary.
pub struct Tokenizer {
    vocabulary: &'static Vocabulary,
    bpe: Bpe,
}

impl Tokenizer {
    /// The tokenizer of all Qwen3 checkpoints.
    pub fn family() -> &'static Self {
        static FAMILY: OnceLock<Tokenizer> = OnceLock::new();
        FAMILY.get_or_init(|| Self::new(Vocabulary::family()))
    }

    /// kipp-tiny's.
    pub fn tiny() -> &'static Self {
        static TINY: OnceLock<Tokenizer> = OnceLock::new();
        TINY.get_or_init(|| Self::new(Vocabulary::tiny()))
    }

    /// The tokenizer of a checkpoint with these dimensions, if there is one.
    pub fn of(spec: &Spec) -> Option<&'static Self> {
        let tiny = std::ptr::eq(Vocabulary::of(spec)?, Vocabulary::tiny());
        Some(if tiny { Self::tiny() } else { Self::family() })
    }

    fn new(vocabulary: &'static Vocabulary) -> Self {
        Self { vocabulary, bpe: Bpe::new(vocabulary) }
    }

    /// The tokens that it knows.
    pub fn vocabulary(&self) -> &'static Vocabulary {
        self.vocabulary
    }

    /// The ids of a text. Nothing is put before or behind them.
    pub fn encode(&self, text: &str, special: Special) -> Vec<u32> {
        let mut encoder = self.encoder();
        match special {
            Special::Literal => encoder.text(text),
            Special::Recognise => {
                let mut rest = text;
                while let Some((start, index)) = find_added(rest) {
                    encoder.text(&rest[..start]);
                    encoder.added(index);
                    rest = &rest[start + ADDED[index].text.len()..];
                }
                encoder.text(rest);
            }
        }
        encoder.ids
    }

    /// Starts a sequence that is put together from stretches of text and tokens.
    pub(crate) fn encoder(&self) -> Encoder<'_> {
        Encoder { tokenizer: self, scratch: Scratch::default(), ids: Vec::new() }
    }
}

/// A sequence of tokens in the making.
pub(crate) struct Encoder<'a> {
    tokenizer: &'a Tokenizer,
    scratch: Scratch,
    pub ids: Vec<u32>,
}

impl Encoder<'_> {
    /// Appends a text between two added tokens.
    pub fn text(&mut self, text: &str) {
        for piece in Pieces(&normalise(text)) {
            self.tokenizer.bpe.encode(piece.as_bytes(), &mut self.scratch, &mut self.ids);
        }
    }

    /// Appends an added token, by its index in [`ADDED`].
    pub fn added(&mut self, index: usize) {
        self.ids.push((self.tokenizer.vocabulary.ranks() + index) as u32);
    }
}

/// The first added token in a text: where it starts and its index in [`ADDED`]. No spelling begins
/// with another one, so there is never a choice.
pub(crate) fn find_added(text: &str) -> Option<(usize, usize)> {
    text.match_indices('<').find_map(|(start, _)| {
        let rest = &text[start..];
        let index = ADDED.iter().position(|added| rest.starts_with(added.text))?;
        Some((start, index))
    })
}
