//! What happens to an answer on its way out: stop strings, thoughts, tool calls. Every test cuts the
//! answer in all the ways that matter and expects the same result.

mod common;

use common::case;
use proptest::prelude::*;
use serde_json::{Value, json};
use text::chat::ToolCall;
use text::thinking::Parts;
use text::tool_calls::Event;
use text::{Begin, StopStrings, Thinking, ToolCalls};

/// Runs pieces through the stop strings: what left at each piece, and the string that ended it.
fn stopped(pieces: &[&str], stops: &[&str]) -> (Vec<String>, Option<String>) {
    watched(pieces, StopStrings::new(stops.iter().map(|stop| stop.to_string())))
}

fn watched(pieces: &[&str], mut watch: StopStrings) -> (Vec<String>, Option<String>) {
    let mut deltas = Vec::new();
    for piece in pieces {
        let mut delta = String::new();
        let stop = watch.push(piece, &mut delta).map(str::to_owned);
        deltas.push(delta);
        if stop.is_some() {
            return (deltas, stop);
        }
    }
    let mut rest = String::new();
    let stop = watch.finish(&mut rest).map(str::to_owned);
    deltas.push(rest);
    (deltas, stop)
}

fn strings(value: &Value) -> Vec<&str> {
    value.as_array().unwrap().iter().map(|item| item.as_str().unwrap()).collect()
}

#[test]
fn case_of_a_stop_string_across_tokens() {
    let input = case("ST-01").0;
    let (deltas, stop) = stopped(&strings(&input["pieces"]), &strings(&input["stop"]));
    assert_eq!(deltas, [" red", " ", "", "", ""]);
    assert_eq!(stop.as_deref(), Some("yellow green"));
}

#[test]
fn case_of_the_cut_position() {
    let input = case("ST-05").0;
    for (name, expected) in [("a", " go "), ("b", " xA"), ("c", "你好")] {
        let (pieces, stops) = (&input[name]["pieces"], &input[name]["stop"]);
        let (deltas, stop) = stopped(&strings(pieces), &strings(stops));
        assert_eq!(deltas.concat(), expected);
        assert!(stop.is_some());
    }
}

#[test]
fn empty_stop_strings_stop_nothing() {
    assert_eq!(stopped(&[" red", " yellow"], &["", ""]).0.concat(), " red yellow");
    assert_eq!(stopped(&["xa"], &["", "a"]), (vec!["x".into()], Some("a".into())));
}

#[test]
fn the_string_that_starts_first_wins_however_the_text_is_cut() {
    for pieces in [&["xBCDE"][..], &["xBCD", "E"], &["x", "B", "C", "D", "E"]] {
        let (deltas, stop) = stopped(pieces, &["CD", "BCDE"]);
        assert_eq!((deltas.concat().as_str(), stop.as_deref()), ("x", Some("BCDE")));
    }
    // The one that started first never came, whether another text followed or nothing.
    for pieces in [&["xBCDF"][..], &["xBCD", "F"], &["xBCD"]] {
        let (deltas, stop) = stopped(pieces, &["CD", "BCDE"]);
        assert_eq!((deltas.concat().as_str(), stop.as_deref()), ("xB", Some("CD")));
    }
}

/// A thought may hold a stop string, and one may lie between it and what is said.
#[test]
fn stop_strings_are_looked_for_behind_a_thought() {
    let (answer, inside, may) = (Begin::Answer, Begin::Inside, Begin::MayThink);
    for (begin, text, left, stops) in [
        (may, "<think>\na\n\nb\n</think>\n\nc\n\nd", "<think>\na\n\nb\n</think>\n\nc", true),
        (answer, " <think>\n\n</think>\n\nc\n\nd", " <think>\n\n</think>\n\nc", true),
        (inside, "a\n\nb</thin</think>c\n\nd", "a\n\nb</thin</think>c", true),
        (inside, "a\n\nb", "a\n\nb", false),
        (inside, "a</think>\n\n", "a</think>\n\n", false),
        (may, "<think>a\n\n", "<think>a\n\n", false),
        // Nothing was thought: all is said, also what could have opened a thought.
        (may, "a\n\nb", "a", true),
        (may, "a<think>b\n\nc", "a<think>b", true),
        (may, "\n\na", "", true),
        (may, "\n\n", "", true),
        (may, "<thi\n\n", "<thi", true),
        (may, "<thi", "<thi", false),
    ] {
        let expected = (left.to_owned(), stops.then(|| "\n\n".to_owned()));
        let found = |pieces: &[&str]| {
            let watch = StopStrings::new(["\n\n".to_owned()]).behind_thought(begin);
            let (deltas, stop) = watched(pieces, watch);
            (deltas.concat(), stop)
        };
        assert_eq!(found(&[text]), expected, "{text:?}");
        for cut in (0..=text.len()).filter(|&cut| text.is_char_boundary(cut)) {
            let (left, right) = text.split_at(cut);
            assert_eq!(found(&[left, right]), expected, "{left:?} {right:?}");
        }
        assert_eq!(found(&text.split("").collect::<Vec<_>>()), expected, "{text:?}");
    }
}

/// Runs pieces through the splitter of thoughts.
fn split(pieces: &[&str], inside: bool) -> Parts {
    split_from(pieces, if inside { Begin::Inside } else { Begin::MayThink })
}

fn split_from(pieces: &[&str], begin: Begin) -> Parts {
    let mut thinking = Thinking::new(begin);
    let mut parts = Parts::default();
    pieces.iter().for_each(|piece| thinking.push(piece, &mut parts));
    thinking.finish(&mut parts);
    parts
}

#[test]
fn thoughts_are_told_from_answers() {
    for (answer, inside, reasoning, content) in [
        ("<think>\nR\n\nS\n</think>\n\nA\n", false, "R\n\nS", "A\n"),
        ("\n<think>R</think>A", false, "R", "A"),
        ("<think>\n\n</think>\n\nA", false, "", "A"),
        ("hi", false, "", "hi"),
        ("\n hi", false, "", "\n hi"),
        ("A <think>x</think>", false, "", "A <think>x</think>"),
        // A thought that was not opened, and what is none.
        ("R</think>", false, "R", ""),
        ("\nR\n\nS\n</think>\n\nA</think>", false, "R\n\nS", "A</think>"),
        ("</think>A", false, "", "A"),
        ("A <tool_call>\"</think>\"", false, "", "A <tool_call>\"</think>\""),
        ("A</think", false, "", "A</think"),
        ("R\n</think>\n\nA", true, "R", "A"),
        ("</think>A", true, "", "A"),
        ("\n\n<think>\nR\n</think>\nA", true, "R", "A"),
        // Cut off: in the thought, in a tag, before anything was said.
        ("<think>\nR\nS", false, "R\nS", ""),
        ("R</thi", true, "R</thi", ""),
        ("R", true, "R", ""),
        ("<thin", false, "", "<thin"),
        ("", true, "", ""),
        ("R</think>\n\n", true, "R", ""),
        ("R </thinking> S</think></think>", true, "R </thinking> S", "</think>"),
    ] {
        let expected = Parts { reasoning: reasoning.into(), content: content.into() };
        assert_eq!(split(&[answer], inside), expected, "{answer:?}");
        for cut in (0..=answer.len()).filter(|&cut| answer.is_char_boundary(cut)) {
            let (left, right) = answer.split_at(cut);
            assert_eq!(split(&[left, right], inside), expected, "{left:?} {right:?}");
        }
        let single: Vec<&str> = answer.split("").collect();
        assert_eq!(split(&single, inside), expected, "{answer:?}");
    }
}

/// Where the end of a thought that was not opened is looked for, and where no longer.
#[test]
fn a_long_answer_is_no_thought_without_its_tag() {
    let text = |len: usize| format!("{}</think>B", "a".repeat(len));
    let thought = text(512 - "</think>".len());
    let answer = text(513 - "</think>".len());
    for cut in (0..=answer.len()).step_by(7).chain(500..=answer.len()) {
        let parts = |text: &str| {
            let (left, right) = text.split_at(cut.min(text.len()));
            split(&[left, right], false)
        };
        assert_eq!(parts(&thought).content, "B", "{cut}");
        assert_eq!(parts(&answer).content, answer, "{cut}");
    }
    // Where no thought was asked for, only one that is opened is one.
    assert_eq!(split_from(&["a</think>", "b"], Begin::Answer).content, "a</think>b");
    assert_eq!(split_from(&["<think>a</th", "ink>b"], Begin::Answer).content, "b");
    let mut thinking = Thinking::new(Begin::MayThink);
    let mut parts = Parts::default();
    thinking.push(&"a".repeat(512), &mut parts);
    assert_eq!(parts.content.len(), 512, "nothing is held back any longer");
}

#[test]
fn a_thought_leaves_as_it_comes() {
    let mut thinking = Thinking::new(Begin::MayThink);
    let mut deltas = Vec::new();
    for piece in ["<think>", "\n", "a ", "b\n", "c<", "/think>", "\n\n", "d", " e"] {
        let mut parts = Parts::default();
        thinking.push(piece, &mut parts);
        deltas.push((parts.reasoning, parts.content, thinking.is_inside()));
    }
    let expected = [
        ("", "", true),
        ("", "", true),
        ("a ", "", true),
        ("b", "", true),
        ("\nc", "", true),
        ("", "", false),
        ("", "", false),
        ("", "d", false),
        ("", " e", false),
    ];
    let expected = expected.map(|(r, c, inside)| (r.to_owned(), c.to_owned(), inside));
    assert_eq!(deltas, expected);
}

/// Runs pieces through the parser of calls; neighbouring texts are joined.
fn parsed(pieces: &[&str]) -> Vec<Event> {
    let mut parser = ToolCalls::default();
    let mut events = Vec::new();
    pieces.iter().for_each(|piece| parser.push(piece, &mut events));
    parser.finish(&mut events);
    events
}

fn said(text: &str) -> Event {
    Event::Text(text.into())
}

fn called(name: &str, arguments: &str) -> Event {
    Event::Call(ToolCall { name: name.into(), arguments: arguments.into() })
}

/// Checks an answer in one piece, in two at every place, and character by character.
fn expect_events(answer: &str, expected: &[Event]) {
    assert_eq!(parsed(&[answer]), expected, "{answer:?}");
    for cut in (0..=answer.len()).filter(|&cut| answer.is_char_boundary(cut)) {
        let (left, right) = answer.split_at(cut);
        assert_eq!(parsed(&[left, right]), expected, "{left:?} {right:?}");
    }
    assert_eq!(parsed(&answer.split("").collect::<Vec<_>>()), expected, "{answer:?}");
}

#[test]
fn case_of_several_calls() {
    let input = case("TC-02").0;
    let expected = [called("f", r#"{"a": 1}"#), called("f", r#"{"a": 2}"#)];
    expect_events(input["model_output"].as_str().unwrap(), &expected);
}

#[test]
fn case_of_argument_shapes() {
    for json in strings(&case("TC-03").0["model_outputs"]) {
        let whole: Value = serde_json::from_str(json).unwrap();
        let answer = format!("<tool_call>\n{json}\n</tool_call>");
        let events = parsed(&[&answer]);
        let [Event::Call(call)] = events.as_slice() else { panic!("{events:?}") };
        assert_eq!(call.name, whole["name"]);
        assert_eq!(serde_json::from_str::<Value>(&call.arguments).unwrap(), whole["arguments"]);
        expect_events(&answer, &events);
    }
    let call = |json: &str| format!("<tool_call>{json}</tool_call>");
    expect_events(&call(r#"{"name": "f"}"#), &[called("f", "{}")]);
    expect_events(&call(r#"{"name": "f", "arguments": null}"#), &[called("f", "{}")]);
    expect_events(&call(r#"{"name": "f", "arguments": ""}"#), &[called("f", "{}")]);
    let alias = r#"{"name": "f", "parameters": {"a": 1}}"#;
    expect_events(&call(alias), &[called("f", r#"{"a": 1}"#)]);
    expect_events(
        &call(r#"{"arguments": "{\"a\": 1}", "name": "f"}"#),
        &[called("f", r#"{"a": 1}"#)],
    );
}

#[test]
fn case_of_text_beside_calls() {
    let input = case("TC-04").0;
    let expected = [said("Let me look."), called("f", "{}")];
    expect_events(input["model_output"].as_str().unwrap(), &expected);
    let plain = input["also_plain"].as_str().unwrap();
    expect_events(plain, &[said(plain)]);
    expect_events("a\n", &[said("a\n")]);
    let call = "<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>";
    expect_events(&format!("{call}\n "), &[called("f", "{}")]);
    expect_events(
        &format!("{call}\nDone. {call}"),
        &[called("f", "{}"), said("\nDone."), called("f", "{}")],
    );
}

#[test]
fn case_of_unfinished_and_bad_calls() {
    let input = case("TC-05").0;
    let cut = input["model_output"].as_str().unwrap();
    let call = "<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>";
    for bad in [
        cut,
        "Look: \n<tool_call>\n{name: f}\n</tool_call>",
        "<tool_call></tool_call>",
        "<tool_call>[1]</tool_call>",
        "<tool_call>{\"name\": \"f\", \"arguments\": 5}</tool_call>",
        "<tool_call>{\"name\": 5, \"arguments\": {}}</tool_call>",
        "<tool_call>{\"name\": \"f, \"arguments\": {}}</tool_call>",
        "<tool_call>{\"name\": \"f\", \"arguments\": {\"s\": \"\\\"</tool_call>",
        "<tool_call",
    ] {
        expect_events(bad, &[said(bad)]);
        if bad.ends_with("</tool_call>") {
            expect_events(&format!("{bad}\n{call}"), &[said(bad), called("f", "{}")]);
        }
    }
}

#[test]
fn a_closing_tag_inside_a_string_is_part_of_it() {
    let arguments = r#"{"s": "a \\\"</tool_call> \\", "t": "<tool_call>"}"#;
    let answer = format!("<tool_call>{{\"name\": \"f\", \"arguments\": {arguments}}}</tool_call>");
    expect_events(&answer, &[called("f", arguments)]);
}

/// An answer of fragments that matter, and where to cut it.
fn fragments() -> impl Strategy<Value = Vec<String>> {
    let fragment = prop_oneof![
        Just("<think>"),
        Just("</think>"),
        Just("<tool_call>"),
        Just("</tool_call>"),
        Just("\n"),
        Just("<"),
        Just("</t"),
        Just("hink>"),
        Just("\""),
        Just("\\"),
        Just("é"),
        Just("a"),
        Just("{\"name\": \"f\", \"arguments\": {}}"),
        Just(" "),
        Just("ool_call>"),
    ];
    proptest::collection::vec(fragment.prop_map(str::to_owned), 0..12)
}

proptest! {
    #[test]
    fn any_cutting_gives_what_the_whole_gives(pieces in fragments(), inside in any::<bool>()) {
        let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
        let whole = pieces.concat();
        prop_assert_eq!(split(&pieces, inside), split(&[&whole], inside));
        let answer = Begin::Answer;
        prop_assert_eq!(split_from(&pieces, answer), split_from(&[&whole], answer));
        prop_assert_eq!(parsed(&pieces), parsed(&[&whole]));
        let parts = split(&[&whole], true);
        prop_assert!(parts.reasoning.len() + parts.content.len() <= whole.len());
    }

    #[test]
    fn a_stop_string_is_found_where_a_search_finds_it(
        pieces in proptest::collection::vec("[ab]{0,3}", 0..8),
        stops in proptest::collection::vec("[ab]{1,4}", 1..4),
    ) {
        let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
        let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
        let whole = pieces.concat();
        let first = stops.iter().filter_map(|stop| whole.find(stop)).min();
        let (deltas, stop) = stopped(&pieces, &stops);
        prop_assert_eq!(deltas.concat(), &whole[..first.unwrap_or(whole.len())]);
        prop_assert_eq!(stop.is_some(), first.is_some());
    }

    #[test]
    fn nothing_is_held_back_without_need(pieces in proptest::collection::vec("[abc]{0,3}", 0..8)) {
        let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
        let mut watch = StopStrings::new(["abca".to_owned()]);
        let (mut seen, mut out) = (String::new(), String::new());
        for piece in pieces {
            seen.push_str(piece);
            if watch.push(piece, &mut out).is_some() {
                break;
            }
            let held = (1..4).rev().find(|&n| seen.ends_with(&"abca"[..n])).unwrap_or(0);
            prop_assert_eq!(out.len(), seen.len() - held);
        }
    }
}

#[test]
fn a_thought_may_speak_of_calls() {
    let parts = split(&["<think><tool_call></think>\n<tool_call>x"], false);
    assert_eq!(json!([parts.reasoning, parts.content]), json!(["<tool_call>", "<tool_call>x"]));
}
