//! From tokens back to text, whole or as a stream.

use model::Vocabulary;
use model::vocabulary::Added;

use crate::tokenizer::Tokenizer;

/// Turns a stream of tokens into text without waiting longer than a character takes.
///
/// A character leaves with the token that completes it. Bytes that can no longer become one leave at
/// once as U+FFFD, one for each maximal part of a well-formed character, so the stream equals the
/// whole decode however it is cut.
pub struct Decoder {
    vocabulary: &'static Vocabulary,
    skip_special: bool,
    /// The beginning of a character, at most 3 bytes.
    pending: Vec<u8>,
}

impl Decoder {
    /// Starts a stream; `skip_special` leaves out the added tokens that are flagged special.
    pub fn new(vocabulary: &'static Vocabulary, skip_special: bool) -> Self {
        Self { vocabulary, skip_special, pending: Vec::new() }
    }

    /// Appends to `out` what this token completes. Ids that stand for no bytes add nothing.
    pub fn push(&mut self, id: u32, out: &mut String) {
        let special = matches!(self.vocabulary.added(id), Some(Added { special: true, .. }));
        if special && self.skip_special {
            return;
        }
        let bytes = self.vocabulary.bytes(id).unwrap_or_default();
        if self.pending.is_empty() {
            self.feed(bytes, out);
        } else {
            let mut joined = std::mem::take(&mut self.pending);
            joined.extend_from_slice(bytes);
            self.feed(&joined, out);
        }
    }

    /// Ends the stream: a character that was never completed becomes U+FFFD.
    pub fn finish(&mut self, out: &mut String) {
        if !self.pending.is_empty() {
            self.pending.clear();
            out.push(char::REPLACEMENT_CHARACTER);
        }
    }

    fn feed(&mut self, mut bytes: &[u8], out: &mut String) {
        loop {
            let error = match std::str::from_utf8(bytes) {
                Ok(text) => return out.push_str(text),
                Err(error) => error,
            };
            let (valid, rest) = bytes.split_at(error.valid_up_to());
            out.push_str(std::str::from_utf8(valid).unwrap_or_default());
            match error.error_len() {
                Some(bad) => {
                    out.push(char::REPLACEMENT_CHARACTER);
                    bytes = &rest[bad..];
                }
                None => return self.pending.extend_from_slice(rest),
            }
        }
    }
}

impl Tokenizer {
    /// The text of a whole sequence; see [`Decoder`].
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let mut out = String::new();
        let mut decoder = Decoder::new(self.vocabulary(), skip_special);
        for &id in ids {
            decoder.push(id, &mut out);
        }
        decoder.finish(&mut out);
        out
    }
}
