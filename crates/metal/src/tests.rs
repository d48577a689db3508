//! The engine's gates through the executed kernels, and faults that they have to find.

#[path = "../../engine/tests/common/ragged.rs"]
mod ragged;

use std::collections::BTreeSet;
use std::io::{self, Write};
use std::sync::Arc;

use engine::conformance::{Finding, GATES, Reproducibility, Rig, Subject};
use engine::{
    Backend, BackendError, Batch, Input, KvConfig, KvKind, Output, Row, Sample, SamplingParams,
    Sequence, Want,
};
use model::{Model, Scheme, Spec};

use crate::emulator::{Emulator, Fault};
use crate::kernels::{Class, SOURCES, TENSOR, expand};
use crate::{MetalBackend, MetalModel, Options};

/// One layer, since every access is checked.
const RAGGED: Spec = Spec { layers: 1, ..ragged::RAGGED };

const OPTIONS: Options =
    Options { tokens: 600, deterministic: false, class: Some(Class::Simdgroup) };

fn ragged(scheme: Scheme, head: Scheme) -> Arc<Model> {
    Arc::new(Model::synthetic(RAGGED, (scheme, head), 1).expect("synthetic"))
}

/// Runs the gates named, or all; the first that does not hold, or cannot be run, with why.
fn run(
    model: &Arc<Model>,
    loaded: &Arc<MetalModel<Emulator>>,
    bound: f64,
    seed: u64,
    names: &[&str],
) -> Result<(), String> {
    let mut make = |kv| Ok(Box::new(MetalBackend::new(loaded, kv)?) as Box<dyn Backend>);
    let mut rig = Rig::new(Subject {
        model: Arc::clone(model),
        make: &mut make,
        reproducibility: Reproducibility::WithinClass,
        bound,
        threads: 1,
        seed,
    });
    for gate in GATES.iter().filter(|gate| names.is_empty() || names.contains(&gate.name)) {
        let finding = (gate.run)(&mut rig).map_err(|error| format!("{}: {error}", gate.name))?;
        let Finding { figure, unit, detail, .. } = &finding;
        // The figures are worth a look even where they hold.
        let scheme = model.scheme.name();
        writeln!(io::stdout(), "{scheme:<5} {:<14} {figure:>9.2e} {unit} ({detail})", gate.name)
            .expect("written");
        if !finding.holds() {
            return Err(format!("{}: {finding:?}", gate.name));
        }
    }
    Ok(())
}

/// Kernels that were launched, with their function constants.
type Launched = BTreeSet<(&'static str, Vec<i32>)>;

/// Runs gates on a fresh device; returns what was launched.
fn gates(model: &Arc<Model>, bound: f64, seed: u64, names: &[&str]) -> Launched {
    gates_of(Class::Simdgroup, model, bound, seed, names)
}

/// The same for a class of kernels.
fn gates_of(class: Class, model: &Arc<Model>, bound: f64, seed: u64, names: &[&str]) -> Launched {
    let options = Options { class: Some(class), ..OPTIONS };
    let loaded = MetalModel::load(Emulator::new(), model, options).expect("load");
    assert!(loaded.describe().contains(" 0 copied"), "{}", loaded.describe());
    run(model, &loaded, bound, seed, names).expect("the gates hold");
    loaded.device().launched.lock().unwrap().clone()
}

/// All gates, on two threads with a device each: in two parts that take about as long.
fn all_gates(model: &Arc<Model>, bound: f64, seed: u64) -> Launched {
    let mut parts: [Vec<&str>; 2] = Default::default();
    for gate in GATES {
        let first = ["chunking", "shared-prefix", "long-context", "logits"].contains(&gate.name);
        parts[usize::from(first)].push(gate.name);
    }
    std::thread::scope(|scope| {
        let part = |names| scope.spawn(move || gates(model, bound, seed, names));
        let [a, b] = [part(&parts[0][..]), part(&parts[1][..])];
        let mut launched = a.join().expect("the gates hold");
        launched.extend(b.join().expect("the gates hold"));
        launched
    })
}

/// Every kernel is one that the gates hit, in each kind of cache and each tile of `project_few` that it knows.
fn covers_everything(launched: &Launched) {
    for (name, _) in SOURCES {
        let with = |index: usize| -> BTreeSet<i32> {
            launched.iter().filter(|(n, _)| *n == name).map(|(_, c)| c[index]).collect()
        };
        let (kv, tile) = (with(4), with(7));
        assert!(!kv.is_empty(), "no gate launched {name}");
        if name == "project_few" {
            assert_eq!(tile, [1, 2, 4, 8].into(), "{name}");
        } else if ["rope", "attend_split", "attend_flash"].contains(&name) {
            assert_eq!(kv, [0, 1].into(), "{name}");
        }
    }
}

#[test]
fn gates_of_kipp_tiny() {
    let model = Arc::new(Model::builtin().expect("builtin"));
    gates(&model, 1e-6, 1, &["logits"]);
    covers_everything(&all_gates(&model, 1e-5, 11));
}

#[test]
fn gates_of_ragged_bf16() {
    covers_everything(&all_gates(&ragged(Scheme::Bf16, Scheme::Bf16), 1e-6, 12));
}

/// The gates that the kind of the weights can change: of both kinds of projection, in every tile.
fn scheme_gates(scheme: Scheme, head: Scheme, seed: u64) {
    gates(&ragged(scheme, head), 1e-6, seed, &["logits", "batched", "mixed"]);
}

#[test]
fn gates_of_ragged_q8_0() {
    scheme_gates(Scheme::Q8_0, Scheme::Bf16, 13);
}

#[test]
fn gates_of_ragged_q4_1() {
    scheme_gates(Scheme::Q4_1, Scheme::Q8_0, 14);
}

#[test]
fn gates_of_ragged_q4_0() {
    scheme_gates(Scheme::Q4_0, Scheme::Q4_0, 15);
}

/// Types of other programs' files, mixed as they mix them: matrices of one launch are stored in different ways.
#[test]
fn gates_of_foreign_types() {
    let spec = Spec { hidden: 256, ffn: 256, heads: 16, ..RAGGED };
    for (i, schemes) in [
        (Scheme::F16, Scheme::Q6K),
        (Scheme::Q4K, Scheme::Q6K),
        (Scheme::Q5K, Scheme::F16),
        (Scheme::Q6K, Scheme::Q5K),
    ]
    .into_iter()
    .enumerate()
    {
        let mut model = Model::synthetic(spec, schemes, 1).expect("synthetic");
        let other = Model::synthetic(spec, (schemes.1, schemes.0), 1).expect("synthetic");
        for (layer, other) in model.weights.layers.iter_mut().zip(other.weights.layers) {
            (layer.v, layer.gate) = (other.v, other.gate);
        }
        let model = Arc::new(model);
        let class = [Class::Simdgroup, Class::Tensor][i % 2];
        gates_of(class, &model, 1e-6, 30 + i as u64, &["logits"]);
    }
}

/// The class of tensors: whatever many tokens can meet.
#[test]
fn gates_of_tensors() {
    let cases: [(_, _, &[&str]); 2] = [
        (Scheme::Bf16, Scheme::Q4_1, &["logits", "mixed"]),
        (Scheme::Q8_0, Scheme::Q4_0, &["logits"]),
    ];
    for (i, (scheme, head, names)) in cases.into_iter().enumerate() {
        let model = ragged(scheme, head);
        let launched = gates_of(Class::Tensor, &model, 1e-6, 40 + i as u64, names);
        let named = |name| launched.iter().any(|(launched, _)| *launched == name);
        assert!(named(TENSOR.0) && !named("project_many"));
    }
}

/// Nothing steps down in silence: the class is the one asked for or the load fails; left open, the banner says which and why.
#[test]
fn the_class_is_chosen_by_the_probe() {
    let model = ragged(Scheme::Q8_0, Scheme::Bf16);
    let load = |class, fault, has_tensors| {
        let mut device = Emulator::with(fault, 1 << 40);
        device.has_tensors = has_tensors;
        let loaded = MetalModel::load(device, &model, Options { class, ..OPTIONS });
        loaded.map(|loaded| loaded.describe()).map_err(|error| error.to_string())
    };
    let describe = |class, fault, has_tensors| load(class, fault, has_tensors).expect("loaded");
    assert!(describe(None, None, true).contains("emulator, tensor kernels, "));
    assert!(describe(Some(Class::Tensor), None, true).contains(", tensor kernels, "));
    assert!(describe(Some(Class::Simdgroup), None, true).contains(", simdgroup kernels, "));
    let none = describe(None, None, false);
    assert!(none.contains(", simdgroup kernels (tensor: no operations on tensors), "), "{none}");
    let error = load(Some(Class::Tensor), None, false).unwrap_err();
    assert!(error.contains("no operations on tensors"), "{error}");
    // Sums that go astray in the weights that are expanded.
    let fault = (TENSOR.0, "array<int, 2>({1, STRIDE})", "array<int, 2>({1, COLS_TILE})");
    let wrong = describe(None, Some(fault), true);
    assert!(
        wrong.contains(", simdgroup kernels (tensor: probe of 73 tokens: expected "),
        "{wrong}"
    );
    let error = load(Some(Class::Tensor), Some(fault), true).unwrap_err();
    assert!(error.contains("probe of 73 tokens: expected "), "{error}");
}

/// One class of kernels for any number of tokens: then batch mates change no bit.
#[test]
fn deterministic_projections_are_bitwise() {
    let model = ragged(Scheme::Bf16, Scheme::Bf16);
    let options = Options { deterministic: true, ..OPTIONS };
    let loaded = MetalModel::load(Emulator::new(), &model, options).expect("load");
    let mut make = |kv| Ok(Box::new(MetalBackend::new(&loaded, kv)?) as Box<dyn Backend>);
    let mut rig = Rig::new(Subject {
        model: Arc::clone(&model),
        make: &mut make,
        reproducibility: Reproducibility::Bitwise,
        bound: 1e-6,
        threads: 1,
        seed: 16,
    });
    let batched = GATES.iter().find(|gate| gate.name == "batched").expect("a gate");
    let finding = (batched.run)(&mut rig).expect("it runs");
    assert!(finding.holds(), "{finding:?}");
}

/// Weights in buffers far smaller than the model, cut at tensors: the same answers, nothing copied.
#[test]
fn weights_are_cut_at_tensors() {
    let model = Arc::new(Model::builtin().expect("builtin"));
    let tensors = [&model.weights.embedding, &model.weights.layers[0].q];
    let largest = tensors.map(|tensor| tensor.bytes().len()).into_iter().max().expect("two");
    let device = Emulator::with(None, largest + 2 * 4096);
    let loaded = MetalModel::load(device, &model, OPTIONS).expect("load");
    assert!(loaded.describe().contains(" 0 copied"), "{}", loaded.describe());
    run(&model, &loaded, 1e-5, 17, &["logits"]).expect("logits");

    let device = Emulator::with(None, largest - 1);
    let error = MetalModel::load(device, &model, OPTIONS).err().expect("a tensor is too large");
    assert!(matches!(error, BackendError::Memory { .. }), "{error}");
}

/// Bytes in the cache where the gates have none: more than one chunk of a decoding step, and copied blocks.
#[test]
fn chunks_and_copies_of_bytes() {
    let model = ragged(Scheme::Bf16, Scheme::Bf16);
    let loaded = MetalModel::load(Emulator::new(), &model, OPTIONS).expect("load");
    let mut make = |kv| Ok(Box::new(MetalBackend::new(&loaded, kv)?) as Box<dyn Backend>);
    let mut rig = Rig::new(Subject {
        model: Arc::clone(&model),
        make: &mut make,
        reproducibility: Reproducibility::WithinClass,
        bound: 1e-5,
        threads: 1,
        seed: 20,
    });
    let (prompt, more) = (rig.tokens(300), rig.tokens(4));
    let subject = rig.subject_with(640, KvKind::Q8_0).expect("a backend");
    let [found, expected] =
        [subject, rig.oracle_with(&model, 640, KvKind::Q8_0)].map(|mut bench| {
            let mut trunk = Sequence::new(prompt.clone());
            let mut logits = bench.evaluate(&mut [&mut trunk], 300, 1).expect("a prompt");
            // Both write into what was one block.
            let mut fork = trunk.fork(&mut bench.pool);
            for sequence in [&mut trunk, &mut fork] {
                sequence.append(&more);
                logits.extend(bench.evaluate(&mut [sequence], 4, 4).expect("a step"));
            }
            logits
        });
    let finding = rig.within(1e-5, "300 tokens", &found, &expected);
    assert!(finding.holds() && found.len() == 9, "{finding:?}");
    let launched = loaded.device().launched.lock().unwrap().clone();
    for name in ["attend_merge", "copy_blocks"] {
        assert!(launched.iter().any(|(n, constants)| *n == name && constants[4] == 1), "{name}");
    }
}

/// Where memory cannot be shared, every tensor is copied once.
#[test]
fn weights_that_cannot_be_shared_are_copied() {
    let model = ragged(Scheme::Q4_0, Scheme::Q8_0);
    let mut device = Emulator::new();
    device.refuses_to_share = true;
    let loaded = MetalModel::load(device, &model, OPTIONS).expect("load");
    assert!(loaded.describe().contains(", 0 bytes of weights mapped"), "{}", loaded.describe());
    run(&model, &loaded, 1e-6, 19, &["logits"]).expect("logits");
}

/// A step may be submitted before the token that it continues with has been read.
#[test]
fn a_step_follows_a_token_that_nobody_has_read() {
    let model = ragged(Scheme::Bf16, Scheme::Bf16);
    let loaded = MetalModel::load(Emulator::new(), &model, OPTIONS).expect("load");
    let row = |position| {
        let params = SamplingParams { temperature: 0.9, seed: 5, ..Default::default() };
        Row { token: 0, want: Want::Sample(Box::new(Sample::new(params, position))) }
    };
    let batch = |input, position| {
        let mut batch = Batch::default();
        batch.push([input], position, &[0]);
        batch.rows.push(row(position as u32 + 1));
        batch
    };
    let new = || {
        let kv = KvConfig { blocks: 1, kind: KvKind::Bf16 };
        MetalBackend::new(&loaded, kv).expect("a backend")
    };
    let drawn = |output: &Output| output.tokens()[0].expect("a token");
    let (mut output, mut alone, mut ahead) = (Output::default(), Vec::new(), Vec::new());
    let (mut backend, mut input) = (new(), 3);
    for position in 0..4 {
        backend.forward(&batch(Input::Token(input), position), &mut output).expect("a step");
        input = drawn(&output);
        alone.push(input);
    }
    let mut backend = new();
    backend.submit(&batch(Input::Token(3), 0)).expect("a step");
    for position in 1..5 {
        let next = backend.submit(&batch(Input::Sampled(0), position));
        next.expect("a step");
        backend.collect(&mut output).expect("an answer");
        ahead.push(drawn(&output));
    }
    assert_eq!(alone, ahead);
    backend.submit(&batch(Input::Sampled(0), 5)).expect("a second one in flight");
    let third = backend.submit(&batch(Input::Sampled(0), 6));
    assert!(matches!(third, Err(BackendError::Batch(_))), "{third:?}");
}

/// Loads a model with a fault in a kernel and runs a gate; says what was found.
fn found(fault: Fault, gate: &str) -> String {
    found_of(Class::Simdgroup, Scheme::Bf16, fault, gate)
}

/// The same for a class of kernels and a scheme.
fn found_of(class: Class, scheme: Scheme, fault: Fault, gate: &str) -> String {
    let model = ragged(scheme, Scheme::Bf16);
    let device = Emulator::with(Some(fault), 1 << 40);
    let outcome = MetalModel::load(device, &model, Options { class: Some(class), ..OPTIONS })
        .map_err(|error| error.to_string())
        .and_then(|loaded| run(&model, &loaded, 1e-6, 18, &[gate]));
    outcome.expect_err("the fault is found")
}

#[test]
fn a_missing_barrier_is_found() {
    let barrier = "    if (lane == 0) scratch[simdgroup] = value;\n    threadgroup_barrier(mem_flags::mem_threadgroup);\n";
    let none = "    if (lane == 0) scratch[simdgroup] = value;\n";
    let why = found(("norm", barrier, none), "logits");
    assert!(why.contains("race: ") && why.contains(" threadgroup memory at byte"), "{why}");
}

#[test]
fn a_barrier_of_the_wrong_memory_is_found() {
    let edited = "edit.bias;\n    }\n    threadgroup_barrier(mem_flags::mem_device);";
    let wrong = "edit.bias;\n    }\n    threadgroup_barrier(mem_flags::mem_threadgroup);";
    let why = found(("sample", edited, wrong), "sampling");
    assert!(why.contains("race: reads buffer 0"), "{why}");
}

/// The probe launches the kernel that the gate would, and is first.
#[test]
fn faults_of_tensors_are_found() {
    let found = |from, to| found_of(Class::Tensor, Scheme::Q8_0, (TENSOR.0, from, to), "logits");
    let expand = "expand_tile<T>(rows, k, tile, thread_index);";
    let before = "threadgroup_barrier(mem_flags::mem_threadgroup);\n        expand_tile<T>(rows, k, tile, thread_index);";
    let after = "expand_tile<T>(rows, k, tile, thread_index);\n        threadgroup_barrier(mem_flags::mem_threadgroup);";
    let why = found(before, expand);
    assert!(why.contains("race: writes threadgroup memory"), "{why}");
    let why = found(after, expand);
    assert!(why.contains("race: reads threadgroup memory"), "{why}");
    let why = found("row >= rows.end", "row > rows.end");
    assert!(why.contains("race: ") || why.contains("out of bounds: "), "{why}");
    let why = found("if (!sums.is_valid_element(i)) continue;", "");
    assert!(why.contains("race: ") || why.contains("out of bounds: "), "{why}");
    let beyond = (TENSOR.0, "Extents(COLS, rows.end)", "Extents(COLS, rows.end + 64)");
    let why = found_of(Class::Tensor, Scheme::Bf16, beyond, "logits");
    assert!(why.contains("out of bounds: reads"), "{why}");
    let why = found("execution_simdgroups<4>", "execution_simdgroups<2>");
    assert!(why.contains("an operation of 64 threads in a threadgroup of 128"), "{why}");
    let why = found(
        "product.run(left, right, sums);\n    }",
        "if (thread_index < 64) product.run(left, right, sums);\n    }",
    );
    assert!(why.contains("divergence"), "{why}");
}

#[test]
fn a_divergent_barrier_is_found() {
    let barrier = "        if (KV == KV_Q8_0) {\n            shared->key_scales";
    let divergent = "        threadgroup_barrier(mem_flags::mem_threadgroup);\n        if (KV == KV_Q8_0) {\n            shared->key_scales";
    let why = found(("attend_split", barrier, divergent), "logits");
    assert!(why.contains("divergence"), "{why}");
}

#[test]
fn a_wrong_simdgroup_width_is_found() {
    let why = found(
        ("project_few", "k = lane * 8; k < COLS; k += 256", "k = lane * 8; k < COLS; k += 512"),
        "logits",
    );
    assert!(why.contains("probe") || why.contains("logits"), "{why}");
    let why = found(
        ("rope", "head = group.y * 8 + simdgroup;", "head = group.y * 8 + simdgroup / 2;"),
        "logits",
    );
    assert!(why.contains("race"), "{why}");
}

#[test]
fn a_tile_edge_that_is_one_off_is_found() {
    let why = found(
        (
            "project_many",
            "(rows.end - rows.first - row) / 8)",
            "(rows.end - rows.first - row) / 8 + 1)",
        ),
        "logits",
    );
    assert!(why.contains("out of bounds: reads"), "{why}");
    let why = found(("attend_flash", "block <= last / BLOCK", "block < last / BLOCK"), "logits");
    assert!(why.contains("logits"), "{why}");
    let why = found(("embed", "k < HIDDEN; k += 128 * 8", "k <= HIDDEN; k += 128 * 8"), "logits");
    assert!(why.contains("buffer"), "{why}");
}

#[test]
fn a_pointer_into_the_wrong_memory_is_found() {
    let why = found(
        (
            "norm",
            "threadgroup float* scratch [[threadgroup(0)]]",
            "device float* scratch [[threadgroup(0)]]",
        ),
        "logits",
    );
    assert!(why.contains("error:"), "{why}");
}

/// What the emulator cannot tell from Metal is not written: casts between vectors convert there and reinterpret here.
#[test]
fn vectors_are_converted_by_element() {
    for (name, source) in SOURCES.into_iter().chain([TENSOR]) {
        let text = expand(source);
        for kind in ["char", "uchar", "ushort", "int", "uint", "ulong", "float"] {
            for size in 2..=4 {
                let cast = format!("{kind}{size}(");
                let at = text.match_indices(&cast).find(|(at, _)| {
                    !text[..*at].ends_with(|c: char| c.is_alphanumeric() || c == '_')
                });
                assert!(at.is_none(), "{name} has {cast}");
                let cast = format!("({kind}{size})");
                assert!(!text.contains(&cast), "{name} has {cast}");
            }
        }
    }
}

/// Figures of the gate `logits` with other tokens.
#[test]
#[ignore = "prints figures"]
fn seeds() {
    let model = Arc::new(Model::builtin().expect("builtin"));
    for seed in (1..=6).chain([17]).chain(101..=110) {
        for class in Class::ALL {
            write!(io::stdout(), "{seed} {class:?} ").expect("written");
            gates_of(class, &model, 1e-5, seed, &["logits"]);
        }
    }
}
