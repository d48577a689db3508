// The paged KV cache of one layer: [block][key/value head][position of the block][128].
//
//   KV_BF16  values rounded to bf16, held as fp16 (the range of keys and values is far inside fp16's)
//   KV_Q8_0  signed bytes, and one fp32 scale a head row: [block][head][position]
#pragma once

#include "common.cuh"

enum Kv { KV_BF16, KV_Q8_0 };

// The keys or the values of one layer.
struct Cache {
    uint8_t* values;
    float* scales;
};

// Head rows before (block, head).
__device__ __forceinline__ size_t cache_row(int block, int head) { return (size_t(block) * KV_HEADS + head) * BLOCK; }

// Byte offset of 16-byte piece c (0..15) of row r of a tile of fp16 head rows in shared memory, free of bank conflicts
// for ldmatrix both ways.
__device__ __forceinline__ uint32_t tile_place(int r, int c) { return r * 256 + ((c ^ (r & 7)) << 4); }

// Four signed bytes to two pairs of fp16, exactly.
__device__ __forceinline__ uint2 widen(uint32_t word) {
    const __half2 offset = __float2half2_rn(1152.0f);
    word ^= 0x80808080;
    uint32_t low = __byte_perm(word, 0x64646464, 0x5140), high = __byte_perm(word, 0x64646464, 0x7362);
    __half2 a = __hsub2(*reinterpret_cast<__half2*>(&low), offset);
    __half2 b = __hsub2(*reinterpret_cast<__half2*>(&high), offset);
    return make_uint2(*reinterpret_cast<uint32_t*>(&a), *reinterpret_cast<uint32_t*>(&b));
}

// Brings the 32 rows of one (block, head) into rows first.. of a tile of fp16 rows; THREADS threads share the work.
// bf16 rows arrive asynchronously, bytes at once and without their scales. Only `valid` rows hold positions of the
// sequence; the others become zeros, since what lies there may be another sequence's NaN and 0 x NaN is not 0.
template <Kv KIND, int THREADS>
__device__ __forceinline__ void stage_rows(uint8_t* tile, int first, const Cache& cache, size_t row, int valid,
                                           int thread) {
    if constexpr (KIND == KV_BF16) {
        const uint8_t* from = cache.values + row * (HEAD * 2);
#pragma unroll
        for (int i = thread; i < BLOCK * 16; i += THREADS)
            copy_async(shared_address(tile) + tile_place(first + i / 16, i % 16), from + i * 16, i / 16 < valid);
    } else {
        const uint4* from = reinterpret_cast<const uint4*>(cache.values + row * HEAD);
#pragma unroll
        for (int i = thread; i < BLOCK * 8; i += THREADS) {
            uint4 v = i / 8 < valid ? from[i] : make_uint4(0, 0, 0, 0);
            uint2 a = widen(v.x), b = widen(v.y), c = widen(v.z), d = widen(v.w);
            int r = first + i / 8, piece = i % 8 * 2;
            *reinterpret_cast<uint4*>(tile + tile_place(r, piece)) = make_uint4(a.x, a.y, b.x, b.y);
            *reinterpret_cast<uint4*>(tile + tile_place(r, piece + 1)) = make_uint4(c.x, c.y, d.x, d.y);
        }
    }
}
