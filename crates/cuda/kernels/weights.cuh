// Weight matrices as they lie on the device, and their expansion to fp16 in registers.
//
// All are row-major [rows][cols]. Quants and scales lie apart, so that every 16-byte load is aligned:
//   F16   2 bytes an element
//   Q8_0  a byte an element (value + 128); scales fp16 [rows][cols / 32]
//   Q4_0  a nibble an element; scales fp16 [rows][cols / 32]
//   Q4_1  a nibble an element; scale and minimum, fp16 x 2 [rows][cols / 32]
// A 32-bit word of nibbles holds eight consecutive elements e0..e7, from bit 0: e0 e2 e4 e6 e1 e3 e5 e7, so that
// `(word >> 4 i) & 0x000f000f` is the pair (e2i, e2i+1) in two half words.
#pragma once

#include "common.cuh"

enum Type { F16, Q8_0, Q4_0, Q4_1 };

struct Weights {
    const uint8_t* quants;
    const __half* scales;
};

template <Type T>
struct Layout {
    static constexpr int PER16 = T == F16 ? 8 : T == Q8_0 ? 16 : 32;  // elements in 16 bytes
    static constexpr int SCALES = T == F16 ? 0 : T == Q4_1 ? 2 : 1;   // halves a block of 32
};

__device__ __forceinline__ uint32_t bits(__half2 h) { return *reinterpret_cast<uint32_t*>(&h); }
__device__ __forceinline__ __half2 halves(uint32_t u) { return *reinterpret_cast<__half2*>(&u); }

// Scale (and minimum) of a block of 32 elements.
struct Scale {
    __half2 scale, minimum;
};

template <Type T>
__device__ __forceinline__ Scale load_scale(const Weights& w, size_t block) {
    Scale s = {};
    if constexpr (T == Q8_0 || T == Q4_0) s.scale = __half2half2(__ldg(w.scales + block));
    if constexpr (T == Q4_1) {
        __half2 both = __ldg(reinterpret_cast<const __half2*>(w.scales) + block);
        s = {__low2half2(both), __high2half2(both)};
    }
    return s;
}

// One 32-bit word of quants to pairs of fp16: 1 pair (F16), 2 (Q8_0) or 4 (4 bits). 0x6400 | q is 1024 + q in fp16.
template <Type T>
__device__ __forceinline__ void expand(uint32_t word, const Scale& s, uint32_t* out) {
    if constexpr (T == F16) {
        out[0] = word;
    } else if constexpr (T == Q8_0) {
        const __half2 offset = __float2half2_rn(1152.0f);
        out[0] = bits(__hmul2(__hsub2(halves(__byte_perm(word, 0x64646464, 0x5140)), offset), s.scale));
        out[1] = bits(__hmul2(__hsub2(halves(__byte_perm(word, 0x64646464, 0x7362)), offset), s.scale));
    } else {
        const __half2 offset = __float2half2_rn(T == Q4_0 ? 1032.0f : 1024.0f);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            __half2 q = __hsub2(halves(((word >> (4 * i)) & 0x000f000f) | 0x64006400), offset);
            out[i] = bits(T == Q4_0 ? __hmul2(q, s.scale) : __hfma2(q, s.scale, s.minimum));
        }
    }
}

// 16 bytes of one row to PER16 / 2 pairs of fp16; all elements lie in one block of 32.
template <Type T>
__device__ __forceinline__ void expand16(const uint4& v, const Scale& s, uint32_t* out) {
    constexpr int N = Layout<T>::PER16 / 8;
    expand<T>(v.x, s, out);
    expand<T>(v.y, s, out + N);
    expand<T>(v.z, s, out + 2 * N);
    expand<T>(v.w, s, out + 3 * N);
}

// Bytes of one row of quants.
template <Type T>
__host__ __device__ constexpr size_t row_bytes(size_t cols) {
    return cols * 16 / Layout<T>::PER16;
}
