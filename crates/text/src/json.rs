//! JSON as the chat template needs it: strict on the way in, and on the way out letter for letter what
//! Python's `json.dumps(value, ensure_ascii=False)` writes, which is what the models were trained on.
//!
//! Values stay in their source text ([`RawValue`]), so key order and the digits of numbers survive.

use std::borrow::Cow;
use std::collections::HashSet;

use serde_json::value::RawValue;

use crate::error::Error;

/// Deepest nesting of arrays and objects.
pub const DEPTH: usize = 128;

/// Reads one JSON value and refuses what readers disagree about: duplicate keys at any depth, nesting
/// beyond [`DEPTH`] and lone surrogates.
pub fn strict(text: &str) -> Result<&RawValue, Error> {
    let value: &RawValue =
        serde_json::from_str(text).map_err(|error| Error::Json(error.to_string()))?;
    // The keys of each object that is open; nothing for an array.
    let mut open: Vec<Option<HashSet<Cow<'_, str>>>> = Vec::new();
    let mut key_follows = false;
    for token in Tokens(value.get()) {
        match token {
            Token::Mark('{') => open.push(Some(HashSet::new())),
            Token::Mark('[') => open.push(None),
            Token::Mark('}' | ']') => drop(open.pop()),
            Token::String(quoted) => {
                let text = unquote(quoted)?;
                if let Some(Some(keys)) = open.last_mut().filter(|_| key_follows)
                    && let Some(twice) = keys.replace(text)
                {
                    return Err(Error::DuplicateKey(twice.into_owned()));
                }
            }
            Token::Mark(_) | Token::Plain(_) => {}
        }
        if open.len() > DEPTH {
            return Err(Error::Depth(DEPTH));
        }
        key_follows = matches!(token, Token::Mark('{' | ','));
    }
    Ok(value)
}

/// Appends a value as Python writes it.
pub fn write_python(value: &RawValue, out: &mut String) -> Result<(), Error> {
    for token in Tokens(value.get()) {
        match token {
            Token::Mark(',') => out.push_str(", "),
            Token::Mark(':') => out.push_str(": "),
            Token::Mark(bracket) => out.push(bracket),
            Token::String(quoted) => write_string(&unquote(quoted)?, out),
            Token::Plain(word @ ("true" | "false" | "null")) => out.push_str(word),
            Token::Plain(number) => write_number(number, out),
        }
    }
    Ok(())
}

/// Appends a string in quotes, escaping no more than JSON demands.
fn write_string(text: &str, out: &mut String) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            control @ ..'\u{20}' => out.push_str(&format!("\\u{:04x}", control as u32)),
            other => out.push(other),
        }
    }
    out.push('"');
}

/// Appends a number: integers of any size as they are, everything else as the nearest double.
fn write_number(source: &str, out: &mut String) {
    if !source.contains(['.', 'e', 'E']) {
        return out.push_str(if source == "-0" { "0" } else { source });
    }
    let value: f64 = source.parse().unwrap_or(f64::NAN);
    if value.is_infinite() {
        return out.push_str(if value > 0.0 { "Infinity" } else { "-Infinity" });
    }
    // Rust's shortest digits, arranged by Python's rule: an exponent below -4 and from 16 on.
    let scientific = format!("{value:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    match exponent.parse().unwrap_or(0i32) {
        exponent @ (..-4 | 16..) => {
            let sign = if exponent < 0 { '-' } else { '+' };
            out.push_str(&format!("{digits}e{sign}{:02}", exponent.unsigned_abs()));
        }
        _ => out.push_str(&format!("{value:?}")),
    }
}

/// The text that a JSON string stands for.
fn unquote(quoted: &str) -> Result<Cow<'_, str>, Error> {
    if quoted.contains('\\') {
        // Everything else was checked when the value was read.
        let start: String = quoted.chars().take(40).collect();
        let lone = || Error::Json(format!("a lone surrogate in the string that begins {start}"));
        serde_json::from_str(quoted).map(Cow::Owned).map_err(|_| lone())
    } else {
        Ok(Cow::Borrowed(quoted.trim_matches('"')))
    }
}

/// A word of JSON.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Token<'a> {
    /// One of `{}[]:,`
    Mark(char),
    /// A string with its quotes.
    String(&'a str),
    /// A number, `true`, `false` or `null`.
    Plain(&'a str),
}

/// Iterates over the words of a valid JSON text.
struct Tokens<'a>(&'a str);

impl<'a> Iterator for Tokens<'a> {
    type Item = Token<'a>;

    fn next(&mut self) -> Option<Token<'a>> {
        let text = self.0.trim_start_matches([' ', '\t', '\n', '\r']);
        let first = text.chars().next()?;
        let end = match first {
            '{' | '}' | '[' | ']' | ':' | ',' => first.len_utf8(),
            '"' => string_end(text),
            _ => text.find([',', ']', '}', ' ', '\t', '\n', '\r']).unwrap_or(text.len()),
        };
        let (word, rest) = text.split_at(end);
        self.0 = rest;
        Some(match first {
            '"' => Token::String(word),
            '{' | '}' | '[' | ']' | ':' | ',' => Token::Mark(first),
            _ => Token::Plain(word),
        })
    }
}

/// Where the string at the start of `text` ends, its closing quote included.
fn string_end(text: &str) -> usize {
    let mut escaped = false;
    let closing = text.bytes().skip(1).position(|byte| {
        let closes = byte == b'"' && !escaped;
        escaped = byte == b'\\' && !escaped;
        closes
    });
    closing.map_or(text.len(), |before| before + 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn python(json: &str) -> String {
        let mut out = String::new();
        write_python(strict(json).unwrap(), &mut out).unwrap();
        out
    }

    #[test]
    fn numbers_are_written_as_python_writes_them() {
        // Right-hand sides are the output of json.dumps(json.loads(left)).
        for (json, expected) in [
            ("1", "1"),
            ("-0", "0"),
            ("-0.0", "-0.0"),
            ("1.0", "1.0"),
            ("1E2", "100.0"),
            ("1e15", "1000000000000000.0"),
            ("1e16", "1e+16"),
            ("12345678901234567890123", "12345678901234567890123"),
            ("123456789012345678.5", "1.2345678901234568e+17"),
            ("0.0001", "0.0001"),
            ("0.00001", "1e-05"),
            ("1.5e-7", "1.5e-07"),
            ("1e400", "Infinity"),
            ("-1e400", "-Infinity"),
            ("1e-400", "0.0"),
            ("5e-324", "5e-324"),
            ("1.7976931348623157e308", "1.7976931348623157e+308"),
            ("0.1e1", "1.0"),
            ("9007199254740993.0", "9007199254740992.0"),
        ] {
            assert_eq!(python(json), expected, "{json}");
        }
    }

    #[test]
    fn strings_are_escaped_no_more_than_needed() {
        assert_eq!(python(r#""a\/b\u00e9\u001f\b<&'\"\\""#), r#""a/bé\u001f\b<&'\"\\""#);
        assert_eq!(python("\"\\ud83d\\ude00\u{7f}\""), "\"😀\u{7f}\"");
    }

    #[test]
    fn separators_and_order_are_pythons() {
        assert_eq!(
            python(" {\"b\":[1,2 ,{}],\n\"a\" : null,\"\":[ ]} "),
            "{\"b\": [1, 2, {}], \"a\": null, \"\": []}"
        );
    }

    #[test]
    fn what_readers_disagree_about_is_refused() {
        let refusal = |json: &str| strict(json).unwrap_err();
        let twice = |key: &str| Error::DuplicateKey(key.into());
        assert_eq!(refusal(r#"{"a":1,"\u0061":2}"#), twice("a"));
        assert_eq!(refusal(r#"[{"x":{"k":"k","k":0}}]"#), twice("k"));
        assert!(strict(r#"{"a":{"a":1},"b":["a","a"]}"#).is_ok());
        assert!(matches!(refusal(r#"["\ud83d"]"#), Error::Json(_)));
        assert!(matches!(refusal("{} {}"), Error::Json(_)));
        let nested = |depth| "[".repeat(depth) + &"]".repeat(depth);
        assert!(strict(&nested(DEPTH)).is_ok());
        assert_eq!(refusal(&nested(DEPTH + 1)), Error::Depth(DEPTH));
        assert_eq!(refusal(&nested(100_000)), Error::Depth(DEPTH));
    }
}
