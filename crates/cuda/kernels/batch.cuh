// What the projections of a batch share (project_batch.cu, project_batch_quants.cu): how a matrix is shared out, and
// how sums leave.
//
// A work item is a range of weight rows, of one of two heights, and one split of the columns; a block takes one, or
// several in turns. The heights fit the matrix to the device: every multiprocessor reads equally much. Nobody waits
// for the parts of a sum: they are left in memory, and the kernel that reads the result adds them in order (norm.cu,
// rope.cu). Ranges and splits are a rule of the matrix alone (src/batch.rs).
#pragma once

#include "epilogue.cuh"

constexpr int UNIT = 16;  // rows; ranges are whole units

struct Shape {
    void* out;         // STORE: fp32 [splits][tokens][rows]; SWIGLU: as in epilogue.cuh, with one split
    const int* count;  // tokens
    int rows, cols;
    int ranges, splits;
    int plane;   // elements of a split in `out`
    int stages;  // of the ring
};

// Rows of the highest range; the others have as many or UNIT less.
__device__ __forceinline__ int most_rows(const Shape& s) { return (s.rows / UNIT + s.ranges - 1) / s.ranges * UNIT; }

struct Item {
    int row, rows;   // the range
    int split;
    int begin, end;  // stages of columns

    __device__ Item(const Shape& s, int i, int depth) {
        int range = i / s.splits, units = s.rows / UNIT, stages = s.cols / depth;
        split = i % s.splits;
        row = units * range / s.ranges * UNIT, rows = units * (range + 1) / s.ranges * UNIT - row;
        begin = stages * split / s.splits, end = stages * (split + 1) / s.splits;
    }
};

// A place in a ring, and the parity of the round.
struct Ring {
    int stage = 0, parity = 0, stages;
    __device__ explicit Ring(int stages_) : stages(stages_) {}
    __device__ void next() {
        if (++stage == stages) stage = 0, parity ^= 1;
    }
};

// Lanes hold sums as mma and wgmma leave them: sum[i] is of row `row` + g + 8 (i / 2 % 2), token 8 (i / 4) + 2 t + i % 2.
template <Epilogue E, int WIDTH>
__device__ __forceinline__ void leave(const Shape& s, const float (&sum)[WIDTH / 2], int row, int split, int tokens) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, rows = s.rows;
    asm volatile("" : "+r"(rows));  // places are not worth registers while the products run
    if constexpr (E == SWIGLU) {
        __half* out = static_cast<__half*>(s.out) + row / 2 + g;
#pragma unroll
        for (int i = 0; i < WIDTH / 2; i++) {
            int token = i / 4 * 8 + 2 * t + i % 2;
            if (i % 4 < 2 && token < tokens)
                out[token * (rows / 2)] = __float2half_rn(swiglu(sum[i], sum[i + 2]));
        }
    } else {
        float* out = static_cast<float*>(s.out) + size_t(split) * s.plane + row + g;
#pragma unroll
        for (int i = 0; i < WIDTH / 2; i++) {
            int token = i / 4 * 8 + 2 * t + i % 2;
            if (token < tokens) out[token * rows + i / 2 % 2 * 8] = sum[i];
        }
    }
}
