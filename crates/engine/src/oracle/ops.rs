//! The operations of the forward pass, as plainly as they can be said.

use model::{HEAD_DIM, KV_HEADS, Matrix, RMS_EPSILON};

use super::kv::View;

/// Partial sums of a dot product: enough for the compiler to vectorise, and more accurate than one.
const LANES: usize = 16;

/// Sum of a\[i\] * b\[i\], in a fixed order.
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let (a_chunks, b_chunks) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let tail: f32 = a_chunks.remainder().iter().zip(b_chunks.remainder()).map(|(a, b)| a * b).sum();
    for (a, b) in a_chunks.zip(b_chunks) {
        for i in 0..LANES {
            lanes[i] += a[i] * b[i];
        }
    }
    lanes.iter().sum::<f32>() + tail
}

/// y\[t, r\] = dot(w\[r\], x\[t\]): `w` is `[rows, cols]`, `x` is `[tokens, cols]`, `y` is `[tokens, rows]`.
pub fn matmul(w: &Matrix, x: &[f32], y: &mut [f32], threads: usize) {
    let tokens = x.len() / w.cols;
    // Each thread owns a band of rows; the results are written [rows, tokens] and then turned.
    let small = w.rows * w.cols * tokens.max(1) < 1 << 18;
    let band = if small { w.rows } else { w.rows.div_ceil(threads) };
    let mut turned = vec![0.0; w.rows * tokens];
    std::thread::scope(|scope| {
        for (i, out) in turned.chunks_mut((band * tokens).max(1)).enumerate() {
            let mut work = move || {
                let mut row = vec![0.0; w.cols];
                for (r, out) in out.chunks_exact_mut(tokens).enumerate() {
                    w.row_f32(i * band + r, &mut row);
                    for (x, out) in x.chunks_exact(w.cols).zip(out) {
                        *out = dot(&row, x);
                    }
                }
            };
            if small {
                work();
            } else {
                scope.spawn(work);
            }
        }
    });
    for (r, turned) in turned.chunks_exact(tokens.max(1)).enumerate() {
        for (t, &value) in turned.iter().enumerate() {
            y[t * w.rows + r] = value;
        }
    }
}

/// out = x / sqrt(mean(x^2) + epsilon) * weight.
pub fn rms_norm(x: &[f32], weight: &[f32], out: &mut [f32]) {
    let mean = dot(x, x) / x.len() as f32;
    let scale = 1.0 / (mean + RMS_EPSILON).sqrt();
    for ((out, x), w) in out.iter_mut().zip(x).zip(weight) {
        *out = x * scale * w;
    }
}

/// x / (1 + e^-x).
pub fn silu(x: f32) -> f32 {
    x / (1.0 + (-x).exp())
}

/// x += y.
pub fn add(x: &mut [f32], y: &[f32]) {
    for (x, y) in x.iter_mut().zip(y) {
        *x += y;
    }
}

/// Attention of one token over the cached positions that it may see: `q` and `out` are
/// `[heads, 128]`; `group` query heads share a key/value head.
pub fn attend(q: &[f32], group: usize, cached: &View<'_>, out: &mut [f32]) {
    let scale = 1.0 / (HEAD_DIM as f32).sqrt();
    let mut scores = vec![0.0; cached.len()];
    let mut head = [0.0; HEAD_DIM];
    for kv_head in 0..KV_HEADS {
        for h in kv_head * group..(kv_head + 1) * group {
            let q = &q[h * HEAD_DIM..][..HEAD_DIM];
            for (position, score) in scores.iter_mut().enumerate() {
                cached.key(position, kv_head, &mut head);
                *score = dot(q, &head) * scale;
            }
            softmax(&mut scores);
            let out = &mut out[h * HEAD_DIM..][..HEAD_DIM];
            out.fill(0.0);
            for (position, &score) in scores.iter().enumerate() {
                cached.value(position, kv_head, &mut head);
                for (out, v) in out.iter_mut().zip(&head) {
                    *out += score * v;
                }
            }
        }
    }
}

/// In place, stable against large scores.
fn softmax(scores: &mut [f32]) {
    let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0;
    for s in scores.iter_mut() {
        *s = (*s - max).exp();
        sum += *s;
    }
    scores.iter_mut().for_each(|s| *s /= sum);
}
