// One token of one sequence: the whole forward pass in a persistent kernel, one block a multiprocessor.
//
// Floor: every weight and every cached key and value read once, at the 4.6-4.7 TB/s of bulk copies.
//
// A producer warp streams the block's share of all weights, and of the KV cache, through a ring in shared
// memory. It never waits for an activation, so memory stays busy while the phases below wait for each other.
// Eight consumer warps multiply what arrives. A layer has five phases, and a sixth where the context is long:
//
//   1. q, k, v = W_qkv norm(x)                      exchanged: q, k, v
//   2. attention of a KV head over a part of the context, the new key and value appended
//                                                   exchanged: its output, or partial outputs
//   3. (several parts) the parts of a head merged   exchanged: attention output
//   4. y = x + W_o attention                        exchanged: y
//   5. h = silu(W_gate norm(y)) * W_up norm(y)      exchanged: h
//   6. x = y + W_down h                             exchanged: x
//
// A block stages its slice of a vector in shared memory, writes it with one bulk store and counts itself in; one warp a
// block polls the count, then all read the vector. No fence orders count and words, for it would wait for the
// copies in flight: the words say themselves whether they are new (hopper.cuh). Nobody overwrites a word too early,
// because the next layer's slices depend on everything that was computed from this layer's.
//
// A matrix-vector product runs on the tensor cores: eight weight rows against the vector, which is split into
// two bf16 parts that sum to 16 bits of mantissa and sit in even and odd rows of the other operand. The warps
// divide each panel's columns; their sums are added in warp order, so the bits never change.
//
// Launch: one block a multiprocessor, THREADS threads, Shape::BYTES of dynamic shared memory, all blocks resident (a
// cooperative launch). Scratch memory, Shape::SCRATCH floats, is zeroed once, and again after a launch that failed.
// The number of layers is even, so that every launch finds the words' tags as the first one did. Every block
// gets a panel of the qkv and the gate-up matrix, at most 32 of the latter.

#include "hopper_decode_attention.cuh"

namespace hopper {

// A float as an unsigned integer of the same order.
__device__ __forceinline__ uint32_t ordered(float x) {
    uint32_t u = __float_as_uint(x);
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}

// W_head norm(x), and the best row of all blocks.
template <int HIDDEN>
__device__ __forceinline__ void answer(Consumer& c, Input<HIDDEN>& input, Share share, const DecodeArgs& args, uint32_t* counters) {
    input.template prepare<true>(c);
    input.share_squares(c);
    unsigned long long best = 0;
    for (int done = 0; done < share.count; done += TILES_AT_ONCE) {
        int tiles = min(TILES_AT_ONCE, share.count - done);
        multiply_panels<HIDDEN>(c, input, tiles);
        c.sync();
        if (threadIdx.x < tiles * 8) {
            float logit = row_sum(c, threadIdx.x) * inverse_norm(c, HIDDEN);
            uint32_t row = (share.first + done) * 8 + threadIdx.x;
            args.logits[row] = logit;
            best = max(best, (static_cast<unsigned long long>(ordered(logit)) << 32) | ~row);
        }
        c.sync();
    }
    for (int m = 16; m > 0; m /= 2) best = max(best, __shfl_xor_sync(0xffffffffu, best, m));
    auto* all = reinterpret_cast<unsigned long long*>(args.scratch);
    auto* seen = reinterpret_cast<uint32_t*>(all + 1);
    uint32_t order = 0;
    if (c.lane == 0) {
        atomicMax(all, best);
        __threadfence();
        order = atomicAdd(seen, 1);
    }
    if (__shfl_sync(0xffffffffu, order, 0) < gridDim.x * CONSUMERS - 1) return;
    // The last warp leaves all as it was.
    if (c.lane == 0) {
        *args.best = ~static_cast<uint32_t>(atomicExch(all, 0));
        *seen = 0;
    }
    for (int i = c.lane; i < args.layers * COUNTERS * 4; i += 32) counters[i * 32] = 0;
}

template <class S, int HIDDEN, int FFN>
__device__ void consume(const DecodeArgs& args, Consumer c, Dealer dealer) {
    const int position = *args.position;
    const Context context(position);
    const Deals<S, HIDDEN, FFN> deals(dealer.blocks, context.splits);
    const float4 rotation = reinterpret_cast<const float4*>(args.rope + size_t(position) * 64)[c.lane];
    const uint32_t token = *args.token, block = args.table[position / BLOCK];
    const bf16* row = args.embedding + (size_t(token / 8) * HIDDEN + token % 8) * 8;  // 8 columns every 64 elements

    float *x = args.scratch + S::X_AT, *y = args.scratch + S::Y_AT, *qkv = args.scratch + S::QKV_AT;
    float *attention = args.scratch + S::ATTENTION_AT, *h = args.scratch + S::H_AT, *parts = args.scratch + S::PARTIAL_AT;

    auto* counters = reinterpret_cast<uint32_t*>(args.scratch + S::COUNTERS_AT);
    auto one = [](const float* p, uint32_t tag) {
        float v;
        do load_posted(v, p);
        while (!tagged(v, tag));
        return v;
    };
    const uint32_t qkv_blocks = min(deals.qkv.tiles, dealer.blocks), back_blocks = min(deals.back.tiles, dealer.blocks);
    const uint32_t gate_up_blocks = min(deals.gate_up.tiles, dealer.blocks);
    const uint32_t* x_counter = nullptr;

    for (int layer = 0; layer < args.layers; layer++) {
        uint32_t* counter = counters + layer * COUNTERS * COUNT_WORDS;
        const float* norms = args.norms + size_t(layer) * S::NORMS;
        const uint32_t tag = (layer + 1) & 1;
        {
            Input<HIDDEN> input;
            input.fetch_norm(c, norms);
            // The next layer's norms into the cache, by a block a layer.
            if (blockIdx.x == layer % gridDim.x)
                for (int i = threadIdx.x * 32; i < (layer + 1 < args.layers ? S::NORMS : HIDDEN); i += CONSUMERS * 32 * 32) asm volatile("prefetch.global.L2 [%0];" ::"l"(norms + S::NORMS + i));
            if (layer > 0) {
                c.await(x_counter, back_blocks);
                input.await(c, x, tag ^ 1);
            } else {
                input.each(c, [&](int i, int column) {
                    uint2 v = *reinterpret_cast<const uint2*>(row + column / 8 * 64 + column % 8);
                    input.x[i] = make_float4(__uint_as_float(v.x << 16), __uint_as_float(v.x & 0xffff0000u), __uint_as_float(v.y << 16),
                                             __uint_as_float(v.y & 0xffff0000u));
                });
            }
            project_qkv<HIDDEN>(c, input, dealer.share(deals.qkv), qkv, tag, counter);
        }

        int index = dealer.rank(deals.attention);
        uint32_t *attended = counter + COUNT_WORDS, attended_by = deals.attention.tiles;
        if (index < deals.attention.tiles) {
            int head = index / context.splits, split = index % context.splits, first = context.begin(split);
            bf16* cache = args.cache + ((size_t(layer) * args.blocks + block) * KV_HEADS + head) * (KV_TILE / 2);
            Part part{head, first, context.begin(split + 1) - first, position, split == context.splits - 1, cache};
            c.await(counter, qkv_blocks);
            attend<S>(c, part, qkv, tag, norms + 2 * HIDDEN, norms + 2 * HIDDEN + HEAD, rotation, context.splits == 1, attention,
                      parts + split * PARTIAL, attended);
        }
        if (context.splits > 1) {
            int head = dealer.rank(deals.merge);
            uint32_t* merged = counter + 2 * COUNT_WORDS;
            if (head < deals.merge.tiles) {
                c.await(attended, attended_by);
                merge(c, parts + head * SPLITS * PARTIAL, context.splits, attention + head * HEAD, tag, merged);
            }
            attended = merged, attended_by = deals.merge.tiles;
        }
        project_back<S::Q>(
            c, attention, [=](int i) { return layer > 0 ? one(x + i, tag ^ 1) : __bfloat162float(row[i / 8 * 64 + i % 8]); }, dealer.share(deals.back), y, tag,
            attended, attended_by, counter + 3 * COUNT_WORDS);
        {
            Input<HIDDEN> input;
            input.fetch_norm(c, norms + HIDDEN);
            c.await(counter + 3 * COUNT_WORDS, back_blocks);
            input.await(c, y, tag);
            project_gate_up<HIDDEN>(c, input, dealer.share(deals.gate_up), h, tag, counter + 4 * COUNT_WORDS);
        }
        x_counter = counter + 5 * COUNT_WORDS;
        project_back<FFN>(c, h, [=](int i) { return one(y + i, tag); }, dealer.share(deals.back), x, tag, counter + 4 * COUNT_WORDS, gate_up_blocks,
                          counter + 5 * COUNT_WORDS);
    }
    Input<HIDDEN> input;
    input.fetch_norm(c, args.norms + size_t(args.layers) * S::NORMS);
    c.await(x_counter, back_blocks);
    input.await(c, x, args.layers & 1);
    answer<HIDDEN>(c, input, dealer.share(Deal(args.vocab / 8, dealer.blocks)), args, counters);
}

template <int HIDDEN, int FFN, int HEADS>
__device__ __forceinline__ void decode(const DecodeArgs& args) {
    using S = Shape<HIDDEN, FFN, HEADS>;
    extern __shared__ uint8_t dynamic[];
    const uint32_t slots = (shared_address(dynamic) + 1023) / 1024 * 1024;
    uint8_t* fixed = dynamic + (slots - shared_address(dynamic)) + S::SLOTS * SLOT;
    auto* vector = reinterpret_cast<float*>(fixed);
    float* sums = vector + S::VECTOR_BYTES / 4;
    float *out = sums + S::SUMS_BYTES / 4, *squares = out + S::OUT_BYTES / 4;
    const uint32_t barriers = shared_address(squares) + 64;
    Ring ring{slots, barriers, barriers + S::SLOTS * 8, S::SLOTS};
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0)
        for (int i = 0; i < S::SLOTS; i++) {
            barrier_init(ring.full + i * 8, 1);
            barrier_init(ring.empty + i * 8, CONSUMERS);
        }
    fence_bulk();
    __syncthreads();
    Dealer dealer{static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x)};
    if (warp >= CONSUMERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == CONSUMERS * 32) produce<S, HIDDEN, FFN>(args, Producer{ring, ring, evict_first(), S::IN_FLIGHT}, dealer);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        consume<S, HIDDEN, FFN>(args, Consumer{ring, warp, lane, vector, sums, out, squares}, dealer);
    }
}

}  // namespace hopper

// One entry a model of the family: hidden width, ffn width, query heads.
#define DECODE(name, hidden, ffn, heads)                                                                                   \
    extern "C" __global__ void __launch_bounds__(hopper::THREADS, 1) name(const __grid_constant__ hopper::DecodeArgs args) { \
        hopper::decode<hidden, ffn, heads>(args);                                                                          \
    }

DECODE(decode_256_768_16, 256, 768, 16)
DECODE(decode_1024_3072_16, 1024, 3072, 16)
DECODE(decode_2048_6144_16, 2048, 6144, 16)
DECODE(decode_2560_9728_32, 2560, 9728, 32)
DECODE(decode_4096_12288_32, 4096, 12288, 32)
