//! The KV cache: blocks of 32 positions, addressed through block tables.
//!
//! Within a layer, block and KV head, keys lie `[128][32 positions]`, so that a vector holds 16
//! positions, and values `[32 positions][128]`, so that a vector holds 16 elements of the result.

use engine::batch::BLOCK;
use engine::rope::{PAIRS, Rotation};
use engine::{BackendError, KvConfig, KvKind};
use model::{HEAD_DIM, KV_HEADS};

use crate::activations::rms_norm;
use crate::memory::Shared;
use crate::simd::{LANES, Simd};

/// Elements of the keys, or of the values, of one head in one block.
const HALF: usize = HEAD_DIM * BLOCK;

/// The cache of all layers.
pub struct Kv {
    layers: usize,
    blocks: usize,
    store: Store,
}

/// What the elements are.
pub enum Store {
    /// bf16.
    Bf16(Bf16),
    /// Signed bytes with a scale for each row of a head.
    Q8(Q8),
}

/// `[layers, blocks, 8 heads, keys then values]`
pub struct Bf16(Shared<u16>);

/// Codes, laid out as [`Bf16`]'s elements, and scales `[layers, blocks, 8 heads, 32 of keys then 32 of values]`.
pub struct Q8(Shared<i8>, Shared<f32>);

/// Elements as vectors. `head` counts the heads of all blocks of all layers: [`Kv::head`].
///
/// # Safety
/// The head exists, nobody writes what is read, and the machine has the class's features.
pub trait Cells {
    /// Bytes of an element of the keys at all positions.
    const KEY_BYTES: usize;
    /// Element `d` of the keys at 16 positions from `position`.
    unsafe fn key<S: Simd>(&self, head: usize, d: usize, position: usize) -> S::F;
    /// 16 elements from `d` of the value at `position`.
    unsafe fn value<S: Simd>(&self, head: usize, position: usize, d: usize) -> S::F;
    /// Where the head's keys begin; its values follow them.
    fn start(&self, head: usize) -> *const i32;
}

impl Cells for Bf16 {
    const KEY_BYTES: usize = 2 * BLOCK;

    #[inline(always)]
    unsafe fn key<S: Simd>(&self, head: usize, d: usize, position: usize) -> S::F {
        // SAFETY: the caller's.
        unsafe { S::load_bf16(self.0.at(head * 2 * HALF + d * BLOCK + position)) }
    }

    #[inline(always)]
    unsafe fn value<S: Simd>(&self, head: usize, position: usize, d: usize) -> S::F {
        // SAFETY: the caller's.
        unsafe { S::load_bf16(self.0.at(head * 2 * HALF + HALF + position * HEAD_DIM + d)) }
    }

    fn start(&self, head: usize) -> *const i32 {
        self.0.at(head * 2 * HALF).cast()
    }
}

impl Cells for Q8 {
    const KEY_BYTES: usize = BLOCK;

    #[inline(always)]
    unsafe fn key<S: Simd>(&self, head: usize, d: usize, position: usize) -> S::F {
        // SAFETY: the caller's.
        unsafe {
            let scale = S::load_f32(self.1.at(head * 2 * BLOCK + position));
            S::mul(S::load_i8(self.0.at(head * 2 * HALF + d * BLOCK + position)), scale)
        }
    }

    #[inline(always)]
    unsafe fn value<S: Simd>(&self, head: usize, position: usize, d: usize) -> S::F {
        // SAFETY: the caller's.
        unsafe {
            let scale = S::splat(*self.1.at(head * 2 * BLOCK + BLOCK + position));
            S::mul(S::load_i8(self.0.at(head * 2 * HALF + HALF + position * HEAD_DIM + d)), scale)
        }
    }

    fn start(&self, head: usize) -> *const i32 {
        self.0.at(head * 2 * HALF).cast()
    }
}

/// What QK-norm, RoPE and the append of one layer need.
pub struct Append<'a> {
    /// Index of the layer.
    pub layer: usize,
    /// `[tokens, q, k and v]`: queries are normalised, turned and scaled in place.
    pub qkv: *mut f32,
    /// Width of a row of `qkv`.
    pub stride: usize,
    /// Query heads.
    pub heads: usize,
    /// `[128]`
    pub q_norm: &'a [f32],
    /// `[128]`
    pub k_norm: &'a [f32],
    /// One a token.
    pub rotations: &'a [Rotation],
    /// Block and slot of each token.
    pub slots: &'a [(u32, u32)],
}

// SAFETY: threads work on disjoint tokens through `qkv`.
unsafe impl Sync for Append<'_> {}

impl Kv {
    /// An empty cache.
    pub fn new(layers: usize, config: KvConfig) -> Result<Self, BackendError> {
        const PURPOSE: &str = "the KV cache";
        let heads = layers * config.blocks * KV_HEADS;
        let store = match config.kind {
            KvKind::Bf16 => Store::Bf16(Bf16(Shared::new(heads * 2 * HALF, PURPOSE)?)),
            KvKind::Q8_0 => {
                let codes = Shared::new(heads * 2 * HALF, PURPOSE)?;
                Store::Q8(Q8(codes, Shared::new(heads * 2 * BLOCK, PURPOSE)?))
            }
        };
        Ok(Kv { layers, blocks: config.blocks, store })
    }

    /// Blocks of a layer.
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    /// Bytes that hold keys and values.
    pub fn bytes(&self) -> usize {
        match &self.store {
            Store::Bf16(Bf16(x)) => x.bytes(),
            Store::Q8(Q8(x, scales)) => x.bytes() + scales.bytes(),
        }
    }

    /// The elements.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// Where a head of a block of a layer is among all.
    pub fn head(&self, layer: usize, block: u32, head: usize) -> usize {
        (layer * self.blocks + block as usize) * KV_HEADS + head
    }

    /// Duplicates a block in every layer.
    pub fn copy_block(&mut self, from: u32, to: u32) {
        fn copy<T: Copy>(x: &Shared<T>, from: usize, to: usize, count: usize) {
            // SAFETY: both blocks exist, and `&mut self` keeps every other access away.
            unsafe { std::ptr::copy(x.at(from), x.at(to), count) };
        }
        for layer in 0..self.layers {
            let (from, to) = (self.head(layer, from, 0), self.head(layer, to, 0));
            let per_head = 2 * HALF;
            match &self.store {
                Store::Bf16(Bf16(x)) => {
                    copy(x, from * per_head, to * per_head, KV_HEADS * per_head)
                }
                Store::Q8(Q8(x, scales)) => {
                    copy(x, from * per_head, to * per_head, KV_HEADS * per_head);
                    let per_head = 2 * BLOCK;
                    copy(scales, from * per_head, to * per_head, KV_HEADS * per_head);
                }
            }
        }
    }

    /// Stores one head's key and value at a slot.
    ///
    /// # Safety
    /// As [`append`].
    #[inline(always)]
    unsafe fn put<S: Simd>(&self, head: usize, slot: usize, key: *const f32, value: *const f32) {
        // SAFETY: the caller's.
        unsafe {
            match &self.store {
                Store::Bf16(Bf16(x)) => {
                    let x = x.at(head * 2 * HALF);
                    for d in 0..HEAD_DIM {
                        *x.add(d * BLOCK + slot) = model::float::f32_to_bf16(*key.add(d));
                        *x.add(HALF + slot * HEAD_DIM + d) =
                            model::float::f32_to_bf16(*value.add(d));
                    }
                }
                Store::Q8(Q8(x, scales)) => {
                    let x = x.at(head * 2 * HALF);
                    let scales = scales.at(head * 2 * BLOCK);
                    let mut code = [0i8; HEAD_DIM];
                    *scales.add(slot) = quantise::<S>(key, &mut code);
                    for (d, &code) in code.iter().enumerate() {
                        *x.add(d * BLOCK + slot) = code;
                    }
                    *scales.add(BLOCK + slot) = quantise::<S>(value, &mut code);
                    for (d, &code) in code.iter().enumerate() {
                        *x.add(HALF + slot * HEAD_DIM + d) = code;
                    }
                }
            }
        }
    }
}

/// Codes of a head row and its scale, the largest magnitude over 127.
///
/// # Safety
/// `x` holds 128 elements and the machine has the class's features.
#[inline(always)]
unsafe fn quantise<S: Simd>(x: *const f32, codes: &mut [i8; HEAD_DIM]) -> f32 {
    // SAFETY: the caller's.
    unsafe {
        let mut most = S::splat(0.0);
        for d in (0..HEAD_DIM).step_by(LANES) {
            most = S::max(most, S::abs(S::load_f32(x.add(d))));
        }
        let scale = S::largest(most) / 127.0;
        let inverse = S::splat(if scale > 0.0 { 1.0 / scale } else { 0.0 });
        for d in (0..HEAD_DIM).step_by(LANES) {
            let mut wide = [0i32; LANES];
            S::store_i(S::to_i32(S::mul(S::load_f32(x.add(d)), inverse)), wide.as_mut_ptr());
            for (code, wide) in codes[d..].iter_mut().zip(wide) {
                *code = wide as i8;
            }
        }
        scale
    }
}

/// QK-norm and RoPE of one token; its queries stay in `qkv`, scaled by 1 / sqrt(128), its keys and
/// values go into the cache.
///
/// # Safety
/// `qkv` holds the token, no other thread touches it or its slot, and the machine has the class's
/// features.
#[inline(always)]
pub unsafe fn append<S: Simd>(kv: &Kv, job: &Append<'_>, token: usize) {
    let scale = 1.0 / (HEAD_DIM as f32).sqrt();
    let rotation = &job.rotations[token];
    let (block, slot) = job.slots[token];
    let mut head = [0.0f32; HEAD_DIM];
    // SAFETY: the caller's.
    unsafe {
        let row = job.qkv.add(token * job.stride);
        for q in 0..job.heads {
            let x = row.add(q * HEAD_DIM);
            rms_norm::<S>(x, job.q_norm.as_ptr(), head.as_mut_ptr(), HEAD_DIM);
            rotate::<S>(rotation, head.as_ptr(), x, scale);
        }
        let keys = row.add(job.heads * HEAD_DIM);
        let values = keys.add(KV_HEADS * HEAD_DIM);
        for h in 0..KV_HEADS {
            let x = keys.add(h * HEAD_DIM);
            rms_norm::<S>(x, job.k_norm.as_ptr(), head.as_mut_ptr(), HEAD_DIM);
            rotate::<S>(rotation, head.as_ptr(), x, 1.0);
            let at = kv.head(job.layer, block, h);
            kv.put::<S>(at, slot as usize, x, values.add(h * HEAD_DIM));
        }
    }
}

/// Turns one head and scales it.
///
/// # Safety
/// `from` and `to` hold 128 elements, and the machine has the class's features.
#[inline(always)]
unsafe fn rotate<S: Simd>(rotation: &Rotation, from: *const f32, to: *mut f32, scale: f32) {
    // SAFETY: the caller's.
    let scale = unsafe { S::splat(scale) };
    for i in (0..PAIRS).step_by(LANES) {
        // SAFETY: the caller's; a rotation holds 64 pairs.
        unsafe {
            let (a, b) = (S::load_f32(from.add(i)), S::load_f32(from.add(PAIRS + i)));
            let cos = S::mul(S::load_f32(rotation.cos.as_ptr().add(i)), scale);
            let sin = S::mul(S::load_f32(rotation.sin.as_ptr().add(i)), scale);
            S::store(S::sub(S::mul(a, cos), S::mul(b, sin)), to.add(i));
            S::store(S::fma(b, cos, S::mul(a, sin)), to.add(PAIRS + i));
        }
    }
}
