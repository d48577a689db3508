// Answers the rows: log-probabilities, alternatives, and the draw, as engine::sampling defines them.
//
// Floor: without filters nothing is read but the statistics (greedy), or the row once (temperature). A threadgroup a row.
// top-k and top-p are selections: the rank of a candidate is its value's bits in order, then its id, 50 bits in all; a
// histogram of weights (1 each, or probability in fixed point, whose integer sums are exact in any order) over 11, 11, 10,
// 9 and 9 bits from the top finds the rank at which the target is reached. Metal adds only 32 bits atomically: a bin is two
// words, and who makes the low one wrap adds the carry to the high one. Then the largest logit + Gumbel noise among those
// kept wins. logits fp32 [rows][vocab], edited in place; answers and tops [all rows]; drawn is what the next step's inputs
// may refer to. Grid: (rows), 256 threads. Threadgroup memory: `Shared`.
#include "sample.h"

#pragma METAL fp contract(off)  // the noise is added to a rounded product

constexpr constant int THREADS = 256;
constexpr constant int BINS = 2048;
constexpr constant float GUMBEL_RANGE = 20.0f;  // a token this far below the best never wins
constexpr constant ulong NEVER = ~0ul;

struct Shared {
    atomic_uint low[BINS], high[BINS];
    ulong sums[32];
    ulong prefix, above;
    ulong ranks[MOST_TOP];
    float values[8];
    int tokens[8];
    atomic_uint filled;
    float raw;
};
static_assert(sizeof(Shared) == 17240, "what src/kernels.rs asks for");

// Where a thread is.
struct Place {
    int index;
    uint lane, simdgroup;
};

// The logits of a row as the draw sees them.
struct Row {
    device const float* logits;
    device const uint* mask;
    bool masked;
    float base, scale;  // value = (logit - base) * scale
};

inline float value_of(Row row, int token) {
    if (row.masked && !(row.mask[token / 32] >> (token % 32) & 1)) return -INFINITY;
    return (row.logits[token] - row.base) * row.scale;
}

inline ulong rank_of(float value, int token) {
    uint b = as_type<uint>(value);
    b = b & 0x80000000 ? ~b : b | 0x80000000;
    return ulong(b) << 18 | ulong(0x3ffff - token);
}

// Probability of a value relative to the best, in units of 2^-40.
inline ulong mass_of(float value) { return ulong(exp(value) * 1099511627776.0f); }

inline void add(threadgroup Shared& shared, int bin, ulong weight) {
    uint low = uint(weight), high = uint(weight >> 32);
    uint before = atomic_fetch_add_explicit(&shared.low[bin], low, memory_order_relaxed);
    high += before + low < before;
    if (high > 0) atomic_fetch_add_explicit(&shared.high[bin], high, memory_order_relaxed);
}

inline ulong weight_in(threadgroup Shared& shared, int bin) {
    ulong high = atomic_load_explicit(&shared.high[bin], memory_order_relaxed);
    return high << 32 | atomic_load_explicit(&shared.low[bin], memory_order_relaxed);
}

// Empties all bins and waits for it.
inline void clear(threadgroup Shared& shared, Place at) {
    for (int i = at.index; i < BINS; i += THREADS) {
        atomic_store_explicit(&shared.low[i], 0, memory_order_relaxed);
        atomic_store_explicit(&shared.high[i], 0, memory_order_relaxed);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
}

// The largest rank for which the candidates of at least that rank, and at least `floor`, weigh `target` or more; `floor` if
// all of them weigh less. Weights are masses, or 1 each.
inline ulong select_rank(Row row, bool mass, ulong floor, ulong target, threadgroup Shared& shared, Place at) {
    ulong prefix = 0, above = 0;
    int shift = 50;
    for (int digit = 0; digit < 5; digit++) {
        int bits = digit < 2 ? 11 : digit == 2 ? 10 : 9;
        shift -= bits;
        clear(shared, at);
        for (int token = at.index; token < VOCAB; token += THREADS) {
            float value = value_of(row, token);
            ulong rank = rank_of(value, token);
            if (value == -INFINITY || rank < floor || rank >> (shift + bits) != prefix) continue;
            ulong weight = mass ? mass_of(value) : 1;
            if (weight > 0) add(shared, int(rank >> shift) & ((1 << bits) - 1), weight);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        constexpr int OWN = BINS / 32;  // of a thread of the first 32, from the top
        if (at.index < 32) {
            ulong sum = 0;
            for (int i = 0; i < OWN; i++) sum += weight_in(shared, BINS - 1 - at.index * OWN - i);
            shared.sums[at.index] = sum;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (at.index == 0) {
            int owner = 0;
            ulong weight = above;
            while (owner < 32 && weight + shared.sums[owner] < target) weight += shared.sums[owner++];
            if (owner == 32) {
                shared.prefix = NEVER;
            } else {
                int bin = BINS - 1 - owner * OWN;
                for (ulong here = weight_in(shared, bin); weight + here < target; here = weight_in(shared, --bin))
                    weight += here;
                shared.prefix = prefix << bits | ulong(bin);
                shared.above = weight;
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        prefix = shared.prefix, above = shared.above;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (prefix == NEVER) return floor;
    }
    return prefix;
}

// Sum of the masses of all candidates of at least a rank.
inline ulong total_mass(Row row, ulong kept, threadgroup Shared& shared, Place at) {
    clear(shared, at);
    ulong mine = 0;
    for (int token = at.index; token < VOCAB; token += THREADS) {
        float value = value_of(row, token);
        if (value > -INFINITY && rank_of(value, token) >= kept) mine += mass_of(value);
    }
    add(shared, 0, mine);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    ulong total = weight_in(shared, 0);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    return total;
}

inline uint4 philox(uint k0, uint k1, uint c0, uint c1) {
    uint c2 = 0, c3 = 0;
    for (int i = 0; i < 10; i++) {
        uint a = mulhi(0xD2511F53u, c0), a_low = 0xD2511F53u * c0;
        uint b = mulhi(0xCD9E8D57u, c2), b_low = 0xCD9E8D57u * c2;
        c0 = b ^ c1 ^ k0, c1 = b_low, c2 = a ^ c3 ^ k1, c3 = a_low;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    uint4 words = {c0, c1, c2, c3};
    return words;
}

inline float gumbel(uint word) {
    float unit = (float(word >> 9) + 0.5f) * (1.0f / 8388608.0f);
    return -log(-log(unit));
}

// The best token of a row; NOBODY if the mask leaves nothing.
inline Best best_of(Row row, threadgroup Shared& shared, Place at) {
    Best best = {-INFINITY, NOBODY};
    for (int token = at.index; token < VOCAB; token += THREADS) {
        Best here = {value_of(row, token), token};
        if (here.value > best.value) best = here;
    }
    return group_best(best, shared.values, shared.tokens, at.lane, at.simdgroup, 8);
}

// The draw from a row whose values are relative to the best.
inline int draw_from(Row row, device const Draw& draw, threadgroup Shared& shared, Place at) {
    ulong kept = 0;
    if (draw.top_k > 0) kept = select_rank(row, false, 0, draw.top_k, shared, at);
    if (draw.top_p > 0) {
        ulong total = total_mass(row, kept, shared, at), p = draw.top_p;
        ulong target = (total >> 32) * p + (((total & 0xffffffff) * p + 0xffffffff) >> 32);
        kept = select_rank(row, true, kept, target, shared, at);
    }
    Best best = {-INFINITY, NOBODY};
    for (int four = at.index; four * 4 < VOCAB; four += THREADS) {
        uint4 words = {0, 0, 0, 0};
        bool drawn = false;
        for (int i = 0; i < 4 && four * 4 + i < VOCAB; i++) {
            int token = four * 4 + i;
            float value = value_of(row, token);
            if (value < draw.floor || value <= -GUMBEL_RANGE || rank_of(value, token) < kept) continue;
            if (!drawn) words = philox(draw.seed[0], draw.seed[1], four, draw.position);
            drawn = true;
            Best here = {value + gumbel(words[i]), token};
            best = better(best, here);
        }
    }
    return group_best(best, shared.values, shared.tokens, at.lane, at.simdgroup, 8).token;
}

// The best `count` of a row with their log-probabilities, best first, as (token, bits of the float).
inline void alternatives(Row row, int count, float log_sum, device uint* out, threadgroup Shared& shared, Place at) {
    ulong kept = select_rank(row, false, 0, count, shared, at);
    if (at.index == 0) atomic_store_explicit(&shared.filled, 0, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int token = at.index; token < VOCAB; token += THREADS) {
        ulong rank = rank_of(value_of(row, token), token);
        if (rank < kept) continue;
        int place = atomic_fetch_add_explicit(&shared.filled, 1, memory_order_relaxed);
        if (place < MOST_TOP) shared.ranks[place] = rank;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    int filled = min(int(atomic_load_explicit(&shared.filled, memory_order_relaxed)), MOST_TOP);
    if (at.index < filled) {
        ulong rank = shared.ranks[at.index];
        int place = 0, token = 0x3ffff - int(rank & 0x3ffff);
        for (int i = 0; i < filled; i++) place += shared.ranks[i] > rank;
        out[2 * place] = token;
        out[2 * place + 1] = as_type<uint>(value_of(row, token) - log_sum);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
}

inline void answer_with(device Answer& answer, device int& drawn, bool finite, int token, float logprob) {
    answer.finite = finite, answer.token = token, answer.logprob = logprob;
    drawn = token;
}

kernel void sample(device float* logits [[buffer(0)]], device const Stats* stats [[buffer(1)]],
                   device Answer* answers [[buffer(2)]], device uint* tops [[buffer(3)]],
                   device int* drawn [[buffer(4)]], device int* step [[buffer(5)]], constant int& first [[buffer(6)]],
                   threadgroup Shared* memory [[threadgroup(0)]], uint3 group [[threadgroup_position_in_grid]],
                   uint thread_index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
                   uint simdgroup [[simdgroup_index_in_threadgroup]]) {
    threadgroup Shared& shared = *memory;
    Place at = {int(thread_index), lane, simdgroup};
    int index = first + group.x;
    device const Draw& draw = *(device const Draw*)(step + step[step[DRAW_AT] + index]);
    if (draw.want == LOGITS) return;

    // Whole-row statistics from those of the parts, which every simdgroup merges alike.
    device const Stats& part = stats[group.x * PARTS + lane];
    Best best = {part.largest, part.token};
    best = simd_best(best);
    float log_sum = best.value + log(simd_sum(part.sum * exp(part.largest - best.value)));
    if (!simd_all(part.finite)) {
        if (at.index == 0) answer_with(answers[index], drawn[index], false, 0, 0.0f);
        return;
    }

    device float* values = logits + ulong(group.x) * VOCAB;
    Row row = {values, (device const uint*)step, false, 0.0f, 1.0f};
    if (draw.top > 0) alternatives(row, draw.top, log_sum, tops + ulong(index) * MOST_TOP * 2, shared, at);
    if (draw.want == SCORE) {
        if (at.index == 0) answer_with(answers[index], drawn[index], true, draw.token, values[draw.token] - log_sum);
        return;
    }

    // The alternatives were read from the logits that are edited now.
    threadgroup_barrier(mem_flags::mem_device);
    device Edit* edits = (device Edit*)(step + draw.edits_at);
    for (int i = at.index; i < draw.edits; i += THREADS) {
        device Edit& edit = edits[i];
        float value = values[edit.token];
        edit.raw = value;
        if (edit.seen >= 0) value = value > 0.0f ? value / draw.repetition : value * draw.repetition;
        if (edit.seen > 0) value -= draw.frequency * float(edit.seen) + draw.presence;
        values[edit.token] = value + edit.bias;
    }
    threadgroup_barrier(mem_flags::mem_device);
    if (draw.mask_at >= 0) row.mask = (device const uint*)step + draw.mask_at, row.masked = true;
    if (draw.edits > 0 || row.masked) best = best_of(row, shared, at);
    int token = best.token;
    if (token < VOCAB && draw.scale > 0.0f) {
        row.base = best.value, row.scale = draw.scale;
        token = draw_from(row, draw, shared, at);
    }
    if (token >= VOCAB) {
        if (at.index == 0) answer_with(answers[index], drawn[index], false, 0, 0.0f);
        return;
    }
    // The log-probability is the model's own: of the logit before it was edited.
    if (at.index == 0) shared.raw = values[token];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int i = at.index; i < draw.edits; i += THREADS)
        if (edits[i].token == token) shared.raw = edits[i].raw;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (at.index == 0) answer_with(answers[index], drawn[index], true, token, shared.raw - log_sum);
}
