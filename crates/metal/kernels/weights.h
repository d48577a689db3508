// Weights as they lie in the file, which is mapped and not copied: rows of COLS elements, row-major.
//
//   BF16   elements
//   Q8_0   blocks of 32 in 34 bytes: fp16 scale, signed bytes
//   Q4_1   blocks of 32 in 20 bytes: fp16 scale, fp16 minimum, nibbles; byte j holds element j below, j + 16 above
//   Q4_0   blocks of 32 in 18 bytes: fp16 scale, nibbles less 8
//
// Every row begins at an even address and nothing larger can be relied on but for BF16, whose rows are multiples of
// 64 bytes in tensors that begin at one.
#pragma once

#include "common.h"

enum Type { BF16, Q8_0, Q4_1, Q4_0 };

template <int T>
inline ulong row_bytes(int cols) {
    return T == BF16 ? cols * 2ul : ulong(cols / 32) * (T == Q8_0 ? 34 : T == Q4_1 ? 20 : 18);
}

// Number of 16 bits to float.
inline float widen_bf16(uint bits) { return as_type<float>(bits << 16); }
inline float widen_fp16(ushort bits) { return float(as_type<half>(bits)); }

// Elements k .. k + 8 of a row; k is a multiple of 8.
template <int T>
inline void expand8(device const uchar* row, int k, thread float* out) {
    if (T == BF16) {
        uint4 v = *(device const uint4*)(row + k * 2);
        for (int i = 0; i < 4; i++) {
            out[2 * i] = widen_bf16(v[i] & 0xffff);
            out[2 * i + 1] = as_type<float>(v[i] & 0xffff0000);
        }
    } else if (T == Q8_0) {
        device const ushort* block = (device const ushort*)(row + k / 32 * 34);
        float scale = widen_fp16(block[0]);
        for (int i = 0; i < 4; i++) {
            ushort pair = block[1 + k % 32 / 2 + i];
            out[2 * i] = scale * float(char(pair & 0xff));
            out[2 * i + 1] = scale * float(char(pair >> 8));
        }
    } else {
        int header = T == Q4_1 ? 2 : 1;  // of the block, in numbers of 16 bits
        device const ushort* block = (device const ushort*)(row + k / 32 * (T == Q4_1 ? 20 : 18));
        float scale = widen_fp16(block[0]);
        float base = T == Q4_1 ? widen_fp16(block[1]) : -8.0f * scale;
        int shift = k % 32 / 16 * 4;
        for (int i = 0; i < 4; i++) {
            uint pair = block[header + k % 16 / 2 + i] >> shift;
            out[2 * i] = fma(scale, float(pair & 15), base);
            out[2 * i + 1] = fma(scale, float(pair >> 8 & 15), base);
        }
    }
}
