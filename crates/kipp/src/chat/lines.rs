//! Messages from lines of text.

/// Reads a message: a line, lines joined by a `\` at their ends, or a text between triple quotes; `None` at the end
/// of the input. A message that the end cuts off is what has come of it.
pub fn read_message<E>(
    mut line: impl FnMut(&str) -> Result<Option<String>, E>,
) -> Result<Option<String>, E> {
    let Some(mut text) = line("> ")? else { return Ok(None) };
    if let Some(quoted) = text.strip_prefix("\"\"\"") {
        let mut text = quoted.to_owned();
        while !text.ends_with("\"\"\"") {
            let Some(next) = line("... ")? else { return Ok(Some(text)) };
            text.push('\n');
            text += &next;
        }
        text.truncate(text.len() - 3);
        return Ok(Some(text));
    }
    while text.ends_with('\\') {
        text.pop();
        let Some(next) = line("... ")? else { break };
        text.push('\n');
        text += &next;
    }
    Ok(Some(text))
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::read_message;

    fn message(lines: &[&str]) -> Option<String> {
        let mut lines = lines.iter();
        let next = |_: &str| Ok::<_, Infallible>(lines.next().map(|line| (*line).to_owned()));
        read_message(next).expect("no errors")
    }

    #[test]
    fn messages_may_have_several_lines() {
        assert_eq!(message(&["hi", "there"]).as_deref(), Some("hi"));
        assert_eq!(message(&["a\\", "b\\", "c"]).as_deref(), Some("a\nb\nc"));
        assert_eq!(message(&["\"\"\"a", "", "b\"\"\""]).as_deref(), Some("a\n\nb"));
        assert_eq!(message(&["\"\"\"one\"\"\""]).as_deref(), Some("one"));
        assert_eq!(message(&[]), None);
    }

    #[test]
    fn a_message_that_the_end_cuts_off_counts() {
        assert_eq!(message(&["\"\"\"never", "closed"]).as_deref(), Some("never\nclosed"));
        assert_eq!(message(&["a\\", "b\\"]).as_deref(), Some("a\nb"));
    }
}
