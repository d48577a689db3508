//! Unicode's normalisation form C, as the reference tokenizer computes it.
//!
//! Its tables are those of Unicode 9. A character that was given a combining class, a decomposition or
//! a composition later is therefore left where it stands, and nothing moves or composes across it.

use std::borrow::Cow;

use unicode_normalization::{IsNormalized, UnicodeNormalization, is_nfc_quick};

/// The text in normalisation form C; borrowed where it is so already, as nearly every text is.
pub fn normalise(text: &str) -> Cow<'_, str> {
    // What newer tables find normalised is so by older ones, which only see fewer marks.
    if text.is_ascii() || is_nfc_quick(text.chars()) == IsNormalized::Yes {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((at, later)) = rest.char_indices().find(|&(_, c)| is_later(c)) {
        out.extend(rest[..at].nfc());
        out.push(later);
        rest = &rest[at + later.len_utf8()..];
    }
    out.extend(rest.nfc());
    Cow::Owned(out)
}

fn is_later(c: char) -> bool {
    let after = LATER.partition_point(|&(first, _)| first <= c);
    after > 0 && c <= LATER[after - 1].1
}

/// Every character that Unicode 18 orders, decomposes or composes and Unicode 9 does not. Between them the
/// ranges hold characters that no version does any of this to.
#[rustfmt::skip]
const LATER: [(char, char); 35] = [
    ('\u{5c8}', '\u{5c9}'), ('\u{7fd}', '\u{7fd}'), ('\u{897}', '\u{8d3}'), ('\u{9fe}', '\u{9fe}'),
    ('\u{c3c}', '\u{c3c}'), ('\u{d3b}', '\u{d3c}'), ('\u{eba}', '\u{eba}'), ('\u{1715}', '\u{1715}'),
    ('\u{1abf}', '\u{1af0}'), ('\u{1df6}', '\u{1dfa}'), ('\u{a82c}', '\u{a82c}'), ('\u{105c9}', '\u{105e4}'),
    ('\u{10d24}', '\u{10d6d}'), ('\u{10eab}', '\u{10f85}'), ('\u{11070}', '\u{11070}'), ('\u{1133b}', '\u{1133b}'),
    ('\u{11382}', '\u{11391}'), ('\u{113c2}', '\u{113c8}'), ('\u{113ce}', '\u{113d0}'), ('\u{1145e}', '\u{1145e}'),
    ('\u{11839}', '\u{1183a}'), ('\u{11935}', '\u{11a99}'), ('\u{11d42}', '\u{11d97}'), ('\u{11f41}', '\u{11f42}'),
    ('\u{1611e}', '\u{1611e}'), ('\u{16121}', '\u{1612f}'), ('\u{16d63}', '\u{16d6a}'), ('\u{16ff0}', '\u{16ff1}'),
    ('\u{1d127}', '\u{1d128}'), ('\u{1d250}', '\u{1d281}'), ('\u{1e08f}', '\u{1e136}'), ('\u{1e2ae}', '\u{1e2ef}'),
    ('\u{1e4ec}', '\u{1e4ef}'), ('\u{1e5ee}', '\u{1e5ef}'), ('\u{1e6e3}', '\u{1e6f5}'),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn composes_orders_and_leaves_later_marks_alone() {
        assert_eq!(normalise("cafe\u{301}"), "caf\u{e9}");
        assert_eq!(normalise("a\u{301}\u{323}"), "\u{1ea1}\u{301}");
        assert_eq!(normalise("\u{1100}\u{1161}\u{11a8}"), "\u{ac01}");
        assert_eq!(normalise("s\u{1ab4}\u{1abf}\u{8f3}"), "s\u{1ab4}\u{1abf}\u{8f3}");
        assert_eq!(normalise("\u{8cd}\u{318}\u{344}"), "\u{8cd}\u{318}\u{308}\u{301}");
        assert_eq!(normalise("\u{105d2}\u{307}e\u{301}"), "\u{105d2}\u{307}\u{e9}");
    }

    /// Newer tables may hold marks that [`LATER`] must then learn.
    #[test]
    fn later_was_drawn_up_for_these_tables() {
        assert_eq!(unicode_normalization::UNICODE_VERSION, (18, 0, 0));
        assert!(LATER.windows(2).all(|pair| pair[0].0 <= pair[0].1 && pair[0].1 < pair[1].0));
    }
}
