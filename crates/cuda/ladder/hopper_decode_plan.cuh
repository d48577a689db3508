// The persistent decode kernel's plan: what lies where, which block does what, and the producer that streams it.

#pragma once

#include "hopper.cuh"

namespace hopper {

constexpr int CONSUMERS = 8;                     // warps
constexpr int THREADS = (CONSUMERS + 4) * 32;    // a warpgroup more, whose first warp is the producer
constexpr int SLOT = 16384;                      // bytes of a ring slot
constexpr int CHUNK = SLOT / 16;                 // panel columns that fill a slot
constexpr int TILES_AT_ONCE = 32;                // panels between two sums over the warps
constexpr int ROWS_AT_ONCE = TILES_AT_ONCE * 8;
constexpr int SPLITS = 16;                       // at most, of a context
constexpr int UNITS_A_SPLIT = 8;                 // KV blocks that one thread block takes before it shares
constexpr int PARTIAL = HEAD + 4;                // floats of a partial attention output: values, maximum, sum
constexpr int MAX_LAYERS = 128;
constexpr int COUNTERS = 6;                      // of a layer: qkv, attention parts, attention, y, h, x

struct DecodeArgs {
    const bf16* weights;        // [layers]: qkv, o, gate and up, down, as panels
    const bf16* embedding;      // [vocab][HIDDEN] as panels
    const bf16* head;           // the same, where tied
    const float* norms;         // [layers]: attention, ffn [HIDDEN], q, k [128]; then the final one [HIDDEN]
    const float2* rope;         // [context][64] cosine and sine
    bf16* cache;                // [layers][blocks] as in hopper.cuh
    const uint32_t* token;      // input id
    const uint32_t* position;   // its position
    const uint32_t* table;      // KV blocks of the sequence
    float* scratch;             // Shape::SCRATCH
    float* logits;              // [vocab]
    uint32_t* best;             // index of the largest logit, the first of equals
    int layers;
    int blocks;                 // of the cache
    int vocab;                  // a multiple of 8
};

template <int HIDDEN, int FFN, int HEADS>
struct Shape {
    static constexpr int GROUP = HEADS / KV_HEADS;  // query heads of a KV head
    static constexpr int Q = HEADS * HEAD;
    static constexpr int QKV = Q + 2 * KV_HEADS * HEAD;
    static constexpr int WIDEST = FFN > Q ? (FFN > HIDDEN ? FFN : HIDDEN) : (Q > HIDDEN ? Q : HIDDEN);

    static constexpr size_t O_AT = size_t(QKV) * HIDDEN;  // elements from a layer's start
    static constexpr size_t GATE_UP_AT = O_AT + size_t(HIDDEN) * Q;
    static constexpr size_t DOWN_AT = GATE_UP_AT + size_t(2) * FFN * HIDDEN;
    static constexpr size_t LAYER = DOWN_AT + size_t(HIDDEN) * FFN;
    static constexpr int NORMS = 2 * HIDDEN + 2 * HEAD;

    // Scratch, in floats: the best logit and how many blocks have seen it, the counters, then the vectors.
    static constexpr int COUNTERS_AT = 32;
    static constexpr int X_AT = COUNTERS_AT + MAX_LAYERS * COUNTERS * COUNT_WORDS;
    static constexpr int Y_AT = X_AT + HIDDEN;
    static constexpr int QKV_AT = Y_AT + HIDDEN;
    static constexpr int ATTENTION_AT = QKV_AT + QKV;
    static constexpr int H_AT = ATTENTION_AT + Q;
    static constexpr int PARTIAL_AT = H_AT + FFN;
    static constexpr int SCRATCH = PARTIAL_AT + HEADS * SPLITS * PARTIAL;

    // Shared memory, in bytes from the (1,024-aligned) start.
    static constexpr int ATTENTION_BYTES = CONSUMERS * GROUP * PARTIAL * 4 + (2 * GROUP + 2) * HEAD * 2;
    static constexpr int VECTOR_BYTES = WIDEST * 4 > ATTENTION_BYTES ? WIDEST * 4 : ATTENTION_BYTES;
    static constexpr int SUMS_BYTES = CONSUMERS * 2 * ROWS_AT_ONCE * 4;
    static constexpr int OUT_BYTES = 4 * (GROUP * PARTIAL > ROWS_AT_ONCE ? GROUP * PARTIAL : ROWS_AT_ONCE);
    static constexpr int FIXED = VECTOR_BYTES + SUMS_BYTES + OUT_BYTES + 512;
    static constexpr int SLOTS = (232448 - 1024 - FIXED) / SLOT;
    static constexpr int BYTES = 1024 + FIXED + SLOTS * SLOT;

    // Slots that are copied at a time. More would only lengthen the queues that the exchanges stand in; short phases
    // gain more from short queues than they lose in bandwidth.
    static constexpr int IN_FLIGHT = HIDDEN <= 1024 ? 2 : 3;
};

// A contiguous part of some tiles.
struct Share {
    int first, count;
};

// A number of tiles over the blocks.
struct Deal {
    int tiles, base, rest;

    __device__ Deal(int tiles, int blocks) : tiles(tiles), base(tiles / blocks), rest(tiles % blocks) {}
};

// Deals out the work of each phase. The blocks that get one tile more rotate from phase to phase, so that over
// a few layers all stream the same number of bytes.
struct Dealer {
    int block, blocks, offset = 0;

    __device__ int rank(const Deal& deal) {
        int r = block - offset;
        offset += deal.rest;
        if (offset >= blocks) offset -= blocks;
        return r < 0 ? r + blocks : r;
    }

    __device__ Share share(const Deal& deal) {
        int r = rank(deal);
        return {r * deal.base + min(r, deal.rest), deal.base + (r < deal.rest)};
    }
};

// The deals of a layer.
template <class S, int HIDDEN, int FFN>
struct Deals {
    Deal qkv, attention, merge, back, gate_up;

    __device__ Deals(int blocks, int splits)
        : qkv(S::QKV / 8, blocks), attention(KV_HEADS * splits, blocks), merge(S::Q / HEAD, blocks), back(HIDDEN / 8, blocks), gate_up(2 * FFN / 8, blocks) {}
};

// How the context is split: KV blocks that hold a position, and the parts that they are cut into.
struct Context {
    int units, splits;

    __device__ explicit Context(int position)
        : units(position / BLOCK + 1), splits(min(min(SPLITS, int(gridDim.x) / KV_HEADS), (units + UNITS_A_SPLIT - 1) / UNITS_A_SPLIT)) {}

    __device__ int begin(int split) const { return split * units / splits; }
};

// The ring, seen from one side.
struct Ring {
    uint32_t slots, full, empty;  // shared addresses
    int size, slot = 0;
    uint32_t parity = 0;

    __device__ uint32_t data() const { return slots + slot * SLOT; }
    __device__ void wait_full() const { barrier_wait(full + slot * 8, parity); }
    __device__ void wait_empty() const { barrier_wait(empty + slot * 8, parity ^ 1); }
    __device__ void release(uint32_t arrivals) const { barrier_arrive(empty + slot * 8, arrivals); }
    __device__ void advance() {
        if (++slot == size) slot = 0, parity ^= 1;
    }
};

// ---- producer

struct Producer {
    Ring ring, behind;  // `behind` is the oldest slot still being copied
    uint64_t policy;
    int more;           // copies that may start before one has ended

    __device__ void copy(const void* from, uint32_t bytes) {
        ring.wait_empty();
        if (more > 0)
            more--;
        else
            behind.wait_full(), behind.advance();
        barrier_expect(ring.full + ring.slot * 8, bytes);
        bulk_load(ring.data(), from, bytes, ring.full + ring.slot * 8, policy);
        ring.advance();
    }

    // Panels `share` of a matrix with `columns` columns.
    __device__ void panels(const bf16* matrix, int columns, Share share) {
        const bf16* p = matrix + size_t(share.first) * columns * 8;
        for (int tile = 0; tile < share.count; tile++)
            for (int c = 0; c < columns; c += CHUNK) {
                int width = min(CHUNK, columns - c);
                copy(p, width * 16);
                p += width * 8;
            }
    }
};

template <class S, int HIDDEN, int FFN>
__device__ void produce(const DecodeArgs& args, Producer producer, Dealer dealer) {
    const Context context(*args.position);
    const Deals<S, HIDDEN, FFN> deals(dealer.blocks, context.splits);
    for (int layer = 0; layer < args.layers; layer++) {
        const bf16* w = args.weights + layer * S::LAYER;
        producer.panels(w, HIDDEN, dealer.share(deals.qkv));
        int part = dealer.rank(deals.attention);
        if (part < deals.attention.tiles) {
            int head = part / context.splits, split = part % context.splits;
            const bf16* cache = args.cache + size_t(layer) * args.blocks * KV_HEADS * (KV_TILE / 2);
            for (int u = context.begin(split); u < context.begin(split + 1); u++)
                producer.copy(cache + (size_t(args.table[u]) * KV_HEADS + head) * (KV_TILE / 2), KV_TILE);
        }
        if (context.splits > 1) dealer.rank(deals.merge);
        producer.panels(w + S::O_AT, S::Q, dealer.share(deals.back));
        producer.panels(w + S::GATE_UP_AT, HIDDEN, dealer.share(deals.gate_up));
        producer.panels(w + S::DOWN_AT, FFN, dealer.share(deals.back));
    }
    producer.panels(args.head, HIDDEN, dealer.share(Deal(args.vocab / 8, dealer.blocks)));
}

}  // namespace hopper
