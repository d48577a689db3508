//! The forward pass as a queue of kernels.

use engine::{BackendError, KvKind};
use model::{HEAD_DIM, KV_HEADS, Spec};

use crate::driver::Stream;
use crate::kernels::{Cache, Epilogue, Heads, Kernels, PARTS, Partials, Parts, SWIGLU_FACTOR};
use crate::rows::{ANSWER_BYTES, TOP_BYTES};
use crate::weights::{Layer, Weights};

type Result<T> = std::result::Result<T, BackendError>;

/// Addresses of the activations of one call; `[tokens, ...]` unless said otherwise.
#[derive(Debug, Clone, Copy, Default)]
pub struct Activations {
    /// Residual stream, fp32 `[hidden]`.
    pub x: u64,
    /// Normed, fp16 `[hidden]`.
    pub normed: u64,
    /// Cosines and sines, fp32 `[64, 2]`.
    pub rotations: u64,
    /// fp32 `[(heads + 16) x 128]`.
    pub qkv: u64,
    /// fp16 `[heads x 128]`.
    pub q: u64,
    /// fp16 `[heads x 128]`.
    pub attended: u64,
    /// SwiGLU products, fp16 `[ffn]`.
    pub products: u64,
    /// Normed answer rows of one pass over the head, fp16 `[pass, hidden]`.
    pub last: u64,
    /// Of one pass over the head, fp32 `[pass, vocab]`.
    pub logits: u64,
    /// Of one pass over the head, `[pass, 32, 4]`.
    pub stats: u64,
    /// `[rows]` of 16 bytes.
    pub answers: u64,
    /// `[rows, 64, 2]`.
    pub tops: u64,
    /// Tokens drawn, `[rows]`.
    pub drawn: u64,
    /// fp64 `[64]`, one for all tokens.
    pub frequencies: u64,
}

impl Activations {
    /// Places everything for calls of `tokens` tokens and passes of `pass` rows; returns the bytes needed. Addresses
    /// count from `base`.
    pub fn place(base: u64, spec: &Spec, tokens: usize, pass: usize) -> (Self, usize) {
        let mut end = base;
        let mut take = |bytes: usize| {
            let at = end;
            end += bytes.next_multiple_of(256) as u64;
            at
        };
        let placed = Activations {
            x: take(tokens * spec.hidden * 4),
            normed: take(tokens * spec.hidden * 2),
            rotations: take(tokens * HEAD_DIM * 4),
            qkv: take(tokens * (spec.q_width() + 2 * spec.kv_width()) * 4),
            q: take(tokens * spec.q_width() * 2),
            attended: take(tokens * spec.q_width() * 2),
            products: take(tokens * spec.ffn * 2),
            last: take(pass * spec.hidden * 2),
            logits: take(pass * spec.vocab * 4),
            stats: take(pass * PARTS * 16),
            answers: take(tokens * ANSWER_BYTES),
            tops: take(tokens * TOP_BYTES),
            drawn: take(tokens * 4),
            frequencies: take(HEAD_DIM / 2 * 8),
        };
        (placed, (end - base) as usize)
    }
}

/// What launches of one call depend on; the contents of the step stay on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Sizes {
    /// Tokens.
    pub tokens: usize,
    /// Work items of split attention.
    pub splits: usize,
    /// Work items of prefill attention.
    pub flashes: usize,
}

/// What is still to be added to the residual stream, and the factor that it takes.
pub type Owed = (Parts, f32);

/// Everything that a forward pass touches.
pub struct Forward<'a> {
    pub stream: &'a Stream,
    pub kernels: &'a Kernels,
    pub spec: &'a Spec,
    pub weights: &'a Weights,
    pub activations: Activations,
    pub partials: Partials,
    /// Keys and values of each layer.
    pub caches: &'a [(Cache, Cache)],
    /// How the cache holds them.
    pub kv: KvKind,
    /// Head rows of a layer's keys, or values.
    pub cache_rows: usize,
    /// Address of the step's words on the device.
    pub step: u64,
}

impl Forward<'_> {
    /// Residual stream of all tokens after the last layer, but for what is still to be added to it; keys and values are
    /// in the cache.
    pub fn layers(&self, sizes: Sizes) -> Result<Owed> {
        let (w, a) = (self.weights, &self.activations);
        self.kernels.embed(
            self.stream,
            self.step,
            sizes.tokens,
            &w.embedding,
            a.frequencies,
            a.drawn,
            a.x,
            a.rotations,
        )?;
        let mut owed = (Parts::default(), 0.0);
        for (layer, &(keys, values)) in w.layers.iter().zip(self.caches) {
            owed = self.attention(layer, keys, values, sizes, owed)?;
            owed = self.feed_forward(layer, sizes.tokens, owed)?;
        }
        Ok(owed)
    }

    /// x += O(attention(norm(x))).
    fn attention(
        &self,
        layer: &Layer,
        keys: Cache,
        values: Cache,
        sizes: Sizes,
        owed: Owed,
    ) -> Result<Owed> {
        let (k, stream, step, a) = (self.kernels, self.stream, self.step, &self.activations);
        let (heads, tokens) = (self.spec.heads, sizes.tokens);
        self.normed(layer.attention_norm, tokens, owed)?;
        let places = Heads {
            q_norm: layer.q_norm,
            k_norm: layer.k_norm,
            rotations: a.rotations,
            q: a.q,
            keys,
            values,
            step,
            heads: heads as i32,
            bytes: i32::from(self.kv == KvKind::Q8_0),
        };
        k.project_heads(stream, &layer.qkv, a.normed, a.qkv, tokens, places)?;
        if sizes.flashes > 0 {
            let (flashes, rows) = (sizes.flashes, self.cache_rows);
            k.attend_many(
                stream, step, flashes, tokens, a.q, keys, values, rows, a.attended, heads,
            )?;
        }
        if sizes.splits > 0 {
            let (q, out) = (a.q, a.attended);
            k.attend_split(stream, step, sizes.splits, q, keys, values, out, self.partials, heads)?;
        }
        let residual = Epilogue::Residual(1.0);
        Ok((k.project(stream, &layer.o, a.attended, a.x, tokens, step, residual)?, 1.0))
    }

    /// x += down(silu(gate(norm(x))) * up(norm(x))).
    fn feed_forward(&self, layer: &Layer, tokens: usize, owed: Owed) -> Result<Owed> {
        let (k, stream, step, a) = (self.kernels, self.stream, self.step, &self.activations);
        self.normed(layer.ffn_norm, tokens, owed)?;
        k.project(stream, &layer.gate_up, a.normed, a.products, tokens, step, Epilogue::SwiGlu)?;
        let residual = Epilogue::Residual(SWIGLU_FACTOR);
        let parts = k.project(stream, &layer.down, a.products, a.x, tokens, step, residual)?;
        Ok((parts, SWIGLU_FACTOR))
    }

    fn normed(&self, weight: u64, tokens: usize, owed: Owed) -> Result<()> {
        let (k, stream, step, a) = (self.kernels, self.stream, self.step, &self.activations);
        k.rms_norm(stream, step, tokens, None, a.x, owed, weight, a.normed, self.spec.hidden)
    }

    /// Logits and answers of `rows` answer rows from `first` on; how many there are is read at `count`.
    pub fn answers(&self, first: usize, rows: usize, count: u64, owed: Owed) -> Result<()> {
        let (k, stream, step, a) = (self.kernels, self.stream, self.step, &self.activations);
        let (hidden, vocab) = (self.spec.hidden, self.spec.vocab);
        let norm = self.weights.output_norm;
        k.rms_norm(stream, step, rows, Some(first), a.x, owed, norm, a.last, hidden)?;
        k.project(stream, &self.weights.head, a.last, a.logits, rows, count, Epilogue::Store)?;
        k.logits_stats(stream, step, rows, first, a.logits, a.stats, vocab)?;
        self.sample(first, rows, PARTS)
    }

    /// Answers of `rows` answer rows from `first` on, whose logits have statistics in `parts` parts.
    pub fn sample(&self, first: usize, rows: usize, parts: usize) -> Result<()> {
        let (a, vocab) = (&self.activations, self.spec.vocab);
        let (logits, stats) = (a.logits, a.stats);
        self.kernels.sample(
            self.stream,
            self.step,
            rows,
            first,
            logits,
            stats,
            parts,
            a.answers,
            a.tops,
            a.drawn,
            vocab,
        )
    }
}

/// Bytes of one head row of the cache's values, and of its scales.
pub const fn cache_row_bytes(kind: KvKind) -> (usize, usize) {
    match kind {
        KvKind::Bf16 => (HEAD_DIM * 2, 0),
        KvKind::Q8_0 => (HEAD_DIM, 4),
    }
}

/// Head rows of one block of keys, or of values.
pub const BLOCK_ROWS: usize = KV_HEADS * engine::batch::BLOCK;
