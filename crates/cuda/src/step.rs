//! A batch as the kernels read it: one array of 32-bit words with a header of counts and places, copied to the device
//! in one piece (`kernels/common.cuh`, `enum Step`).

use engine::batch::BLOCK;
use engine::device::{Attention, Cuts};
use engine::{BackendError, Batch, Input};

use crate::rows::pack_row;

/// Words of the header.
const HEADER: usize = 16;
/// Where the header keeps the address of the answers, of two words.
const ANSWERS: usize = 14;
/// Words of a work item of split attention.
const ITEM: usize = 8;
/// Query rows of one tile of split attention: tokens x query heads of a KV head.
const TILE: usize = 16;
/// A sequence with more new tokens than this is prefill, unless one class of kernels is to do everything.
const FEW: usize = 16;

/// How work is cut up.
#[derive(Debug, Clone, Copy)]
pub struct Tiles {
    /// Query heads a KV head.
    pub group: usize,
    /// Queries of one tile of prefill attention.
    pub queries: usize,
    /// Whether clusters of blocks take a chunk of split attention together.
    pub clusters: bool,
    /// Whether attention is split for any number of new tokens.
    pub deterministic: bool,
    /// Answer rows that pass over the head together, at most.
    pub pass: usize,
}

/// Chunks that attention up to this position is split into: of `CHUNK` positions, but for the last, which is half as long
/// to half as long again, since short ones cost as much as long ones.
fn chunks<const CHUNK: usize>(last: usize) -> usize {
    ((last + 1 + CHUNK / 2) / CHUNK).max(1)
}

impl Tiles {
    /// Positions of a chunk of split attention.
    fn chunk(self) -> usize {
        if self.clusters { 1024 } else { 512 }
    }

    fn chunks(self) -> fn(usize) -> usize {
        if self.clusters { chunks::<1024> } else { chunks::<512> }
    }
}

/// Where the header keeps what. The order is that of `enum Step`.
#[derive(Clone, Copy)]
pub enum Field {
    Tokens,
    Rows,
    Splits,
    Flashes,
    Copies,
    TokenAt,
    PositionAt,
    TableAt,
    RowAt,
    FlashAt,
    CopyAt,
    DrawAt,
    GroupAt,
}

/// The words of a batch, and the sizes that launches need.
#[derive(Default)]
pub struct Step {
    /// What the device gets.
    pub words: Vec<u32>,
    /// Tokens.
    pub tokens: usize,
    /// Answer rows of each pass over the head.
    pub groups: Vec<usize>,
    /// Work items of split attention.
    pub splits: usize,
    /// Work items of prefill attention.
    pub flashes: usize,
    /// Blocks to duplicate.
    pub copies: usize,
    /// Partial results of split attention.
    pub partials: usize,
}

impl Step {
    /// Lays a checked batch out for a model with `vocab` tokens.
    pub fn build(&mut self, batch: &Batch, vocab: usize, tiles: Tiles) -> Result<(), BackendError> {
        self.words.clear();
        self.words.resize(HEADER, 0);
        self.tokens = batch.tokens.len();
        self.copies = batch.copies.len();
        self.set(Field::Tokens, self.tokens);
        self.set(Field::Rows, batch.rows.len());
        self.set(Field::Copies, self.copies);

        let (group, queries) = (tiles.group, tiles.queries);
        let few = if tiles.deterministic { usize::MAX } else { FEW };
        let cuts = Cuts { few, tokens: TILE / group, queries, chunks: tiles.chunks() };
        let items = Attention::of(batch, &cuts);
        self.words.resize(HEADER + ITEM * items.splits.len(), 0);
        self.place(Field::TokenAt);
        self.words.extend(batch.tokens.iter().map(|input| match *input {
            Input::Token(id) => id,
            Input::Sampled(row) => !(row as u32), // -1 - row
        }));
        self.place(Field::PositionAt);
        self.words.extend(&batch.positions);
        self.tables(batch);
        self.attention(batch, tiles, items);
        self.place(Field::CopyAt);
        self.words.extend(batch.copies.iter().flat_map(|&(from, to)| [from, to]));
        self.rows(batch, vocab, tiles.pass)
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

    /// Work items of both attention kernels; those of split attention, which puts its chunks together itself, have their
    /// place behind the header.
    fn attention(&mut self, batch: &Batch, tiles: Tiles, items: Attention) {
        let Attention { splits, flashes, partials, .. } = items;
        (self.splits, self.flashes, self.partials) = (splits.len(), flashes.len(), partials);
        let tables = self.words[Field::TableAt as usize] as usize;
        for (i, &[first, count, chunk, partial]) in splits.iter().enumerate() {
            let last = batch.positions[(first + count - 1) as usize];
            let sequence = batch.offsets.partition_point(|&offset| offset <= first as usize) - 1;
            let fresh = last + 1 - batch.positions[batch.offsets[sequence]];
            let (chunks, blocks) = (tiles.chunks()(last as usize) as u32, tiles.chunk() / BLOCK);
            let end = match chunk + 1 == chunks {
                true => last as usize / BLOCK + 1,
                false => (chunk as usize + 1) * blocks,
            };
            let item = [
                first,
                count | fresh << 16,
                (chunk as usize * blocks) as u32,
                end as u32,
                last,
                partial,
                chunk | chunks << 16,
                self.words[tables + first as usize],
            ];
            self.words[HEADER + ITEM * i..][..ITEM].copy_from_slice(&item);
        }
        self.set(Field::Splits, splits.len());
        self.set(Field::Flashes, flashes.len());
        self.place(Field::FlashAt);
        self.words.extend(flashes.iter().flatten());
    }

    /// Answer rows: their tokens, their draws, and how many each pass over the head takes.
    fn rows(&mut self, batch: &Batch, vocab: usize, pass: usize) -> Result<(), BackendError> {
        self.place(Field::RowAt);
        self.words.extend(batch.rows.iter().map(|row| row.token as u32));
        self.groups.clear();
        self.groups.extend(batch.rows.chunks(pass).map(<[_]>::len));
        self.place(Field::GroupAt);
        self.words.extend(self.groups.iter().map(|&rows| rows as u32));
        let draws = self.words.len();
        self.place(Field::DrawAt);
        self.words.resize(draws + batch.rows.len(), 0);
        for (i, row) in batch.rows.iter().enumerate() {
            let at = pack_row(&row.want, vocab, &mut self.words)?;
            self.words[draws + i] = at as u32;
        }
        Ok(())
    }

    /// Says where the device writes the answers.
    pub fn answers_go_to(&mut self, address: u64) {
        self.words[ANSWERS..HEADER].copy_from_slice(&[address as u32, (address >> 32) as u32]);
    }

    /// Byte offset of the count of a pass over the head.
    pub fn group_offset(&self, pass: usize) -> usize {
        (self.words[Field::GroupAt as usize] as usize + pass) * 4
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn field(step: &Step, field: Field) -> usize {
        step.words[field as usize] as usize
    }

    /// Every query of every sequence is covered once, by chunks that cover its whole context.
    #[test]
    fn attention_covers_every_position_once() {
        for (group, clusters) in [(2, false), (4, false), (5, true), (8, true), (2, true)] {
            let mut batch = Batch::default();
            for (count, position) in
                [(1, 0), (1, 127), (1, 128), (3, 126), (16, 500), (1, 1600), (17, 0), (200, 77)]
            {
                let table: Vec<u32> = (0..60).collect();
                batch.push((0..count).map(Input::Token), position, &table);
            }
            let mut step = Step::default();
            let tiles = Tiles { group, queries: 128, clusters, deterministic: group == 8, pass: 8 };
            step.build(&batch, 1000, tiles).unwrap();
            assert_eq!(step.flashes == 0, tiles.deterministic);
            let mut seen = vec![0; step.tokens];
            let items = &step.words[HEADER..HEADER + step.splits * ITEM];
            for item in items.chunks(ITEM) {
                let count = item[1] & 0xffff;
                assert!(count as usize * group <= TILE);
                assert_eq!(item[4], batch.positions[(item[0] + count - 1) as usize]);
                // A token is cut up as it would be alone.
                let chunks = |token: u32| tiles.chunks()(batch.positions[token as usize] as usize);
                assert_eq!((item[6] >> 16) as usize, chunks(item[0]));
                assert_eq!(item[7], step.words[field(&step, Field::TableAt) + item[0] as usize]);
                for token in item[0]..item[0] + count {
                    let position = batch.positions[token as usize] as usize;
                    let (begin, end) = (item[2] as usize * BLOCK, item[3] as usize * BLOCK);
                    seen[token as usize] += end.min(position + 1).saturating_sub(begin);
                }
            }
            let at = field(&step, Field::FlashAt);
            for item in step.words[at..at + step.flashes * 2].chunks(2) {
                for token in item[0]..item[0] + item[1] {
                    seen[token as usize] += batch.positions[token as usize] as usize + 1;
                }
            }
            let expected: Vec<usize> = batch.positions.iter().map(|&p| p as usize + 1).collect();
            assert_eq!(seen, expected);

            // Every partial is written once.
            let mut written = vec![0; step.partials];
            for item in items.chunks(ITEM).filter(|item| item[5] != u32::MAX) {
                let count = item[1] & 0xffff;
                for token in 0..count {
                    written[(item[5] + (item[6] & 0xffff) * count + token) as usize] += 1;
                }
            }
            assert!(written.iter().all(|&count| count == 1), "{written:?}");
        }
    }

    #[test]
    fn tables_are_found_from_tokens() {
        let mut batch = Batch::default();
        batch.push([Input::Token(5), Input::Sampled(2)], 31, &[7, 9]);
        batch.push([Input::Token(6)], 0, &[3]);
        let mut step = Step::default();
        let tiles = Tiles { group: 2, queries: 64, clusters: false, deterministic: false, pass: 8 };
        step.build(&batch, 100, tiles).unwrap();
        let word = |at: usize| step.words[at];
        let table = field(&step, Field::TableAt);
        assert_eq!(word(word(table) as usize), 7);
        assert_eq!(word(word(table + 1) as usize + 1), 9);
        assert_eq!(word(word(table + 2) as usize), 3);
        assert_eq!(word(field(&step, Field::TokenAt) + 1) as i32, -3);
    }
}
