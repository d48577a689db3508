//! How a batch is cut into the units of work of a layer; the same for all layers.

use engine::Batch;
use engine::batch::BLOCK;
use engine::rope::Rotation;
use model::{HEAD_DIM, KV_HEADS, Spec};

use crate::activations::{Tile, tiles};
use crate::attention::{Merge, ROWS, SPLIT, Unit};

/// Partial attention results that fit.
pub const PARTIALS: usize = 4096;

/// Tiles of tokens for the products, and units of attention.
#[derive(Default)]
pub struct Plan {
    /// In order of their tokens.
    pub tiles: Vec<Tile>,
    /// Each token's tile.
    pub tile_of: Vec<Tile>,
    /// One a token.
    pub rotations: Vec<Rotation>,
    /// Each token's block, and its place there.
    pub slots: Vec<(u32, u32)>,
    /// Attention of some rows over some positions.
    pub units: Vec<Unit>,
    /// Rows whose units wrote partial results.
    pub merges: Vec<Merge>,
}

impl Plan {
    /// Cuts a batch for tiles of at most `tile_tokens` tokens and for `threads` threads.
    pub fn cut(
        &mut self,
        spec: &Spec,
        batch: &Batch,
        rotation: impl Fn(u32) -> Rotation,
        tile_tokens: usize,
        threads: usize,
    ) {
        tiles(batch.tokens.len(), tile_tokens, &mut self.tiles);
        self.tile_of.clear();
        for tile in &self.tiles {
            self.tile_of.extend(std::iter::repeat_n(*tile, tile.len));
        }
        self.rotations.clear();
        self.rotations.extend(batch.positions.iter().map(|&p| rotation(p)));
        self.slots.clear();
        for (sequence, table) in batch.tables.iter().enumerate() {
            let tokens = batch.offsets[sequence]..batch.offsets[sequence + 1];
            self.slots.extend(batch.positions[tokens].iter().map(|&position| {
                (table[position as usize / BLOCK], (position as usize % BLOCK) as u32)
            }));
        }
        self.whole_units(spec.group(), batch);
        self.split_units(spec.group(), threads);
    }

    /// Units that see all of their rows' context.
    fn whole_units(&mut self, group: usize, batch: &Batch) {
        let per_unit = (ROWS / group).max(1);
        self.units.clear();
        for sequence in 0..batch.sequences() {
            let (first, last) = (batch.offsets[sequence], batch.offsets[sequence + 1]);
            for token in (first..last).step_by(per_unit) {
                let tokens = per_unit.min(last - token);
                let end = batch.positions[token + tokens - 1] as usize + 1;
                let unit =
                    |head| Unit { sequence, head, token, tokens, start: 0, end, partial: None };
                self.units.extend((0..KV_HEADS).map(unit));
            }
        }
    }

    /// Cuts few units over long contexts into one a split, if the partial results fit.
    fn split_units(&mut self, group: usize, threads: usize) {
        self.merges.clear();
        let rows = |unit: &Unit| unit.tokens * group;
        let splits = |unit: &Unit| unit.end.div_ceil(SPLIT);
        let partials: usize = self.units.iter().map(|unit| rows(unit) * splits(unit)).sum();
        let long = self.units.iter().any(|unit| splits(unit) > 1);
        if !long || threads == 1 || self.units.len() >= 8 * threads || partials > PARTIALS {
            return;
        }
        let mut next = 0;
        for unit in std::mem::take(&mut self.units) {
            for row in 0..rows(&unit) {
                self.merges.push(Merge {
                    token: unit.token + row / group,
                    head: unit.head * group + row % group,
                    first: next + row,
                    splits: splits(&unit),
                    step: rows(&unit),
                });
            }
            for start in (0..unit.end).step_by(SPLIT) {
                let end = unit.end.min(start + SPLIT);
                self.units.push(Unit { start, end, partial: Some(next), ..unit });
                next += rows(&unit);
            }
        }
    }
}

const _: () = assert!(SPLIT.is_multiple_of(BLOCK) && HEAD_DIM.is_multiple_of(32));
