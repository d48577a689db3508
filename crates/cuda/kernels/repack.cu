// Weights from their file's layout to the device's (weights.cuh), once, as they arrive.
//
// Floor: the bytes in and out over the memory's bandwidth, hidden behind the host link. `from` holds whole rows of the
// file, the first of them row `skipped` of its tensor. Tensor row r becomes row `first + r` of the matrix, or, where
// two tensors take turns of 8 rows (gate and up), row `first + r / 8 * 16 + r % 8`. One thread a block of 32.
// Grid: (blocks of 32 / 256), 256 threads.
#include "weights.cuh"

struct Target {
    uint8_t* quants;
    __half* scales;
    int first, turns, skipped, cols;
};

// Row of the matrix and block of that row for this thread; false past the end.
__device__ __forceinline__ bool locate(const Target& to, long long blocks, size_t& row, size_t& block) {
    long long i = blockIdx.x * 256ll + threadIdx.x;
    if (i >= blocks) return false;
    int width = to.cols / 32;
    int r = to.skipped + int(i / width);
    row = to.first + (to.turns ? r / 8 * 16 + r % 8 : r);
    block = row * width + i % width;
    return true;
}

extern "C" __global__ void __launch_bounds__(256) repack_BF16(const uint8_t* from, Target to, long long blocks) {
    size_t row, block;
    if (!locate(to, blocks, row, block)) return;
    const uint4* in = reinterpret_cast<const uint4*>(from) + (blockIdx.x * 256ll + threadIdx.x) * 4;
    uint4* out = reinterpret_cast<uint4*>(to.quants) + block * 4;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint4 v = in[i];
        uint32_t* word = reinterpret_cast<uint32_t*>(&v);
#pragma unroll
        for (int j = 0; j < 4; j++)
            word[j] = pack(__uint_as_float(word[j] << 16), __uint_as_float(word[j] & 0xffff0000));
        out[i] = v;
    }
}

// What the host has decoded.
extern "C" __global__ void __launch_bounds__(256) repack_F16(const uint8_t* from, Target to, long long blocks) {
    size_t row, block;
    if (!locate(to, blocks, row, block)) return;
    const uint4* in = reinterpret_cast<const uint4*>(from) + (blockIdx.x * 256ll + threadIdx.x) * 4;
    uint4* out = reinterpret_cast<uint4*>(to.quants) + block * 4;
#pragma unroll
    for (int i = 0; i < 4; i++) out[i] = in[i];
}

extern "C" __global__ void __launch_bounds__(256) repack_Q8_0(const uint8_t* from, Target to, long long blocks) {
    size_t row, block;
    if (!locate(to, blocks, row, block)) return;
    const uint16_t* in = reinterpret_cast<const uint16_t*>(from + (blockIdx.x * 256ll + threadIdx.x) * 34);
    reinterpret_cast<uint16_t*>(to.scales)[block] = in[0];
    uint32_t* out = reinterpret_cast<uint32_t*>(to.quants + block * 32);
#pragma unroll
    for (int i = 0; i < 8; i++) out[i] = (in[1 + 2 * i] | uint32_t(in[2 + 2 * i]) << 16) ^ 0x80808080;
}

// Nibbles of a file's block: byte j holds element j below and j + 16 above.
__device__ __forceinline__ void repack_nibbles(const uint16_t* in, uint32_t* out) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint32_t word = 0;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            int element = i * 8 + j, byte = element % 16;
            uint32_t nibble = in[byte / 2] >> (byte % 2 * 8 + element / 16 * 4) & 15;
            word |= nibble << (j / 2 * 4 + j % 2 * 16);
        }
        out[i] = word;
    }
}

extern "C" __global__ void __launch_bounds__(256) repack_Q4_0(const uint8_t* from, Target to, long long blocks) {
    size_t row, block;
    if (!locate(to, blocks, row, block)) return;
    const uint16_t* in = reinterpret_cast<const uint16_t*>(from + (blockIdx.x * 256ll + threadIdx.x) * 18);
    reinterpret_cast<uint16_t*>(to.scales)[block] = in[0];
    repack_nibbles(in + 1, reinterpret_cast<uint32_t*>(to.quants + block * 16));
}

extern "C" __global__ void __launch_bounds__(256) repack_Q4_1(const uint8_t* from, Target to, long long blocks) {
    size_t row, block;
    if (!locate(to, blocks, row, block)) return;
    const uint16_t* in = reinterpret_cast<const uint16_t*>(from + (blockIdx.x * 256ll + threadIdx.x) * 20);
    reinterpret_cast<uint32_t*>(to.scales)[block] = in[0] | uint32_t(in[1]) << 16;
    repack_nibbles(in + 2, reinterpret_cast<uint32_t*>(to.quants + block * 16));
}
