//! The vocabulary of the family, compiled in, and its cut for kipp-tiny.
//!
//! An id below 256 is a byte, in GPT-2's order; id 256 + i is the token that merge i makes; then come the
//! 26 added tokens, then rows that no text reaches. The merge list alone is therefore the whole vocabulary,
//! and a smaller one is a prefix of it. `scripts/make_vocabulary.py` writes the data file from a published
//! tokenizer.json and proves these statements on the way.

use std::sync::OnceLock;

use crate::spec::Spec;

/// Pairs of little-endian 24-bit ids, in order of rank.
static MERGES: &[u8] = include_bytes!("../data/qwen3-merges.bin");
const PAIR: usize = 6;

/// Ids that are single bytes.
const BYTES: usize = 256;

/// Embedding rows of the Qwen3 checkpoints; those behind the added tokens are unused.
pub(crate) const FAMILY_ROWS: usize = 151_936;
/// Embedding rows of kipp-tiny, all used.
pub(crate) const TINY_ROWS: usize = 8_192;

/// A token that is matched as a whole in text instead of being made by merges.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Added {
    /// Its spelling.
    pub text: &'static str,
    /// Whether decoding may leave it out. `<think>` or `<tool_call>` for instance are not special.
    pub special: bool,
}

/// The added tokens, in order of their ids.
pub const ADDED: [Added; 26] = [
    added("<|endoftext|>", true),
    added("<|im_start|>", true),
    added("<|im_end|>", true),
    added("<|object_ref_start|>", true),
    added("<|object_ref_end|>", true),
    added("<|box_start|>", true),
    added("<|box_end|>", true),
    added("<|quad_start|>", true),
    added("<|quad_end|>", true),
    added("<|vision_start|>", true),
    added("<|vision_end|>", true),
    added("<|vision_pad|>", true),
    added("<|image_pad|>", true),
    added("<|video_pad|>", true),
    added("<tool_call>", false),
    added("</tool_call>", false),
    added("<|fim_prefix|>", false),
    added("<|fim_middle|>", false),
    added("<|fim_suffix|>", false),
    added("<|fim_pad|>", false),
    added("<|repo_name|>", false),
    added("<|file_sep|>", false),
    added("<tool_response>", false),
    added("</tool_response>", false),
    added("<think>", false),
    added("</think>", false),
];

const fn added(text: &'static str, special: bool) -> Added {
    Added { text, special }
}

/// The added tokens that kipp itself has to know; the numbers are indices into [`ADDED`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Marker {
    /// `<|endoftext|>`
    EndOfText = 0,
    /// `<|im_start|>`
    ImStart = 1,
    /// `<|im_end|>`
    ImEnd = 2,
    /// `<tool_call>`
    ToolCall = 14,
    /// `</tool_call>`
    ToolCallEnd = 15,
    /// `<tool_response>`
    ToolResponse = 22,
    /// `</tool_response>`
    ToolResponseEnd = 23,
    /// `<think>`
    Think = 24,
    /// `</think>`
    ThinkEnd = 25,
}

impl Marker {
    /// Its spelling.
    pub const fn text(self) -> &'static str {
        ADDED[self as usize].text
    }
}

/// What an id stands for; the numbers are those of GGUF's `tokenizer.ggml.token_type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenKind {
    /// Made by merges, or a byte.
    Normal = 1,
    /// An added token that steers the model: special, or spelled `<|...|>`.
    Control = 3,
    /// Any other added token.
    UserDefined = 4,
    /// A row of the embedding that no text reaches.
    Unused = 5,
}

/// The tokens of one checkpoint.
pub struct Vocabulary {
    /// Rows of the embedding, the unused ones at the end included.
    rows: usize,
    /// Bytes of all tokens made by merges, one behind the other.
    bytes: Vec<u8>,
    /// Where each of them ends in `bytes`, `[ranks]`.
    ends: Vec<u32>,
}

impl Vocabulary {
    /// The vocabulary of all Qwen3 checkpoints: 151,643 ranks in 151,936 rows.
    pub fn family() -> &'static Self {
        static FAMILY: OnceLock<Vocabulary> = OnceLock::new();
        FAMILY.get_or_init(|| Self::cut(BYTES + MERGES.len() / PAIR, FAMILY_ROWS))
    }

    /// kipp-tiny's: the first 8,166 ranks and the added tokens.
    pub fn tiny() -> &'static Self {
        static TINY: OnceLock<Vocabulary> = OnceLock::new();
        TINY.get_or_init(|| Self::cut(TINY_ROWS - ADDED.len(), TINY_ROWS))
    }

    /// The vocabulary of a checkpoint with these dimensions, if there is one.
    pub fn of(spec: &Spec) -> Option<&'static Self> {
        match spec.vocab {
            FAMILY_ROWS => Some(Self::family()),
            TINY_ROWS => Some(Self::tiny()),
            _ => None,
        }
    }

    fn cut(ranks: usize, rows: usize) -> Self {
        let mut bytes = Vec::with_capacity(8 * ranks);
        let mut ends = Vec::with_capacity(ranks);
        for byte in (0..=u8::MAX).filter(|&b| printable(b)) {
            bytes.push(byte);
        }
        for byte in (0..=u8::MAX).filter(|&b| !printable(b)) {
            bytes.push(byte);
        }
        ends.extend(1..=BYTES as u32);
        for pair in MERGES.chunks_exact(PAIR).take(ranks - BYTES) {
            for id in [id24(&pair[..3]), id24(&pair[3..])] {
                bytes.extend_from_within(range(&ends, id as usize));
            }
            ends.push(bytes.len() as u32);
        }
        Self { rows, bytes, ends }
    }

    /// Rows of the embedding; every valid id is below this.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Ids made by merges, the 256 bytes included; also the id of the first added token.
    pub fn ranks(&self) -> usize {
        self.ends.len()
    }

    /// The pairs of ids that merge into id 256, 257 and so on.
    pub fn merges(&self) -> impl ExactSizeIterator<Item = (u32, u32)> {
        let pairs = MERGES.chunks_exact(PAIR).take(self.ranks() - BYTES);
        pairs.map(|pair| (id24(&pair[..3]), id24(&pair[3..])))
    }

    /// Id of an added token.
    pub fn id(&self, marker: Marker) -> u32 {
        (self.ranks() + marker as usize) as u32
    }

    /// The added token with this id.
    pub fn added(&self, id: u32) -> Option<Added> {
        ADDED.get((id as usize).checked_sub(self.ranks())?).copied()
    }

    /// The bytes that a token stands for; none for unused rows and beyond.
    pub fn bytes(&self, id: u32) -> Option<&[u8]> {
        if (id as usize) < self.ranks() {
            Some(&self.bytes[range(&self.ends, id as usize)])
        } else {
            self.added(id).map(|added| added.text.as_bytes())
        }
    }

    /// What an id stands for.
    pub fn kind(&self, id: u32) -> TokenKind {
        match self.added(id) {
            _ if (id as usize) < self.ranks() => TokenKind::Normal,
            Some(Added { special: true, .. }) => TokenKind::Control,
            Some(Added { text, .. }) if text.starts_with("<|") => TokenKind::Control,
            Some(_) => TokenKind::UserDefined,
            None => TokenKind::Unused,
        }
    }

    /// Appends the spelling of a token in GGUF's `tokenizer.ggml.tokens`: bytes as GPT-2's printable
    /// stand-ins, added tokens as they are, unused rows as `[PAD<id>]`.
    pub fn spell(&self, id: u32, out: &mut String) {
        if let Some(added) = self.added(id) {
            out.push_str(added.text);
        } else if let Some(bytes) = self.bytes(id) {
            out.extend(bytes.iter().map(|&byte| SYMBOLS[byte as usize]));
        } else {
            out.push_str("[PAD");
            out.push_str(&id.to_string());
            out.push(']');
        }
    }

    /// Appends the spelling of merge `pair` in GGUF's `tokenizer.ggml.merges`: both tokens, a space between.
    pub fn spell_merge(&self, pair: (u32, u32), out: &mut String) {
        self.spell(pair.0, out);
        out.push(' ');
        self.spell(pair.1, out);
    }
}

fn id24(bytes: &[u8]) -> u32 {
    u32::from_le_bytes([bytes[0], bytes[1], bytes[2], 0])
}

fn range(ends: &[u32], id: usize) -> std::ops::Range<usize> {
    let start = if id == 0 { 0 } else { ends[id - 1] as usize };
    start..ends[id] as usize
}

/// Bytes that GPT-2 writes as the Latin-1 character of the same number.
const fn printable(byte: u8) -> bool {
    matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff)
}

/// The character that stands for each byte; those that are not printable follow from U+0100 on.
const SYMBOLS: [char; 256] = {
    let mut symbols = ['\0'; 256];
    let mut next = 0x100;
    let mut byte = 0;
    while byte < 256 {
        symbols[byte] = if printable(byte as u8) {
            byte as u8 as char
        } else {
            next += 1;
            match char::from_u32(next - 1) {
                Some(symbol) => symbol,
                None => unreachable!(),
            }
        };
        byte += 1;
    }
    symbols
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_follow_from_the_merge_list() {
        for vocabulary in [Vocabulary::family(), Vocabulary::tiny()] {
            for (i, (left, right)) in vocabulary.merges().enumerate() {
                let id = (BYTES + i) as u32;
                assert!(left < id && right < id);
                let joined = [vocabulary.bytes(left).unwrap(), vocabulary.bytes(right).unwrap()];
                assert_eq!(vocabulary.bytes(id).unwrap(), joined.concat());
            }
        }
    }

    #[test]
    fn the_two_cuts_have_their_published_sizes() {
        let (family, tiny) = (Vocabulary::family(), Vocabulary::tiny());
        assert_eq!((family.ranks(), family.rows()), (151_643, 151_936));
        assert_eq!((tiny.ranks(), tiny.rows()), (8_166, 8_192));
        assert_eq!(family.id(Marker::ImEnd), 151_645);
        assert_eq!(family.id(Marker::ThinkEnd), 151_668);
        assert_eq!(tiny.id(Marker::EndOfText), 8_166);
        assert_eq!(tiny.id(Marker::ThinkEnd), 8_191);
        assert_eq!(family.bytes(9707), Some(&b"Hello"[..]));
        assert_eq!(family.bytes(151_669), None);
        assert_eq!(family.bytes(u32::MAX), None);
    }

    #[test]
    fn spellings_and_kinds_are_those_of_gguf() {
        let family = Vocabulary::family();
        let spelled = |id| {
            let mut text = String::new();
            family.spell(id, &mut text);
            text
        };
        assert_eq!(spelled(220), "Ġ");
        assert_eq!(spelled(198), "Ċ");
        assert_eq!(spelled(188), "Ā");
        assert_eq!(spelled(255), "Ń");
        assert_eq!(spelled(1879), "Ġworld");
        assert_eq!(spelled(151_645), "<|im_end|>");
        assert_eq!(spelled(151_700), "[PAD151700]");
        let mut merge = String::new();
        family.spell_merge(family.merges().next().unwrap(), &mut merge);
        assert_eq!(merge, "Ġ Ġ");
        let kinds = [1879, 151_645, 151_659, 151_667, 151_669].map(|id| family.kind(id) as u32);
        assert_eq!(kinds, [1, 3, 3, 4, 5]);
    }

    #[test]
    fn markers_name_the_token_they_stand_for() {
        let spelled = [
            (Marker::EndOfText, "<|endoftext|>"),
            (Marker::ImStart, "<|im_start|>"),
            (Marker::ImEnd, "<|im_end|>"),
            (Marker::ToolCall, "<tool_call>"),
            (Marker::ToolCallEnd, "</tool_call>"),
            (Marker::ToolResponse, "<tool_response>"),
            (Marker::ToolResponseEnd, "</tool_response>"),
            (Marker::Think, "<think>"),
            (Marker::ThinkEnd, "</think>"),
        ];
        for (marker, text) in spelled {
            assert_eq!(marker.text(), text);
        }
    }
}
