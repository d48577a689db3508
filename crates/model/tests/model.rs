//! Files against the registry: what kipp writes opens again as what it was, and anything else is
//! refused by name.

use std::path::Path;

use model::gguf::{Array, Gguf, Value, Writer};
use model::layout::{self, Tensor};
use model::tensor::Bytes;
use model::{Checkpoint, Model, Origin, Scheme, TensorType, synthetic};

const SCHEMES: (Scheme, Scheme) = (Scheme::Q4_0, Scheme::Q8_0);

fn tiny() -> &'static Checkpoint {
    Checkpoint::find("kipp-tiny").unwrap()
}

#[test]
fn a_synthetic_file_holds_what_is_made_in_memory() {
    for schemes in [(Scheme::Q8_0, Scheme::Bf16), (Scheme::Bf16, Scheme::Q8_0)] {
        let path = std::env::temp_dir().join(format!("kipp-{}-synthetic.gguf", std::process::id()));
        let mut calls = Vec::new();
        synthetic::write(&path, tiny(), schemes, 7, |done, total| calls.push((done, total)))
            .unwrap();
        let file = Model::open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let memory = Model::synthetic(tiny(), schemes, 7).unwrap();

        assert_eq!(calls.last().map(|&(done, total)| done == total), Some(true));
        assert_eq!((file.scheme, file.head), schemes);
        assert_eq!(
            (file.checkpoint(), &file.origin),
            (Some(tiny()), &Origin::Synthetic { seed: 7 })
        );
        assert_eq!((file.identity, &file.origin), (memory.identity, &memory.origin));
        let (a, b) = (&file.weights, &memory.weights);
        assert_eq!(a.embedding.bytes(), b.embedding.bytes());
        assert_eq!(a.head.bytes().as_ptr(), a.embedding.bytes().as_ptr());
        assert_eq!(a.output_norm.as_f32(), b.output_norm.as_f32());
        for (a, b) in a.layers.iter().zip(&b.layers) {
            let matrices = |l: &model::Layer| l.projections().map(|m| m.bytes().to_vec());
            let norms = |l: &model::Layer| {
                [&l.attention_norm, &l.q_norm, &l.k_norm, &l.ffn_norm].map(|v| v.as_f32().to_vec())
            };
            assert_eq!(matrices(a), matrices(b));
            assert_eq!(norms(a), norms(b));
        }
    }
}

#[test]
fn a_synthetic_model_may_have_any_dimensions_and_a_head_of_its_own() {
    let spec = model::Spec {
        layers: 1,
        hidden: 64,
        ffn: 96,
        heads: 24,
        vocab: 40,
        context: 32,
        theta: 1e4,
        tied: false,
    };
    let model = Model::synthetic(spec, (Scheme::Q4_1, Scheme::Bf16), 3).unwrap();
    assert_eq!((model.checkpoint(), *model.spec()), (None, spec));
    assert_eq!(model.weights.layers[0].o.cols, 24 * 128);
    assert_eq!((model.weights.head.rows, model.weights.head.ty), (40, TensorType::Bf16));
    assert_ne!(model.weights.head.bytes(), model.weights.embedding.bytes());
    let mut row = [0.0; 64];
    model.weights.head.row_f32(39, &mut row);
    assert!(row.iter().all(|x| x.abs() < 0.15) && row.iter().any(|x| x.abs() > 0.02));
}

/// kipp-tiny's metadata and tensors as a q4_0 file has them; the weights will be zeros.
fn parts() -> (Vec<(String, Value)>, Vec<Tensor>) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/kipp-tiny.gguf");
    let mut metadata = Gguf::open(&path).unwrap().metadata;
    metadata.retain(|(key, _)| key != "general.alignment");
    set(&mut metadata, "kipp.scheme", Value::String("q4_0".into()));
    set(&mut metadata, "general.file_type", Value::U32(2));
    (metadata, layout::tensors(&tiny().spec, SCHEMES.0, SCHEMES.1))
}

fn set(metadata: &mut [(String, Value)], key: &str, value: Value) {
    metadata.iter_mut().find(|(k, _)| k == key).unwrap().1 = value;
}

fn find<'a>(tensors: &'a mut [Tensor], name: &str) -> &'a mut Tensor {
    tensors.iter_mut().find(|tensor| tensor.name == name).unwrap()
}

fn open(metadata: &[(String, Value)], tensors: &[Tensor]) -> model::Result<Model> {
    let mut writer = Writer::new(Vec::new(), metadata, tensors)?;
    tensors.iter().try_for_each(|tensor| writer.append(&vec![0; tensor.bytes()]))?;
    Model::read(Bytes::new(writer.finish()?))
}

#[test]
fn metadata_that_differs_from_the_registry_is_refused() {
    let (metadata, tensors) = parts();
    assert!(open(&metadata, &tensors).is_ok());

    let text = |text: &str| Value::String(text.into());
    let cases = [
        ("general.architecture", text("llama"), r#"expected "qwen3", found "llama""#),
        ("kipp.checkpoint", text("qwen3-5b"), "expected a registered checkpoint, found qwen3-5b"),
        ("kipp.checkpoint", Value::U32(1), "expected a string, found 1"),
        ("kipp.scheme", text("q5_0"), "expected bf16, q8_0, q4_1 or q4_0, found q5_0"),
        (
            "kipp.source.repository",
            text("else/where"),
            r#"expected "kipp-tiny", found "else/where""#,
        ),
        ("kipp.source.revision", text("main"), r#"found "main""#),
        ("qwen3.block_count", Value::U32(7), "expected 6, found 7"),
        ("qwen3.context_length", Value::U32(4096), "expected 2048, found 4096"),
        ("qwen3.attention.head_count_kv", Value::U32(4), "expected 8, found 4"),
        (
            "qwen3.attention.layer_norm_rms_epsilon",
            Value::F32(1e-5),
            "expected 0.000001, found 0.00001",
        ),
        ("qwen3.rope.freq_base", Value::F32(1e4), "expected 1000000, found 10000"),
        ("tokenizer.ggml.pre", text("llama3"), r#"expected "qwen2", found "llama3""#),
        ("tokenizer.ggml.eos_token_id", Value::U32(8166), "expected 8168, found 8166"),
        ("tokenizer.ggml.add_bos_token", Value::Bool(true), "expected false, found true"),
        (
            "tokenizer.ggml.merges",
            Value::Array(Array::of_strings(1, |_, _| ())),
            "expected 7910 x String, found 1 x String",
        ),
    ];
    for (key, value, reason) in cases {
        let mut metadata = metadata.clone();
        set(&mut metadata, key, value);
        let error = open(&metadata, &tensors).err().unwrap().to_string();
        assert!(error.starts_with(&format!("`{key}`: ")) && error.contains(reason), "{error}");
    }
    for key in ["tokenizer.ggml.merges", "qwen3.rope.freq_base", "kipp.source.sha256"] {
        let mut metadata = metadata.clone();
        metadata.retain(|(k, _)| k != key);
        let error = open(&metadata, &tensors).err().unwrap().to_string();
        assert_eq!(error, format!("`{key}`: expected a value, found no such key"));
    }
}

/// What would change the computation is refused, not left out; what changes nothing may be said.
#[test]
fn settings_that_the_family_does_not_have_are_refused() {
    let (metadata, tensors) = parts();
    let mut foreign = metadata.clone();
    foreign.retain(|(key, _)| !key.starts_with("kipp."));
    let text = |text: &str| Value::String(text.into());
    let cases = [
        ("rope.scaling.type", text("none"), text("yarn"), r#"expected "none", found "yarn""#),
        ("rope.scaling.factor", Value::F32(1.0), Value::F32(4.0), "expected 1, found 4"),
        ("rope.scaling.attn_factor", Value::F32(1.0), Value::F32(1.2), "expected 1, found 1.2"),
        ("rope.scale_linear", Value::F32(1.0), Value::F32(2.0), "expected 1, found 2"),
        ("rope.dimension_count", Value::U64(128), Value::U32(64), "expected 128, found 64"),
        ("attention.causal", Value::Bool(true), Value::Bool(false), "expected true, found false"),
        ("expert_count", Value::U32(0), Value::U32(128), "expected 0, found 128"),
        ("pooling_type", Value::U32(0), Value::U32(3), "expected 0, found 3"),
    ];
    for (key, neutral, other, reason) in cases {
        for metadata in [&metadata, &foreign] {
            let mut metadata = metadata.clone();
            metadata.push((format!("qwen3.{key}"), neutral.clone()));
            assert!(open(&metadata, &tensors).is_ok(), "{key}");
            metadata.last_mut().unwrap().1 = other.clone();
            let error = open(&metadata, &tensors).err().unwrap().to_string();
            assert_eq!(error, format!("`qwen3.{key}`: {reason}"));
        }
    }
}

/// Other programs copy the keys that they do not know, so they say what the file was.
#[test]
fn a_file_that_another_program_quantised_is_foreign() {
    let (mut metadata, mut tensors) = parts();
    set(&mut metadata, "general.file_type", Value::U32(15));
    for tensor in tensors.iter_mut().filter(|tensor| tensor.ty == TensorType::Q4_0) {
        tensor.ty = TensorType::Q4K;
    }
    find(&mut tensors, "blk.2.ffn_down.weight").ty = TensorType::Q6K;
    let model = open(&metadata, &tensors).unwrap();
    assert_eq!(
        (model.origin, model.scheme, model.head),
        (Origin::Foreign, Scheme::Q4K, Scheme::Q8_0)
    );
    assert_eq!(model.weights.layers[2].down.ty, TensorType::Q6K);
}

#[test]
fn a_part_of_a_model_says_that_it_is_one() {
    let (mut metadata, tensors) = parts();
    metadata.retain(|(key, _)| !key.starts_with("kipp."));
    metadata.push(("split.count".into(), Value::U16(1)));
    assert!(open(&metadata, &tensors).is_ok());
    set(&mut metadata, "split.count", Value::U16(2));
    let error = open(&metadata, &tensors[..20]).err().unwrap().to_string();
    assert!(error.starts_with("`split.count`: expected one file") && error.ends_with("found 2"));
}

/// Tokens are compared one by one, whatever holes or other types the arrays have, and nothing grows with the number of
/// tensors but the time to read it once.
#[test]
fn hostile_files_of_other_programs_are_refused_quickly() {
    let (mut metadata, mut tensors) = parts();
    metadata.retain(|(key, _)| !key.starts_with("kipp."));
    let tokens = "tokenizer.ggml.tokens";
    let Some(Value::Array(all)) =
        metadata.iter().find(|(key, _)| key == tokens).map(|(_, value)| value.clone())
    else {
        unreachable!("an array of tokens")
    };
    let strings: Vec<_> = all.strings().collect();
    let holes = |at: usize| {
        Value::Array(Array::of_strings(strings.len(), |i, out| {
            *out += if i % at == 0 { "" } else { &strings[i] }
        }))
    };
    let short = Array::of_strings(strings.len() - 1, |i, out| *out += &strings[i]);
    let cases = [
        (tokens, holes(100), r#"`tokenizer.ggml.tokens`[0]: expected "!", found """#),
        (tokens, Value::Array(short), "dimensions: expected those of one registered checkpoint"),
        (tokens, Value::Array(Array::of_i32(0..8192)), "expected 8192 x String, found 8192 x I32"),
        (tokens, Value::Bool(true), "`tokenizer.ggml.tokens`: expected an array, found true"),
        ("tokenizer.ggml.token_type", Value::F32(0.0), "`tokenizer.ggml.token_type`: expected"),
        (
            "qwen3.block_count",
            Value::I32(-6),
            "`qwen3.block_count`: expected a whole number, found -6",
        ),
        ("qwen3.block_count", Value::U64(u64::MAX), "dimensions: expected those of one registered"),
        ("qwen3.embedding_length", Value::F32(256.0), "expected a whole number, found 256"),
        ("qwen3.rope.freq_base", Value::F32(f32::NAN), "dimensions: expected those of one"),
        ("qwen3.rope.freq_base", Value::U32(1_000_000), "expected a float, found 1000000"),
    ];
    for (key, value, reason) in cases {
        let mut metadata = metadata.clone();
        set(&mut metadata, key, value);
        let error = open(&metadata, &tensors).err().unwrap().to_string();
        assert!(error.contains(reason), "{key}: {error}");
    }
    let extra = find(&mut tensors, "blk.0.attn_k.weight").clone();
    tensors.extend((0..60_000).map(|i| {
        let name = format!("blk.{i}.x");
        Tensor { name, rows: 1, cols: 32, ..extra.clone() }
    }));
    let start = std::time::Instant::now();
    let error = open(&metadata, &tensors).err().unwrap().to_string();
    assert!(error.contains("expected no such tensor in kipp-tiny, found one"), "{error}");
    assert!(start.elapsed() < std::time::Duration::from_secs(20));
}

#[test]
fn one_changed_token_merge_or_type_is_named() {
    let (metadata, tensors) = parts();
    let with = |key: &str, change: &dyn Fn(&Array) -> Array| {
        let mut metadata = metadata.clone();
        let (_, value) = metadata.iter_mut().find(|(k, _)| k == key).unwrap();
        *value = Value::Array(change(value.as_array().unwrap()));
        open(&metadata, &tensors).err().unwrap().to_string()
    };
    let swapped = |i: usize, text: &'static str| {
        move |array: &Array| {
            let strings: Vec<_> = array.strings().collect();
            Array::of_strings(strings.len(), |at, out| {
                *out += if at == i { text } else { &strings[at] }
            })
        }
    };
    assert_eq!(
        with("tokenizer.ggml.tokens", &swapped(1925, "once")),
        r#"`tokenizer.ggml.tokens`[1925]: expected "On", found "once""#
    );
    assert_eq!(
        with("tokenizer.ggml.merges", &swapped(2, "n i")),
        r#"`tokenizer.ggml.merges`[2]: expected "i n", found "n i""#
    );
    let normal = |array: &Array| Array::of_i32(array.i32s().map(|_| 1));
    assert_eq!(
        with("tokenizer.ggml.token_type", &normal),
        "`tokenizer.ggml.token_type`[8166]: expected 3, found 1"
    );
}

#[test]
fn tensors_that_differ_from_the_layout_are_refused() {
    let (metadata, tensors) = parts();
    let with = |change: &dyn Fn(&mut Vec<Tensor>)| {
        let mut tensors = tensors.clone();
        change(&mut tensors);
        open(&metadata, &tensors).err().unwrap().to_string()
    };
    let name = "blk.3.ffn_up.weight";
    assert_eq!(
        with(&|tensors| tensors.retain(|tensor| tensor.name != name)),
        format!("tensor `{name}`: presence: expected one, found none")
    );
    assert_eq!(
        with(&|tensors| find(tensors, name).ty = TensorType::Bf16),
        format!("tensor `{name}`: type: expected Q4_0, found BF16")
    );
    assert_eq!(
        with(&|tensors| find(tensors, name).rows = 1024),
        format!("tensor `{name}`: shape: expected [256, 768], found [256, 1024]")
    );
    assert_eq!(
        with(&|tensors| {
            let mut head = find(tensors, "token_embd.weight").clone();
            head.name = "output.weight".into();
            tensors.push(head);
        }),
        "tensor `output.weight`: expected no such tensor in kipp-tiny, found one"
    );
    assert_eq!(
        with(&|tensors| find(tensors, "token_embd.weight").ty = TensorType::F32),
        "tensor `token_embd.weight`: type: expected any but F32, found F32"
    );
    assert_eq!(
        with(&|tensors| find(tensors, "output_norm.weight").ty = TensorType::Bf16),
        "tensor `output_norm.weight`: type: expected F32, found BF16"
    );
}

#[test]
fn what_is_not_a_file_is_an_error() {
    let missing = Model::open(Path::new("no/such/file.gguf")).err().unwrap().to_string();
    assert!(missing.starts_with("no/such/file.gguf: "), "{missing}");
    let folder = Model::open(&std::env::temp_dir()).err().unwrap().to_string();
    assert!(folder.ends_with(": kind: expected a regular file, found a folder"), "{folder}");
}
