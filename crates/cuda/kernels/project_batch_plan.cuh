// What project_batch.cuh is told, and how its work is shared out: types of a launch, what a kernel is made of, ranges and stages.
#pragma once

#include "cluster.cuh"
#include "epilogue.cuh"
#include "heads.cuh"
#include "normed.cuh"
#include "weights.cuh"

constexpr Epilogue HEADS = Epilogue(3);
constexpr int UNIT = 16;  // rows; ranges are whole units
constexpr int MOST_STAGES = 16;

struct Maps {
    CUtensorMap lower, upper;  // weights: the lower and the higher of the ranges, or heads
    CUtensorMap x;             // WIDTH tokens, 64 columns
};

struct Task {
    const int* count;      // tokens
    const __half* scales;  // of quantised weights
    int rows, cols;
    int ranges;
    int stages;   // of the ring
    int mailbox;  // bytes before it
    Normed normed;      // HEADS, SWIGLU: X as it is read
    Residual residual;  // RESIDUAL
    Heads heads;        // HEADS
    void* out;          // STORE: fp32 [tokens][rows]; SWIGLU: fp16 [tokens][rows / 2]
};

// Teams of warps that take the stages in turns: where warps are few, and where they expand quants, as far as registers go.
__host__ __device__ constexpr int teams(Type type, int width, int groups, Epilogue epilogue) {
    if (epilogue == STORE) return 1;
    bool room = groups == 3 ? epilogue == SWIGLU && width == 16 : width <= 32;
    return groups == 1 || (type != F16 && room) ? 2 : 1;
}

#if HOPPER

template <Type T, int WIDTH, int GROUPS, Epilogue E>
struct Plan {
    static constexpr int SPLITS = E == RESIDUAL ? 4 : E == HEADS ? 2 : 1;  // of the columns, over a cluster
    static constexpr int TEAMS = teams(T, WIDTH, GROUPS, E);
    // Columns of a stage: 128 bytes of a row of weights, but for nibbles beside the activations of 128 tokens.
    static constexpr int DEPTH = T == F16 ? 64 : T == Q8_0 || WIDTH == 128 ? 128 : 256;
    static constexpr int X_BYTES = WIDTH * DEPTH * 2;
    static constexpr int ROW = DEPTH * 16 / Layout<T>::PER16;  // bytes of a row of weights in a stage
    static constexpr int CONSUMERS = GROUPS * TEAMS;
    static constexpr int SCALES = T == F16 ? 0 : T == Q4_1 ? 2048 : 1024;  // bytes of a warp's ring of scales
    // Registers that consumers have of what the fourth part of a warpgroup's does not need; 0 if there are enough.
    static constexpr int REGISTERS = WIDTH < 128 || CONSUMERS == 1 ? 0 : CONSUMERS == 2 ? 232 : 160;
};

// What a block computes: a range of rows, and stages of columns.
template <class P>
struct Item {
    int row, rows, begin, end;
    __device__ __forceinline__ Item(const Task& s, int range) {
        int units = s.rows / UNIT, stages = s.cols / P::DEPTH;
        row = units * range / s.ranges * UNIT, rows = units * (range + 1) / s.ranges * UNIT - row;
        int rank = P::SPLITS > 1 ? cluster_rank() : 0;
        begin = stages * rank / P::SPLITS, end = stages * (rank + 1) / P::SPLITS;
    }
};

// Rows of the highest range; the others have as many or UNIT less.
__device__ __forceinline__ int most_rows(const Task& s) { return (s.rows / UNIT + s.ranges - 1) / s.ranges * UNIT; }

struct Place {  // in a ring, and the parity of the round
    int stage = 0, parity = 0;
    __device__ __forceinline__ void next(int stages, int by = 1) {
        stage += by;
        if (stage >= stages) stage -= stages, parity ^= 1;
    }
};

#endif
