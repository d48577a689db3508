//! From f32 rows, wherever they come from, to stored tensors: in memory or streamed to a file,
//! encoded by all cores.

use std::num::NonZero;
use std::path::Path;
use std::thread;

use crate::error::{Error, Result};
use crate::gguf::Writer;
use crate::layout::{self, Tensor};
use crate::metadata::{self, Origin};
use crate::part::Part;
use crate::registry::Checkpoint;
use crate::scheme::{self, Scheme};
use crate::weights::{Layer, Weights};

/// Bytes of a tensor that are encoded before they are written, and so the memory that writing
/// needs.
const PIECE: usize = 32 << 20;

/// Something that can produce the rows of a checkpoint's tensors.
pub trait Source: Sync {
    /// Fills `out`, `[cols]`, with a row of a tensor.
    fn row(&self, tensor: &Tensor, row: usize, out: &mut [f32]);

    /// An error if rows that were given may be wrong.
    fn check(&self) -> Result<()> {
        Ok(())
    }

    /// How much each input of a tensor matters, `[cols]`, where that is known.
    fn importance(&self, _tensor: &Tensor) -> Option<&[f32]> {
        None
    }
}

/// The weights once more, to be stored under another scheme. A tensor that is not of this checkpoint's layout is
/// a fault of the caller.
impl Source for Weights {
    fn row(&self, tensor: &Tensor, row: usize, out: &mut [f32]) {
        let name = tensor.name.trim_end_matches(".weight");
        let layer = || {
            let (number, part) = name.strip_prefix("blk.")?.split_once('.')?;
            Some((self.layers.get(number.parse::<usize>().ok()?)?, part))
        };
        match (name, layer()) {
            ("token_embd", _) => self.embedding.row_f32(row, out),
            ("output_norm", _) => out.copy_from_slice(self.output_norm.as_f32()),
            ("output", _) => self.head.row_f32(row, out),
            (_, Some((layer, part))) => layer.row(part, row, out),
            (_, None) => panic!("no tensor `{}` in this checkpoint", tensor.name),
        }
    }

    fn check(&self) -> Result<()> {
        Weights::check(self)
    }
}

impl Layer {
    fn row(&self, part: &str, row: usize, out: &mut [f32]) {
        let matrix = match part {
            "attn_norm" => return out.copy_from_slice(self.attention_norm.as_f32()),
            "attn_q_norm" => return out.copy_from_slice(self.q_norm.as_f32()),
            "attn_k_norm" => return out.copy_from_slice(self.k_norm.as_f32()),
            "ffn_norm" => return out.copy_from_slice(self.ffn_norm.as_f32()),
            "attn_q" => &self.q,
            "attn_k" => &self.k,
            "attn_v" => &self.v,
            "attn_output" => &self.o,
            "ffn_gate" => &self.gate,
            "ffn_up" => &self.up,
            "ffn_down" => &self.down,
            other => panic!("no tensor `{other}` in a layer"),
        };
        matrix.row_f32(row, out);
    }
}

/// Writes a checkpoint's GGUF. The file appears under its name when it is complete. `progress` is
/// told the bytes of tensors written so far and in all.
pub fn write(
    path: &Path,
    checkpoint: &Checkpoint,
    (scheme, head): (Scheme, Scheme),
    origin: &Origin,
    source: &impl Source,
    mut progress: impl FnMut(u64, u64),
) -> Result<()> {
    let tensors = layout::tensors(&checkpoint.spec, scheme, head);
    let metadata = metadata::describe(checkpoint, scheme, origin);
    let total = tensors.iter().map(|tensor| tensor.bytes() as u64).sum();

    let mut write = || {
        let mut writer = Writer::new(Part::create(path)?, &metadata, &tensors)?;
        let (mut piece, mut done) = (Vec::new(), 0);
        for tensor in &tensors {
            let row_bytes = tensor.ty.row_bytes(tensor.cols);
            let rows_at_once = (PIECE / row_bytes).max(1);
            for first in (0..tensor.rows).step_by(rows_at_once) {
                let rows = rows_at_once.min(tensor.rows - first);
                piece.resize(rows * row_bytes, 0);
                encode(source, tensor, first, &mut piece)?;
                writer.append(&piece)?;
                done += piece.len() as u64;
                progress(done, total);
            }
        }
        source.check()?;
        Ok(writer.finish()?.complete()?)
    };
    write().map_err(|error: Error| error.in_file(path))
}

/// Encodes rows `first..` of a tensor into `out`, which holds whole rows.
pub(crate) fn encode(
    source: &impl Source,
    tensor: &Tensor,
    first: usize,
    out: &mut [u8],
) -> Result<()> {
    let row_bytes = tensor.ty.row_bytes(tensor.cols);
    let importance = source.importance(tensor);
    let encode = |first: usize, out: &mut [u8]| {
        let mut values = vec![0.0; tensor.cols];
        for (row, out) in (first..).zip(out.chunks_exact_mut(row_bytes)) {
            source.row(tensor, row, &mut values);
            scheme::encode(tensor.ty, &values, importance, out).map_err(|fault| Error::Value {
                tensor: tensor.upstream.clone(),
                index: row * tensor.cols + fault.index,
                value: fault.value,
                ty: tensor.ty,
            })?;
        }
        Ok(())
    };
    let threads = thread::available_parallelism().map_or(1, NonZero::get);
    let rows = (out.len() / row_bytes).div_ceil(threads);
    thread::scope(|scope| {
        let workers: Vec<_> = out
            .chunks_mut(rows * row_bytes)
            .enumerate()
            .map(|(i, out)| scope.spawn(move || encode(first + i * rows, out)))
            .collect();
        // In order of the rows, so that of several faults the first is reported.
        workers.into_iter().try_for_each(|worker| match worker.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        })
    })
}
