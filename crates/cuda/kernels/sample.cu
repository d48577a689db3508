// Answers the rows: log-probabilities, alternatives, and the draw, as engine::sampling defines them.
//
// Floor: without filters nothing is read but the statistics (greedy) or the row once (temperature). One block a row.
// top-k and top-p are selections: the rank of a candidate is its value's bits in order, then its id, 50 bits in all;
// a histogram of weights (1 each, or probability in fixed point, whose integer sums are exact in any order) over
// 11, 11, 10, 9 and 9 bits from the top finds the rank where the target is reached. Then the largest logit + Gumbel
// noise among those kept wins.
// logits fp32 [rows][vocab], edited in place; drawn [rows] is what the next step's inputs may refer to. Answers go straight to the host's
// memory: a copy behind takes the stream longer.
// Grid: (rows), 1024 threads.
#include "sample.cuh"

constexpr int THREADS = 1024;
constexpr int BINS = 2048;
constexpr float GUMBEL_RANGE = 20.0f;  // a token this far below the best never wins

__device__ __forceinline__ uint64_t rank_of(float value, int token) {
    uint32_t b = __float_as_uint(value);
    b = b & 0x80000000 ? ~b : b | 0x80000000;
    return uint64_t(b) << 18 | (0x3ffff - token);
}

__device__ __forceinline__ void philox(uint32_t k0, uint32_t k1, uint32_t c0, uint32_t c1, uint32_t (&out)[4]) {
    uint32_t c2 = 0, c3 = 0;
#pragma unroll
    for (int i = 0; i < 10; i++) {
        uint32_t a = __umulhi(0xD2511F53u, c0), a_low = 0xD2511F53u * c0;
        uint32_t b = __umulhi(0xCD9E8D57u, c2), b_low = 0xCD9E8D57u * c2;
        c0 = b ^ c1 ^ k0, c1 = b_low, c2 = a ^ c3 ^ k1, c3 = a_low;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

__device__ __forceinline__ float gumbel(uint32_t word) {
    float unit = ((word >> 9) + 0.5f) * (1.0f / 8388608.0f);
    return -logf(-logf(unit));
}

// The logits of a row as the draw sees them.
struct Row {
    const float* logits;
    const uint32_t* mask;  // null allows all
    int vocab;
    float base, scale;     // value = (logit - base) * scale

    __device__ __forceinline__ float operator()(int token) const {
        if (mask && !(mask[token / 32] >> (token % 32) & 1)) return -INFINITY;
        return __fmul_rn(logits[token] - base, scale);  // not contracted with the noise that is added to it
    }
};

// Probability of a value relative to the best, in units of 2^-40.
__device__ __forceinline__ uint64_t mass_of(float value) { return uint64_t(expf(value) * 1099511627776.0f); }

// The largest rank for which the candidates of at least that rank, and at least `floor`, weigh `target` or more;
// `floor` if all of them weigh less. Weights are 1, or masses.
template <bool MASS>
__device__ uint64_t select(const Row& row, uint64_t floor, uint64_t target, unsigned long long* bins) {
    __shared__ uint64_t found[2];  // prefix of the rank; weight above it
    uint64_t prefix = 0, above = 0;
    int shift = 50;
    for (int bits : {11, 11, 10, 9, 9}) {
        shift -= bits;
        for (int i = threadIdx.x; i < BINS; i += THREADS) bins[i] = 0;
        __syncthreads();
        for (int token = threadIdx.x; token < row.vocab; token += THREADS) {
            float value = row(token);
            uint64_t rank = rank_of(value, token);
            if (value == -INFINITY || rank < floor || rank >> (shift + bits) != prefix) continue;
            int bin = rank >> shift & ((1 << bits) - 1);
            if constexpr (MASS) {
                uint64_t mass = mass_of(value);
                if (mass) atomicAdd(bins + bin, static_cast<unsigned long long>(mass));
            } else {
                atomicAdd(reinterpret_cast<unsigned*>(bins + bin), 1u);  // the low word: counts stay below 2^32
            }
        }
        __syncthreads();
        if (threadIdx.x < 32) {  // lane l owns bins from the top: 64 l, 64 l + 1, ...
            constexpr int OWN = BINS / 32;
            int lane = threadIdx.x;
            uint64_t own = 0;
            for (int i = 0; i < OWN; i++) own += bins[BINS - 1 - lane * OWN - i];
            uint64_t upto = own;
#pragma unroll
            for (int d = 1; d < 32; d *= 2) {
                uint64_t other = __shfl_up_sync(0xffffffffu, upto, d);
                if (lane >= d) upto += other;
            }
            unsigned reached = __ballot_sync(0xffffffffu, above + upto >= target);
            if (reached == 0) {
                if (lane == 0) found[0] = ~0ull;
            } else if (lane == __ffs(reached) - 1) {
                uint64_t weight = above + upto - own;
                int bin = BINS - 1 - lane * OWN;
                while (weight + bins[bin] < target) weight += bins[bin--];
                found[0] = prefix << bits | bin;
                found[1] = weight;
            }
        }
        __syncthreads();
        prefix = found[0], above = found[1];
        __syncthreads();
        if (prefix == ~0ull) return floor;
    }
    return prefix;
}

// The best token of a row; a token of `vocab` or more if the mask leaves nothing.
__device__ Best best_of(const Row& row, Best* scratch) {
    Best best = {-INFINITY, 1 << 30};
    for (int token = threadIdx.x; token < row.vocab; token += THREADS) {
        float value = row(token);
        if (value > best.value) best = {value, token};
    }
    return block_best(best, scratch);
}

// The draw from a row whose values are relative to the best.
__device__ int draw_from(const Row& row, const Draw& draw, unsigned long long* bins, Best* scratch) {
    uint64_t kept = 0;
    if (draw.top_k > 0) kept = select<false>(row, 0, draw.top_k, bins);
    if (draw.top_p < 1.0f) {
        // Integer sums are the same in any order, so all of the mass can go through one counter a warp.
        __shared__ unsigned long long total;
        if (threadIdx.x == 0) total = 0;
        __syncthreads();
        uint64_t mine = 0;
        for (int token = threadIdx.x; token < row.vocab; token += THREADS) {
            float value = row(token);
            if (value > -INFINITY && rank_of(value, token) >= kept) mine += mass_of(value);
        }
#pragma unroll
        for (int mask = 16; mask > 0; mask >>= 1) mine += __shfl_xor_sync(0xffffffffu, mine, mask);
        if (threadIdx.x % 32 == 0) atomicAdd(&total, static_cast<unsigned long long>(mine));
        __syncthreads();
        uint64_t target = uint64_t(ceil(double(draw.top_p) * double(total)));
        kept = select<true>(row, kept, target, bins);
    }
    Best best = {-INFINITY, 1 << 30};
    for (int four = threadIdx.x; four * 4 < row.vocab; four += THREADS) {
        uint32_t words[4];
        bool drawn = false;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int token = four * 4 + i;
            if (token >= row.vocab) break;
            float value = row(token);
            if (value < draw.floor || value <= -GUMBEL_RANGE || rank_of(value, token) < kept) continue;
            if (!drawn) philox(draw.seed[0], draw.seed[1], four, draw.position, words);
            drawn = true;
            best = better(best, {value + gumbel(words[i]), token});
        }
    }
    return block_best(best, scratch).token;
}

// The best `count` of a row with their log-probabilities, best first.
__device__ void alternatives(const Row& row, int count, float log_sum, float2* out, unsigned long long* bins) {
    __shared__ uint64_t ranks[MOST_TOP];
    __shared__ int filled;
    uint64_t kept = select<false>(row, 0, count, bins);
    if (threadIdx.x == 0) filled = 0;
    __syncthreads();
    for (int token = threadIdx.x; token < row.vocab; token += THREADS) {
        uint64_t rank = rank_of(row(token), token);
        if (rank >= kept) {
            int at = atomicAdd(&filled, 1);
            if (at < MOST_TOP) ranks[at] = rank;
        }
    }
    __syncthreads();
    if (threadIdx.x < min(filled, MOST_TOP)) {
        uint64_t rank = ranks[threadIdx.x];
        int place = 0, token = 0x3ffff - int(rank & 0x3ffff);
        for (int i = 0; i < min(filled, MOST_TOP); i++) place += ranks[i] > rank;
        out[place] = make_float2(__int_as_float(token), row(token) - log_sum);
    }
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS)
    sample(float* logits, const Stats* stats, int parts, float2* tops, int* drawn, int* step, int vocab, int first) {
    __shared__ unsigned long long bins[BINS];
    __shared__ Best scratch[THREADS / 32];
    release();
    depend();
    int index = first + blockIdx.x;
    if (index >= step[ROWS]) return;
    const Draw& draw = *reinterpret_cast<const Draw*>(step + step[step[DRAW_AT] + index]);
    Answer& answer = (*reinterpret_cast<Answer**>(step + ANSWERS))[index];
    if (draw.want == LOGITS) return;

    // Whole-row statistics from those of the parts, which every warp merges alike.
    const int lane = threadIdx.x % 32;
    stats += blockIdx.x * parts;
    Best best = {-INFINITY, vocab};
    bool finite = true;
    for (int i = lane; i < parts; i += 32) {
        best = better(best, {stats[i].largest, stats[i].token});
        finite &= stats[i].finite != 0;
    }
    best = warp_best(best);
    float sum = 0.0f;
    for (int i = lane; i < parts; i += 32) sum += stats[i].sum * __expf(stats[i].largest - best.value);
    float log_sum = best.value + logf(warp_sum(sum));
    if (!__all_sync(0xffffffffu, finite)) {
        if (threadIdx.x == 0) answer = {}, drawn[index] = 0;
        return;
    }

    float* values = logits + size_t(blockIdx.x) * vocab;
    Row row = {values, nullptr, vocab, 0.0f, 1.0f};
    if (draw.top > 0) alternatives(row, draw.top, log_sum, tops + index * MOST_TOP, bins);
    int token = draw.want == SCORE ? draw.token : best.token;
    if (draw.want == SAMPLE) {
        Edit* edits = reinterpret_cast<Edit*>(step + draw.edits_at);
        for (int i = threadIdx.x; i < draw.edits; i += THREADS) {
            Edit& edit = edits[i];
            float value = values[edit.token];
            edit.raw = value;
            if (edit.seen >= 0) value = value > 0.0f ? __fdiv_rn(value, draw.repetition) : value * draw.repetition;
            if (edit.seen > 0)
                value = __fsub_rn(value, __fadd_rn(__fmul_rn(draw.frequency, edit.seen), draw.presence));
            values[edit.token] = __fadd_rn(value, edit.bias);
        }
        __syncthreads();
        if (draw.mask_at >= 0) row.mask = reinterpret_cast<const uint32_t*>(step + draw.mask_at);
        if (draw.edits > 0 || row.mask) best = best_of(row, scratch);
        token = best.token;
        if (token < vocab && draw.scale > 0.0f) {
            row.base = best.value, row.scale = draw.scale;
            token = draw_from(row, draw, bins, scratch);
        }
        if (token >= vocab) {
            if (threadIdx.x == 0) answer = {}, drawn[index] = 0;
            return;
        }
        __shared__ float raw;
        if (threadIdx.x == 0) raw = values[token];
        __syncthreads();
        for (int i = threadIdx.x; i < draw.edits; i += THREADS) {
            if (edits[i].token == token) raw = edits[i].raw;
        }
        __syncthreads();
        if (threadIdx.x == 0) answer = {1, token, raw - log_sum, 0}, drawn[index] = token;
    } else if (threadIdx.x == 0) {
        answer = {1, token, values[token] - log_sum, 0}, drawn[index] = token;
    }
}
