// Weights as they lie in the file, which is mapped and not copied: rows of COLS elements, row-major.
//
//   BF16   elements
//   Q8_0   blocks of 32 in 34 bytes: fp16 scale, signed bytes
//   Q4_1   blocks of 32 in 20 bytes: fp16 scale, fp16 minimum, nibbles; byte j holds element j below, j + 16 above
//   Q4_0   blocks of 32 in 18 bytes: fp16 scale, nibbles less 8
//   F16    elements
//   Q4_K   blocks of 256 in 144 bytes: fp16 scale and minimum, 12 bytes of 6-bit factors of both for every 32, nibbles
//   Q5_K   blocks of 256 in 176 bytes: the same, and before the nibbles 32 bytes with the fifth bits
//   Q6_K   blocks of 256 in 210 bytes: lower four bits, upper two, 16 signed factors, fp16 scale; codes less 32
//
// Every row begins at an even address and nothing larger can be relied on but for BF16, whose rows are multiples of
// 64 bytes in tensors that begin at one.
#pragma once

#include "common.h"

enum Type { BF16, Q8_0, Q4_1, Q4_0, F16, Q4_K, Q5_K, Q6_K };

// Calls a kernel's function for the type that the weights have.
#define WITH_TYPE(call, ...)                     \
    switch (TYPE) {                              \
        case BF16: return call<BF16>(__VA_ARGS__); \
        case Q8_0: return call<Q8_0>(__VA_ARGS__); \
        case Q4_1: return call<Q4_1>(__VA_ARGS__); \
        case Q4_0: return call<Q4_0>(__VA_ARGS__); \
        case F16: return call<F16>(__VA_ARGS__);   \
        case Q4_K: return call<Q4_K>(__VA_ARGS__); \
        case Q5_K: return call<Q5_K>(__VA_ARGS__); \
        case Q6_K: return call<Q6_K>(__VA_ARGS__); \
    }

template <int T>
inline ulong row_bytes(int cols) {
    if (T == BF16 || T == F16) return cols * 2ul;
    if (T == Q4_K || T == Q5_K || T == Q6_K) return ulong(cols / 256) * (T == Q4_K ? 144 : T == Q5_K ? 176 : 210);
    return ulong(cols / 32) * (T == Q8_0 ? 34 : T == Q4_1 ? 20 : 18);
}

// Number of 16 bits to float.
inline float widen_bf16(uint bits) { return as_type<float>(bits << 16); }
inline float widen_fp16(ushort bits) { return float(as_type<half>(bits)); }

// Elements k .. k + 8 of a block of Q4_K or Q5_K.
template <int T>
inline void expand8_affine(device const uchar* block, int k, thread float* out) {
    int part = k / 32, shift = part % 2 * 4;
    device const uchar* factors = block + 4;
    uint of_scale = factors[part % 4 + part / 4 * 8], of_minimum = factors[part + 4];
    if (part < 4) {
        of_scale &= 63, of_minimum &= 63;
    } else {
        // The upper two bits of the last four parts' factors are those that the first four leave free.
        of_scale = (of_scale & 15) | factors[part - 4] >> 6 << 4;
        of_minimum = of_minimum >> 4 | factors[part] >> 6 << 4;
    }
    device const ushort* numbers = (device const ushort*)block;
    float scale = widen_fp16(numbers[0]) * float(of_scale);
    float base = -widen_fp16(numbers[1]) * float(of_minimum);
    // Two parts share 32 bytes, one in the lower nibbles.
    device const ushort* nibbles = numbers + (T == Q5_K ? 24 : 8) + (part / 2 * 32 + k % 32) / 2;
    for (int i = 0; i < 4; i++) {
        uint codes = uint(nibbles[i]) >> shift & 0x0f0f;
        if (T == Q5_K) codes |= (uint(numbers[8 + k % 32 / 2 + i]) >> part & 0x0101) << 4;
        out[2 * i] = fma(scale, float(codes & 31), base);
        out[2 * i + 1] = fma(scale, float(codes >> 8), base);
    }
}

// Elements k .. k + 8 of a block of Q6_K: halves of 128 of four runs of 32, of which two share the bytes of the lower bits
// and all four those of the upper.
inline void expand8_scaled(device const uchar* block, int k, thread float* out) {
    int half_block = k / 128, run = k / 32 % 4, at = k % 32;
    device const ushort* numbers = (device const ushort*)block;
    float scale = widen_fp16(numbers[104]) * float(char(block[192 + k / 16]));
    device const ushort* low = numbers + (half_block * 64 + run % 2 * 32 + at) / 2;
    device const ushort* high = numbers + 64 + (half_block * 32 + at) / 2;
    for (int i = 0; i < 4; i++) {
        uint codes = (uint(low[i]) >> (run / 2 * 4) & 0x0f0f) | (uint(high[i]) >> (run * 2) & 0x0303) << 4;
        out[2 * i] = scale * (float(codes & 63) - 32.0f);
        out[2 * i + 1] = scale * (float(codes >> 8) - 32.0f);
    }
}

// Elements k .. k + 8 of a row; k is a multiple of 8.
template <int T>
inline void expand8(device const uchar* row, int k, thread float* out) {
    if (T == BF16) {
        uint4 v = *(device const uint4*)(row + k * 2);
        for (int i = 0; i < 4; i++) {
            out[2 * i] = widen_bf16(v[i] & 0xffff);
            out[2 * i + 1] = as_type<float>(v[i] & 0xffff0000);
        }
    } else if (T == F16) {
        device const ushort* from = (device const ushort*)row + k;
        for (int i = 0; i < 8; i++) out[i] = widen_fp16(from[i]);
    } else if (T == Q4_K || T == Q5_K) {
        expand8_affine<T>(row + k / 256 * (T == Q4_K ? 144 : 176), k % 256, out);
    } else if (T == Q6_K) {
        expand8_scaled(row + k / 256 * 210, k % 256, out);
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
