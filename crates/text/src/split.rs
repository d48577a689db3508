//! Cuts text into the pieces that byte-level BPE works on; no token crosses from one piece to the next.
//!
//! The family's pattern, by hand. At each position the first alternative that matches wins:
//!
//! ```text
//! (?i:'s|'t|'re|'ve|'m|'ll|'d)        a contraction
//! [^\r\n\p{L}\p{N}]?\p{L}+            letters, with whatever single character stands before them
//! \p{N}                               one digit
//!  ?[^\s\p{L}\p{N}]+[\r\n]*           symbols, with a space before and line ends after
//! \s*[\r\n]+                          white space up to its last line end
//! \s+(?!\S)                           white space but its last character, or all of it at the end
//! \s+                                 that last character
//! ```

use unicode_properties::{GeneralCategoryGroup, UnicodeGeneralCategory};

/// Iterates over the pieces of a text, which follow one another without gaps.
pub struct Pieces<'a>(pub &'a str);

impl<'a> Iterator for Pieces<'a> {
    type Item = &'a str;

    fn next(&mut self) -> Option<&'a str> {
        if self.0.is_empty() {
            return None;
        }
        let (piece, rest) = self.0.split_at(piece_len(self.0));
        self.0 = rest;
        Some(piece)
    }
}

/// What the pattern distinguishes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Class {
    Letter,
    Number,
    /// CR and LF.
    LineEnd,
    /// Other white space.
    Space,
    Symbol,
    /// Behind the last character.
    End,
}

use Class::{End, Letter, LineEnd, Number, Space, Symbol};

/// Length of the first piece in bytes; `text` is not empty.
fn piece_len(text: &str) -> usize {
    let (class, width) = first(text, 0);
    if class == Letter {
        return run(text, width, Letter);
    }
    if class == Number {
        return width;
    }
    if let Some(length) = contraction(text.as_bytes()) {
        return length;
    }
    let (next, next_width) = first(text, width);
    if class != LineEnd && next == Letter {
        return run(text, width + next_width, Letter);
    }
    if class == Symbol || (text.starts_with(' ') && next == Symbol) {
        return run(text, run(text, width, Symbol), LineEnd);
    }
    white_space(text)
}

/// Length of the piece at the start of `text`, which begins with white space that no other alternative took.
fn white_space(text: &str) -> usize {
    let (mut end, mut last_width, mut line_end) = (0, 0, 0);
    let after = loop {
        let (class, width) = first(text, end);
        if class != Space && class != LineEnd {
            break class;
        }
        end += width;
        last_width = width;
        if class == LineEnd {
            line_end = end;
        }
    };
    if line_end > 0 {
        line_end
    } else if after == End || end == last_width {
        end
    } else {
        end - last_width
    }
}

/// End of the run of `class` that begins at byte `at`.
fn run(text: &str, mut at: usize, class: Class) -> usize {
    loop {
        match first(text, at) {
            (found, width) if found == class => at += width,
            _ => return at,
        }
    }
}

/// Length of a contraction at the start of the text. Case folding makes U+017F an s.
fn contraction(text: &[u8]) -> Option<usize> {
    let [b'\'', rest @ ..] = text else { return None };
    let lower = |i: usize| rest.get(i).map(u8::to_ascii_lowercase);
    match (lower(0)?, lower(1)) {
        (b's' | b't' | b'm' | b'd', _) => Some(2),
        (b'r' | b'v', Some(b'e')) | (b'l', Some(b'l')) => Some(3),
        _ => rest.starts_with("ſ".as_bytes()).then_some(3),
    }
}

/// Class and width of the character at byte `at`.
#[inline]
fn first(text: &str, at: usize) -> (Class, usize) {
    match text.as_bytes().get(at) {
        None => (End, 0),
        Some(&byte) if byte < 0x80 => (ASCII[byte as usize], 1),
        Some(_) => text[at..].chars().next().map_or((End, 0), |c| (classify(c), c.len_utf8())),
    }
}

fn classify(c: char) -> Class {
    match c.general_category_group() {
        GeneralCategoryGroup::Letter => Letter,
        GeneralCategoryGroup::Number => Number,
        _ if c.is_whitespace() => Space,
        _ => Symbol,
    }
}

/// Classes of the ASCII characters.
static ASCII: [Class; 128] = {
    let mut classes = [Symbol; 128];
    let mut byte = 0;
    while byte < 128 {
        classes[byte] = match byte as u8 {
            b'a'..=b'z' | b'A'..=b'Z' => Letter,
            b'0'..=b'9' => Number,
            b'\r' | b'\n' => LineEnd,
            b'\t' | 0x0b | 0x0c | b' ' => Space,
            _ => Symbol,
        };
        byte += 1;
    }
    classes
};

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(text: &str) -> Vec<&str> {
        Pieces(text).collect()
    }

    #[test]
    fn each_alternative_takes_what_the_pattern_says() {
        assert_eq!(pieces("I'Ll don'T'ſa 'x"), ["I", "'Ll", " don", "'T", "'ſ", "a", " '", "x"]);
        assert_eq!(pieces("\u{3000}x(y\t z"), ["\u{3000}x", "(y", "\t", " z"]);
        assert_eq!(pieces("12½a"), ["1", "2", "½", "a"]);
        assert_eq!(pieces("  !?\r\n\n x"), [" ", " !?\r\n\n", " x"]);
        assert_eq!(pieces("a \n \r  b"), ["a", " \n \r", " ", " b"]);
        assert_eq!(pieces("a   \u{85}. "), ["a", "   ", "\u{85}", ".", " "]);
        assert_eq!(pieces("x \t "), ["x", " \t "]);
        assert_eq!(pieces("\n\n a"), ["\n\n", " a"]);
    }
}
