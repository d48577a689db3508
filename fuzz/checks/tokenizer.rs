//! Encoding and decoding any text.

use std::collections::HashMap;
use std::sync::OnceLock;

use model::Vocabulary;
use text::{Decoder, Special, Tokenizer};

/// Input: text (invalid UTF-8 is replaced); its bytes, three at a time, serve as ids as well.
pub fn run(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    for tokenizer in [Tokenizer::family(), Tokenizer::tiny()] {
        for special in [Special::Literal, Special::Recognise] {
            let ids = tokenizer.encode(&text, special);
            let normal = tokenizer.decode(&ids, false);
            if text.is_ascii() {
                assert_eq!(normal, text);
            }
            assert_eq!(tokenizer.decode(&tokenizer.encode(&normal, special), false), normal);
        }
        let literal = tokenizer.encode(&text, Special::Literal);
        assert!(literal.iter().all(|&id| (id as usize) < tokenizer.vocabulary().ranks()));
    }
    // A text of letters is one piece, so its ids follow from the definition of BPE alone.
    let letters: String = text.chars().filter(char::is_ascii_lowercase).take(64).collect();
    assert_eq!(Tokenizer::family().encode(&letters, Special::Literal), by_definition(&letters));

    let vocabulary = Vocabulary::family();
    let ids = data.chunks(3).map(|c| c.iter().fold(0, |id, &byte| id << 8 | u32::from(byte)));
    let ids: Vec<u32> = ids.collect();
    let bytes: Vec<u8> =
        ids.iter().flat_map(|&id| vocabulary.bytes(id).unwrap_or_default()).copied().collect();
    let (mut stream, mut decoder) = (String::new(), Decoder::new(vocabulary, false));
    ids.iter().for_each(|&id| decoder.push(id, &mut stream));
    decoder.finish(&mut stream);
    assert_eq!(stream, String::from_utf8_lossy(&bytes));
}

/// Merges the pair of the lowest rank, leftmost first, looking at all pairs each time.
fn by_definition(piece: &str) -> Vec<u32> {
    static RANKS: OnceLock<HashMap<(u32, u32), u32>> = OnceLock::new();
    let vocabulary = Vocabulary::family();
    let ranks = RANKS.get_or_init(|| vocabulary.merges().zip(256..).collect());
    let byte_id = |byte| (0..256).find(|&id| vocabulary.bytes(id) == Some(&[byte])).unwrap_or(0);
    let mut ids: Vec<u32> = piece.bytes().map(byte_id).collect();
    let best = |ids: &[u32]| {
        let pairs = ids.windows(2).enumerate();
        pairs.filter_map(|(at, pair)| Some((*ranks.get(&(pair[0], pair[1]))?, at))).min()
    };
    while let Some((id, at)) = best(&ids) {
        ids.splice(at..at + 2, [id]);
    }
    ids
}
