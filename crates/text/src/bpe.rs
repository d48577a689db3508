//! Byte-level BPE: from the bytes of one piece to ids, by merging pairs in order of rank.

use std::collections::BinaryHeap;

use model::Vocabulary;

/// Ids are packed into words with this many bits each; no vocabulary of the family needs more.
const ID_BITS: u32 = 18;
const ID_MASK: u64 = (1 << ID_BITS) - 1;
const EMPTY: u64 = u64::MAX;

/// The merges of a vocabulary, arranged for lookup.
pub struct Bpe {
    vocabulary: &'static Vocabulary,
    /// Id of each single byte.
    byte_ids: [u32; 256],
    /// From a pair of ids to the id it makes: words of left, right and made id.
    pairs: Table,
    /// From the bytes of a token to its id: words of a hash of the bytes and the id.
    tokens: Table,
    /// Bytes of the longest token.
    longest: usize,
}

/// Memory of a merge run, kept from piece to piece.
#[derive(Default)]
pub struct Scratch {
    symbols: Vec<Symbol>,
    /// Candidate merges, the smallest (id made, position) on top.
    heap: BinaryHeap<std::cmp::Reverse<(u32, usize)>>,
}

/// A token of the piece so far, at the position of its first byte.
#[derive(Clone, Copy)]
struct Symbol {
    id: u32,
    /// What it makes with its right neighbour, or [`NOTHING`].
    made: u32,
    /// Position of the left neighbour.
    left: usize,
    /// Position of the right neighbour; the piece's length for the last symbol.
    right: usize,
}

const NOTHING: u32 = u32::MAX;

impl Bpe {
    pub fn new(vocabulary: &'static Vocabulary) -> Self {
        let mut byte_ids = [0; 256];
        let mut tokens = Table::new(vocabulary.ranks());
        let mut longest = 0;
        for id in 0..vocabulary.ranks() as u32 {
            let bytes = vocabulary.bytes(id).unwrap_or_default();
            if let [byte] = bytes {
                byte_ids[*byte as usize] = id;
            }
            let hash = hash_bytes(bytes);
            tokens.insert(hash, hash >> ID_BITS << ID_BITS | u64::from(id));
            longest = longest.max(bytes.len());
        }
        let merges = vocabulary.merges();
        let mut pairs = Table::new(merges.len());
        for (pair, id) in merges.zip(256u64..) {
            pairs.insert(hash_pair(pair), pair_key(pair) << ID_BITS | id);
        }
        Self { vocabulary, byte_ids, pairs, tokens, longest }
    }

    /// Appends the ids of one piece.
    pub fn encode(&self, piece: &[u8], scratch: &mut Scratch, ids: &mut Vec<u32>) {
        match self.token(piece) {
            Some(id) => ids.push(id),
            None => self.merge(piece, scratch, ids),
        }
    }

    /// The token with exactly these bytes. Merging its bytes would lead to the same id.
    fn token(&self, bytes: &[u8]) -> Option<u32> {
        if bytes.len() > self.longest {
            return None;
        }
        let hash = hash_bytes(bytes);
        let word = self.tokens.find(hash, |word| {
            (word ^ hash) >> ID_BITS == 0
                && self.vocabulary.bytes((word & ID_MASK) as u32) == Some(bytes)
        })?;
        Some((word & ID_MASK) as u32)
    }

    /// What two neighbours make, or [`NOTHING`].
    fn made(&self, left: u32, right: u32) -> u32 {
        let key = pair_key((left, right));
        let word = self.pairs.find(hash_pair((left, right)), |word| word >> ID_BITS == key);
        word.map_or(NOTHING, |word| (word & ID_MASK) as u32)
    }

    /// Merges the pair of the lowest rank, leftmost first, until none is left. A heap finds it, so the
    /// time is n log n whatever the piece looks like.
    fn merge(&self, piece: &[u8], scratch: &mut Scratch, ids: &mut Vec<u32>) {
        let Scratch { symbols, heap } = scratch;
        symbols.clear();
        heap.clear();
        let end = piece.len();
        for (at, &byte) in piece.iter().enumerate() {
            let id = self.byte_ids[byte as usize];
            symbols.push(Symbol { id, made: NOTHING, left: at.wrapping_sub(1), right: at + 1 });
        }
        for at in 1..end {
            self.propose(symbols, heap, at - 1);
        }
        while let Some(std::cmp::Reverse((made, at))) = heap.pop() {
            // A candidate is stale once either neighbour has changed.
            if symbols[at].made != made {
                continue;
            }
            let gone = symbols[at].right;
            symbols[gone].made = NOTHING;
            let right = symbols[gone].right;
            symbols[at] = Symbol { id: made, right, made: NOTHING, ..symbols[at] };
            if right < end {
                symbols[right].left = at;
                self.propose(symbols, heap, at);
            }
            let left = symbols[at].left;
            if at > 0 {
                self.propose(symbols, heap, left);
            }
        }
        let mut at = 0;
        while at < end {
            ids.push(symbols[at].id);
            at = symbols[at].right;
        }
    }

    /// Looks up what the symbol at `at` makes with its right neighbour and queues it.
    fn propose(
        &self,
        symbols: &mut [Symbol],
        heap: &mut BinaryHeap<std::cmp::Reverse<(u32, usize)>>,
        at: usize,
    ) {
        let made = self.made(symbols[at].id, symbols[symbols[at].right].id);
        symbols[at].made = made;
        if made != NOTHING {
            heap.push(std::cmp::Reverse((made, at)));
        }
    }
}

fn pair_key((left, right): (u32, u32)) -> u64 {
    u64::from(left) << ID_BITS | u64::from(right)
}

fn hash_pair(pair: (u32, u32)) -> u64 {
    mix(pair_key(pair))
}

fn hash_bytes(bytes: &[u8]) -> u64 {
    let mut hash = bytes.len() as u64;
    let mut chunks = bytes.chunks_exact(8);
    for chunk in &mut chunks {
        let word = chunk.iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte));
        hash = mix(hash ^ word);
    }
    let rest = chunks.remainder();
    mix(hash ^ rest.iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte)))
}

/// Spreads a word over all its bits: both halves of a product with a constant.
fn mix(word: u64) -> u64 {
    let product = u128::from(word) * 0x9e37_79b9_7f4a_7c15;
    (product as u64) ^ (product >> 64) as u64
}

/// An open-addressed table of words, filled once and at most two thirds full.
struct Table {
    slots: Box<[u64]>,
}

impl Table {
    fn new(entries: usize) -> Self {
        Self { slots: vec![EMPTY; (entries * 3 / 2).next_power_of_two()].into() }
    }

    fn insert(&mut self, hash: u64, word: u64) {
        let mut at = self.home(hash);
        while self.slots[at] != EMPTY {
            at = (at + 1) & (self.slots.len() - 1);
        }
        self.slots[at] = word;
    }

    /// The first word along the probe path of `hash` that `is_it` accepts.
    fn find(&self, hash: u64, is_it: impl Fn(u64) -> bool) -> Option<u64> {
        let mut at = self.home(hash);
        loop {
            match self.slots[at] {
                EMPTY => return None,
                word if is_it(word) => return Some(word),
                _ => at = (at + 1) & (self.slots.len() - 1),
            }
        }
    }

    fn home(&self, hash: u64) -> usize {
        (hash >> ID_BITS) as usize & (self.slots.len() - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Looking a whole piece up instead of merging it is sound because of this.
    #[test]
    fn merging_the_bytes_of_a_token_gives_the_token() {
        for vocabulary in [Vocabulary::family(), Vocabulary::tiny()] {
            let bpe = Bpe::new(vocabulary);
            let mut scratch = Scratch::default();
            for id in 0..vocabulary.ranks() as u32 {
                let bytes = vocabulary.bytes(id).unwrap();
                let mut ids = Vec::new();
                bpe.merge(bytes, &mut scratch, &mut ids);
                assert_eq!(ids, [id]);
                assert_eq!(bpe.token(bytes), Some(id));
            }
        }
    }
}
