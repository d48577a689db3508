//! The forward pass: phases that all threads run together, with a barrier between one and the next.

use std::array;
use std::cell::Cell;

use engine::BackendError;
use model::{Model, Spec};

use crate::activations::{Activations, Rows, Source, Tile};
use crate::attention::{Attend, PARTIAL, SCRATCH};
use crate::kernels::Kernels;
use crate::kv::{Append, Kv};
use crate::matmul::{self, Product, STREAMS};
use crate::memory::{BUFFERS, Shared};
use crate::packed::{Packed, PackedLayer};
use crate::panels::Panels;
use crate::plan::{PARTIALS, Plan};
use crate::pool::{Shares, Team};
use crate::simd::LANES;

/// Tokens of one call.
pub const TOKENS: usize = 512;
/// Rows of the head that are computed together.
pub const HEAD_ROWS: usize = 12;
/// Bytes of a unit's weights that pass by once.
const UNIT_BYTES: usize = 256 << 10;
/// Panels that a unit multiplies with many tokens: they stay in the second-level cache.
const UNIT_PANELS: usize = 8;

/// Memory of the forward pass, allocated once.
pub struct Buffers {
    /// Residual stream, `[tokens, hidden]`.
    x: Shared<f32>,
    /// `[tokens, q + 2 kv]`
    qkv: Shared<f32>,
    /// `[tokens, q]`
    attended: Shared<f32>,
    /// `[tokens, ffn]` each.
    gate: Shared<f32>,
    up: Shared<f32>,
    partials: Shared<f32>,
    /// Quantised inputs of QKV and gate/up, of O, of down and of the head.
    normed: Activations,
    mixed: Activations,
    gated: Activations,
    last: Activations,
    /// Rows that want an answer, `[HEAD_ROWS, hidden]`, and their logits.
    rows: Shared<f32>,
    /// `[HEAD_ROWS, vocab]`
    pub logits: Shared<f32>,
    /// One part a thread.
    scratch: Shared<f32>,
    scratch_len: usize,
    shares: [Shares; 2],
    /// How the batch is cut.
    pub plan: Plan,
}

impl Buffers {
    /// Memory for a model on `threads` threads.
    pub fn new(spec: &Spec, packed: &Packed, threads: usize) -> Result<Self, BackendError> {
        let levels = |panels: fn(&PackedLayer) -> &[Panels]| {
            let formats = packed.layers.iter().flat_map(panels).map(|p| p.format.levels());
            formats.fold(f32::INFINITY, f32::min)
        };
        let normed = levels(|l| &l.qkv).min(levels(|l| &l.gate_up));
        let mixed = levels(|l| std::slice::from_ref(&l.o));
        let gated = levels(|l| std::slice::from_ref(&l.down));
        let widest = spec.hidden.max(spec.ffn).max(spec.q_width());
        let scratch_len =
            SCRATCH.max(widest).max(matmul::scratch(UNIT_PANELS, TOKENS)).next_multiple_of(64);
        Ok(Buffers {
            x: Shared::new(TOKENS * stride(spec.hidden), BUFFERS)?,
            qkv: Shared::new(TOKENS * stride(qkv_width(spec)), BUFFERS)?,
            attended: Shared::new(TOKENS * stride(spec.q_width()), BUFFERS)?,
            gate: Shared::new(TOKENS * stride(spec.ffn), BUFFERS)?,
            up: Shared::new(TOKENS * stride(spec.ffn), BUFFERS)?,
            partials: Shared::new(PARTIALS * PARTIAL, BUFFERS)?,
            normed: Activations::new(TOKENS, spec.hidden, normed)?,
            mixed: Activations::new(TOKENS, spec.q_width(), mixed)?,
            gated: Activations::new(TOKENS, spec.ffn, gated)?,
            last: Activations::new(HEAD_ROWS, spec.hidden, packed.head.format.levels())?,
            rows: Shared::new(HEAD_ROWS * stride(spec.hidden), BUFFERS)?,
            logits: Shared::new(HEAD_ROWS * spec.vocab, BUFFERS)?,
            scratch: Shared::new(threads * scratch_len, BUFFERS)?,
            scratch_len,
            shares: [Shares::new(threads), Shares::new(threads)],
            plan: Plan::default(),
        })
    }

    /// Forgets which units were taken, before the threads run.
    pub fn reset(&self) {
        self.shares.iter().for_each(Shares::reset);
    }
}

/// Width of a row of Q, K and V side by side.
fn qkv_width(spec: &Spec) -> usize {
    spec.q_width() + 2 * spec.kv_width()
}

/// Distance between rows of that width: one line more, so that the same column of many rows does not fall
/// into few sets of the caches.
fn stride(width: usize) -> usize {
    width + LANES
}

/// One batch on its way through the layers, as every thread sees it.
pub struct Step<'a> {
    pub model: &'a Model,
    pub packed: &'a Packed,
    pub kernels: &'a Kernels,
    pub kv: &'a Kv,
    pub buffers: &'a Buffers,
    pub tables: &'a [Vec<u32>],
    pub positions: &'a [u32],
    /// Token ids.
    pub tokens: &'a [u32],
}

/// A thread within a step.
struct Worker<'a> {
    thread: usize,
    team: &'a Team,
    shares: &'a [Shares; 2],
    phase: Cell<usize>,
}

impl Worker<'_> {
    /// One phase: all threads take units until none is left, then meet.
    fn phase(&self, units: usize, work: impl FnMut(usize)) {
        let phase = self.phase.get();
        self.shares[phase % 2].take(self.thread, units, work);
        if self.thread == 0 {
            // Nobody is in the phase before any more; its counters serve the next.
            self.shares[(phase + 1) % 2].reset();
        }
        self.phase.set(phase + 1);
        self.team.barrier();
    }
}

impl<'a> Step<'a> {
    fn worker(&self, thread: usize, team: &'a Team) -> Worker<'a> {
        Worker { thread, team, shares: &self.buffers.shares, phase: Cell::new(0) }
    }

    /// All layers; leaves the residual stream in `x`.
    pub fn layers(&self, thread: usize, team: &'a Team) {
        let worker = self.worker(thread, team);
        let spec = self.model.spec();
        worker.phase(self.tokens.len(), |token| {
            let row = self.row(&self.buffers.x, token, spec.hidden);
            self.model.weights.embedding.row_f32(self.tokens[token] as usize, row);
        });
        for layer in 0..spec.layers {
            self.attention(&worker, layer);
            self.feed_forward(&worker, layer);
        }
    }

    /// x += O(attention(norm(x))).
    fn attention(&self, worker: &Worker<'_>, index: usize) {
        let (b, spec) = (self.buffers, self.model.spec());
        let (layer, packed) = (&self.model.weights.layers[index], &self.packed.layers[index]);
        let width = stride(qkv_width(spec));
        let norm = layer.attention_norm.as_f32().as_ptr();
        self.quantise(worker, &b.normed, Rows::Norm(b.x.at(0), norm));
        let columns = [0, spec.q_width(), spec.q_width() + spec.kv_width()];
        let out = columns.map(|column| (b.qkv.at(column), width));
        self.multiply(worker, &packed.qkv, &b.normed, out, false);

        let append = Append {
            layer: index,
            qkv: b.qkv.at(0),
            stride: width,
            heads: spec.heads,
            q_norm: layer.q_norm.as_f32(),
            k_norm: layer.k_norm.as_f32(),
            rotations: &b.plan.rotations,
            slots: &b.plan.slots,
        };
        worker.phase(self.tokens.len(), |token| {
            // SAFETY: the token and its slot are this thread's in this phase.
            unsafe { (self.kernels.append)(self.kv, &append, token) };
        });

        let attend = Attend {
            kv: self.kv,
            layer: index,
            q: b.qkv.at(0),
            stride: width,
            heads: spec.heads,
            positions: self.positions,
            tables: self.tables,
            units: &b.plan.units,
            out: b.attended.at(0),
            out_stride: stride(spec.q_width()),
            partials: &b.partials,
            merges: &b.plan.merges,
        };
        worker.phase(b.plan.units.len(), |unit| {
            let scratch = &mut self.scratch(worker.thread)[..SCRATCH];
            // SAFETY: keys and values are in the cache since the barrier; units write their own rows.
            unsafe { (self.kernels.attend)(&attend, unit, scratch) };
        });
        if !b.plan.merges.is_empty() {
            worker.phase(b.plan.merges.len(), |row| {
                // SAFETY: the splits are complete since the barrier; rows are distinct.
                unsafe { (self.kernels.merge)(&attend, row) };
            });
        }
        self.quantise(worker, &b.mixed, Rows::Plain(b.attended.at(0)));
        let out = [(b.x.at(0), stride(spec.hidden))];
        self.multiply(worker, array::from_ref(&packed.o), &b.mixed, out, true);
    }

    /// x += down(silu(gate(norm(x))) * up(norm(x))).
    fn feed_forward(&self, worker: &Worker<'_>, index: usize) {
        let (b, spec) = (self.buffers, self.model.spec());
        let (layer, packed) = (&self.model.weights.layers[index], &self.packed.layers[index]);
        let norm = layer.ffn_norm.as_f32().as_ptr();
        self.quantise(worker, &b.normed, Rows::Norm(b.x.at(0), norm));
        let out = [(b.gate.at(0), stride(spec.ffn)), (b.up.at(0), stride(spec.ffn))];
        self.multiply(worker, &packed.gate_up, &b.normed, out, false);
        self.quantise(worker, &b.gated, Rows::Gated(b.gate.at(0), b.up.at(0)));
        let out = [(b.x.at(0), stride(spec.hidden))];
        self.multiply(worker, array::from_ref(&packed.down), &b.gated, out, true);
    }

    /// Logits of up to [`HEAD_ROWS`] tokens; `answer` is then called for each row, by some thread.
    pub fn head(
        &self,
        thread: usize,
        team: &'a Team,
        tokens: &[usize],
        tiles: &[Tile],
        answer: impl Fn(usize, &[f32]),
    ) {
        let worker = self.worker(thread, team);
        let (b, spec) = (self.buffers, self.model.spec());
        worker.phase(tokens.len(), |row| {
            let from = self.row(&b.x, tokens[row], spec.hidden);
            self.row(&b.rows, row, spec.hidden).copy_from_slice(from);
            let norm = self.model.weights.output_norm.as_f32().as_ptr();
            let source =
                Source { rows: Rows::Norm(b.rows.at(0), norm), stride: stride(spec.hidden) };
            let tile = tiles.iter().find(|t| row < t.start + t.len).copied();
            let tile = tile.unwrap_or(Tile { start: row, len: 1 });
            let scratch = &mut self.scratch(worker.thread)[..spec.hidden];
            // SAFETY: the row is this thread's in this phase.
            unsafe { (self.kernels.quantise)(&b.last, tile, row, &source, scratch) };
        });
        let product = Product {
            weights: &self.packed.head,
            activations: &b.last,
            tiles,
            out: b.logits.at(0),
            stride: spec.vocab,
            add: false,
        };
        self.products(&worker, &[product]);
        worker.phase(tokens.len(), |row| {
            let start = b.logits.at(row * spec.vocab);
            // SAFETY: the row is complete since the barrier, and nobody writes to it.
            answer(row, unsafe { std::slice::from_raw_parts(start, spec.vocab) });
        });
    }

    /// Quantises all tokens' rows.
    fn quantise(&self, worker: &Worker<'_>, to: &Activations, rows: Rows) {
        let source = Source { rows, stride: stride(to.cols) };
        worker.phase(self.tokens.len(), |token| {
            let scratch = &mut self.scratch(worker.thread)[..to.cols];
            let tile = self.buffers.plan.tile_of[token];
            // SAFETY: the row is complete since the barrier, and this thread's in this phase.
            unsafe { (self.kernels.quantise)(to, tile, token, &source, scratch) };
        });
    }

    /// Multiplies matrices that share their input; `out` is where each puts its first row, and the width.
    fn multiply<const N: usize>(
        &self,
        worker: &Worker<'_>,
        matrices: &[Panels; N],
        input: &Activations,
        out: [(*mut f32, usize); N],
        add: bool,
    ) {
        let products: [_; N] = array::from_fn(|i| Product {
            weights: &matrices[i],
            activations: input,
            tiles: &self.buffers.plan.tiles,
            out: out[i].0,
            stride: out[i].1,
            add,
        });
        self.products(worker, &products);
    }

    /// One phase of products, cut into units of some panels.
    fn products<const N: usize>(&self, worker: &Worker<'_>, products: &[Product<'_>; N]) {
        let mut unit_panels = [0; N];
        let mut units = [0; N];
        for (i, product) in products.iter().enumerate() {
            let most = match product.tiles.len() {
                1 => UNIT_BYTES / product.weights.panel_bytes(),
                _ => UNIT_PANELS,
            };
            let each = product.weights.panels() / (2 * worker.team.threads());
            unit_panels[i] = most.min(each).next_multiple_of(STREAMS).max(STREAMS);
            units[i] = product.weights.panels().div_ceil(unit_panels[i]);
        }
        worker.phase(units.iter().sum(), |mut unit| {
            let mut i = 0;
            while unit >= units[i] {
                unit -= units[i];
                i += 1;
            }
            let first = unit * unit_panels[i];
            let count = unit_panels[i].min(products[i].weights.panels() - first);
            // SAFETY: the input is complete since the barrier; panels are distinct.
            unsafe {
                (self.kernels.product)(&products[i], first, count, self.scratch(worker.thread))
            };
        });
    }

    /// A token's row of a buffer. The phases hand a row to one thread at a time.
    #[expect(clippy::mut_from_ref, reason = "rows of shared memory")]
    fn row(&self, buffer: &Shared<f32>, row: usize, width: usize) -> &mut [f32] {
        // SAFETY: inside the buffer; see above.
        unsafe { std::slice::from_raw_parts_mut(buffer.at(row * stride(width)), width) }
    }

    /// This thread's scratch.
    #[expect(clippy::mut_from_ref, reason = "each thread has its own part")]
    fn scratch(&self, thread: usize) -> &mut [f32] {
        let len = self.buffers.scratch_len;
        // SAFETY: the part belongs to this thread, which uses it for one thing at a time.
        unsafe { std::slice::from_raw_parts_mut(self.buffers.scratch.at(thread * len), len) }
    }
}
