// One token of one sequence: the whole forward pass in a persistent kernel, one block a multiprocessor (Hopper).
//
// Floor: every weight and every cached key and value read once, at the 4.6 to 4.7 TB/s of bulk copies.
//
// A producer warp streams the block's share of all weights, and of the KV cache, through a ring in shared memory. It
// never waits for an activation, so memory stays busy while the phases below wait for each other. Eight consumer warps
// multiply what arrives. A layer has five phases, and a sixth where the context is long:
//
//   1. q, k, v = W_qkv norm(x)                      exchanged: q, k, v
//   2. attention of a KV head over a part of the context, the new key and value appended
//                                                   exchanged: its output, or partial outputs
//   3. (several parts) the parts of a head merged   exchanged: attention output
//   4. y = x + W_o attention                        exchanged: y
//   5. h = silu(W_gate norm(y)) * W_up norm(y)      exchanged: h
//   6. x = y + W_down h                             exchanged: x
//
// A warp posts up to 32 values of a vector and counts them in; one warp a block polls the count, then all read the vector. No
// fence orders count and words, for it would wait for the copies in flight: the words say themselves whether they are new
// (decode_exchange.cuh). Nobody overwrites a word too early,
// because the next layer's slices depend on everything that was computed from this layer's.
//
// Launch: one block a multiprocessor, DECODE_THREADS threads, all blocks resident (a cooperative launch); scratch memory is
// zeroed once. There is a kernel for each checkpoint, since loops of known length and addresses known when it is compiled are what
// keeps a phase short (docs/kernels.md, Step).
#pragma once

#include "decode_attention.cuh"

#if HOPPER

// The part of a layer's attention that is this block's.
template <class M, Kv KIND>
__device__ __forceinline__ void attend_part(Consumer& c, const DecodeArgs& args, const Context& context, int index, int layer, int position,
                                            int block, const Source& qkv, uint32_t* counter) {
    const int head = index % KV_HEADS, split = index / KV_HEADS;
    const Share units = context.share(split);
    Part part{head, units.first, units.count, position, split == context.splits - 1};
    const size_t plane = size_t(args.blocks) * KV_HEADS * BLOCK, row_bytes = KIND == KV_BF16 ? HEAD * 2 : HEAD;
    part.keys = {args.pool.values + 2 * layer * plane * row_bytes, args.pool.scales + 2 * layer * plane};
    part.values = {part.keys.values + plane * row_bytes, part.keys.scales + plane};
    part.row = cache_row(block, head) + position % BLOCK;
    attend<M, KIND>(c, args, part, qkv, split, context.splits == 1, args.q_norm + layer * args.norm_stride,
                    args.k_norm + layer * args.norm_stride, counter);
}

// The residual stream's first vector, posted like all others; returns its sum of squares.
template <Type H, int HIDDEN>
__device__ __forceinline__ float embed(const Consumer& c, const DecodeArgs& args, Share share, int token, uint32_t tag, uint32_t* counter) {
    c.publish(share.count * PANEL, args.scratch + args.x + share.first * PANEL, tag, counter, [&](int i) {
        const int column = share.first * PANEL + i;
        const float4 v = embedding<H>(args.embedding, token, HIDDEN, column / 4);
        return column % 4 < 2 ? (column % 2 ? v.y : v.x) : (column % 2 ? v.w : v.z);
    });
    float squares = 0;
#pragma unroll 1
    for (int i = c.lane; i < HIDDEN / 4; i += 32) {
        const float4 v = embedding<H>(args.embedding, token, HIDDEN, i);
        squares += (v.x * v.x + v.y * v.y) + (v.z * v.z + v.w * v.w);
    }
    return warp_sum(squares);
}

// W norm(vector). Output i is `value(i, factor)` of the rows' sums, where `factor` norms and undoes the scale of the vector.
template <Type T, int K, bool PAIRS = false, class Value>
__device__ __forceinline__ void project_normed(Consumer& c, const Source& source, const float* norm, float scale, int panels, int outputs,
                                               float* to, uint32_t tag, uint32_t* counter, Value value) {
    Input<T, K, false> input;
    float squares = input.prepare(c, source, norm, scale);
    multiply(c, input, panels);
    c.share_squares(squares);
    c.template publish<PAIRS>(outputs, to, tag, counter, [&](int i) {
        return value(i, __fdividef(1.0f, scale) * rsqrtf(__fdividef(c.sum_of_squares(), K) + EPSILON));
    });
}

// residual + W vector / vector's scale.
template <Type T, int K>
__device__ __forceinline__ void project_back(Consumer& c, const Source& source, float scale, const Source& residual, Share share, float* to,
                                             uint32_t tag, uint32_t* counter) {
    if (share.count == 0) {
        c.sync();  // the warps' squares of the phase before, which the next one's scale is made of
        return;
    }
    const int first = share.first * PANEL, outputs = share.count * PANEL, mine = c.warp * 32 + c.lane;
    float before = 0;
    if (mine < outputs) before = await_word(residual.posted + first + mine, residual.tag);
    Input<T, K, true> input;
    input.prepare(c, source);
    multiply(c, input, share.count);
    const float factor = __fdividef(1.0f, scale);
    c.publish(outputs, to + first, tag, counter, [&](int i) { return before + c.row_sum(i) * factor; });
}

// Brings a layer's norms into the L2 cache, where all blocks then find them.
template <class M>
__device__ __forceinline__ void prefetch_norms(const DecodeArgs& args, int layer) {
    auto prefetch = [&](const float* norm, int width) {
#pragma unroll 1
        for (int i = threadIdx.x * 32; i < width; i += CONSUMERS * 32 * 32)
            asm volatile("prefetch.global.L2 [%0];" ::"l"(norm + layer * args.norm_stride + i));
    };
    prefetch(args.attention_norm, M::HIDDEN);
    prefetch(args.q_norm, HEAD);
    prefetch(args.k_norm, HEAD);
    prefetch(args.ffn_norm, M::HIDDEN);
}

// Everything up to the last layer's output; returns where that is posted, and the scale for it.
template <class M, Type T, Type H>
__device__ __forceinline__ Source run_layers(Consumer& c, const DecodeArgs& args, Dealer& dealer, int token, int position, int block,
                                             float& scale) {
    const Context context(position);
    const int parts = KV_HEADS * context.splits;
    uint32_t* counters = args.counters + args.layers * EXCHANGES * COUNTER_WORDS;
    const Deal& back = args.deals[OUT];
    scale = scale_of(embed<H, M::HIDDEN>(c, args, Dealer(dealer).share(back), token, tag_of(-1, args.layers), counters), M::HIDDEN);
    Source x{args.scratch + args.x, tag_of(-1, args.layers), counters, back.arrivals};
    counters = args.counters;
#pragma unroll 1
    for (int layer = 0; layer < args.layers; layer++, counters += EXCHANGES * COUNTER_WORDS) {
        const uint32_t tag = tag_of(layer, args.layers);
        float* const scratch = args.scratch;
        float *const posted_x = scratch + args.x, *const posted_y = scratch + args.y;
        auto counter = [&](Exchange e) { return counters + e * COUNTER_WORDS; };
        if (layer + 1 < args.layers && blockIdx.x == layer % gridDim.x) prefetch_norms<M>(args, layer + 1);
        Share share = dealer.share(args.deals[QKV]);
        if (layer > 0) scale = scale_of(c.sum_of_squares(), M::HIDDEN);
        project_normed<T, M::HIDDEN>(c, x, args.attention_norm + layer * args.norm_stride, scale, share.count, share.count * PANEL,
                                     scratch + args.qkv + share.first * PANEL, tag, counter(QKV_READY),
                                     [&](int i, float factor) { return c.row_sum(i) * factor; });
        Source attention{scratch + args.attention, tag, counter(ATTENTION_READY), uint32_t(parts * CONSUMERS)};
        uint32_t* const partial = counter(PARTS_READY);
        const int index = dealer.rank(parts);
        if (index < parts) {
            const Source qkv{scratch + args.qkv, tag, counter(QKV_READY), args.deals[QKV].arrivals};
            uint32_t* to = context.splits == 1 ? counter(ATTENTION_READY) : partial;
            if (args.kv == KV_BF16) attend_part<M, KV_BF16>(c, args, context, index, layer, position, block, qkv, to);
            else attend_part<M, KV_Q8_0>(c, args, context, index, layer, position, block, qkv, to);
        }
        if (context.splits > 1) {
            const int head = dealer.rank(M::HEADS);
            if (head < M::HEADS) {
                c.await(partial, parts * CONSUMERS);
                merge(c, args, head, context.splits, tag, counter(ATTENTION_READY));
            }
            attention.arrivals = M::HEADS * (HEAD / 32);
        }
        project_back<T, M::Q>(c, attention, 1.0f, x, dealer.share(back), posted_y, tag, counter(Y_READY));
        const Source y{posted_y, tag, counter(Y_READY), back.arrivals};
        share = dealer.share(args.deals[GATE_UP]);
        scale = scale_of(c.sum_of_squares(), M::HIDDEN);
        project_normed<T, M::HIDDEN, true>(c, y, args.ffn_norm + layer * args.norm_stride, scale, share.count * 2, share.count * PANEL,
                                     scratch + args.h + share.first * PANEL / 2, tag, counter(H_READY), [&](int i, float factor) {
                                         const int row = i / PANEL * 2 * PANEL + i % PANEL;
                                         return silu(c.row_sum(row) * factor) * (c.row_sum(row + PANEL) * factor) * PRODUCT_SCALE;
                                     });
        const Source h{scratch + args.h, tag, counter(H_READY), args.deals[GATE_UP].arrivals};
        project_back<T, M::FFN>(c, h, PRODUCT_SCALE, y, dealer.share(back), posted_x, tag, counter(X_READY));
        x = {posted_x, tag, counter(X_READY), back.arrivals};
    }
    scale = scale_of(c.sum_of_squares(), M::HIDDEN);
    return x;
}

// W_head norm(x), and the statistics of the block's logits for `sample`.
template <Type H, int HIDDEN>
__device__ __forceinline__ void run_head(Consumer& c, const DecodeArgs& args, Dealer& dealer, const Source& source, float scale) {
    const Share share = dealer.share(args.deals[VOCABULARY]);
    Input<H, HIDDEN, false> input;
    c.share_squares(input.prepare(c, source, args.output_norm, scale));
    Best best = {-INFINITY, args.deals[VOCABULARY].units * PANEL};
    float sum = 0, odd = 0;  // of exponentials over the best; stays 0 while all are finite
    auto scaled = [](float s, float from, float to) { return s > 0 ? s * __expf(from - to) : 0.0f; };
#pragma unroll 1
    for (int done = 0; done < share.count; done += ROUND) {
        const int panels = min(ROUND, share.count - done);
        multiply(c, input, panels);
        c.sync();
        if (threadIdx.x < panels * PANEL) {
            const float factor = __fdividef(1.0f, scale) * rsqrtf(__fdividef(c.sum_of_squares(), HIDDEN) + EPSILON);
            const float logit = c.row_sum(threadIdx.x) * factor;
            const int row = (share.first + done) * PANEL + threadIdx.x;
            args.logits[row] = logit;
            odd += logit - logit;
            const Best both = better(best, {logit, row});
            sum = scaled(sum, best.value, both.value) + __expf(logit - both.value);
            best = both;
        }
        c.sync();
    }
    // The warps' statistics, then the block's.
    auto* bests = reinterpret_cast<Stats*>(c.sums);
    const Best warp = warp_best(best);
    sum = warp_sum(scaled(sum, best.value, warp.value));
    odd = warp_sum(odd);
    if (c.lane == 0) bests[c.warp] = {warp.value, sum, warp.token, odd == 0.0f};
    c.sync();
    if (threadIdx.x != 0) return;
    Stats all = bests[0];
    for (int w = 1; w < CONSUMERS; w++) {
        const Stats next = bests[w];
        const Best both = better({all.largest, all.token}, {next.largest, next.token});
        all.sum = scaled(all.sum, all.largest, both.value) + scaled(next.sum, next.largest, both.value);
        all.largest = both.value, all.token = both.token, all.finite &= next.finite;
    }
    args.stats[blockIdx.x] = all;
}

template <class M, Type T, Type H>
__device__ __forceinline__ void decode(const DecodeArgs& args, const DecodeMaps& maps) {
    extern __shared__ uint8_t dynamic[];
    uint8_t* const start = dynamic + (1024 - shared_address(dynamic) % 1024) % 1024;
    auto at = [&](int offset) { return reinterpret_cast<float*>(start + offset); };
    float* const fixed = at(args.fixed);
    auto* const rotations = reinterpret_cast<float2*>(fixed);
    float* const squares = fixed + HEAD;
    int* const taken = reinterpret_cast<int*>(squares + CONSUMERS);
    const uint32_t barriers = shared_address(taken + SLOTS);
    Ring ring{shared_address(start), barriers, barriers + SLOTS * 8, args.ring, 0, 0};
    // Through a shuffle, so that the compiler keeps them instead of reading the special register anew.
    const int lane = __shfl_sync(0xffffffffu, threadIdx.x % 32, threadIdx.x), warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);

    const int position = args.step[args.step[POSITION_AT]];
    const int* table = args.step + args.step[args.step[TABLE_AT]];
    if (threadIdx.x == 0) {
        for (int i = 0; i < SLOTS; i++) {
            barrier_init(ring.full_at + i * 8, 1);
            barrier_init(ring.empty_at + i * 8, CONSUMERS);
        }
    }
    if (threadIdx.x < HEAD / 2) {
        // In turns, since fp32 is off by 1e-3 at position 32,768.
        const double turns = position * (args.frequencies[threadIdx.x] * 0.15915494309189533577);
        float sine, cosine;
        sincospif(2.0f * float(turns - rint(turns)), &sine, &cosine);
        rotations[threadIdx.x] = make_float2(cosine, sine);
    }
    for (int i = blockIdx.x * DECODE_THREADS + threadIdx.x; i < (args.layers * EXCHANGES + 1) * 4; i += gridDim.x * DECODE_THREADS)
        args.spent[i * 32] = 0;
    fence_bulk();
    __syncthreads();

    Dealer dealer{static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x), 0};
    if (warp >= CONSUMERS) {
        fewer_registers<40>();
        if (warp == CONSUMERS) {
            Producer producer{ring, ring, ring.bytes, taken, evict_first(), args, maps};
            produce<M, T, H>(producer, dealer, position, table);
        }
    } else {
        more_registers<232>();
        int token = args.step[args.step[TOKEN_AT]];
        if (token < 0) token = args.drawn[-1 - token];
        Consumer c{ring, warp, lane, start + args.vector, at(args.sums), args.sum_rows, squares, rotations, uint32_t(args.early)};
        float scale;
        const Source answer = run_layers<M, T, H>(c, args, dealer, token, position, table[position / BLOCK], scale);
        run_head<H, M::HIDDEN>(c, args, dealer, answer, scale);
    }
}

#endif

// By the checkpoint's dimensions (src/kernels.rs lists them: those whose gates have run), the type of the layers' matrices and that of the embedding and the head.
#define KERNEL(hidden, ffn, heads, layers, head)                                                                              \
    extern "C" __global__ void __launch_bounds__(DECODE_THREADS, 1)                                                           \
        decode_##hidden##_##ffn##_##heads##_##layers##_##head(const __grid_constant__ DecodeMaps maps,                        \
                                                              const __grid_constant__ DecodeArgs args) {                      \
        RUN(hidden, ffn, heads, layers, head)                                                                                 \
    }
#if HOPPER
#define RUN(hidden, ffn, heads, layers, head) decode<Checkpoint<hidden, ffn, heads>, layers, head>(args, maps);
#else
#define RUN(hidden, ffn, heads, layers, head)
#endif
#define CHECKPOINTS(layers, head)                                                                                             \
    KERNEL(256, 768, 16, layers, head)                                                                                        \
    KERNEL(1024, 3072, 16, layers, head)                                                                                      \
    KERNEL(2048, 6144, 16, layers, head)                                                                                      \
    KERNEL(2560, 9728, 32, layers, head)                                                                                      \
    KERNEL(4096, 12288, 32, layers, head)                                                                                     \
    KERNEL(5120, 17408, 40, layers, head)                                                                                     \
    KERNEL(5120, 25600, 64, layers, head)
