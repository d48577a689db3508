//! The forward pass as a queue of kernels.

use engine::{BackendError, KvKind};
use model::{HEAD_DIM, KV_HEADS, Spec};

use crate::batch::{BATCHED, BatchKernels, Normed, Residual, Use, parts};
use crate::driver::Stream;
use crate::kernels::{Cache, Epilogue, Heads, Kernels, PARTS, Partials, SWIGLU_FACTOR};
use crate::rows::TOP_BYTES;
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
    /// `[rows, 64, 2]`.
    pub tops: u64,
    /// Tokens drawn, `[rows]`.
    pub drawn: u64,
    /// fp64 `[64]`, one for all tokens.
    pub frequencies: u64,
    /// Squares of parts of residual vectors, fp32 `[parts, BATCHED]`.
    pub squares: u64,
    /// Powers of residual vectors, of every second vector each, fp32.
    pub powers: [u64; 2],
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
            tops: take(tokens * TOP_BYTES),
            drawn: take(tokens * 4),
            frequencies: take(HEAD_DIM / 2 * 8),
            squares: take(parts(spec.hidden) * BATCHED * 4),
            powers: [take(tokens.min(BATCHED) * 4), take(tokens.min(BATCHED) * 4)],
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
    /// Residual stream of all tokens after the last layer; keys and values are in the cache.
    pub fn layers(&self, sizes: Sizes) -> Result<()> {
        let (w, a) = (self.weights, &self.activations);
        if let Some(batch) = self.kernels.batch(sizes.tokens) {
            return self.batch_layers(batch, sizes);
        }
        self.kernels.embed(
            self.stream,
            self.step,
            sizes.tokens,
            &w.embedding,
            a.frequencies,
            a.drawn,
            Residual { x: a.x, ..Residual::default() },
            0,
            a.rotations,
        )?;
        for (layer, &(keys, values)) in w.layers.iter().zip(self.caches) {
            self.attention(layer, keys, values, sizes)?;
            self.feed_forward(layer, sizes.tokens)?;
        }
        Ok(())
    }

    /// All layers by the kernels of batches, whose norms are spread over their neighbours.
    fn batch_layers(&self, batch: &BatchKernels, sizes: Sizes) -> Result<()> {
        let (k, stream, step, a, w) =
            (self.kernels, self.stream, self.step, &self.activations, self.weights);
        let (tokens, parts) = (sizes.tokens, parts(self.spec.hidden));
        let vector = |weight: u64, powers: usize, factor: f32| Residual {
            x: a.x,
            scaled: a.normed,
            weight,
            powers: a.powers[powers],
            squares: a.squares,
            factor,
        };
        let normed = |powers: usize| Normed {
            squares: a.squares,
            powers: a.powers[powers],
            next: a.powers[1 - powers],
            parts: parts as i32,
        };
        let weights =
            |layer: usize| w.layers.get(layer).map_or(w.output_norm, |l| l.attention_norm);
        let first = vector(weights(0), 0, 0.0);
        k.embed(
            stream,
            step,
            tokens,
            &w.embedding,
            a.frequencies,
            a.drawn,
            first,
            parts,
            a.rotations,
        )?;
        for (i, (layer, &(keys, values))) in w.layers.iter().zip(self.caches).enumerate() {
            let heads = Use::Heads(normed(0), self.places(layer, keys, values));
            batch.project(stream, &layer.qkv, a.normed, tokens, step, heads)?;
            self.attend(keys, values, sizes)?;
            let after = Use::Residual(vector(layer.ffn_norm, 1, 1.0));
            batch.project(stream, &layer.o, a.attended, tokens, step, after)?;
            let products = Use::SwiGlu(normed(1), a.products);
            batch.project(stream, &layer.gate_up, a.normed, tokens, step, products)?;
            let after = Use::Residual(vector(weights(i + 1), 0, SWIGLU_FACTOR));
            batch.project(stream, &layer.down, a.products, tokens, step, after)?;
        }
        Ok(())
    }

    /// Where heads of a layer go.
    fn places(&self, layer: &Layer, keys: Cache, values: Cache) -> Heads {
        Heads {
            q_norm: layer.q_norm,
            k_norm: layer.k_norm,
            rotations: self.activations.rotations,
            q: self.activations.q,
            keys,
            values,
            step: self.step,
            heads: self.spec.heads as i32,
            bytes: i32::from(self.kv == KvKind::Q8_0),
        }
    }

    /// Attention of all sequences.
    fn attend(&self, keys: Cache, values: Cache, sizes: Sizes) -> Result<()> {
        let (k, stream, step, a) = (self.kernels, self.stream, self.step, &self.activations);
        let heads = self.spec.heads;
        if sizes.flashes > 0 {
            let (flashes, rows, tokens) = (sizes.flashes, self.cache_rows, sizes.tokens);
            k.attend_many(
                stream, step, flashes, tokens, a.q, keys, values, rows, a.attended, heads,
            )?;
        }
        if sizes.splits > 0 {
            let (q, out) = (a.q, a.attended);
            let (tokens, splits, partials) = (sizes.tokens, sizes.splits, self.partials);
            k.attend_split(stream, step, tokens, splits, q, keys, values, out, partials, heads)?;
        }
        Ok(())
    }

    /// x += O(attention(norm(x))).
    fn attention(&self, layer: &Layer, keys: Cache, values: Cache, sizes: Sizes) -> Result<()> {
        let (k, stream, step, a) = (self.kernels, self.stream, self.step, &self.activations);
        let tokens = sizes.tokens;
        self.normed(layer.attention_norm, tokens)?;
        let places = self.places(layer, keys, values);
        k.project_heads(stream, &layer.qkv, a.normed, a.qkv, tokens, places)?;
        self.attend(keys, values, sizes)?;
        k.project(stream, &layer.o, a.attended, a.x, tokens, step, Epilogue::Residual(1.0))
    }

    /// x += down(silu(gate(norm(x))) * up(norm(x))).
    fn feed_forward(&self, layer: &Layer, tokens: usize) -> Result<()> {
        let (k, stream, step, a) = (self.kernels, self.stream, self.step, &self.activations);
        self.normed(layer.ffn_norm, tokens)?;
        k.project(stream, &layer.gate_up, a.normed, a.products, tokens, step, Epilogue::SwiGlu)?;
        let residual = Epilogue::Residual(SWIGLU_FACTOR);
        k.project(stream, &layer.down, a.products, a.x, tokens, step, residual)
    }

    fn normed(&self, weight: u64, tokens: usize) -> Result<()> {
        let (k, stream, step, a) = (self.kernels, self.stream, self.step, &self.activations);
        k.rms_norm(stream, step, tokens, None, a.x, weight, a.normed, self.spec.hidden)
    }

    /// Logits and answers of `rows` answer rows from `first` on; how many there are is read at `count`.
    pub fn answers(&self, first: usize, rows: usize, count: u64) -> Result<()> {
        let (k, stream, step, a) = (self.kernels, self.stream, self.step, &self.activations);
        let (hidden, vocab) = (self.spec.hidden, self.spec.vocab);
        let norm = self.weights.output_norm;
        k.rms_norm(stream, step, rows, Some(first), a.x, norm, a.last, hidden)?;
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
