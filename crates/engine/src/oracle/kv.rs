//! The oracle's KV cache: blocks of 32 positions, read and written through block tables.

use model::float::{bf16_to_f32, f32_to_bf16};
use model::{HEAD_DIM, KV_HEADS};

use crate::backend::{KvConfig, KvKind};
use crate::batch::BLOCK;

/// Head rows of one block: keys, then values, each `[8 heads, 32 positions]`.
const ROWS: usize = 2 * KV_HEADS * BLOCK;

/// Where a head row lies within its block.
fn row(value: bool, head: usize, slot: usize) -> usize {
    (usize::from(value) * KV_HEADS + head) * BLOCK + slot
}

/// Keys and values of all layers, `[layers, blocks, 2, 8, 32, 128]`.
pub struct KvStore {
    layers: usize,
    blocks: usize,
    elements: Elements,
}

enum Elements {
    Bf16(Vec<u16>),
    /// Signed bytes, and one scale a head row.
    Q8_0(Vec<i8>, Vec<f32>),
}

impl KvStore {
    pub fn new(layers: usize, config: KvConfig) -> Self {
        let rows = layers * config.blocks * ROWS;
        let elements = match config.kind {
            KvKind::Bf16 => Elements::Bf16(vec![0; rows * HEAD_DIM]),
            KvKind::Q8_0 => Elements::Q8_0(vec![0; rows * HEAD_DIM], vec![0.0; rows]),
        };
        KvStore { layers, blocks: config.blocks, elements }
    }

    pub fn blocks(&self) -> usize {
        self.blocks
    }

    /// Index of a block's first head row.
    fn base(&self, layer: usize, block: u32) -> usize {
        (layer * self.blocks + block as usize) * ROWS
    }

    /// Stores one position's keys and values, `[8, 128]` each.
    pub fn append(&mut self, layer: usize, table: &[u32], position: usize, k: &[f32], v: &[f32]) {
        let base = self.base(layer, table[position / BLOCK]);
        for (value, rows) in [(false, k), (true, v)] {
            for (head, x) in rows.chunks_exact(HEAD_DIM).enumerate() {
                self.elements.store(base + row(value, head, position % BLOCK), x);
            }
        }
    }

    /// Duplicates a block in every layer.
    pub fn copy_block(&mut self, from: u32, to: u32) {
        for layer in 0..self.layers {
            let (from, to) = (self.base(layer, from), self.base(layer, to));
            match &mut self.elements {
                Elements::Bf16(x) => copy(x, from * HEAD_DIM, to * HEAD_DIM, ROWS * HEAD_DIM),
                Elements::Q8_0(x, scales) => {
                    copy(x, from * HEAD_DIM, to * HEAD_DIM, ROWS * HEAD_DIM);
                    copy(scales, from, to, ROWS);
                }
            }
        }
    }

    /// The first `len` positions of a sequence in one layer.
    pub fn view<'a>(&'a self, layer: usize, table: &'a [u32], len: usize) -> View<'a> {
        View { store: self, layer, table, len }
    }
}

fn copy<T: Copy>(x: &mut [T], from: usize, to: usize, len: usize) {
    x.copy_within(from..from + len, to);
}

impl Elements {
    fn store(&mut self, row: usize, x: &[f32]) {
        let range = row * HEAD_DIM..(row + 1) * HEAD_DIM;
        match self {
            Elements::Bf16(stored) => {
                for (s, &x) in stored[range].iter_mut().zip(x) {
                    *s = f32_to_bf16(x);
                }
            }
            Elements::Q8_0(stored, scales) => {
                let largest = x.iter().fold(0.0f32, |m, x| m.max(x.abs()));
                let scale = largest / 127.0;
                let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
                scales[row] = scale;
                for (s, &x) in stored[range].iter_mut().zip(x) {
                    *s = (x * inverse).round_ties_even() as i8;
                }
            }
        }
    }

    fn load(&self, row: usize, out: &mut [f32; HEAD_DIM]) {
        let range = row * HEAD_DIM..(row + 1) * HEAD_DIM;
        match self {
            Elements::Bf16(stored) => {
                for (out, &s) in out.iter_mut().zip(&stored[range]) {
                    *out = bf16_to_f32(s);
                }
            }
            Elements::Q8_0(stored, scales) => {
                for (out, &s) in out.iter_mut().zip(&stored[range]) {
                    *out = f32::from(s) * scales[row];
                }
            }
        }
    }
}

/// What one token may attend to.
pub struct View<'a> {
    store: &'a KvStore,
    layer: usize,
    table: &'a [u32],
    len: usize,
}

impl View<'_> {
    /// Positions.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Key of one position and head.
    pub fn key(&self, position: usize, head: usize, out: &mut [f32; HEAD_DIM]) {
        self.load(false, position, head, out);
    }

    /// Value of one position and head.
    pub fn value(&self, position: usize, head: usize, out: &mut [f32; HEAD_DIM]) {
        self.load(true, position, head, out);
    }

    fn load(&self, value: bool, position: usize, head: usize, out: &mut [f32; HEAD_DIM]) {
        let base = self.store.base(self.layer, self.table[position / BLOCK]);
        self.store.elements.load(base + row(value, head, position % BLOCK), out);
    }
}
