// The paged KV cache of one layer: keys or values as [block][key/value head][position of the block][128].
//
//   KV_BF16  elements
//   KV_Q8_0  signed bytes, and one fp32 scale a head row: [block][head][position]
//
// What lies in a slot behind a sequence's end is another sequence's or nothing yet; its weight in attention is zero, and
// since 0 x NaN is not zero, only finite numbers enter the cache (rope.metal).
#pragma once

#include "common.h"

enum Kv { KV_BF16, KV_Q8_0 };

// Head rows before (block, head).
inline ulong cache_row(int block, int head) { return (ulong(block) * KV_HEADS + head) * BLOCK; }

constexpr constant int SLICE = 32;  // elements of a head row that are widened at a time

// Brings elements `at` .. `at` + 32 of the 32 bytes rows from `row` on to a simdgroup's tile [32][SLICE] as bfloat, which
// holds every byte exactly; scales are applied to scores and weights instead. The simdgroup may read it on return.
inline void widen_slice(device const uchar* values, ulong row, int at, threadgroup uint* tile, uint lane) {
    simdgroup_barrier(mem_flags::mem_threadgroup);
    device const uint* from = (device const uint*)(values + (row + lane) * HEAD + at);
    for (int i = 0; i < SLICE / 4; i++) {
        uint four = from[i];
        uint pair[2];
        for (int j = 0; j < 2; j++) {
            uint low = as_type<uint>(float(char(four >> (16 * j) & 0xff))) >> 16;
            uint high = as_type<uint>(float(char(four >> (16 * j + 8) & 0xff))) & 0xffff0000;
            pair[j] = low | high;
        }
        tile[lane * (SLICE / 2) + 2 * i] = pair[0];
        tile[lane * (SLICE / 2) + 2 * i + 1] = pair[1];
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
}

// The matrix of positions p .. p + 8 and elements d .. d + 8 of a (block, head): from the cache, or from the tile that
// holds the slice of d. Transposed, its rows are elements.
inline simdgroup_bfloat8x8 load_cache(device const uchar* values, ulong row, int p, int d, threadgroup uint* tile,
                                      bool transposed) {
    simdgroup_bfloat8x8 m;
    if (KV == KV_BF16) simdgroup_load(m, (device const bfloat*)values + (row + p) * HEAD + d, HEAD, 0, transposed);
    else simdgroup_load(m, (threadgroup const bfloat*)tile + p * SLICE + d % SLICE, SLICE, 0, transposed);
    return m;
}
