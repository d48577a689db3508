//! GGUF files: what is written reads back, and what is damaged is refused with the reason, quickly
//! and without a panic.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use model::gguf::{Array, Gguf, Value, Writer};
use model::layout::{Role, Tensor};
use model::tensor::Bytes;
use model::{Model, TensorType};
use proptest::prelude::*;

fn data(dir: &str) -> Vec<PathBuf> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join(dir);
    let mut files: Vec<_> = dir.read_dir().unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

/// File name without the ending, and what the reason for its refusal has to say.
const CASES: [(&str, &str); 39] = [
    ("00_control", "`qwen3.rope.freq_base`: expected a value, found no such key"),
    ("00_control_align64", "expected a value, found no such key"),
    ("00_control_two", "expected a value, found no such key"),
    ("01a_magic_only", "version: expected 4 bytes, found 0 before the end of the file"),
    ("01b_empty", "magic: expected 4 bytes, found 0 before the end of the file"),
    ("01c_nkv_2p63", "metadata key"),
    ("01d_ntensors_2p63", "name of tensor 1: expected 1 to 64 bytes, found 0"),
    ("01e_keylen_2p63", "metadata key 0 of 1: expected 9223372036854775808 bytes"),
    ("01f_strlen_2p62", "`general.name`: expected 4611686018427387904 bytes"),
    ("01g_arrlen_2p62", "`a`: expected 4611686018427387904 bytes"),
    ("01h_arr_of_str_2p40", "element 1 of `a`: expected 137438953473 bytes"),
    ("01i_nested_arr_len", "`a`: expected an array of scalars or strings, found one of arrays"),
    (
        "01j_nested_arr_depth50k",
        "`a`: expected an array of scalars or strings, found one of arrays",
    ),
    ("01k_kv_type_13", "type of `a`: expected 0 to 12, found 13"),
    ("03a_ndims5", "tensor `t`: dimensions: expected 1 to 4, found 5"),
    ("03b_ndims9", "tensor `t`: dimensions: expected 1 to 4, found 9"),
    ("03c_ndims_4g", "tensor `t`: dimensions: expected 1 to 4, found 4294967295"),
    ("04a_dim0", "tensor `t`: shape: expected no dimension of 0, found [0]"),
    ("04b_dim32x0", "tensor `t`: shape: expected no dimension of 0, found [32, 0]"),
    ("05a_align0", "`general.alignment`: expected a power of two from 8 to 65536, found 0"),
    ("05b_align3", "`general.alignment`: expected a power of two from 8 to 65536, found 3"),
    ("05c_align_2p31", "expected a power of two from 8 to 65536, found 2147483648"),
    ("05d_align_i32", "`general.alignment`: expected a value of type U32, found I32"),
    ("05e_align_str", "`general.alignment`: expected a value of type U32, found String"),
    ("06a_dup_tensor", "tensor `a`: expected one, found a second one"),
    ("06b_dup_key", "`general.architecture`: expected one value, found a second one"),
    (
        "08a_type99",
        "tensor `t`: type: expected F32, F16, BF16, Q8_0, Q4_1, Q4_0, Q4_K, Q5_K or Q6_K, found number 99",
    ),
    (
        "08b_type_removed4",
        "tensor `t`: type: expected F32, F16, BF16, Q8_0, Q4_1, Q4_0, Q4_K, Q5_K or Q6_K, found number 4",
    ),
    ("08c_type_4g", "found number 4294967295"),
    ("08d_q8_0_cols31", "shape: expected rows of a multiple of 32 elements for Q8_0, found [31]"),
    (
        "08e_q4k_cols128",
        "tensor `t`: shape: expected rows of a multiple of 256 elements for Q4_K, found [128, 2]",
    ),
    ("08f_empty_key", "metadata key 1: expected a name, found an empty one"),
    ("08g_key_bad_utf8", "metadata key 1 of 2: expected UTF-8"),
    ("08h_version0", "version: expected 3, found 0"),
    ("08i_version4", "version: expected 3, found 4"),
    ("08j_bigendian", "byte order: expected little-endian, found big-endian"),
    ("08k_bad_magic", "magic: expected GGUF, found GGML"),
    ("08l_empty_tensor_name", "name of tensor 0: expected 1 to 64 bytes, found 0"),
    ("08m_arch_twice_type", "`general.architecture`: expected a value of type String, found U32"),
];

#[test]
fn every_damaged_file_is_refused_with_its_reason() {
    let files = data("tests/data/gguf");
    assert_eq!(files.len(), CASES.len());
    let start = Instant::now();
    for (path, (name, reason)) in files.iter().zip(CASES) {
        assert_eq!(path.file_stem().unwrap(), name);
        let error = Model::open(path).err().unwrap().to_string();
        assert!(error.starts_with(&path.display().to_string()), "{name}: {error}");
        assert!(error.contains(reason), "{name}: {error}");
        assert_eq!(Gguf::open(path).is_ok(), name.starts_with("00_"), "{name}");
    }
    // 100 ms each, taken together because other programs may run beside this.
    assert!(start.elapsed() < Duration::from_millis(100) * CASES.len() as u32);
}

/// A file with a value of every type and three tensors.
fn small_file() -> Vec<u8> {
    let metadata = vec![
        ("general.architecture".into(), Value::String("qwen3".into())),
        ("a".into(), Value::U8(1)),
        ("b".into(), Value::I8(-1)),
        ("c".into(), Value::U16(2)),
        ("d".into(), Value::I16(-2)),
        ("e".into(), Value::U32(3)),
        ("f".into(), Value::I32(-3)),
        ("g".into(), Value::F32(0.5)),
        ("h".into(), Value::Bool(true)),
        ("i".into(), Value::U64(4)),
        ("j".into(), Value::I64(-4)),
        ("k".into(), Value::F64(-0.25)),
        ("l".into(), Value::Array(Array::of_strings(3, |i, text| *text += &"é".repeat(i)))),
        ("m".into(), Value::Array(Array::of_i32(-2..2))),
    ];
    let tensors = [
        tensor("x", Role::Norm, TensorType::F32, 1, 3),
        tensor("y", Role::Projection, TensorType::Q4_0, 2, 64),
        tensor("z", Role::Head, TensorType::Bf16, 3, 5),
    ];
    write(&metadata, &tensors, |i| i as u8)
}

#[test]
fn names_that_could_take_over_a_terminal_are_refused() {
    let refusal = |key: &str, name: &str| {
        let tensors = [tensor(name, Role::Norm, TensorType::F32, 1, 3)];
        let file = write(&[(key.into(), Value::U8(1))], &tensors, |_| 0);
        Gguf::read(Bytes::new(file)).err().map(|error| error.to_string())
    };
    assert_eq!(refusal("a", "x"), None);
    let expected = r#"metadata key 0: expected no control characters, found "a\u{1b}[2J""#;
    assert_eq!(refusal("a\x1b[2J", "x").as_deref(), Some(expected));
    let expected = r#"name of tensor 0: expected no control characters, found "x\n""#;
    assert_eq!(refusal("a", "x\n").as_deref(), Some(expected));
}

fn tensor(name: &str, role: Role, ty: TensorType, rows: usize, cols: usize) -> Tensor {
    Tensor { name: name.into(), upstream: String::new(), role, ty, rows, cols }
}

fn write(metadata: &[(String, Value)], tensors: &[Tensor], byte: impl Fn(usize) -> u8) -> Vec<u8> {
    let mut writer = Writer::new(Vec::new(), metadata, tensors).unwrap();
    for tensor in tensors {
        let bytes: Vec<u8> = (0..tensor.bytes()).map(&byte).collect();
        let (first, second) = bytes.split_at(bytes.len() / 3);
        writer.append(first).unwrap();
        writer.append(second).unwrap();
    }
    writer.finish().unwrap()
}

fn read(bytes: &[u8]) -> model::Result<Gguf> {
    Gguf::read(Bytes::new(bytes.to_vec()))
}

#[test]
fn every_flipped_bit_is_refused_or_read_and_never_panics() {
    let mut file = small_file();
    let original = read(&file).unwrap();
    let mut refused = 0;
    for at in 0..file.len() {
        for mask in [1, 2, 4, 8, 16, 32, 64, 128, 0xff] {
            file[at] ^= mask;
            match read(&file) {
                Err(_) => refused += 1,
                Ok(gguf) => {
                    // Whatever was read has to be usable.
                    gguf.tensors.iter().for_each(|tensor| drop(gguf.bytes(tensor).to_vec()));
                    let _ = gguf.check_values();
                    let _ = Model::read(Bytes::new(file.clone()));
                }
            }
            file[at] ^= mask;
        }
    }
    assert!(refused > file.len(), "{refused} of {} flips", 9 * file.len());
    assert_eq!(read(&file).unwrap().tensors, original.tensors);
}

#[test]
fn every_truncated_file_is_refused() {
    let file = small_file();
    // What follows the last tensor is padding.
    let needed = read(&file).unwrap().tensors.iter().map(|tensor| tensor.range.end).max().unwrap();
    for len in 0..needed {
        assert!(read(&file[..len]).is_err(), "{len} of {needed} bytes");
    }
    assert!(read(&file[..needed]).is_ok());
}

#[test]
fn offsets_have_to_be_aligned_inside_and_apart() {
    let file = small_file();
    let at = |name: &[u8]| file.windows(name.len()).rposition(|window| window == name).unwrap();
    // The entry of `y`: name, number of dimensions, two of them, type, offset.
    let offset = at(b"y\x02\0\0\0") + 1 + 4 + 16 + 4;
    let with = |value: u64| {
        let mut file = file.clone();
        file[offset..offset + 8].copy_from_slice(&value.to_le_bytes());
        read(&file).unwrap_err().to_string()
    };
    assert_eq!(file[offset], 32);
    assert_eq!(with(16), "tensor `y`: offset: expected a multiple of 32, found 16");
    assert!(with(0).starts_with("tensor `y`: offset: expected at least"));
    assert!(with(64 * 64).starts_with("tensor `y`: end: expected 4168 bytes, found"));
    assert!(with(u64::MAX - 63).contains("tensor `y`: "));
}

#[test]
fn a_weight_that_is_not_finite_is_found() {
    let tensors = [
        tensor("half", Role::Projection, TensorType::Q8_0, 1, 64),
        tensor("full", Role::Projection, TensorType::F32, 1, 4096),
        tensor("bf16", Role::Projection, TensorType::Bf16, 1, 8),
    ];
    let metadata = [("general.architecture".into(), Value::String("qwen3".into()))];
    let file = write(&metadata, &tensors, |_| 0);
    assert!(read(&file).unwrap().check_values().is_ok());
    let damaged = |index: usize, at: usize, bytes: &[u8]| {
        let mut file = file.clone();
        let start = read(&file).unwrap().tensors[index].range.start + at;
        file[start..start + bytes.len()].copy_from_slice(bytes);
        read(&file).unwrap().check_values().unwrap_err().to_string()
    };
    let expected = "expected a finite value in the range of";
    assert_eq!(
        damaged(0, 34, &[0, 0x7e]),
        format!("tensor `half`: element 32: {expected} Q8_0, found NaN")
    );
    let infinity = f32::INFINITY.to_le_bytes();
    assert_eq!(
        damaged(1, 4 * 3000, &infinity),
        format!("tensor `full`: element 3000: {expected} F32, found inf")
    );
    assert_eq!(
        damaged(2, 6, &[0xc0, 0x7f]),
        format!("tensor `bf16`: element 3: {expected} BF16, found NaN")
    );
}

#[test]
fn inputs_that_once_mattered_to_the_fuzzer_are_still_harmless() {
    for path in data("../../fuzz/corpus/gguf") {
        if let Ok(gguf) = Gguf::open(&path) {
            let _ = gguf.check_values();
        }
        let _ = Model::open(&path);
    }
}

fn values() -> impl Strategy<Value = Value> {
    prop_oneof![
        any::<u8>().prop_map(Value::U8),
        any::<i8>().prop_map(Value::I8),
        any::<u16>().prop_map(Value::U16),
        any::<i16>().prop_map(Value::I16),
        any::<u32>().prop_map(Value::U32),
        any::<i32>().prop_map(Value::I32),
        any::<f32>().prop_map(Value::F32),
        any::<bool>().prop_map(Value::Bool),
        ".{0,40}".prop_map(Value::String),
        any::<u64>().prop_map(Value::U64),
        any::<i64>().prop_map(Value::I64),
        any::<f64>().prop_map(Value::F64),
        prop::collection::vec(any::<i32>(), 0..20)
            .prop_map(|v| Value::Array(Array::of_i32(v.into_iter()))),
        prop::collection::vec(".{0,9}", 0..20)
            .prop_map(|v| Value::Array(Array::of_strings(v.len(), |i, text| *text += &v[i]))),
    ]
}

fn tensors() -> impl Strategy<Value = Vec<Tensor>> {
    let types =
        [TensorType::F32, TensorType::Bf16, TensorType::Q8_0, TensorType::Q4_1, TensorType::Q4_0];
    let one = (prop::sample::select(types.to_vec()), 1usize..5, 1usize..5, any::<bool>());
    prop::collection::vec(one, 0..6).prop_map(|tensors| {
        let made = tensors.into_iter().enumerate().map(|(i, (ty, rows, blocks, norm))| {
            let (role, rows) = if norm { (Role::Norm, 1) } else { (Role::Projection, rows) };
            tensor(&format!("tensor {i}"), role, ty, rows, blocks * ty.block())
        });
        made.collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..Default::default() })]

    #[test]
    fn what_is_written_reads_back(
        values in prop::collection::btree_map("[a-z._]{1,30}", values(), 0..12),
        tensors in tensors(),
    ) {
        let mut metadata = vec![("general.architecture".to_owned(), Value::String("any".into()))];
        metadata.extend(values.into_iter().filter(|(key, _)| !key.starts_with("general.")));
        let file = write(&metadata, &tensors, |i| (i * 31) as u8);
        let gguf = read(&file).unwrap();

        prop_assert_eq!(&gguf.metadata, &metadata);
        prop_assert_eq!(gguf.tensors.len(), tensors.len());
        for (read, written) in gguf.tensors.iter().zip(&tensors) {
            prop_assert_eq!((&read.name, read.ty, &read.dims), (&written.name, written.ty, &written.dims()));
            prop_assert_eq!(read.range.start % 32, 0);
            let bytes: Vec<u8> = (0..written.bytes()).map(|i| (i * 31) as u8).collect();
            prop_assert_eq!(&*gguf.bytes(read), &*bytes);
        }
    }

    #[test]
    fn no_bytes_make_the_reader_panic(start in 0usize..100, noise in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = read(&noise);
        let mut file = small_file();
        file.truncate(start);
        file.extend(noise);
        let _ = read(&file);
    }
}
