//! The kernels of every class of this machine on random ragged shapes: products against plain f64 arithmetic, attention
//! against itself.

use engine::batch::BLOCK;
use engine::philox::philox;
use engine::rope::Rope;
use engine::{KvConfig, KvKind};
use model::float::{f32_to_bf16, f32_to_f16};
use model::tensor::Bytes;
use model::{HEAD_DIM, KV_HEADS, Matrix, TensorType};

use crate::activations::{Activations, Rows, Source, Tile, tiles};
use crate::attention::{Attend, SCRATCH, Unit};
use crate::kernels::Kernels;
use crate::kv::{Append, Kv};
use crate::matmul::{self, Product};
use crate::memory::Shared;
use crate::panels::{Format, Panels};
use crate::simd::Class;

/// Random numbers.
struct Dice(u64, u32);

impl Dice {
    fn next(&mut self) -> u32 {
        self.1 += 1;
        philox(self.0, [self.1, 0, 0, 0])[0]
    }

    fn below(&mut self, sides: usize) -> usize {
        self.next() as usize % sides
    }

    /// About normal.
    fn normal(&mut self) -> f32 {
        let bytes = self.next().to_le_bytes().map(f32::from);
        (bytes.iter().sum::<f32>() - 510.0) / 147.8
    }
}

const TYPES: [TensorType; 8] = [
    TensorType::Bf16,
    TensorType::Q8_0,
    TensorType::Q4_1,
    TensorType::Q4_0,
    TensorType::F16,
    TensorType::Q4K,
    TensorType::Q5K,
    TensorType::Q6K,
];

fn matrix(dice: &mut Dice, ty: TensorType, rows: usize, cols: usize) -> Matrix {
    let mut bytes = Vec::new();
    for _ in 0..rows * cols / ty.block() {
        if ty.is_wide() {
            let weight = dice.normal() * 0.02;
            let bits = if ty == TensorType::F16 { f32_to_f16(weight) } else { f32_to_bf16(weight) };
            bytes.extend(bits.to_le_bytes());
            continue;
        }
        let start = bytes.len();
        while bytes.len() < start + ty.block_bytes() {
            bytes.extend(dice.next().to_le_bytes());
        }
        bytes.truncate(start + ty.block_bytes());
        // Where the block's halves are: scale, or scale and minimum.
        let halves: &[usize] = match ty {
            TensorType::Q4_1 | TensorType::Q4K | TensorType::Q5K => &[0, 2],
            TensorType::Q6K => &[208],
            _ => &[0],
        };
        for at in halves {
            let half = f32_to_f16(dice.normal() * 0.01).to_le_bytes();
            bytes[start + at..start + at + 2].copy_from_slice(&half);
        }
    }
    Matrix::new(ty, rows, cols, Bytes::new(bytes)).expect("a matrix")
}

/// `x`, `[tokens, cols]`, times the matrix, by one class's kernels, in units of `unit` panels.
fn multiply(kernels: &Kernels, matrix: &Matrix, x: &[f32], add: f32, unit: usize) -> Vec<f32> {
    let (rows, cols) = (matrix.rows, matrix.cols);
    let tokens = x.len() / cols;
    let format = Format::of(matrix.ty).expect("a format");
    let arena = Shared::<u8>::new(Panels::bytes(format, rows, cols), "a test").expect("memory");
    let weights = Panels::new(format, rows, cols, arena.at(0));
    let activations = Activations::new(tokens, cols, format.levels()).expect("memory");
    let mut cut = Vec::new();
    tiles(tokens, kernels.tile_tokens, &mut cut);
    let mut out = vec![add; tokens * rows];
    let len = cols.max(matmul::scratch(unit, tokens));
    let memory = Shared::<f32>::new(len, "a test").expect("memory");
    // SAFETY: the memory's elements, which nothing else uses.
    let scratch = unsafe { std::slice::from_raw_parts_mut(memory.at(0), len) };
    let source = Source { rows: Rows::Plain(x.as_ptr()), stride: cols };
    // SAFETY: the class is this machine's, everything has these shapes, and there is one thread.
    unsafe {
        for panel in 0..weights.panels() {
            (kernels.pack)(&weights, matrix, panel);
        }
        for &tile in &cut {
            let Tile { start, len } = tile;
            for token in start..start + len {
                (kernels.quantise)(&activations, tile, token, &source, &mut scratch[..cols]);
            }
        }
        let product = Product {
            weights: &weights,
            activations: &activations,
            tiles: &cut,
            out: out.as_mut_ptr(),
            stride: rows,
            add: add != 0.0,
        };
        for first in (0..weights.panels()).step_by(unit) {
            let count = unit.min(weights.panels() - first);
            (kernels.product)(&product, first, count, scratch);
        }
    }
    out
}

fn nmse(found: &[f32], expected: &[f64]) -> f64 {
    let difference: f64 =
        found.iter().zip(expected).map(|(&a, &b)| (f64::from(a) - b).powi(2)).sum();
    difference / expected.iter().map(|b| b * b).sum::<f64>()
}

#[test]
fn products_agree_with_plain_arithmetic_and_do_not_depend_on_the_tile() {
    let seed = std::process::id().into();
    let mut dice = Dice(seed, 0);
    for class in Class::available() {
        let kernels = class.kernels().expect("available");
        for ty in TYPES {
            for _ in 0..4 {
                let step = ty.block().max(32);
                let (rows, cols) = (1 + dice.below(90), step * (1 + dice.below(2240 / step)));
                let tokens = 1 + dice.below(40);
                let w = matrix(&mut dice, ty, rows, cols);
                let x: Vec<f32> = (0..tokens * cols).map(|_| dice.normal()).collect();
                let add = if dice.below(2) == 0 { 0.0 } else { 0.5 };
                let name = format!("seed {seed}: {class:?} {ty} [{rows}, {cols}] x {tokens}");

                let mut row = vec![0.0; cols];
                let mut expected = vec![0.0; tokens * rows];
                for r in 0..rows {
                    w.row_f32(r, &mut row);
                    for (t, x) in x.chunks_exact(cols).enumerate() {
                        let products =
                            x.iter().zip(&row).map(|(&x, &w)| f64::from(x) * f64::from(w));
                        expected[t * rows + r] = products.sum::<f64>() + f64::from(add);
                    }
                }
                let found = multiply(kernels, &w, &x, add, 1 + dice.below(6));
                let error = nmse(&found, &expected);
                // The scales of K-quants are rounded once more.
                let bound = if ty.block() > 32 { 1e-6 } else { 1e-7 };
                assert!(error <= bound, "{name}: NMSE {error:e}");
                for (t, x) in x.chunks_exact(cols).enumerate() {
                    let alone = multiply(kernels, &w, x, add, 2);
                    let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                    assert_eq!(bits(&alone), bits(&found[t * rows..][..rows]), "{name}, token {t}");
                }
            }
        }
    }
}

#[test]
fn the_largest_sums_do_not_overflow() {
    for class in Class::available() {
        let kernels = class.kernels().expect("available");
        let (rows, cols) = (16, 256);
        let byte = |i: usize| if i % 34 < 2 { [0x00, 0x3c][i % 34] } else { 0x80 };
        let q8 = (0..rows * cols / 32 * 34).map(byte).collect::<Vec<u8>>();
        let bf16 = f32_to_bf16(3.0).to_le_bytes().repeat(rows * cols);
        for (ty, bytes, weight) in [(TensorType::Q8_0, q8, -128.0), (TensorType::Bf16, bf16, 3.0)] {
            let w = Matrix::new(ty, rows, cols, Bytes::new(bytes)).expect("a matrix");
            let found = multiply(kernels, &w, &vec![7.0; cols], 0.0, 1);
            let expected = vec![weight * 7.0 * cols as f64; rows];
            // Equal weights are all rounded alike, by up to half of one in 2,040.
            assert!(nmse(&found, &expected) <= 1e-7, "{class:?} {ty}: {found:?}");
        }
    }
}

/// A token alone, whose attention keeps everything in registers, and the same token beside another: the same bits.
#[test]
fn attention_of_a_token_does_not_depend_on_its_neighbour() {
    let seed = std::process::id().into();
    let mut dice = Dice(seed, 1);
    let tokens = 70 + dice.below(600);
    let blocks = tokens.div_ceil(BLOCK);
    // Blocks in reverse.
    let tables = [(0..blocks as u32).rev().collect::<Vec<_>>()];
    let positions: Vec<u32> = (0..tokens as u32).collect();
    let rope = Rope::new(1e6);
    let rotations: Vec<_> = positions.iter().map(|&p| rope.at(p)).collect();
    let slot = |p: usize| (tables[0][p / BLOCK], (p % BLOCK) as u32);
    let slots: Vec<_> = (0..tokens).map(slot).collect();
    let norm = [1.0; HEAD_DIM];
    for (class, kind) in
        Class::available().into_iter().flat_map(|c| [(c, KvKind::Bf16), (c, KvKind::Q8_0)])
    {
        let kernels = class.kernels().expect("available");
        let heads = KV_HEADS * (1 + dice.below(8));
        let (width, stride) = (heads * HEAD_DIM, (heads + 2 * KV_HEADS) * HEAD_DIM);
        let mut qkv: Vec<f32> = (0..tokens * stride).map(|_| dice.normal()).collect();
        let kv = Kv::new(1, KvConfig { blocks, kind }).expect("memory");
        let partials = Shared::new(1, "a test").expect("memory");
        let memory = Shared::<f32>::new(SCRATCH, "a test").expect("memory");
        let append = Append {
            layer: 0,
            qkv: qkv.as_mut_ptr(),
            stride,
            heads,
            q_norm: &norm,
            k_norm: &norm,
            rotations: &rotations,
            slots: &slots,
        };
        let first = tokens - 2;
        let attended = |together: usize| {
            let mut out = vec![0.0f32; tokens * width];
            let units: Vec<Unit> = (first..tokens)
                .step_by(together)
                .flat_map(|token| (0..KV_HEADS).map(move |head| (token, head)))
                .map(|(token, head)| Unit {
                    sequence: 0,
                    head,
                    token,
                    tokens: together,
                    start: 0,
                    end: token + together,
                    partial: None,
                })
                .collect();
            let job = Attend {
                kv: &kv,
                layer: 0,
                q: append.qkv,
                stride,
                heads,
                positions: &positions,
                tables: &tables,
                units: &units,
                out: out.as_mut_ptr(),
                out_stride: width,
                partials: &partials,
                merges: &[],
            };
            for unit in 0..units.len() {
                // SAFETY: the class is this machine's, everything has these shapes, and there is one thread.
                unsafe {
                    let scratch = std::slice::from_raw_parts_mut(memory.at(0), SCRATCH);
                    (kernels.attend)(&job, unit, scratch);
                }
            }
            out[first * width..].iter().map(|x| x.to_bits()).collect::<Vec<_>>()
        };
        for token in 0..tokens {
            // SAFETY: as above.
            unsafe { (kernels.append)(&kv, &append, token) };
        }
        let (apart, together) = (attended(1), attended(2));
        let name = format!("seed {seed}: {class:?} {kind:?}, {heads} heads, {tokens} tokens");
        assert!(apart.iter().any(|&bits| bits != 0), "{name}");
        assert!(apart == together, "{name}");
    }
}
