//! The backend: owns the device's memory, submits batches and collects their answers.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use engine::device::check_drawn;
use engine::rope::Rope;
use engine::{Backend, BackendError, Batch, KvConfig, KvKind, Limits, Output, Want};
use model::{KV_HEADS, Model, Spec};

use crate::decode::{Decode, Surroundings};
use crate::driver::{Buffer, Context, Device, Event, Graph, Pinned, Stream};
use crate::forward::{Activations, BLOCK_ROWS, Forward, Sizes, cache_row_bytes};
use crate::kernels::{Cache, Kernels, Partials};
use crate::rows::{ANSWER_BYTES, Asked, TOP_BYTES, unpack_answer};
use crate::step::{Field, Step, Tiles};
use crate::weights::Weights;

type Result<T> = std::result::Result<T, BackendError>;

/// Answer rows of one pass over the head: their logits are in memory together.
const PASS: usize = 128;
/// Tokens up to which a decoding step is recorded once and then replayed: launching its kernels one by one takes the
/// host longer than running them takes the device.
const RECORDED: usize = 256;
/// Recordings that are kept; past that all are dropped.
const RECORDINGS: usize = 256;

/// Tokens of a call whose attention is split all over.
const SPLIT_TOKENS: usize = 512;

/// How to run.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Number of the device, counted from 0.
    pub device: usize,
    /// Tokens a call, if what they leave between kernels takes no more than a 64th of the device's memory, and at most 512
    /// where one class of kernels does everything: its attention leaves parts for each.
    pub tokens: usize,
    /// Whether everything uses one class of kernels, whatever the number of tokens: slower, and the same bits for a token
    /// in any batch.
    pub deterministic: bool,
    /// Whether only kernels that every architecture has are used, for gates and comparisons.
    pub generic: bool,
}

impl Default for Options {
    fn default() -> Self {
        Options { device: 0, tokens: 16_384, deterministic: false, generic: false }
    }
}

/// A model's weights on a device. Several backends can share it.
pub struct CudaModel {
    context: Arc<Context>,
    spec: Spec,
    options: Options,
    weights: Weights,
}

impl CudaModel {
    /// Brings a model to the device. `progress` is told the bytes moved so far and in all.
    pub fn load(
        model: &Model,
        options: Options,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Arc<Self>> {
        let context = Context::open(options.device)?;
        let (_, bytes) = Activations::place(0, model.spec(), SPLIT_TOKENS, 0);
        let fitting = SPLIT_TOKENS * (context.device.memory as usize / 64 / bytes).max(1);
        let most = if options.deterministic { SPLIT_TOKENS } else { fitting };
        let options = Options { tokens: options.tokens.min(most), ..options };
        let stream = Stream::new(&context)?;
        let kernels = Kernels::load(&context, &stream, KvKind::Bf16, &options)?;
        let weights = Weights::upload(&context, &stream, &kernels, model, progress)?;
        Ok(Arc::new(CudaModel { context, spec: *model.spec(), options, weights }))
    }

    /// Bytes of the device's memory that are free now.
    pub fn free_memory(&self) -> Result<u64> {
        self.context.enter()?;
        self.context.free_memory()
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.context.device
    }
}

/// What is remembered of a submitted batch until it is collected.
struct Pending {
    slot: usize,
    asked: Vec<Asked>,
}

/// Host memory of one batch in flight.
struct Slot {
    step: Pinned,
    answers: Pinned,
    done: Event,
}

/// A backend on one device.
pub struct CudaBackend {
    kv: KvConfig,
    step: Step,
    slots: [Slot; 2],
    turn: usize,
    pending: VecDeque<Pending>,
    /// Rows of the last batch that drew a token.
    drew: Vec<bool>,
    activations: Activations,
    caches: Vec<(Cache, Cache)>,
    /// The kernel of steps of one token, where there is one.
    decode: Option<Decode>,
    /// Forward passes by what their launches depend on: sizes and answer rows.
    graphs: HashMap<(Sizes, usize), Graph>,
    // Fields drop in this order: the stream waits for its work before memory goes.
    stream: Stream,
    kernels: Kernels,
    step_words: Buffer,
    partials: Buffer,
    arrivals: Buffer,
    pool: Buffer,
    scales: Buffer,
    _scratch: Buffer,
    model: Arc<CudaModel>,
}

impl CudaBackend {
    /// A backend with its own cache over a model's weights.
    pub fn new(model: &Arc<CudaModel>, kv: KvConfig) -> Result<Self> {
        let (context, spec, options) = (&model.context, &model.spec, model.options);
        context.enter()?;
        let stream = Stream::new(context)?;
        let kernels = Kernels::load(context, &stream, kv.kind, &options)?;
        let (_, bytes) = Activations::place(0, spec, options.tokens, PASS);
        let scratch = Buffer::new(context, bytes, "activations")?;
        let (activations, _) = Activations::place(scratch.address(), spec, options.tokens, PASS);

        let (row, scale) = cache_row_bytes(kv.kind);
        let planes = 2 * spec.layers;
        let rows = planes * kv.blocks * BLOCK_ROWS;
        let pool = Buffer::new(context, rows * row, "KV cache")?;
        let scales = Buffer::new(context, rows * scale, "KV cache")?;
        // Attention multiplies what lies past a sequence's end by 0, which only does for finite numbers.
        // SAFETY: the whole of a live buffer.
        unsafe { stream.zero(pool.address(), pool.bytes())? };
        let plane = |i: usize| Cache {
            values: pool.address() + (i * kv.blocks * BLOCK_ROWS * row) as u64,
            scales: scales.address() + (i * kv.blocks * BLOCK_ROWS * scale) as u64,
        };
        let caches =
            (0..spec.layers).map(|layer| (plane(2 * layer), plane(2 * layer + 1))).collect();

        let slot = || {
            Ok(Slot {
                step: Pinned::new(context, 64 << 10)?,
                answers: Pinned::new(context, 64 << 10)?,
                done: Event::new(context)?,
            })
        };
        let arrivals = Buffer::new(context, options.tokens * KV_HEADS * 4, "attention")?;
        // SAFETY: the whole of a live buffer.
        unsafe { stream.zero(arrivals.address(), arrivals.bytes())? };
        let mut backend = CudaBackend {
            kv,
            step: Step::default(),
            slots: [slot()?, slot()?],
            turn: 0,
            pending: VecDeque::new(),
            drew: Vec::new(),
            activations,
            caches,
            decode: None,
            graphs: HashMap::new(),
            stream,
            kernels,
            step_words: Buffer::new(context, 64 << 10, "batch")?,
            partials: Buffer::new(context, 0, "attention")?,
            arrivals,
            pool,
            scales,
            _scratch: scratch,
            model: model.clone(),
        };
        backend.upload_frequencies()?;
        backend.decode = backend.new_decode()?;
        Ok(backend)
    }

    fn new_decode(&self) -> Result<Option<Decode>> {
        let (model, a) = (&self.model, &self.activations);
        let around = Surroundings {
            pool: Cache { values: self.pool.address(), scales: self.scales.address() },
            blocks: self.kv.blocks,
            kv: self.kv.kind,
            frequencies: a.frequencies,
            drawn: a.drawn,
            logits: a.logits,
            stats: a.stats,
        };
        let (stream, kernels) = (&self.stream, &self.kernels);
        Decode::new(&model.context, stream, kernels, &model.spec, &model.weights, around)
    }

    fn upload_frequencies(&mut self) -> Result<()> {
        let frequencies = Rope::new(self.model.spec.theta).frequencies().map(f64::to_le_bytes);
        let bytes = frequencies.as_flattened();
        let slot = &mut self.slots[0];
        slot.step[..bytes.len()].copy_from_slice(bytes);
        // SAFETY: a place of 64 doubles; the slot is next written after the wait.
        unsafe { self.stream.upload(self.activations.frequencies, &slot.step, bytes.len())? };
        self.stream.wait()
    }

    /// Makes room for the step that is laid out; what is queued is finished before memory moves.
    fn make_room(&mut self, slot: usize, answer_bytes: usize) -> Result<()> {
        let context = &self.model.context;
        let words = self.step.words.len() * 4;
        if self.slots[slot].step.len() < words {
            self.slots[slot].step = Pinned::new(context, words.next_power_of_two())?;
        }
        if self.slots[slot].answers.len() < answer_bytes {
            self.slots[slot].answers = Pinned::new(context, answer_bytes.next_power_of_two())?;
        }
        if self.step_words.bytes() < words {
            self.stream.wait()?;
            self.graphs.clear();
            self.step_words = Buffer::new(context, words.next_power_of_two(), "batch")?;
        }
        let partials = self.step.partials * self.model.spec.heads * PARTIAL_BYTES;
        if self.partials.bytes() < partials {
            self.stream.wait()?;
            self.graphs.clear();
            self.partials = Buffer::new(context, partials.next_power_of_two(), "attention")?;
        }
        Ok(())
    }

    /// Queues the batch that is laid out, up to its answers in the slot.
    fn queue(&mut self, slot: usize, asked: &[Asked]) -> Result<()> {
        let spec = &self.model.spec;
        let slot = &mut self.slots[slot];
        let words = self.step.words.len() * 4;
        self.step.answers_go_to(slot.answers.device_address());
        for (to, word) in slot.step.chunks_exact_mut(4).zip(&self.step.words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        let (a, step) = (self.activations, self.step_words.address());
        // SAFETY: `make_room` made both that large; the slot is next written when this batch is collected.
        unsafe { self.stream.upload(step, &slot.step, words)? };
        let capacity = self.partials.bytes() / PARTIAL_BYTES;
        let forward = Forward {
            stream: &self.stream,
            kernels: &self.kernels,
            spec,
            weights: &self.model.weights,
            activations: a,
            partials: Partials {
                sums: self.partials.address(),
                totals: self.partials.address() + (capacity * SUM_BYTES) as u64,
                arrivals: self.arrivals.address(),
            },
            caches: &self.caches,
            kv: self.kv.kind,
            cache_rows: self.kv.blocks * BLOCK_ROWS,
            step,
        };
        if self.step.copies > 0 {
            let planes = 2 * spec.layers;
            let (row, scale) = cache_row_bytes(self.kv.kind);
            for (pool, bytes) in [(&self.pool, row), (&self.scales, scale)] {
                if bytes > 0 {
                    let (pool, bytes) = (pool.address(), bytes * BLOCK_ROWS);
                    let blocks = self.kv.blocks;
                    self.kernels.copy_blocks(&self.stream, step, pool, planes, blocks, bytes)?;
                }
            }
        }
        let sizes = Sizes {
            tokens: self.step.tokens,
            splits: self.step.splits,
            flashes: self.step.flashes,
        };
        let all_rows = step + Field::Rows as u64 * 4;
        let recorded =
            sizes.flashes == 0 && sizes.tokens <= RECORDED && self.step.groups.len() == 1;
        let decode = self.decode.as_mut().filter(|_| sizes.tokens == 1 && asked.len() == 1);
        let answered = if let Some(decode) = decode {
            let parts = decode.run(&self.stream, step)?;
            forward.sample(0, 1, parts)?;
            true
        } else if recorded {
            // Work items grow with the context: launches have room for the next power of two.
            let room = |items: usize| if items == 0 { 0 } else { items.next_power_of_two() };
            let sizes = Sizes { splits: room(sizes.splits), ..sizes };
            let rows = asked.len();
            if self.graphs.len() >= RECORDINGS && !self.graphs.contains_key(&(sizes, rows)) {
                self.stream.wait()?;
                self.graphs.clear();
            }
            let graph = match self.graphs.entry((sizes, rows)) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(new) => new.insert(self.stream.capture(|| {
                    forward.layers(sizes)?;
                    forward.answers(0, rows, all_rows)
                })?),
            };
            self.stream.replay(graph)?;
            true
        } else {
            forward.layers(sizes)?;
            false
        };

        let places = AnswerPlaces::of(asked, spec.vocab);
        let mut first = 0;
        for (pass, &rows) in self.step.groups.iter().enumerate() {
            if !answered {
                let count = step + self.step.group_offset(pass) as u64;
                forward.answers(first, rows, count)?;
            }
            for row in 0..rows {
                if let Some(offset) = places.logits(first + row) {
                    let from = a.logits + (row * spec.vocab * 4) as u64;
                    // SAFETY: a logits row of the pass; the slot is read when this batch is collected.
                    unsafe {
                        self.stream.download(&mut slot.answers, offset, from, spec.vocab * 4)?
                    };
                }
            }
            first += rows;
        }
        if places.tops_bytes > 0 {
            // SAFETY: as above, for the alternatives of all rows.
            unsafe {
                self.stream.download(&mut slot.answers, places.tops, a.tops, places.tops_bytes)?
            };
        }
        slot.done.record(&self.stream)
    }
}

/// Bytes of a head's partial sums, and of the whole partial.
const SUM_BYTES: usize = model::HEAD_DIM * 4;
const PARTIAL_BYTES: usize = SUM_BYTES + 8;

/// Where a slot keeps the answers of its batch: all rows' answers, their alternatives if any row wants some, and the
/// logits of the rows that want them.
struct AnswerPlaces {
    tops: usize,
    tops_bytes: usize,
    logits: Vec<Option<usize>>,
    bytes: usize,
}

impl AnswerPlaces {
    fn of(asked: &[Asked], vocab: usize) -> Self {
        let tops = asked.len() * ANSWER_BYTES;
        let listed = asked.iter().any(|asked| matches!(asked, Asked::Choice { top } if *top > 0));
        let tops_bytes = if listed { asked.len() * TOP_BYTES } else { 0 };
        let mut bytes = tops + tops_bytes;
        let mut place = |asked: &Asked| {
            (*asked == Asked::Logits).then(|| {
                bytes += vocab * 4;
                bytes - vocab * 4
            })
        };
        let logits = asked.iter().map(&mut place).collect();
        AnswerPlaces { tops, tops_bytes, logits, bytes }
    }

    fn logits(&self, row: usize) -> Option<usize> {
        self.logits[row]
    }
}

impl Backend for CudaBackend {
    fn limits(&self) -> Limits {
        let (spec, options) = (&self.model.spec, self.model.options);
        Limits {
            tokens: options.tokens,
            rows: options.tokens,
            blocks: self.kv.blocks,
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
        self.model.context.enter()?;
        let (spec, vocab) = (self.model.spec, self.model.spec.vocab);
        let (queries, clusters) =
            (self.kernels.queries(), self.kernels.clusters(batch.tokens.len()));
        let deterministic = self.model.options.deterministic;
        let tiles = Tiles { group: spec.group(), queries, clusters, deterministic, pass: PASS };
        self.step.build(batch, vocab, tiles)?;
        let asked: Vec<Asked> = batch.rows.iter().map(|row| Asked::of(&row.want, vocab)).collect();
        let slot = self.turn;
        self.make_room(slot, AnswerPlaces::of(&asked, vocab).bytes)?;
        if let Err(error) = self.queue(slot, &asked) {
            // What was queued before it may still read the slot, which is written next.
            return self.stream.wait().and(Err(error));
        }
        self.turn = 1 - self.turn;
        self.drew.clear();
        self.drew.extend(batch.rows.iter().map(|row| matches!(row.want, Want::Sample(_))));
        self.pending.push_back(Pending { slot, asked });
        Ok(())
    }

    fn collect(&mut self, out: &mut Output) -> Result<()> {
        let Some(Pending { slot, asked }) = self.pending.pop_front() else {
            return Err(BackendError::Batch("nothing was submitted".into()));
        };
        self.model.context.enter()?;
        let slot = &self.slots[slot];
        slot.done.wait()?;
        let vocab = self.model.spec.vocab;
        let places = AnswerPlaces::of(&asked, vocab);
        out.answers.clear();
        for (row, asked) in asked.iter().enumerate() {
            let logits = places.logits(row).map_or(&[][..], |at| &slot.answers[at..at + vocab * 4]);
            let tops = &slot.answers[places.tops..];
            out.answers.push(unpack_answer(asked, row, &slot.answers, tops, logits));
        }
        Ok(())
    }
}
