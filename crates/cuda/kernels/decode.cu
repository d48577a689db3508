// One token of one sequence: the whole forward pass in a persistent kernel, one block a multiprocessor (Hopper).
//
// Floor: every weight and every cached key and value read once, at the 4.6 to 4.7 TB/s of bulk copies.
//
// A producer thread streams the block's share of all weights, and of the KV cache, through a ring in shared memory. It
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
// A block stages its slice of a vector in shared memory, writes it with a bulk store a warp and counts it in; one warp a
// block polls the count, then all read the vector. No fence orders count and words, for it would wait for the copies in
// flight: the words say themselves whether they are new (decode_exchange.cuh). Nobody overwrites a word too early,
// because the next layer's slices depend on everything that was computed from this layer's.
//
// Launch: one block a multiprocessor, DECODE_THREADS threads, all blocks resident (a cooperative launch); scratch memory is
// zeroed once.
#include "decode_attention.cuh"

#if HOPPER

// The part of a layer that a block attends to; returns where the ring stands. A function of its own, so that its registers
// do not crowd out what the products keep.
template <Kv KIND>
__device__ __noinline__ Ring attend_part(Consumer c, const DecodeArgs& args, Context context, int index, int layer, int position, int block,
                                         uint32_t tag, uint32_t* counter) {
    const int head = index / context.splits, split = index % context.splits, first = context.begin(split);
    Part part{head, first, context.begin(split + 1) - first, position, split == context.splits - 1};
    const size_t plane = size_t(args.blocks) * KV_HEADS * BLOCK, row_bytes = KIND == KV_BF16 ? HEAD * 2 : HEAD;
    part.keys = {args.pool.values + 2 * layer * plane * row_bytes, args.pool.scales + 2 * layer * plane};
    part.values = {part.keys.values + plane * row_bytes, part.keys.scales + plane};
    part.row = cache_row(block, head) + position % BLOCK;
    attend<KIND>(c, args, part, split, context.splits == 1, tag, args.q_norm + layer * args.norm_stride,
                 args.k_norm + layer * args.norm_stride, counter);
    return c.ring;
}

// The residual stream's first vector, posted like all others; returns its sum of squares.
template <Type H>
__device__ __forceinline__ float embed(const Consumer& c, const DecodeArgs& args, Share share, int token, uint32_t tag, uint32_t* counter) {
    c.publish(share.count * PANEL, args.scratch + args.x + share.first * PANEL, tag, counter, [&](int i) {
        const int column = share.first * PANEL + i;
        const float4 v = embedding<H>(args.embedding, token, args.hidden, column / 4);
        return column % 4 < 2 ? (column % 2 ? v.y : v.x) : (column % 2 ? v.w : v.z);
    });
    float squares = 0;
    for (int i = c.lane; i < args.hidden / 4; i += 32) {
        const float4 v = embedding<H>(args.embedding, token, args.hidden, i);
        squares += (v.x * v.x + v.y * v.y) + (v.z * v.z + v.w * v.w);
    }
    return warp_sum(squares);
}

// Everything up to the last layer's output; returns where that is posted, and the scale for it.
template <Type T, Type H>
__device__ __forceinline__ Source run_layers(Consumer& c, const DecodeArgs& args, Dealer& dealer, int token, int position, int block,
                                             float& scale) {
    const Context context(position);
    const Deal parts(KV_HEADS * context.splits, dealer.blocks), merges(args.heads, dealer.blocks);
    uint32_t* counters = args.counters + args.layers * EXCHANGES * COUNTER_WORDS;
    const Deal columns = deal_of(args, OUT);
    scale = scale_of(embed<H>(c, args, Dealer(dealer).share(columns), token, tag_of(-1, args.layers), counters), args.hidden);
    Source source{args.scratch + args.x, tag_of(-1, args.layers), counters, columns.arrivals(PANEL)};
    counters = args.counters;
#pragma unroll 1
    for (int layer = 0; layer < args.layers; layer++, counters += EXCHANGES * COUNTER_WORDS) {
        const uint32_t tag = tag_of(layer, args.layers);
#pragma unroll 1
        for (int matrix = QKV; matrix <= DOWN; matrix++) {
            if (matrix == OUT) {
                uint32_t *partial = counters + PARTS_READY * COUNTER_WORDS, *whole = counters + ATTENTION_READY * COUNTER_WORDS;
                int index = dealer.rank(parts);
                if (index < parts.units) {
                    c.await(source.counter, source.arrivals);
                    uint32_t* to = context.splits == 1 ? whole : partial;
                    if (args.kv == KV_BF16) c.ring = attend_part<KV_BF16>(c, args, context, index, layer, position, block, tag, to);
                    else c.ring = attend_part<KV_Q8_0>(c, args, context, index, layer, position, block, tag, to);
                }
                source = {args.scratch + args.attention, tag, whole, uint32_t(parts.units)};
                if (context.splits > 1) {
                    int head = dealer.rank(merges);
                    if (head < merges.units) {
                        c.await(partial, parts.units);
                        merge(c, args, head, context.splits, tag, whole);
                    }
                    source.arrivals = args.heads * Deal::publishers(HEAD);
                }
            }

            const Chunks m = args.matrices[matrix];
            const Deal deal(m.rows / PANEL / unit_panels(matrix), dealer.blocks);
            const Share share = dealer.share(deal);
            const int first = share.first * PANEL, outputs = share.count * PANEL;  // of a unit as many as a panel has rows
            const float* norm = nullptr;
            if (matrix == QKV) norm = args.attention_norm + layer * args.norm_stride;
            if (matrix == GATE_UP) norm = args.ffn_norm + layer * args.norm_stride;
            if (norm && (layer > 0 || matrix == GATE_UP)) scale = scale_of(c.sum_of_squares(), args.hidden);
            const float input_scale = norm ? scale : matrix == OUT ? 1.0f : PRODUCT_SCALE;
            float* const to = args.scratch + (matrix == QKV ? args.qkv : matrix == OUT ? args.y : matrix == GATE_UP ? args.h : args.x);
            uint32_t* const done =
                counters + (matrix == QKV ? QKV_READY : matrix == OUT ? Y_READY : matrix == GATE_UP ? H_READY : X_READY) * COUNTER_WORDS;

            float residual = 0;  // x before attention, y after it
            const int mine = c.warp * 32 + c.lane;
            if (!norm && mine < outputs)
                residual = await_word(args.scratch + (matrix == OUT ? args.x : args.y) + first + mine,
                                      matrix == OUT ? tag_of(layer - 1, args.layers) : tag);
            if (outputs > 0) {
                const int low = input_apart<T>(m.cols);
                multiply<T>(c, m, share.count * unit_panels(matrix), low, [&] { prepare<T>(c, source, norm, input_scale, m.cols, low); });
                c.publish(outputs, to + first, tag, done, [&](int i) {
                    float factor = __fdividef(sum_factor<T>(), input_scale);
                    if (!norm) return residual + c.row_sum(i) * factor;
                    factor *= rsqrtf(__fdividef(c.sum_of_squares(), m.cols) + EPSILON);
                    if (matrix == QKV) return c.row_sum(i) * factor;
                    const int row = i / PANEL * 2 * PANEL + i % PANEL;
                    return silu(c.row_sum(row) * factor) * (c.row_sum(row + PANEL) * factor);
                });
            }
            source = {to, tag, done, deal.arrivals(PANEL)};
        }
    }
    scale = scale_of(c.sum_of_squares(), args.hidden);
    return source;
}

// W_head norm(x), and the statistics of the block's logits for `sample`.
template <Type H>
__device__ __forceinline__ void run_head(Consumer& c, const DecodeArgs& args, Dealer& dealer, const Source& source, float scale) {
    const Chunks m = args.matrices[VOCABULARY];
    const Share share = dealer.share(deal_of(args, VOCABULARY));
    const int low = input_apart<H>(m.cols);
    Best best = {-INFINITY, args.vocab};
    float sum = 0, odd = 0;  // of exponentials over the best; stays 0 while all are finite
    auto scaled = [](float s, float from, float to) { return s > 0 ? s * __expf(from - to) : 0.0f; };
#pragma unroll 1
    for (int done = 0; done < share.count; done += ROUND) {
        const int panels = min(ROUND, share.count - done);
        multiply<H>(c, m, panels, low, [&] {
            if (done == 0) prepare<H>(c, source, args.output_norm, scale, m.cols, low);
        });
        c.sync();
        if (threadIdx.x < panels * PANEL) {
            const float factor = __fdividef(sum_factor<H>(), scale) * rsqrtf(__fdividef(c.sum_of_squares(), m.cols) + EPSILON);
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

template <Type T, Type H>
__device__ __forceinline__ void decode(const DecodeArgs& args, const DecodeMaps& maps) {
    extern __shared__ uint8_t dynamic[];
    uint8_t* const start = dynamic + (1024 - shared_address(dynamic) % 1024) % 1024;
    auto at = [&](int offset) { return reinterpret_cast<float*>(start + offset); };
    float* const fixed = at(args.fixed);
    auto* const rotations = reinterpret_cast<float2*>(fixed);
    float* const squares = fixed + HEAD;
    int* const far = reinterpret_cast<int*>(squares + CONSUMERS);
    int* const bytes = far + 8;
    const uint32_t barriers = shared_address(bytes + 32);
    Ring ring{shared_address(start), barriers, barriers + args.slots * 8, args.slots, args.slot_bytes, 0, 0};
    // Through a shuffle, so that the compiler keeps them instead of reading the special register anew.
    const int lane = __shfl_sync(0xffffffffu, threadIdx.x % 32, threadIdx.x), warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);

    const int position = args.step[args.step[POSITION_AT]];
    const int* table = args.step + args.step[args.step[TABLE_AT]];
    if (threadIdx.x == 0) {
        *far = 0;
        for (int i = 0; i < args.slots; i++) {
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
        if (threadIdx.x == CONSUMERS * 32) {
            Producer producer{ring, ring, 0, 0, bytes, far, evict_first(), args, maps};
            produce<T, H>(producer, dealer, position, table);
        }
    } else {
        more_registers<232>();
        int token = args.step[args.step[TOKEN_AT]];
        if (token < 0) token = args.drawn[-1 - token];
        Consumer c{ring, warp, lane, start + args.vector, at(args.block_sums), at(args.sums), args.sum_rows, at(args.out), squares, rotations, far};
        float scale;
        const Source answer = run_layers<T, H>(c, args, dealer, token, position, table[position / BLOCK], scale);
        run_head<H>(c, args, dealer, answer, scale);
    }
}

#endif

// By the type of the layers' matrices and that of the embedding and the head.
#define KERNEL(layers, head)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(DECODE_THREADS, 1)                                                           \
        decode_##layers##_##head(const __grid_constant__ DecodeMaps maps, const __grid_constant__ DecodeArgs args) {          \
        RUN(layers, head)                                                                                                     \
    }
#if HOPPER
#define RUN(layers, head) decode<layers, head>(args, maps);
#else
#define RUN(layers, head)
#endif
KERNEL(F16, F16)
KERNEL(Q8_0, Q8_0)
KERNEL(Q4_0, Q8_0)
KERNEL(Q4_1, Q8_0)
