//! The scalar oracle: the definition of the model, in f32, one operation after the other. Slow on
//! purpose: every line can be held against the description of the model in ARCHITECTURE.md.
//!
//! There is one forward pass and it runs over block tables; a prompt is a batch of many tokens and a
//! decode step a batch of few.

pub(crate) mod faults;
mod kv;
mod ops;

use std::sync::Arc;

use model::{HEAD_DIM, KV_HEADS, Layer, Model, Spec};

use crate::backend::{Answered, Backend, BackendError, KvConfig, Limits};
use crate::batch::{BLOCK, Batch, Output};
use crate::rope::{Rope, Rotation};
use crate::sampling::Sampler;
use faults::Faults;
use kv::KvStore;
use ops::{add, attend, matmul, rms_norm, silu};

/// Tokens a call. The oracle computes token by token, so this bounds only its scratch memory.
const MAX_TOKENS: usize = 2048;

/// The reference backend.
pub struct Oracle {
    model: Arc<Model>,
    threads: usize,
    /// None, except where tests plant some.
    pub(crate) faults: Faults,
    rope: Rope,
    kv: KvStore,
    sampler: Sampler,
    answered: Answered,
    observer: Option<Observer>,
}

/// Hears what a layer's matrices are multiplied with: the layer, their names in a GGUF, the inputs, `[tokens, cols]`, and
/// the number of tokens.
pub type Observer = Box<dyn FnMut(usize, &[&str], &[f32], usize) + Send>;

impl Oracle {
    /// An oracle for `model` that spreads rows of its matrices over `threads`; results do not depend
    /// on how many.
    pub fn new(model: Arc<Model>, kv: KvConfig, threads: usize) -> Self {
        Oracle {
            rope: Rope::new(model.spec().theta),
            kv: KvStore::new(model.spec().layers, kv),
            model,
            threads: threads.max(1),
            faults: Faults::default(),
            sampler: Sampler::default(),
            answered: Answered::default(),
            observer: None,
        }
    }

    /// Shows the inputs of the layers' matrices to `observer` from now on.
    pub fn observe(&mut self, observer: Observer) {
        self.observer = Some(observer);
    }

    fn show(&mut self, layer: usize, matrices: &[&str], inputs: &[f32], tokens: usize) {
        if let Some(observer) = &mut self.observer {
            observer(layer, matrices, inputs, tokens);
        }
    }

    /// The forward pass: logits for each of the batch's rows, `[rows, vocab]`.
    fn logits(&mut self, batch: &Batch, tokens: &[u32]) -> Vec<f32> {
        let model = Arc::clone(&self.model);
        let (spec, weights) = (model.spec(), &model.weights);
        let first = batch.positions.first().copied().unwrap_or(0);
        let turned = |&position: &u32| self.rope.at(self.faults.turned(position, first));
        let rotations = batch.positions.iter().map(turned).collect();

        let mut a = Activations::new(spec, rotations);
        for (row, &token) in a.x.chunks_exact_mut(spec.hidden).zip(tokens) {
            weights.embedding.row_f32(token as usize, row);
        }
        for (index, layer) in weights.layers.iter().enumerate() {
            self.attention(index, layer, batch, &mut a);
            self.feed_forward(index, layer, &mut a);
        }

        let mut last = vec![0.0; batch.rows.len() * spec.hidden];
        for (out, row) in last.chunks_exact_mut(spec.hidden).zip(&batch.rows) {
            let x = &a.x[row.token * spec.hidden..][..spec.hidden];
            rms_norm(x, weights.output_norm.as_f32(), out);
        }
        let mut logits = vec![0.0; batch.rows.len() * spec.vocab];
        matmul(&weights.head, &last, &mut logits, self.threads);
        logits
    }

    /// x += O(attention(norm(x))), appending this batch's keys and values to the cache.
    fn attention(&mut self, index: usize, layer: &Layer, batch: &Batch, a: &mut Activations) {
        let spec = *self.model.spec();
        let tokens = a.rotations.len();
        norm_rows(&a.x, layer.attention_norm.as_f32(), &mut a.normed);
        self.show(index, &["attn_q", "attn_k", "attn_v"], &a.normed, tokens);
        matmul(&layer.q, &a.normed, &mut a.q, self.threads);
        matmul(&layer.k, &a.normed, &mut a.k, self.threads);
        matmul(&layer.v, &a.normed, &mut a.v, self.threads);
        norm_and_rotate(&mut a.q, spec.heads, layer.q_norm.as_f32(), &a.rotations);
        norm_and_rotate(&mut a.k, KV_HEADS, layer.k_norm.as_f32(), &a.rotations);

        for sequence in 0..batch.sequences() {
            let table = &batch.tables[sequence];
            let own = batch.offsets[sequence]..batch.offsets[sequence + 1];
            for t in own.clone() {
                let row = t * spec.kv_width()..(t + 1) * spec.kv_width();
                let position = batch.positions[t] as usize;
                let (at, k, v) = self.faults.stored(position, &a.k[row.clone()], &a.v[row]);
                self.kv.append(index, table, at, k, v);
            }
            for t in own.filter(|&t| !self.faults.skips(t)) {
                let row = t * spec.q_width()..(t + 1) * spec.q_width();
                let length = batch.positions[t] as usize + 1;
                let length = self.faults.visible(length, table.len() * BLOCK);
                let cached = self.kv.view(index, table, length);
                attend(&a.q[row.clone()], spec.group(), &cached, &mut a.attended[row]);
            }
        }
        self.show(index, &["attn_output"], &a.attended, tokens);
        matmul(&layer.o, &a.attended, &mut a.update, self.threads);
        add(&mut a.x, &a.update);
    }

    /// x += down(silu(gate(norm(x))) * up(norm(x))).
    fn feed_forward(&mut self, index: usize, layer: &Layer, a: &mut Activations) {
        let tokens = a.rotations.len();
        norm_rows(&a.x, layer.ffn_norm.as_f32(), &mut a.normed);
        self.show(index, &["ffn_gate", "ffn_up"], &a.normed, tokens);
        matmul(&layer.gate, &a.normed, &mut a.gate, self.threads);
        matmul(&layer.up, &a.normed, &mut a.up, self.threads);
        self.faults.product(&mut a.up, layer.up.rows);
        for (gate, up) in a.gate.iter_mut().zip(&a.up) {
            *gate = silu(*gate) * up;
        }
        self.show(index, &["ffn_down"], &a.gate, tokens);
        matmul(&layer.down, &a.gate, &mut a.update, self.threads);
        add(&mut a.x, &a.update);
    }
}

/// Activations of one call, `[tokens, width]` each.
struct Activations {
    /// One a token.
    rotations: Vec<Rotation>,
    /// The residual stream.
    x: Vec<f32>,
    normed: Vec<f32>,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    attended: Vec<f32>,
    gate: Vec<f32>,
    up: Vec<f32>,
    update: Vec<f32>,
}

impl Activations {
    fn new(spec: &Spec, rotations: Vec<Rotation>) -> Self {
        let rows = |width: usize| vec![0.0; rotations.len() * width];
        Activations {
            x: rows(spec.hidden),
            normed: rows(spec.hidden),
            q: rows(spec.q_width()),
            k: rows(spec.kv_width()),
            v: rows(spec.kv_width()),
            attended: rows(spec.q_width()),
            gate: rows(spec.ffn),
            up: rows(spec.ffn),
            update: rows(spec.hidden),
            rotations,
        }
    }
}

/// RMSNorm of every row of width `weight.len()`.
fn norm_rows(x: &[f32], weight: &[f32], out: &mut [f32]) {
    let width = weight.len();
    for (x, out) in x.chunks_exact(width).zip(out.chunks_exact_mut(width)) {
        rms_norm(x, weight, out);
    }
}

/// RMSNorm and RoPE of every head of every token, in place; `x` is `[tokens, heads, 128]`.
fn norm_and_rotate(x: &mut [f32], heads: usize, weight: &[f32], rotations: &[Rotation]) {
    for (token, rotation) in x.chunks_exact_mut(heads * HEAD_DIM).zip(rotations) {
        for head in token.chunks_exact_mut(HEAD_DIM) {
            let mut normed = [0.0; HEAD_DIM];
            rms_norm(head, weight, &mut normed);
            rotation.apply(&mut normed);
            head.copy_from_slice(&normed);
        }
    }
}

impl Backend for Oracle {
    fn limits(&self) -> Limits {
        let spec = self.model.spec();
        Limits {
            tokens: MAX_TOKENS,
            rows: MAX_TOKENS,
            blocks: self.kv.blocks(),
            context: spec.context,
            vocab: spec.vocab,
            queue: 1,
        }
    }

    fn submit(&mut self, batch: &Batch) -> Result<(), BackendError> {
        batch.check(&self.limits())?;
        let tokens = batch.resolve(self.answered.drawn())?;
        for &(from, to) in &batch.copies {
            self.kv.copy_block(from, to);
        }
        let logits = self.logits(batch, &tokens);
        self.model.weights.check().map_err(BackendError::weights)?;
        let rows = batch.rows.iter().zip(logits.chunks_exact(self.model.spec().vocab));
        let answers = rows.map(|(row, logits)| self.sampler.answer(&row.want, logits)).collect();
        self.answered.push(Output { answers });
        Ok(())
    }

    fn collect(&mut self, out: &mut Output) -> Result<(), BackendError> {
        *out = self.answered.pop()?;
        Ok(())
    }
}
