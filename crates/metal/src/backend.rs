//! The backend: owns the memory that it shares with the device, submits batches and collects their answers.

use std::collections::VecDeque;
use std::sync::Arc;

use engine::device::{Asked, check_drawn, choice};
use engine::rope::Rope;
use engine::{Answer, Backend, BackendError, Batch, KvConfig, Limits, Output, Want};
use model::{HEAD_DIM, Model, Spec};

use crate::device::{Device, Slice};
use crate::forward::{Activations, Forward, Pool};
use crate::kernels::{Class, Kernels, Libraries, Partials, Stream};
use crate::probe;
use crate::rows::{ANSWER_BYTES, TOP_BYTES};
use crate::step::Step;
use crate::weights::Weights;

type Result<T> = std::result::Result<T, BackendError>;

/// Answer rows of one pass over the head.
const PASS: usize = 128;
/// Bytes of a head's partial sums, and of its totals.
const SUM_BYTES: usize = HEAD_DIM * 4;
const TOTAL_BYTES: usize = 8;

/// How to run.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Tokens a call.
    pub tokens: usize,
    /// Whether every projection uses one class of kernels, whatever the number of tokens: slower, and the same bits
    /// for a token in any batch.
    pub deterministic: bool,
    /// What multiplies many tokens; the best that the device passes the probe with if left out.
    pub class: Option<Class>,
}

impl Default for Options {
    fn default() -> Self {
        Options { tokens: 1024, deterministic: false, class: None }
    }
}

/// A model's weights and kernels on a device. Several backends can share it.
pub struct MetalModel<D: Device> {
    device: D,
    libraries: Libraries<D>,
    /// What multiplies many tokens, and why if it was not asked for.
    class: String,
    spec: Spec,
    options: Options,
    weights: Weights<D>,
}

impl<D: Device> MetalModel<D> {
    /// Compiles the kernels and makes a model's weights visible to the device.
    pub fn load(device: D, model: &Arc<Model>, options: Options) -> Result<Arc<Self>> {
        let (libraries, class) = probe::choose(&device, options.class)?;
        let weights = Weights::share(&device, model)?;
        let spec = *model.spec();
        Ok(Arc::new(MetalModel { device, libraries, class, spec, options, weights }))
    }

    /// For banners: the device, the class of its kernels, and how it got the weights.
    pub fn describe(&self) -> String {
        let (device, class) = (self.device.describe(), &self.class);
        let Weights { shared, copied, .. } = self.weights;
        format!("{device}, {class}, {shared} bytes of weights mapped, {copied} copied")
    }

    /// The device.
    pub fn device(&self) -> &D {
        &self.device
    }
}

/// What is remembered of a submitted batch until it is collected.
struct Pending<D: Device> {
    slot: usize,
    asked: Vec<Asked>,
    ticket: D::Ticket,
}

/// Memory of one batch in flight.
struct Slot<D: Device> {
    step: D::Buffer,
    answers: D::Buffer,
    tops: D::Buffer,
    /// fp32 `[rows, vocab]` of one pass over the head, or of all rows if any wants its logits back.
    logits: D::Buffer,
}

/// A backend on one device.
pub struct MetalBackend<D: Device> {
    model: Arc<MetalModel<D>>,
    kernels: Kernels<D>,
    rope: Rope,
    pool: Pool<D>,
    placed: Activations,
    activations: D::Buffer,
    sums: D::Buffer,
    totals: D::Buffer,
    queue: D::Queue,
    step: Step,
    slots: [Slot<D>; 2],
    turn: usize,
    pending: VecDeque<Pending<D>>,
    /// Rows of the last batch that drew a token.
    drew: Vec<bool>,
}

impl<D: Device> MetalBackend<D> {
    /// A backend with its own cache over a model's weights.
    pub fn new(model: &Arc<MetalModel<D>>, kv: KvConfig) -> Result<Self> {
        let MetalModel { device, libraries, spec, options, weights, .. } = &**model;
        let mut shapes = vec![(weights.head.kind, weights.head.cols)];
        for layer in &weights.layers {
            let parts = layer.qkv.iter().chain(&layer.gate_up).chain([&layer.o, &layer.down]);
            shapes.extend(parts.map(|part| (part.kind, part.cols)));
        }
        let kind = weights.embedding.kind;
        let kernels =
            Kernels::new(device, libraries, spec, kv.kind, kind, &shapes, options.deterministic)?;
        let (placed, bytes) = Activations::place(spec, options.tokens, PASS);
        let small = |purpose| device.allocate(4096, purpose);
        let slot = || {
            Ok(Slot {
                step: small("batch")?,
                answers: small("answers")?,
                tops: small("answers")?,
                logits: small("logits")?,
            })
        };
        Ok(MetalBackend {
            kernels,
            rope: Rope::new(spec.theta),
            pool: Pool::new(device, kv.kind, kv.blocks, spec.layers)?,
            placed,
            activations: device.allocate(bytes, "activations")?,
            sums: small("attention")?,
            totals: small("attention")?,
            queue: device.queue()?,
            step: Step::default(),
            slots: [slot()?, slot()?],
            turn: 0,
            pending: VecDeque::new(),
            drew: Vec::new(),
            model: Arc::clone(model),
        })
    }

    /// Makes room for the step that is laid out. A buffer that is replaced while the device still uses it lives until the
    /// device is done: launches hold what they use.
    fn make_room(&mut self, asked: &[Asked]) -> Result<()> {
        let device = &self.model.device;
        let grow = |buffer: &mut D::Buffer, bytes: usize, purpose| {
            if device.bytes(buffer) < bytes {
                *buffer = device.allocate(bytes.next_power_of_two(), purpose)?;
            }
            Ok(())
        };
        let heads = self.step.partials * self.model.spec.heads;
        grow(&mut self.sums, heads * SUM_BYTES, "attention")?;
        grow(&mut self.totals, heads * TOTAL_BYTES, "attention")?;
        let slot = &mut self.slots[self.turn];
        let rows = asked.len();
        grow(&mut slot.step, self.step.words.len() * 4, "batch")?;
        grow(&mut slot.answers, rows * ANSWER_BYTES, "answers")?;
        grow(&mut slot.tops, rows * TOP_BYTES, "answers")?;
        let kept = if keeps_logits(asked) { rows } else { rows.min(PASS) };
        grow(&mut slot.logits, kept.next_multiple_of(8) * self.model.spec.vocab * 4, "logits")
    }

    /// Queues the batch that is laid out.
    fn queue(&mut self, asked: &[Asked]) -> Result<D::Ticket> {
        let MetalModel { device, spec, weights, .. } = &*self.model;
        let slot = &self.slots[self.turn];
        let words: Vec<u8> = self.step.words.iter().flat_map(|w| w.to_le_bytes()).collect();
        device.write(&slot.step, 0, &words);
        let whole = |buffer| Slice::whole(device, buffer);
        let forward = Forward {
            kernels: &self.kernels,
            spec,
            weights,
            placed: self.placed,
            activations: &self.activations,
            partials: Partials { sums: whole(&self.sums), totals: whole(&self.totals) },
            pool: &self.pool,
            sizes: &self.step,
        };
        let step = Slice { buffer: &slot.step, offset: 0, bytes: words.len() };
        let mut stream = Stream { device, queue: &mut self.queue, step };
        forward.layers(&mut stream)?;
        for first in (0..asked.len()).step_by(PASS) {
            let rows = PASS.min(asked.len() - first);
            let at = if keeps_logits(asked) { first * spec.vocab * 4 } else { 0 };
            let (logits, answers) = (whole(&slot.logits).from(at), whole(&slot.answers));
            forward.answers(&mut stream, (first, rows), logits, answers, whole(&slot.tops))?;
        }
        device.commit(&mut self.queue)
    }

    /// The answer to one row of a batch that the device is done with.
    fn answer(&self, slot: &Slot<D>, row: usize, asked: Asked) -> Answer {
        let device = &self.model.device;
        match asked {
            Asked::Logits => {
                let vocab = self.model.spec.vocab;
                let mut bytes = vec![0; vocab * 4];
                device.read(&slot.logits, row * vocab * 4, &mut bytes);
                let logit = |b: &[u8]| f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
                Answer::Logits(bytes.chunks_exact(4).map(logit).collect())
            }
            Asked::Choice { top } => {
                let (mut answer, mut tops) = ([0; ANSWER_BYTES], [0; TOP_BYTES]);
                device.read(&slot.answers, row * ANSWER_BYTES, &mut answer);
                device.read(&slot.tops, row * TOP_BYTES, &mut tops);
                choice(&answer, &tops, top)
            }
        }
    }
}

/// Whether the logits of all rows stay until the batch is collected.
fn keeps_logits(asked: &[Asked]) -> bool {
    asked.contains(&Asked::Logits)
}

impl<D: Device> Backend for MetalBackend<D> {
    fn limits(&self) -> Limits {
        let MetalModel { spec, options, .. } = &*self.model;
        Limits {
            tokens: options.tokens,
            rows: options.tokens,
            blocks: self.pool.blocks,
            context: spec.context,
            vocab: spec.vocab,
            queue: self.slots.len(),
        }
    }

    fn submit(&mut self, batch: &Batch) -> Result<()> {
        batch.check(&self.limits())?;
        if self.pending.len() == self.slots.len() {
            return Err(BackendError::Batch("two batches are submitted and not collected".into()));
        }
        check_drawn(batch, &self.drew)?;
        let spec = self.model.spec;
        self.step.build(batch, &self.rope, spec.group(), spec.vocab)?;
        let asked: Vec<_> = batch.rows.iter().map(|row| Asked::of(&row.want, spec.vocab)).collect();
        self.make_room(&asked)?;
        let ticket = self.queue(&asked)?;
        self.pending.push_back(Pending { slot: self.turn, asked, ticket });
        self.turn = 1 - self.turn;
        self.drew.clear();
        self.drew.extend(batch.rows.iter().map(|row| matches!(row.want, Want::Sample(_))));
        Ok(())
    }

    fn collect(&mut self, out: &mut Output) -> Result<()> {
        let Some(Pending { slot, asked, ticket }) = self.pending.pop_front() else {
            return Err(BackendError::Batch("nothing was submitted".into()));
        };
        self.model.device.wait(ticket)?;
        let slot = &self.slots[slot];
        out.answers.clear();
        out.answers.extend(asked.iter().enumerate().map(|(i, &asked)| self.answer(slot, i, asked)));
        Ok(())
    }
}
