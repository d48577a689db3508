//! Tags that arrive in pieces.

/// Length of the longest end of `text` with which `tag` could begin, short of the whole tag.
pub fn partial_suffix(text: &str, tag: &str) -> usize {
    let longest = text.len().min(tag.len() - 1);
    let is_end = |&length: &usize| {
        tag.is_char_boundary(length) && text.as_bytes().ends_with(&tag.as_bytes()[..length])
    };
    (1..=longest).rev().find(is_end).unwrap_or(0)
}
