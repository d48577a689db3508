//! One token of one sequence on Hopper: the whole forward pass as one persistent kernel (`kernels/decode.cuh`).
//!
//! This prepares what the kernel needs once: how each matrix is cut into what the copy engine brings at a time, where
//! vectors lie that the blocks exchange, and what the shared memory of a block holds.

use std::sync::Arc;

use engine::{BackendError, KvKind};
use model::{HEAD_DIM, KV_HEADS, Spec};

use crate::driver::{Buffer, Context, Element, Function, Promotion, Stream, TensorMap};
use crate::forward::BLOCK_ROWS;
use crate::kernels::{Cache, Kernels};
use crate::weights::{Kind, Projection, Weights};

type Result<T> = std::result::Result<T, BackendError>;

/// Threads of a block: eight consumer warps and a warpgroup whose first warp is the producer.
const THREADS: u32 = 384;
const CONSUMERS: usize = 8;
/// Bytes of a swizzled line, a piece of one weight row.
const LINE: usize = 128;
/// Rows that are multiplied together.
const PANEL: usize = 8;
/// Rows of up to so many lines come as a whole; otherwise so many lines, or some more, of each of a panel's rows come in a slot.
const WHOLE_LINES: usize = 24;
const BOX_LINES: usize = 16;
/// Columns that a warp multiplies at a time.
const UNIT: usize = 64;
/// What the L2 cache fetches at a time: pieces of a line lie rows apart, and 256 bytes would fetch their neighbours too early.
const PROMOTION: Promotion = Promotion::Bytes128;
/// Shared memory of a block.
const SHARED: usize = 232_448;
/// Parts of a context, at most, and the floats of one head's.
const PARTS: usize = 16;
const PARTIAL: usize = HEAD_DIM + 4;
/// Hidden widths up to this make short vectors and phases: words are read earlier and fewer bytes are on their way.
const SHORT: usize = 1024;
/// Slots of a layer's weights on their way to a block, at most, and the same for a block that lags behind: of a model with short vectors,
/// of quants, and of fp16. More would lengthen the queues that the exchanges stand in.
const SHORT_FLYING: (i32, i32) = (1, 2);
const QUANTS_FLYING: (i32, i32) = (2, 4);
const HALVES_FLYING: (i32, i32) = (3, 5);
/// Rows of the head between two sums over the warps.
const ROUND_ROWS: usize = 32 * PANEL;
/// Words of the counters of a layer: six exchanges, each counted on four lines.
const LAYER_COUNTERS: usize = 6 * 4 * 32;
/// Slots of the ring, at most.
const SLOTS: usize = 32;
/// Rotations, sums of squares, sizes of the slots, and barriers.
const FIXED: usize = 512 + 32 + 4 * SLOTS + 2 * 8 * SLOTS;

/// The matrices of a step, in the kernel's order.
const MATRICES: usize = 5;

/// How a matrix is dealt out to the blocks, as the kernel takes it.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
struct Deal {
    units: i32,
    base: i32,
    rest: i32,
    arrivals: u32,
}

/// As the kernel takes them.
#[derive(Clone, Copy)]
#[repr(C)]
struct Maps {
    quants: [TensorMap; MATRICES],
    scales: [TensorMap; MATRICES],
    cache: TensorMap,
    cache_scales: TensorMap,
}

/// As the kernel takes them.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct Arguments {
    deals: [Deal; MATRICES],
    embedding: [u64; 2],
    attention_norm: u64,
    q_norm: u64,
    k_norm: u64,
    ffn_norm: u64,
    output_norm: u64,
    frequencies: u64,
    step: u64,
    drawn: u64,
    pool: Cache,
    scratch: u64,
    counters: u64,
    spent: u64,
    logits: u64,
    stats: u64,
    norm_stride: i64,
    layers: i32,
    blocks: i32,
    kv: i32,
    x: i32,
    y: i32,
    qkv: i32,
    attention: i32,
    h: i32,
    parts: i32,
    ring: i32,
    vector: i32,
    sums: i32,
    fixed: i32,
    sum_rows: i32,
    flying: i32,
    hurried: i32,
    early: i32,
}

/// What of the backend's memory the kernel works on.
#[derive(Debug, Clone, Copy)]
pub struct Surroundings {
    /// The keys of layer 0; all other planes follow.
    pub pool: Cache,
    /// Blocks of a plane, and how they are stored.
    pub blocks: usize,
    pub kv: KvKind,
    /// fp64 `[64]`.
    pub frequencies: u64,
    /// Tokens drawn by the last step.
    pub drawn: u64,
    /// `[vocab]`
    pub logits: u64,
    /// `[blocks of the launch, 4]`
    pub stats: u64,
}

/// The persistent kernel and its memory.
pub struct Decode {
    function: Function,
    maps: Maps,
    arguments: Arguments,
    shared: u32,
    /// Blocks of a launch.
    multiprocessors: usize,
    /// Two sets of counters: a launch uses one and clears the other.
    counters: [u64; 2],
    turn: usize,
    _memory: Buffer,
}

impl Decode {
    /// The kernel for a model; none where the device or the model has no use for it.
    pub fn new(
        context: &Arc<Context>,
        stream: &Stream,
        kernels: &Kernels,
        spec: &Spec,
        weights: &Weights,
        around: Surroundings,
    ) -> Result<Option<Self>> {
        let (Some(strides), Some(kind)) = (Strides::of(weights), layers_kind(weights)) else {
            return Ok(None);
        };
        let Some(function) = kernels.decode(spec, kind, weights.head.kind) else {
            return Ok(None);
        };
        let first = &weights.layers[0];
        let matrices = [&first.qkv, &first.o, &first.gate_up, &first.down, &weights.head];

        let mut end = 0;
        let mut take = |floats: usize| {
            let at = end;
            end += floats.next_multiple_of(32);
            at as i32
        };
        let (x, y) = (take(spec.hidden), take(spec.hidden));
        let qkv = take(first.qkv.rows);
        let (attention, h) = (take(spec.q_width()), take(spec.ffn));
        let parts = take(spec.heads * PARTS * PARTIAL);
        let vectors = end * 4;
        // One more for the embedding.
        let counters = (spec.layers + 1) * LAYER_COUNTERS * 4;
        let memory = Buffer::new(context, vectors + 2 * counters, "decoding")?;
        // SAFETY: the whole of a live buffer.
        unsafe { stream.zero(memory.address(), memory.bytes())? };
        let multiprocessors = context.device.multiprocessors as usize;
        let layout = Layout::of(&matrices, spec, multiprocessors);

        let maps = Maps {
            quants: each(&matrices, |i, m| quants_map(m, strides.quants[i], spec))?,
            scales: each(&matrices, |i, m| scales_map(m, strides.scales[i], spec))?,
            cache: cache_map(spec, &around)?,
            cache_scales: cache_scales_map(spec, &around)?,
        };
        let counters_at = memory.address() + vectors as u64;
        let (flying, hurried) = match kind {
            _ if spec.hidden <= SHORT => SHORT_FLYING,
            Kind::F16 => HALVES_FLYING,
            _ => QUANTS_FLYING,
        };
        let arguments = Arguments {
            deals: std::array::from_fn(|i| Deal::of(matrices[i], i, multiprocessors)),
            embedding: [weights.embedding.quants, weights.embedding.scales],
            attention_norm: first.attention_norm,
            q_norm: first.q_norm,
            k_norm: first.k_norm,
            ffn_norm: first.ffn_norm,
            output_norm: weights.output_norm,
            frequencies: around.frequencies,
            step: 0,
            drawn: around.drawn,
            pool: around.pool,
            scratch: memory.address(),
            counters: counters_at,
            spent: counters_at + counters as u64,
            logits: around.logits,
            stats: around.stats,
            norm_stride: strides.norms as i64 / 4,
            layers: spec.layers as i32,
            blocks: around.blocks as i32,
            kv: i32::from(around.kv == KvKind::Q8_0),
            x,
            y,
            qkv,
            attention,
            h,
            parts,
            ring: layout.ring as i32,
            vector: layout.vector as i32,
            sums: layout.sums as i32,
            fixed: layout.fixed as i32,
            sum_rows: layout.sum_rows as i32,
            flying,
            hurried,
            early: if spec.hidden <= SHORT { 64 } else { 32 },
        };
        function.allow_shared(SHARED as u32)?;
        Ok(Some(Decode {
            function,
            maps,
            arguments,
            shared: SHARED as u32,
            multiprocessors,
            counters: [counters_at, counters_at + counters as u64],
            turn: 0,
            _memory: memory,
        }))
    }

    /// Queues the step at `step` up to its logits and their statistics, of which there are as many parts as this says.
    pub fn run(&mut self, stream: &Stream, step: u64) -> Result<usize> {
        let mut arguments = Arguments {
            step,
            counters: self.counters[self.turn],
            spent: self.counters[1 - self.turn],
            ..self.arguments
        };
        self.turn = 1 - self.turn;
        let mut pointers =
            [(&raw mut self.maps).cast(), (&raw mut arguments).cast::<std::ffi::c_void>()];
        let blocks = self.multiprocessors as u32;
        // SAFETY: the two arguments have the layout of the kernel's parameters, and every address in them is of memory
        // that the backend sized for its limits and still owns.
        unsafe {
            stream.launch_together(self.function, blocks, THREADS, self.shared, &mut pointers)?
        };
        Ok(self.multiprocessors)
    }
}

/// Panels of a unit of work: gate and up rows are dealt out in pairs.
fn unit_rows(matrix: usize) -> usize {
    if matrix == 2 { 2 * PANEL } else { PANEL }
}

impl Deal {
    fn of(p: &Projection, matrix: usize, blocks: usize) -> Self {
        let units = p.rows / unit_rows(matrix);
        let (base, rest) = (units / blocks, units % blocks);
        let publishers = |units: usize| (units * PANEL).div_ceil(32);
        let arrivals = rest * publishers(base + 1) + (blocks - rest) * publishers(base);
        Deal {
            units: units as i32,
            base: base as i32,
            rest: rest as i32,
            arrivals: arrivals as u32,
        }
    }
}

/// The one type of all layers' matrices, if the embedding has the head's.
fn layers_kind(weights: &Weights) -> Option<Kind> {
    let kind = weights.layers.first()?.qkv.kind;
    let same = |p: &Projection| p.kind == kind;
    let layers = weights
        .layers
        .iter()
        .all(|l| same(&l.qkv) && same(&l.o) && same(&l.gate_up) && same(&l.down));
    (layers && weights.layers.len() > 1 && weights.embedding.kind == weights.head.kind)
        .then_some(kind)
}

/// Bytes from a layer's matrices and norms to the next one's: the same for all layers, which are alike.
struct Strides {
    quants: [u64; MATRICES],
    scales: [u64; MATRICES],
    norms: u64,
}

impl Strides {
    fn of(weights: &Weights) -> Option<Self> {
        let [a, b, ..] = &weights.layers[..] else { return None };
        let projections = |l: &crate::weights::Layer| [l.qkv, l.o, l.gate_up, l.down];
        let (mut quants, mut scales) = ([16; MATRICES], [16; MATRICES]);
        for (i, (p, q)) in projections(a).iter().zip(projections(b)).enumerate() {
            (quants[i], scales[i]) = (q.quants - p.quants, q.scales - p.scales);
        }
        let norms = b.attention_norm - a.attention_norm;
        let even = weights.layers.windows(2).all(|pair| {
            let (p, q) = (projections(&pair[0]), projections(&pair[1]));
            (0..4).all(|i| {
                q[i].quants - p[i].quants == quants[i] && q[i].scales - p[i].scales == scales[i]
            }) && [
                pair[1].attention_norm - pair[0].attention_norm,
                pair[1].q_norm - pair[0].q_norm,
                pair[1].k_norm - pair[0].k_norm,
                pair[1].ffn_norm - pair[0].ffn_norm,
            ] == [norms; 4]
        });
        even.then_some(Strides { quants, scales, norms })
    }
}

/// Bytes of a row of quants, and 32-bit words of its scales.
fn row_sizes(p: &Projection) -> (usize, usize) {
    let (quants, scales) = p.kind.block_bytes();
    (p.cols / 32 * quants, p.cols / 32 * scales / 4)
}

/// Lines of a row in a slot: the whole row, or those that leave the least of its last slot empty. So many lines are as many operands of
/// every warp, of one unit in fp16 and of two in quants.
fn box_lines(p: &Projection) -> usize {
    let lines = row_sizes(p).0 / LINE;
    if lines <= WHOLE_LINES {
        return lines;
    }
    let units = if p.kind == Kind::F16 { 1 } else { 2 };
    let evenly = units * CONSUMERS * UNIT * lines / p.cols;
    let covered = |&lines_of_box: &usize| lines.next_multiple_of(lines_of_box);
    (BOX_LINES..=WHOLE_LINES).step_by(evenly).min_by_key(covered).unwrap_or(BOX_LINES)
}

/// Words of a row of scales in a slot; the four beyond the box's spread the rows over the banks.
fn scales_pitch(p: &Projection) -> usize {
    let (quants, scales) = row_sizes(p);
    scales * LINE / quants * box_lines(p) + 4
}

fn quants_map(p: &Projection, stride: u64, spec: &Spec) -> Result<TensorMap> {
    let bytes = row_sizes(p).0;
    TensorMap::tensor(
        p.quants,
        Element::U8,
        &[LINE as u64, p.rows as u64, (bytes / LINE) as u64, spec.layers as u64],
        &[bytes as u64, LINE as u64, stride],
        &[LINE as u32, PANEL as u32, box_lines(p) as u32, 1],
        true,
        PROMOTION,
    )
}

fn scales_map(p: &Projection, stride: u64, spec: &Spec) -> Result<TensorMap> {
    let words = row_sizes(p).1;
    if words == 0 {
        return quants_map(p, stride.max(16), spec); // not used
    }
    TensorMap::tensor(
        p.scales,
        Element::F32,
        &[words as u64, p.rows as u64, spec.layers as u64],
        &[words as u64 * 4, stride],
        &[scales_pitch(p) as u32, PANEL as u32, 1],
        false,
        PROMOTION,
    )
}

/// A head's keys and values of one block of the cache at once.
fn cache_map(spec: &Spec, around: &Surroundings) -> Result<TensorMap> {
    let (rows, planes) = (around.blocks * BLOCK_ROWS, 2 * spec.layers);
    let lines = if around.kv == KvKind::Bf16 { 2 } else { 1 };
    let row_bytes = LINE as u64 * lines;
    TensorMap::tensor(
        around.pool.values,
        Element::U8,
        &[LINE as u64, rows as u64, lines, planes as u64],
        &[row_bytes, LINE as u64, rows as u64 * row_bytes],
        &[LINE as u32, engine::batch::BLOCK as u32, lines as u32, 2],
        true,
        PROMOTION,
    )
}

fn cache_scales_map(spec: &Spec, around: &Surroundings) -> Result<TensorMap> {
    if around.kv == KvKind::Bf16 {
        return cache_map(spec, around); // not used
    }
    let (rows, planes) = (around.blocks * BLOCK_ROWS, 2 * spec.layers);
    TensorMap::tensor(
        around.pool.scales,
        Element::F32,
        &[rows as u64, planes as u64, 1],
        &[rows as u64 * 4, (planes * rows) as u64 * 4],
        &[engine::batch::BLOCK as u32, 2, 1],
        false,
        PROMOTION,
    )
}

/// Shared memory of a block, in bytes from its start.
#[derive(Debug)]
struct Layout {
    ring: usize,
    vector: usize,
    sums: usize,
    fixed: usize,
    sum_rows: usize,
}

impl Layout {
    fn of(matrices: &[&Projection; MATRICES], spec: &Spec, blocks: usize) -> Self {
        let group = spec.heads / KV_HEADS;
        let (mut vector, mut sum_rows) = (attention_bytes(group), ROUND_ROWS);
        for (i, p) in matrices.iter().enumerate() {
            let units = (p.cols / UNIT).div_ceil(CONSUMERS).next_multiple_of(4); // of a warp, with padding
            // High and low parts in fp16, or in bytes and a scale for each block of 32 with what belongs to it.
            let region = match p.kind {
                Kind::F16 => 2 * (units * UNIT * 2 + 16),
                _ => units * (UNIT * 2 + UNIT / 32 * 8),
            };
            vector = vector.max(CONSUMERS * region);
            if i + 1 < MATRICES {
                let unit = unit_rows(i);
                sum_rows = sum_rows.max((p.rows / unit).div_ceil(blocks) * unit);
            }
        }
        let sums = CONSUMERS * sum_rows * 4;
        let sizes = [vector, sums, FIXED].map(|n: usize| n.next_multiple_of(128));
        let rest: usize = sizes.iter().sum();
        let ring = (SHARED - 1024 - rest) / 1024 * 1024;
        let mut end = ring;
        let mut take = |bytes: usize| {
            end += bytes;
            end - bytes
        };
        Layout {
            ring,
            vector: take(sizes[0]),
            sums: take(sizes[1]),
            fixed: take(sizes[2]),
            sum_rows,
        }
    }
}

/// What attention keeps where the vectors of the products lie in other phases (`AttentionMemory`).
fn attention_bytes(group: usize) -> usize {
    let positions = CONSUMERS * 32;
    let rows = 2 * group * (HEAD_DIM + 8 + positions + 8) + 2 * HEAD_DIM;
    2 * rows + 4 * (3 * group * CONSUMERS + 2 + group).next_multiple_of(4)
}

/// An array whose elements may fail.
fn each(
    matrices: &[&Projection; MATRICES],
    make: impl Fn(usize, &Projection) -> Result<TensorMap>,
) -> Result<[TensorMap; MATRICES]> {
    let made: Vec<_> =
        matrices.iter().enumerate().map(|(i, m)| make(i, m)).collect::<Result<_>>()?;
    match made.try_into() {
        Ok(array) => Ok(array),
        Err(_) => unreachable!("as many as there are matrices"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes of a slot of quants and their scales.
    fn slot_bytes(p: &Projection) -> usize {
        let scales = if row_sizes(p).1 == 0 { 0 } else { PANEL * scales_pitch(p) * 4 };
        box_lines(p) * PANEL * LINE + scales
    }

    /// Every checkpoint of the registry in every type leaves room for enough slots, and chunks cover whole rows.
    #[test]
    fn layouts_fit() {
        let ids = [
            "kipp-tiny",
            "qwen3-0.6b",
            "qwen3-1.7b",
            "qwen3-4b",
            "qwen3-8b",
            "qwen3-14b",
            "qwen3-32b",
        ];
        for checkpoint in ids.map(|id| model::Checkpoint::find(id).unwrap()) {
            let spec = &checkpoint.spec;
            for (kind, head) in [
                (Kind::F16, Kind::F16),
                (Kind::Q8_0, Kind::Q8_0),
                (Kind::Q4_0, Kind::Q8_0),
                (Kind::Q4_1, Kind::F16),
            ] {
                let p = |kind, rows, cols| Projection { kind, rows, cols, quants: 0, scales: 0 };
                let q = spec.q_width();
                let matrices = [
                    p(kind, q + 2 * spec.kv_width(), spec.hidden),
                    p(kind, spec.hidden, q),
                    p(kind, 2 * spec.ffn, spec.hidden),
                    p(kind, spec.hidden, spec.ffn),
                    p(head, spec.vocab, spec.hidden),
                ];
                for (i, m) in matrices.iter().enumerate() {
                    // Full slots are shared evenly by the warps, and the smallest copy has whole 16 bytes.
                    let (bytes, _) = row_sizes(m);
                    assert!(bytes.is_multiple_of(LINE) && scales_pitch(m) <= 256);
                    let units = box_lines(m) * (m.cols * LINE / bytes) / UNIT;
                    assert!(bytes / LINE <= WHOLE_LINES || units.is_multiple_of(CONSUMERS));
                    // Every unit has an owner, and every warp that publishes is awaited.
                    let deal = Deal::of(m, i, 132);
                    assert_eq!(132 * deal.base + deal.rest, deal.units);
                    assert!(deal.arrivals >= deal.units.min(132) as u32);
                }
                let layout = Layout::of(&matrices.each_ref(), spec, 132);
                let cached = 2 * engine::batch::BLOCK * HEAD_DIM * 2;
                let widest = matrices.each_ref().map(slot_bytes).into_iter().max();
                let widest = widest.unwrap().max(cached) + 1024;
                assert!(4 * widest <= layout.ring, "{}: {layout:?}", checkpoint.id);
                assert!(1024 + layout.fixed + FIXED <= SHARED);
                assert!(layout.sum_rows / 2 <= CONSUMERS * 32);
            }
        }
    }
}
