//! Taking any answer apart, whole and in pieces.

use text::thinking::Parts;
use text::{Begin, StopStrings, Thinking, ToolCalls};

/// Input: a byte that says how to cut, then an answer.
pub fn run(data: &[u8]) {
    let [how, answer @ ..] = data else { return };
    let answer = String::from_utf8_lossy(answer);
    let size = usize::from(how % 8) + 1;
    let characters: Vec<char> = answer.chars().collect();
    let pieces: Vec<String> = characters.chunks(size).map(|piece| piece.iter().collect()).collect();
    let whole = [answer.to_string()];

    let begin = match how & 24 {
        0 => Begin::Inside,
        8 => Begin::MayThink,
        _ => Begin::Answer,
    };
    let stops = ["\n\n", "</", "a<tool", "<tool_call>\n"];
    let watch = StopStrings::new(stops.iter().map(|stop| stop.to_string()));
    let stopped = |pieces: &[String], mut watch: StopStrings| {
        let mut out = String::new();
        for piece in pieces {
            if let Some(stop) = watch.push(piece, &mut out).map(str::to_owned) {
                return (out, Some(stop));
            }
        }
        let stop = watch.finish(&mut out).map(str::to_owned);
        (out, stop)
    };
    for watch in [watch.clone(), watch.behind_thought(begin)] {
        assert_eq!(stopped(&pieces, watch.clone()), stopped(&whole, watch));
    }

    let split = |pieces: &[String]| {
        let (mut thinking, mut parts) = (Thinking::new(begin), Parts::default());
        pieces.iter().for_each(|piece| thinking.push(piece, &mut parts));
        thinking.finish(&mut parts);
        parts
    };
    assert_eq!(split(&pieces), split(&whole));

    let calls = |pieces: &[String]| {
        let (mut parser, mut events) = (ToolCalls::default(), Vec::new());
        pieces.iter().for_each(|piece| parser.push(piece, &mut events));
        parser.finish(&mut events);
        events
    };
    assert_eq!(calls(&pieces), calls(&whole));
}
