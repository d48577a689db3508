//! A rendered conversation, which remembers which of its added tokens the template wrote.

use model::Marker;
use model::vocabulary::ADDED;

use crate::tokenizer::{Tokenizer, find_added};

/// The text of a prompt and the places where an added token is meant.
///
/// What users, tools and the model wrote may spell added tokens too; there they are plain text, so that
/// nobody can end a turn or open another one from inside a message.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Prompt {
    text: String,
    /// Byte offset and index in [`ADDED`] of each added token of the template, ascending.
    added: Vec<(usize, usize)>,
}

impl Prompt {
    /// Appends text of the template; the added tokens that it spells are meant.
    pub(super) fn template(&mut self, text: &str) {
        let mut done = 0;
        while let Some((start, index)) = find_added(&text[done..]) {
            self.added.push((self.text.len() + done + start, index));
            done += start + ADDED[index].text.len();
        }
        self.text.push_str(text);
    }

    /// Appends text from outside.
    pub(super) fn content(&mut self, text: &str) {
        self.text.push_str(text);
    }

    /// The prompt as the reference template writes it.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The prompt's ids. Text between two added tokens is encoded as one, wherever it came from.
    ///
    /// `tokenizer.encode(prompt.text(), Special::Recognise)` instead follows the reference library, which
    /// makes tokens of everything that looks like one.
    pub fn encode(&self, tokenizer: &Tokenizer) -> Vec<u32> {
        let mut encoder = tokenizer.encoder();
        let mut done = 0;
        for &(start, index) in &self.added {
            encoder.text(&self.text[done..start]);
            encoder.added(index);
            done = start + ADDED[index].text.len();
        }
        encoder.text(&self.text[done..]);
        encoder.ids
    }

    /// Whether the prompt ends inside a thought, so that the answer begins there.
    pub fn ends_thinking(&self) -> bool {
        let turn = [Marker::ImStart, Marker::Think, Marker::ThinkEnd].map(|marker| marker as usize);
        let last = self.added.iter().rev().find(|(_, index)| turn.contains(index));
        last.is_some_and(|&(_, index)| index == Marker::Think as usize)
    }
}
