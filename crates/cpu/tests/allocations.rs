//! Nothing is allocated inside the loop over the layers: a step allocates as often in a model of many as in one of few.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use cpu::{Cpu, CpuModel, Options};
use engine::{Backend, Batch, Input, KvConfig, KvKind, Output, Row, Want};
use model::{Model, Scheme, Vocabulary};

/// The system's allocator, with a count of the calls of all threads.
struct Counting;

static CALLS: AtomicUsize = AtomicUsize::new(0);

#[global_allocator]
static ALLOCATOR: Counting = Counting;

// SAFETY: the system's allocator does it all.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        CALLS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller's.
        unsafe { System.dealloc(memory, layout) }
    }
}

/// Allocations of a prompt and of a single token, on a model that has seen both before.
fn allocations(layers: usize) -> [usize; 2] {
    let spec = model::Spec { layers, ..*Model::builtin().expect("kipp-tiny").spec() };
    let schemes = (Scheme::Q8_0, Scheme::Q8_0);
    let model = Arc::new(Model::synthetic(spec, schemes, 1).expect("synthetic"));
    let options = Options { threads: 2, ..Options::default() };
    let weights = CpuModel::load(model, options, &mut |_, _| ()).expect("weights");
    let kv = KvConfig::for_positions(640, KvKind::Bf16);
    let table: Vec<u32> = (0..kv.blocks as u32).collect();
    let mut cpu = Cpu::new(&weights, kv).expect("a backend");
    let vocabulary = Vocabulary::tiny().rows() as u32;
    let mut forward = |first: usize, tokens: usize| {
        let mut batch = Batch::default();
        let ids = (0..tokens as u32).map(|i| Input::Token(i * 31 % vocabulary));
        batch.push(ids, first, &table);
        batch.rows.push(Row { token: tokens - 1, want: Want::Logits });
        let mut out = Output::default();
        let before = CALLS.load(Ordering::Relaxed);
        cpu.forward(&batch, &mut out).expect("a batch");
        CALLS.load(Ordering::Relaxed) - before
    };
    // The single token comes after enough positions that its attention is cut into splits.
    [(0, 512), (512, 1)].map(|(first, tokens)| {
        forward(first, tokens);
        forward(first, tokens)
    })
}

#[test]
fn a_step_allocates_as_often_whatever_the_number_of_layers() {
    assert_eq!(allocations(1), allocations(5));
}
