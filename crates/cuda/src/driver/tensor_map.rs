//! Tensor maps, by which Hopper's copy engine finds boxes of a matrix.

use std::ffi::c_void;

use cudarc::driver::sys;

use super::{Result, check};

/// What a tensor map's matrix is made of.
#[derive(Debug, Clone, Copy)]
pub enum Element {
    /// fp16.
    F16,
    /// fp32.
    F32,
    /// Bytes.
    U8,
}

/// What the L2 cache fetches at once for a copy.
#[derive(Debug, Clone, Copy)]
pub enum Promotion {
    /// 128 bytes.
    Bytes128,
    /// 256 bytes.
    Bytes256,
}

/// How the copy engine of Hopper finds boxes of a tensor; kernels take it by value.
#[derive(Debug, Clone, Copy)]
#[repr(transparent)]
pub struct TensorMap(sys::CUtensorMap);

impl TensorMap {
    /// Boxes of 64 columns and `box_rows` rows of fp16 `[rows, cols]` at `address`, swizzled for wgmma; rows past the end
    /// are zeros.
    pub fn new(address: u64, rows: usize, cols: usize, box_rows: usize) -> Result<Self> {
        Self::boxes(address, Element::F16, [rows, cols], [box_rows, 64], Promotion::Bytes256)
    }

    /// Boxes of `[rows, cols]` elements of a matrix of that `shape`. A box's rows lie 16, 32, 64 or 128 bytes apart in
    /// shared memory and are swizzled from 64 bytes on; what lies outside the matrix reads as zero and is not written.
    pub fn boxes(
        address: u64,
        element: Element,
        shape: [usize; 2],
        part: [usize; 2],
        promotion: Promotion,
    ) -> Result<Self> {
        let bytes = match element {
            Element::F16 => 2,
            Element::F32 => 4,
            Element::U8 => 1,
        };
        let dims = shape.map(|n| n as u64);
        let part = part.map(|n| n as u32);
        let (dims, part) = ([dims[1], dims[0]], [part[1], part[0]]);
        Self::tensor(address, element, &dims, &[dims[0] * bytes], &part, true, promotion)
    }

    /// Boxes of `part` elements of a tensor of `dims` elements, the first dimension contiguous and the others `strides`
    /// bytes apart; `swizzled` as above by the first dimension of `part`, or plain. The L2 cache fetches as much at
    /// a time as `promotion` says.
    pub fn tensor(
        address: u64,
        element: Element,
        dims: &[u64],
        strides: &[u64],
        part: &[u32],
        swizzled: bool,
        promotion: Promotion,
    ) -> Result<Self> {
        use sys::CUtensorMapDataType::*;
        use sys::CUtensorMapSwizzle::*;
        let (ty, bytes) = match element {
            Element::F16 => (CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2),
            Element::F32 => (CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4),
            Element::U8 => (CU_TENSOR_MAP_DATA_TYPE_UINT8, 1),
        };
        let swizzle = match part[0] * bytes {
            128 if swizzled => CU_TENSOR_MAP_SWIZZLE_128B,
            64 if swizzled => CU_TENSOR_MAP_SWIZZLE_64B,
            _ => CU_TENSOR_MAP_SWIZZLE_NONE,
        };
        use sys::CUtensorMapL2promotion::*;
        let promotion = match promotion {
            Promotion::Bytes128 => CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            Promotion::Bytes256 => CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        };
        let rank = dims.len();
        assert!(strides.len() + 1 == rank && part.len() == rank && rank <= 5);
        let mut map = sys::CUtensorMap { opaque: [0; 16] };
        // SAFETY: the arrays have as many elements as the rank says (strides one less) and are read during the call only.
        unsafe {
            driver!(cuTensorMapEncodeTiled(
                &mut map,
                ty,
                rank as u32,
                address as *mut c_void,
                dims.as_ptr(),
                strides.as_ptr(),
                part.as_ptr(),
                [1; 5].as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                swizzle,
                promotion,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            ))?;
        }
        Ok(TensorMap(map))
    }
}
