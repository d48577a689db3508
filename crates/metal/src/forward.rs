//! The forward pass as a queue of kernels.

use engine::{BackendError, KvKind};
use model::{HEAD_DIM, KV_HEADS, Spec};

use crate::device::{Device, Slice};
use crate::kernels::{Cache, Kernels, PARTS, Partials, STATS_BYTES, Stream};
use crate::project::Target;
use crate::step::Step;
use crate::weights::{Layer, Place, Projection, Weights};

type Result<T> = std::result::Result<T, BackendError>;

/// Tokens by which `project_many` and `attend_flash` may look and write past the last.
const SLACK: usize = 16;

/// Where the activations of one call lie in their buffer: (offset, bytes). fp32 `[tokens, ...]` unless said otherwise.
#[derive(Debug, Clone, Copy)]
pub struct Activations {
    /// Residual stream, `[hidden]`.
    x: (usize, usize),
    /// Normed, `[hidden]`.
    normed: (usize, usize),
    /// `[(heads + 16) x 128]`.
    qkv: (usize, usize),
    /// `[heads x 128]`.
    attended: (usize, usize),
    /// `[2 x ffn]`.
    gate_up: (usize, usize),
    /// SwiGLU products, `[ffn]`.
    products: (usize, usize),
    /// Normed answer rows of one pass over the head, `[pass, hidden]`.
    last: (usize, usize),
    /// Statistics of one pass over the head, `[pass, 32]` of 16 bytes.
    stats: (usize, usize),
    /// Tokens drawn, int32 `[tokens]`.
    drawn: (usize, usize),
}

impl Activations {
    /// Places everything for calls of `tokens` tokens and passes of `pass` rows; returns the bytes needed.
    pub fn place(spec: &Spec, tokens: usize, pass: usize) -> (Self, usize) {
        let mut end = 0;
        let mut take = |bytes: usize| {
            let at = end;
            end += bytes.next_multiple_of(256);
            (at, bytes)
        };
        let room = (tokens + SLACK).next_multiple_of(64);
        let mut floats = |width: usize| take(room * width * 4);
        let placed = Activations {
            x: floats(spec.hidden),
            normed: floats(spec.hidden),
            qkv: floats(spec.q_width() + 2 * spec.kv_width()),
            attended: floats(spec.q_width()),
            gate_up: floats(2 * spec.ffn),
            products: floats(spec.ffn),
            last: take(pass * spec.hidden * 4),
            stats: take(pass * PARTS * STATS_BYTES),
            drawn: take(tokens * 4),
        };
        (placed, end)
    }
}

/// Keys, values and their scales of all layers, each `[layers x 2][blocks][8][32]` head rows.
pub struct Pool<D: Device> {
    pub kind: KvKind,
    pub blocks: usize,
    pub rows: D::Buffer,
    pub scales: D::Buffer,
}

impl<D: Device> Pool<D> {
    /// An empty pool.
    pub fn new(device: &D, kind: KvKind, blocks: usize, layers: usize) -> Result<Self> {
        let rows = 2 * layers * blocks * BLOCK_ROWS;
        let (row, scale) = row_bytes(kind);
        let scales = (rows * scale).max(4);
        Ok(Pool {
            kind,
            blocks,
            rows: device.allocate(rows * row, "KV cache")?,
            scales: device.allocate(scales, "KV cache")?,
        })
    }

    /// Keys (0) or values (1) of a layer.
    fn plane(&self, layer: usize, which: usize) -> Cache<'_, D> {
        let (row, scale) = row_bytes(self.kind);
        let rows = self.blocks * BLOCK_ROWS;
        let part = |buffer, bytes: usize| {
            let bytes = rows * bytes;
            Slice { buffer, offset: (2 * layer + which) * bytes, bytes: bytes.max(4) }
        };
        Cache { values: part(&self.rows, row), scales: part(&self.scales, scale) }
    }
}

/// Bytes of a head row, and of its scale.
fn row_bytes(kind: KvKind) -> (usize, usize) {
    match kind {
        KvKind::Bf16 => (HEAD_DIM * 2, 0),
        KvKind::Q8_0 => (HEAD_DIM, 4),
    }
}

/// Head rows of one block of keys, or of values.
const BLOCK_ROWS: usize = KV_HEADS * engine::batch::BLOCK;

/// Everything that a forward pass touches.
pub struct Forward<'a, D: Device> {
    pub kernels: &'a Kernels<D>,
    pub spec: &'a Spec,
    pub weights: &'a Weights<D>,
    pub placed: Activations,
    pub activations: &'a D::Buffer,
    pub partials: Partials<'a, D>,
    pub pool: &'a Pool<D>,
    /// The batch.
    pub sizes: &'a Step,
}

impl<'a, D: Device> Forward<'a, D> {
    fn at(&self, (offset, bytes): (usize, usize)) -> Slice<'a, D> {
        Slice { buffer: self.activations, offset, bytes }
    }

    fn weight(&self, place: Place) -> Slice<'a, D> {
        self.weights.slice(place)
    }

    /// Residual stream of all tokens after the last layer; keys and values are in the cache.
    pub fn layers(&self, stream: &mut Stream<'_, D>) -> Result<()> {
        self.copies(stream)?;
        let (table, a) = (self.weight(self.weights.embedding.place), &self.placed);
        let (drawn, x) = (self.at(a.drawn), self.at(a.x));
        self.kernels.embed(stream, self.sizes.tokens, table, drawn, x)?;
        for (index, layer) in self.weights.layers.iter().enumerate() {
            self.attention(stream, index, layer)?;
            self.feed_forward(stream, layer)?;
        }
        Ok(())
    }

    /// Copy-on-write, before anything reads or writes the blocks.
    fn copies(&self, stream: &mut Stream<'_, D>) -> Result<()> {
        let (copies, planes, pool) = (self.sizes.copies, 2 * self.spec.layers, self.pool);
        let (row, scale) = row_bytes(pool.kind);
        for (buffer, bytes) in [(&pool.rows, row * BLOCK_ROWS), (&pool.scales, scale * BLOCK_ROWS)]
        {
            if copies > 0 && bytes > 0 {
                let all = Slice { buffer, offset: 0, bytes: planes * pool.blocks * bytes };
                let k = self.kernels;
                k.copy_blocks(stream, copies, all, planes, pool.blocks, bytes)?;
            }
        }
        Ok(())
    }

    /// x += O(attention(norm(x))).
    fn attention(&self, stream: &mut Stream<'_, D>, index: usize, layer: &Layer) -> Result<()> {
        let (k, a, sizes) = (self.kernels, &self.placed, self.sizes);
        let (qkv, attended) = (self.at(a.qkv), self.at(a.attended));
        let caches = [0, 1].map(|which| self.pool.plane(index, which));
        self.norm(stream, layer.attention_norm)?;
        self.project(stream, &layer.qkv, a.normed, a.qkv, false)?;
        let norms = [self.weight(layer.q_norm), self.weight(layer.k_norm)];
        k.rope(stream, sizes.tokens, qkv, norms, &caches)?;
        if sizes.flashes > 0 {
            k.attend_flash(stream, sizes.flashes, qkv, &caches, attended)?;
        }
        if sizes.splits > 0 {
            let partials = &self.partials;
            k.attend_split(stream, sizes.splits, qkv, &caches, attended, partials)?;
        }
        if sizes.merges > 0 {
            k.attend_merge(stream, sizes.merges, &self.partials, attended)?;
        }
        self.project(stream, &[layer.o], a.attended, a.x, true)
    }

    /// x += down(silu(gate(norm(x))) * up(norm(x))).
    fn feed_forward(&self, stream: &mut Stream<'_, D>, layer: &Layer) -> Result<()> {
        let a = &self.placed;
        self.norm(stream, layer.ffn_norm)?;
        self.project(stream, &layer.gate_up, a.normed, a.gate_up, false)?;
        let (gate_up, products) = (self.at(a.gate_up), self.at(a.products));
        self.kernels.swiglu(stream, self.sizes.tokens, gate_up, products)?;
        self.project(stream, &[layer.down], a.products, a.x, true)
    }

    fn norm(&self, stream: &mut Stream<'_, D>, weight: Place) -> Result<()> {
        let (x, out) = (self.at(self.placed.x), self.at(self.placed.normed));
        let weight = self.weight(weight);
        self.kernels.norm(stream, self.sizes.tokens, None, x, weight, out)
    }

    fn project(
        &self,
        stream: &mut Stream<'_, D>,
        parts: &[Projection],
        x: (usize, usize),
        out: (usize, usize),
        residual: bool,
    ) -> Result<()> {
        let parts: Vec<_> = parts.iter().map(|&part| (part, self.weight(part.place))).collect();
        let target = Target { out: self.at(out), residual };
        self.kernels.project(stream, &parts, self.at(x), target, self.sizes.tokens)
    }

    /// Logits and answers of `rows` answer rows from `first` on.
    pub fn answers(
        &self,
        stream: &mut Stream<'_, D>,
        (first, rows): (usize, usize),
        logits: Slice<'_, D>,
        answers: Slice<'_, D>,
        tops: Slice<'_, D>,
    ) -> Result<()> {
        let (k, a, w) = (self.kernels, &self.placed, self.weights);
        let (x, last, stats) = (self.at(a.x), self.at(a.last), self.at(a.stats));
        k.norm(stream, rows, Some(first), x, self.weight(w.output_norm), last)?;
        let head = [(w.head, self.weight(w.head.place))];
        k.project(stream, &head, last, Target { out: logits, residual: false }, rows)?;
        k.logits_stats(stream, rows, logits, stats)?;
        k.sample(stream, (first, rows), logits, stats, [answers, tops, self.at(a.drawn)])
    }
}
