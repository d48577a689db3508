//! A batch as the kernels read it: one array of 32-bit words with a header of counts and places, in memory that the
//! device shares (`kernels/common.h`, `enum Step`).

use engine::batch::BLOCK;
use engine::device::{Attention, Cuts};
use engine::rope::Rope;
use engine::{BackendError, Batch, Input};

use crate::rows::pack_row;

/// Words of the header.
const HEADER: usize = 12;
/// Positions of one chunk of split attention.
const CHUNK: usize = 4 * BLOCK;
/// Query rows of one tile of split attention: tokens x query heads of a KV head.
const TILE: usize = 16;
/// A sequence with more new tokens than this is prefill.
const FEW: usize = 16;
/// Tokens of one tile of prefill attention.
const QUERIES: usize = 64;

/// Where the header keeps what. The order is that of `enum Step`.
#[derive(Clone, Copy)]
enum Field {
    Tokens,
    Rows,
    TokenAt,
    PositionAt,
    RotationAt,
    TableAt,
    RowAt,
    SplitAt,
    MergeAt,
    FlashAt,
    CopyAt,
    DrawAt,
}

/// The words of a batch, and the sizes that launches need.
#[derive(Default)]
pub struct Step {
    /// What the device gets.
    pub words: Vec<u32>,
    /// Tokens.
    pub tokens: usize,
    /// Answer rows.
    pub rows: usize,
    /// Work items of split attention.
    pub splits: usize,
    /// Tokens whose chunks have to be merged.
    pub merges: usize,
    /// Work items of prefill attention.
    pub flashes: usize,
    /// Blocks to duplicate.
    pub copies: usize,
    /// Partial results of split attention.
    pub partials: usize,
}

impl Step {
    /// Lays a checked batch out for a model with `group` query heads a KV head and `vocab` tokens.
    pub fn build(
        &mut self,
        batch: &Batch,
        rope: &Rope,
        group: usize,
        vocab: usize,
    ) -> Result<(), BackendError> {
        self.words.clear();
        self.words.resize(HEADER, 0);
        (self.tokens, self.rows) = (batch.tokens.len(), batch.rows.len());
        self.copies = batch.copies.len();
        self.set(Field::Tokens, self.tokens);
        self.set(Field::Rows, self.rows);

        // First of all, since kernels read four words at a time.
        self.place(Field::RotationAt);
        for &position in &batch.positions {
            let rotation = rope.at(position);
            let pairs = rotation.cos.iter().zip(&rotation.sin);
            self.words.extend(pairs.flat_map(|(c, s)| [c.to_bits(), s.to_bits()]));
        }
        self.place(Field::TokenAt);
        self.words.extend(batch.tokens.iter().map(|input| match *input {
            Input::Token(id) => id,
            Input::Sampled(row) => !(row as u32), // -1 - row
        }));
        self.place(Field::PositionAt);
        self.words.extend(&batch.positions);
        self.tables(batch);
        self.attention(batch, group);
        self.place(Field::CopyAt);
        self.words.extend(batch.copies.iter().flat_map(|&(from, to)| [from, to]));
        self.answers(batch, vocab)
    }

    fn set(&mut self, field: Field, value: usize) {
        self.words[field as usize] = value as u32;
    }

    /// The next words are this field's array.
    fn place(&mut self, field: Field) {
        self.set(field, self.words.len());
    }

    /// Block tables, and where each token finds its own.
    fn tables(&mut self, batch: &Batch) {
        let mut at = self.words.len() + self.tokens;
        self.place(Field::TableAt);
        for (table, range) in batch.tables.iter().zip(batch.offsets.windows(2)) {
            self.words.extend((range[0]..range[1]).map(|_| at as u32));
            at += table.len();
        }
        self.words.extend(batch.tables.iter().flatten());
    }

    /// Work items of the attention kernels.
    fn attention(&mut self, batch: &Batch, group: usize) {
        let chunks = |last| last / CHUNK + 1;
        let cuts = Cuts { few: FEW, tokens: TILE / group, queries: QUERIES, chunks };
        let Attention { splits, merges, flashes, partials } = Attention::of(batch, &cuts);
        (self.splits, self.merges, self.flashes) = (splits.len(), merges.len(), flashes.len());
        self.partials = partials;
        self.place(Field::SplitAt);
        self.words.extend(splits.iter().flatten());
        self.place(Field::MergeAt);
        self.words.extend(merges.iter().flatten());
        self.place(Field::FlashAt);
        self.words.extend(flashes.iter().flatten());
    }

    /// Answer rows: their tokens and their draws.
    fn answers(&mut self, batch: &Batch, vocab: usize) -> Result<(), BackendError> {
        self.place(Field::RowAt);
        self.words.extend(batch.rows.iter().map(|row| row.token as u32));
        let draws = self.words.len();
        self.place(Field::DrawAt);
        self.words.resize(draws + batch.rows.len(), 0);
        for (i, row) in batch.rows.iter().enumerate() {
            let at = pack_row(&row.want, vocab, &mut self.words)?;
            self.words[draws + i] = at as u32;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn items<const N: usize>(step: &Step, field: Field, count: usize) -> Vec<[usize; N]> {
        let at = step.words[field as usize] as usize;
        let item = |i: usize| std::array::from_fn(|j| step.words[at + i * N + j] as usize);
        (0..count).map(item).collect()
    }

    /// Every query of every sequence is covered once, by chunks that cover its whole context, and merges read what splits
    /// write.
    #[test]
    fn attention_covers_every_position_once() {
        for group in [2, 4, 5, 8] {
            let mut batch = Batch::default();
            for (count, position) in
                [(1, 0), (1, 127), (1, 128), (3, 126), (16, 500), (17, 0), (200, 77)]
            {
                let table: Vec<u32> = (0..40).collect();
                batch.push((0..count).map(Input::Token), position, &table);
            }
            let mut step = Step::default();
            step.build(&batch, &Rope::new(1e6), group, 1000).unwrap();
            let mut seen = vec![0; step.tokens];
            let mut written = vec![0; step.partials];
            for [first, tokens, chunk, base] in items(&step, Field::SplitAt, step.splits) {
                assert!(tokens * group <= TILE);
                for token in first..first + tokens {
                    let end = batch.positions[token] as usize + 1;
                    seen[token] += CHUNK.min(end.saturating_sub(chunk * CHUNK));
                }
                if base != u32::MAX as usize {
                    (0..tokens).for_each(|i| written[base + chunk * tokens + i] += 1);
                }
            }
            for [first, tokens] in items(&step, Field::FlashAt, step.flashes) {
                (first..first + tokens).for_each(|t| seen[t] += batch.positions[t] as usize + 1);
            }
            let expected: Vec<usize> = batch.positions.iter().map(|&p| p as usize + 1).collect();
            assert_eq!(seen, expected);
            for [_, first, stride, chunks] in items(&step, Field::MergeAt, step.merges) {
                (0..chunks).for_each(|chunk| written[first + chunk * stride] += 1);
            }
            assert!(written.iter().all(|&count| count == 2), "{written:?}");
        }
    }

    #[test]
    fn tables_are_found_from_tokens() {
        let mut batch = Batch::default();
        batch.push([Input::Token(5), Input::Sampled(2)], 31, &[7, 9]);
        batch.push([Input::Token(6)], 0, &[3]);
        let mut step = Step::default();
        step.build(&batch, &Rope::new(1e6), 2, 100).unwrap();
        let tables = items::<1>(&step, Field::TableAt, 3);
        assert_eq!(step.words[tables[0][0]], 7);
        assert_eq!(step.words[tables[1][0] + 1], 9);
        assert_eq!(step.words[tables[2][0]], 3);
        assert_eq!(items::<1>(&step, Field::TokenAt, 2)[1][0] as u32 as i32, -3);
        assert_eq!(step.words[Field::RotationAt as usize] % 4, 0);
    }
}
