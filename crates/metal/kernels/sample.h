// What a draw is, and the order of candidates. The host sampler (engine::sampling) is the definition.
#pragma once

#include "common.h"

constexpr constant int PARTS = 32;     // of a logits row, for its statistics
constexpr constant int MOST_TOP = 64;  // alternatives of an answer
constexpr constant int NOBODY = 1 << 30;

struct Stats {
    float largest, sum;  // sum of exp(logit - largest)
    int token, finite;
};

struct Best {
    float value;
    int token;
};

// Larger first, then lower id.
inline Best better(Best a, Best b) { return b.value > a.value || (b.value == a.value && b.token < a.token) ? b : a; }

// The best of a simdgroup; every lane gets it.
inline Best simd_best(Best best) {
    float value = simd_max(best.value);
    Best found = {value, simd_min(best.value == value ? best.token : NOBODY)};
    return found;
}

// The best of a threadgroup of at most 32 simdgroups; every thread gets it. `values` and `tokens` hold one a simdgroup.
inline Best group_best(Best best, threadgroup float* values, threadgroup int* tokens, uint lane, uint simdgroup,
                       uint simdgroups) {
    best = simd_best(best);
    if (lane == 0) values[simdgroup] = best.value, tokens[simdgroup] = best.token;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    Best other = {-INFINITY, NOBODY};
    if (lane < simdgroups) other.value = values[lane], other.token = tokens[lane];
    best = simd_best(other);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    return best;
}

enum Want { LOGITS, SCORE, SAMPLE };

// One answer row's request, in the step buffer. Laid out by pack_row in src/rows.rs.
struct Draw {
    int want;      // Want
    int token;     // SCORE: the token to score
    int position;  // SAMPLE: counter of the random numbers
    int top;       // alternatives, at most MOST_TOP
    float scale;   // 1 / temperature; 0 takes the best
    int top_k;     // 0 keeps all
    uint top_p;    // in units of 2^-32; 0 keeps all
    float floor;   // ln(min_p)
    uint seed[2];  // key of the random numbers
    int edits, edits_at;  // [edits] Edit
    int mask_at;   // bit set of the allowed tokens; -1 allows all
    float repetition, frequency, presence;
};

// A token whose logit changes before the draw.
struct Edit {
    int token;
    int seen;    // occurrences in the output; -1: neither in prompt nor output
    float bias;
    float raw;   // the logit before the change, kept here by `sample`
};

struct Answer {
    int finite, token;
    float logprob;
    int unused;
};
