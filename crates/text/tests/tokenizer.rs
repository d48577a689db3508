//! The tokenizer against cases made with the reference library, its invariants, and its promises about time.

mod common;

use std::time::Duration;

use common::{case, ids, lines, time};
use model::Vocabulary;
use proptest::prelude::*;
use sha2::{Digest, Sha256};
use text::{Decoder, Special, Tokenizer};

#[test]
fn reference_cases() {
    let cases = lines(include_str!("data/tokenizer-cases.jsonl"));
    assert_eq!(cases.len(), 2018);
    for case in cases {
        let text = case["text"].as_str().unwrap();
        let found = Tokenizer::family().encode(text, Special::Recognise);
        assert_eq!(found, ids(&case["ids"]), "{text:?}");
    }
}

#[test]
fn cases_of_digits_symbols_white_space_and_normal_forms() {
    let tokenizer = Tokenizer::family();
    for id in ["TK-01", "TK-03", "TK-04"] {
        for item in case(id).0.as_array().unwrap() {
            let text = item["text"].as_str().unwrap();
            let found = tokenizer.encode(text, Special::Recognise);
            assert_eq!(found, ids(&item["ids"]), "{id} {text:?}");
            if id != "TK-04" {
                assert_eq!(tokenizer.decode(&found, false), text);
            }
        }
    }
}

#[test]
fn case_of_added_tokens() {
    let (tokenizer, input) = (Tokenizer::family(), case("TK-05").0);
    for item in input["encode"].as_array().unwrap() {
        let text = item["text"].as_str().unwrap();
        assert_eq!(tokenizer.encode(text, Special::Recognise), ids(&item["ids"]), "{text:?}");
    }
    let decode = &input["decode"];
    assert_eq!(tokenizer.decode(&ids(&decode["ids"]), true), decode["skip_special"]);
    assert_eq!(tokenizer.decode(&ids(&decode["ids"]), false), decode["keep_special"]);
}

#[test]
fn case_of_huge_pieces() {
    for item in case("TK-07").0.as_array().unwrap() {
        let unit = item["repeat"].as_str().unwrap();
        let text = unit.repeat(item["times"].as_u64().unwrap() as usize);
        let mut found = Vec::new();
        let taken = time(|| found = Tokenizer::family().encode(&text, Special::Recognise));
        assert!(taken < Duration::from_secs(1), "{unit:?} took {taken:?}");
        assert_eq!(found.len() as u64, item["count"].as_u64().unwrap());
        let joined = found.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
        let hash: String =
            Sha256::digest(joined).iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hash, item["sha256_of_comma_joined_ids"], "{unit:?}");
    }
}

/// A merge loop that looks at all pairs again after each merge would need 16 times as long.
#[test]
fn four_times_the_length_takes_about_four_times_as_long() {
    let tokenizer = Tokenizer::family();
    let best = |bytes: usize| {
        let text = "a".repeat(bytes);
        let run =
            || time(|| assert_eq!(tokenizer.encode(&text, Special::Literal).len(), bytes / 8));
        (0..3).map(|_| run()).min().unwrap()
    };
    let (short, long) = (best(250_000), best(1_000_000));
    assert!(long < Duration::from_secs(1), "one megabyte took {long:?}");
    assert!(long < 10 * short, "{short:?} for a quarter, {long:?} for the whole");
}

#[test]
fn case_of_characters_split_over_tokens() {
    let input = case("TK-09").0;
    let stream = |ids: &[u32]| {
        let mut decoder = Decoder::new(Vocabulary::family(), false);
        let mut deltas = Vec::new();
        for &id in ids {
            let mut delta = String::new();
            decoder.push(id, &mut delta);
            deltas.push(delta);
        }
        let mut rest = String::new();
        decoder.finish(&mut rest);
        assert_eq!(rest, "");
        deltas
    };
    let family = stream(&ids(&input["ids"]));
    assert_eq!(family, ["👨", "", "\u{200d}", "👩", "", "\u{200d}", "👧"]);
    assert_eq!(stream(&ids(&input["also_ids"])), ["", "", "", "😀"]);
}

#[test]
fn stray_bytes_leave_at_once_and_literal_replacements_are_not_held_back() {
    let tokenizer = Tokenizer::family();
    let mut decoder = Decoder::new(tokenizer.vocabulary(), false);
    let mut push = |bytes: &[u8]| {
        let mut delta = String::new();
        for &byte in bytes {
            let id = (0..256).find(|&id| tokenizer.vocabulary().bytes(id) == Some(&[byte]));
            decoder.push(id.unwrap(), &mut delta);
        }
        delta
    };
    assert_eq!(push(b"\xff"), "\u{fffd}");
    assert_eq!(push("\u{fffd}".as_bytes()), "\u{fffd}");
    assert_eq!(push(b"\xf0\x9f"), "");
    assert_eq!(push(b"x"), "\u{fffd}x");
    assert_eq!(push(b"\xe2\x80"), "");
    assert_eq!(push(b"\xe2"), "\u{fffd}");
    let mut rest = String::new();
    decoder.finish(&mut rest);
    assert_eq!(rest, "\u{fffd}");
}

#[test]
fn literal_text_never_becomes_an_added_token() {
    for tokenizer in [Tokenizer::family(), Tokenizer::tiny()] {
        for added in model::vocabulary::ADDED {
            let text = format!("a {} b", added.text);
            let literal = tokenizer.encode(&text, Special::Literal);
            assert!(literal.iter().all(|&id| (id as usize) < tokenizer.vocabulary().ranks()));
            assert_eq!(tokenizer.decode(&literal, true), text);
            assert!(tokenizer.encode(&text, Special::Recognise).len() < literal.len());
        }
    }
}

proptest! {
    #[test]
    fn ascii_comes_back_from_the_round_trip(text in "[ -~\\n\\r\\t]{0,200}") {
        for tokenizer in [Tokenizer::family(), Tokenizer::tiny()] {
            for special in [Special::Literal, Special::Recognise] {
                let ids = tokenizer.encode(&text, special);
                prop_assert_eq!(&tokenizer.decode(&ids, false), &text);
            }
        }
    }

    #[test]
    fn a_second_round_trip_changes_nothing(text in "\\PC{0,60}") {
        let tokenizer = Tokenizer::family();
        let once = tokenizer.decode(&tokenizer.encode(&text, Special::Literal), false);
        let twice = tokenizer.decode(&tokenizer.encode(&once, Special::Literal), false);
        prop_assert_eq!(once, twice);
    }

    #[test]
    fn the_stream_equals_the_lossy_text_of_all_bytes(
        ids in proptest::collection::vec(prop_oneof![0u32..256, 0u32..152_000], 0..60),
        skip in any::<bool>(),
    ) {
        let vocabulary = Vocabulary::family();
        let kept = |&&id: &&u32| !(skip && vocabulary.added(id).is_some_and(|added| added.special));
        let bytes: Vec<u8> = ids.iter().filter(kept)
            .flat_map(|&id| vocabulary.bytes(id).unwrap_or_default()).copied().collect();
        prop_assert_eq!(Tokenizer::family().decode(&ids, skip), String::from_utf8_lossy(&bytes));
    }
}
