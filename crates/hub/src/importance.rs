//! How much each input of a matrix matters: the mean square of the values that it is multiplied with on some text. The
//! file is laid out as llama.cpp's importance matrices, so that either program can use the other's.

use std::collections::HashMap;
use std::path::Path;

use model::gguf::{Array, Gguf, Value, Writer};
use model::layout::{self, Role, Tensor};
use model::{Error, Part, Result, Scheme, Spec, TensorType};

const SUMS: &str = ".in_sum2";
const COUNTS: &str = ".counts";
/// What an input counts at least, relative to the mean: none is free to become anything.
const LEAST: f32 = 1e-3;

/// Weights of the inputs of a checkpoint's matrices.
#[derive(Debug, Default)]
pub struct Importance(HashMap<String, Vec<f32>>);

/// Squares of inputs, summed over tokens.
#[derive(Debug, Default, Clone)]
pub struct Squares {
    /// Sums, `[cols]`.
    pub sums: Vec<f64>,
    /// Tokens.
    pub count: u64,
}

impl Squares {
    /// Adds the inputs of some tokens, `[tokens, cols]`.
    pub fn add(&mut self, inputs: &[f32], cols: usize) {
        self.sums.resize(cols, 0.0);
        for token in inputs.chunks_exact(cols) {
            for (sum, &x) in self.sums.iter_mut().zip(token) {
                *sum += f64::from(x) * f64::from(x);
            }
            self.count += 1;
        }
    }
}

impl Importance {
    /// Reads a file and checks it against a checkpoint's matrices.
    pub fn read(path: &Path, spec: &Spec) -> Result<Self> {
        let gguf = Gguf::open(path)?;
        Self::check(&gguf, spec).map_err(|error| error.in_file(path))
    }

    fn check(gguf: &Gguf, spec: &Spec) -> Result<Self> {
        let find = |name: &str| gguf.tensors.iter().find(|tensor| tensor.name == name);
        let mut found = HashMap::new();
        for tensor in layout::tensors(spec, Scheme::Bf16, Scheme::Bf16) {
            let (sums, counts) = (tensor.name.clone() + SUMS, tensor.name.clone() + COUNTS);
            let (Some(sums), Some(counts)) = (find(&sums), find(&counts)) else { continue };
            let floats = |info: &model::gguf::TensorInfo, count: usize| {
                let field = format!("tensor `{}`", info.name);
                if info.ty != TensorType::F32 || info.range.len() != 4 * count {
                    let found = format!("{:?} of {}", info.dims, info.ty);
                    return Err(Error::mismatch(field, format_args!("{count} floats"), found));
                }
                let values: Vec<f32> =
                    gguf.bytes(info).as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
                match values.iter().find(|value| !value.is_finite() || **value < 0.0) {
                    Some(value) => Err(Error::mismatch(field, "finite squares", value)),
                    None => Ok(values),
                }
            };
            let (sums, counts) = (floats(sums, tensor.cols)?, floats(counts, 1)?);
            let mean = sums.iter().sum::<f32>() / tensor.cols as f32;
            if counts[0] > 0.0 && mean > 0.0 && mean.is_finite() {
                let weight = |sum: &f32| (sum / mean).max(LEAST);
                found.insert(tensor.name, sums.iter().map(weight).collect());
            }
        }
        if found.is_empty() {
            return Err(Error::mismatch("importance of the checkpoint's matrices", "some", "none"));
        }
        Ok(Self(found))
    }

    /// The weights of a matrix's inputs, `[cols]`, with a mean of about 1.
    pub fn of(&self, name: &str) -> Option<&[f32]> {
        self.0.get(name).map(Vec::as_slice)
    }

    /// Writes what was summed over a text in chunks of `chunk` tokens, by the names of the matrices. The file appears
    /// under its name when it is complete.
    pub fn write(
        path: &Path,
        squares: &[(String, Squares)],
        text: &str,
        chunk: usize,
    ) -> Result<()> {
        let tensor = |name: String, cols| Tensor {
            name,
            upstream: String::new(),
            role: Role::Norm,
            ty: TensorType::F32,
            rows: 1,
            cols,
        };
        let tensors: Vec<Tensor> = squares
            .iter()
            .flat_map(|(name, squares)| {
                [
                    tensor(format!("{name}{SUMS}"), squares.sums.len()),
                    tensor(format!("{name}{COUNTS}"), 1),
                ]
            })
            .collect();
        let tokens = squares.iter().map(|(_, squares)| squares.count).max().unwrap_or(0);
        let metadata = [
            ("general.type".to_owned(), Value::String("imatrix".into())),
            (
                "imatrix.datasets".to_owned(),
                Value::Array(Array::of_strings(1, |_, out| *out += text)),
            ),
            ("imatrix.chunk_count".to_owned(), Value::U32(tokens.div_ceil(chunk as u64) as u32)),
            ("imatrix.chunk_size".to_owned(), Value::U32(chunk as u32)),
        ];
        let write = || {
            let mut writer = Writer::new(Part::create(path)?, &metadata, &tensors)?;
            for (_, squares) in squares {
                let sums = squares.sums.iter().flat_map(|&sum| (sum as f32).to_le_bytes());
                writer.append(&sums.collect::<Vec<u8>>())?;
                writer.append(&(squares.count as f32).to_le_bytes())?;
            }
            Ok(writer.finish()?.complete()?)
        };
        write().map_err(|error: Error| error.in_file(path))
    }
}
