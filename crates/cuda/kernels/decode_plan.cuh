// One token of one sequence: what lies where, which block does what, and the producer that streams it (decode.cu).
#pragma once

#include "cache.cuh"
#include "decode_exchange.cuh"
#include "sample.cuh"
#include "weights.cuh"


constexpr int CONSUMERS = 8;                            // warps
constexpr int DECODE_THREADS = (CONSUMERS + 4) * 32;    // a warpgroup more, whose first warp is the producer
constexpr int LINE = 128;                               // bytes of a swizzled line: a piece of one weight row
constexpr int PANEL = 8;                                // weight rows that are multiplied together
constexpr int GROUP = PANEL * LINE;                     // bytes of a panel's lines side by side
constexpr int CONTEXT_PARTS = 16;                              // parts of a context, at most
constexpr int UNITS_A_PART = 8;                        // KV blocks that one thread block takes before it shares
constexpr int PARTIAL = HEAD + 4;                       // floats of a partial attention output: values, maximum, sum
constexpr int ROUND = 32;                               // panels of the head between two sums over the warps

// The matrices of a step; all but the last in every layer.
enum Matrix { QKV, OUT, GATE_UP, DOWN, VOCABULARY, MATRICES };

// Exchanges of a layer, each with a counter.
enum Exchange { QKV_READY, PARTS_READY, ATTENTION_READY, Y_READY, H_READY, X_READY, EXCHANGES };

// How a matrix comes through the ring: a panel in chunks of `chunk` groups.
struct Chunks {
    int rows, cols, groups, chunk, chunks;
};

// Boxes of 128 bytes x 8 rows x `chunk` groups of each matrix in its layers, the scales that belong to one, and boxes
// of 32 head rows of the cache. Laid out by decode.rs, like what follows.
struct DecodeMaps {
    CUtensorMap quants[MATRICES], scales[MATRICES], cache;
};

struct DecodeArgs {
    Chunks matrices[MATRICES];
    Weights embedding;             // [vocab][hidden], in the head's type
    const float* attention_norm;   // of layer 0; the others follow at `norm_stride` floats
    const float* q_norm;
    const float* k_norm;
    const float* ffn_norm;
    const float* output_norm;
    const double* frequencies;     // [64]
    const int* step;               // the batch: one token (common.cuh)
    const int* drawn;
    Cache pool;                    // [layers][keys, values][blocks] of cache.cuh
    float* scratch;                // vectors that blocks exchange, at the offsets below, in floats
    uint32_t* counters;            // [layers][EXCHANGES] and one for the embedding, zero
    uint32_t* spent;               // the counters of the step before this one: to be zeroed
    float* logits;                 // [vocab]
    Stats* stats;                  // [blocks]
    long long norm_stride;
    int layers, hidden, ffn, heads, vocab;
    int blocks;                    // of the cache, in a plane
    int kv;                        // enum Kv
    int x, y, qkv, attention, h, parts;
    // Shared memory, in bytes from its 1,024-aligned start: slots, then the rest.
    int slots, slot_bytes, vector, block_sums, sums, out, fixed;
    int sum_rows;                  // of each warp's sums
    int near, far;                 // bytes in flight while an exchange is near, and otherwise
};

#if HOPPER

// A contiguous part of some units of work.
struct Share {
    int first, count;
};

// A number of units over the blocks.
struct Deal {
    int units, base, rest;

    __device__ Deal(int units, int blocks) : units(units), base(units / blocks), rest(units % blocks) {}

    // How many warps publish, in all blocks, if a unit has `outputs` results.
    __device__ uint32_t arrivals(int outputs) const {
        return rest * publishers((base + 1) * outputs) + (gridDim.x - rest) * publishers(base * outputs);
    }
    static __device__ uint32_t publishers(int outputs) { return (outputs + 31) / 32; }
};

// Deals out the work of each phase. The blocks that get one unit more rotate from phase to phase, so that over a few
// layers all stream the same number of bytes.
struct Dealer {
    int block, blocks, offset;

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

// Panels of a unit: gate and up rows take turns of 8, and a unit holds both.
__device__ __forceinline__ int unit_panels(int matrix) { return matrix == GATE_UP ? 2 : 1; }

__device__ __forceinline__ Deal deal_of(const DecodeArgs& args, int matrix) {
    return Deal(args.matrices[matrix].rows / PANEL / unit_panels(matrix), gridDim.x);
}

// How the context is split: KV blocks that hold a position, and the parts that they are cut into.
struct Context {
    int units, splits;

    __device__ explicit Context(int position)
        : units(position / BLOCK + 1),
          splits(min(min(CONTEXT_PARTS, int(gridDim.x) / KV_HEADS), (units + UNITS_A_PART - 1) / UNITS_A_PART)) {}

    __device__ int begin(int split) const { return split * units / splits; }
};

// The ring of slots in shared memory, seen from one side.
struct Ring {
    uint32_t data_at, full_at, empty_at;  // shared addresses
    int slots, slot_bytes, slot;
    uint32_t parity;

    __device__ uint32_t data() const { return data_at + slot * slot_bytes; }
    __device__ uint32_t full() const { return full_at + slot * 8; }
    __device__ void wait_full() const { barrier_wait(full(), parity); }
    __device__ bool is_full() const { return barrier_test(full(), parity); }
    __device__ void wait_empty() const { barrier_wait(empty_at + slot * 8, parity ^ 1); }
    __device__ void release() const { barrier_arrive(empty_at + slot * 8); }
    __device__ void advance() {
        if (++slot == slots) slot = 0, parity ^= 1;
    }
};

// 32-bit words of scales of a line of 128 bytes.
template <Type T>
struct Scales {
    static constexpr int WORDS = T == F16 ? 0 : T == Q8_0 ? 2 : T == Q4_0 ? 4 : 8;
    // Words of a row of scales in a slot; the four more than needed spread the rows over the banks.
    static __device__ int pitch(const Chunks& m) { return m.chunk * WORDS + 4; }
};

// ---- producer, a single thread

struct Producer {
    Ring ring, behind;        // `behind` is the oldest slot that may still be on its way
    int flying, pending;      // bytes and slots on their way, or not known to have arrived
    int* bytes;               // of each slot's copy
    const volatile int* far;  // whether no exchange is near
    uint64_t policy;
    const DecodeArgs& args;
    const DecodeMaps& maps;

    // The next slot, whose copies bring `count` bytes. More of them at once would lengthen the queues that the exchanges
    // stand in.
    __device__ void begin(int count) {
        ring.wait_empty();
        int most = *far ? args.far : args.near;
        while (pending > 0 && (flying + count > most || pending == ring.slots)) {
            behind.wait_full();
            flying -= bytes[behind.slot], pending--;
            behind.advance();
        }
        flying += count, pending++;
        bytes[ring.slot] = count;
        barrier_expect(ring.full(), count);
    }

    // Units `share` of a matrix.
    template <Type T>
    __device__ void stream(int matrix, int layer, Share share) {
        const Chunks& m = args.matrices[matrix];
        const int quants = m.chunk * GROUP, scales = T == F16 ? 0 : PANEL * Scales<T>::pitch(m) * 4;
        const int each = unit_panels(matrix);
        for (int panel = share.first * each; panel < (share.first + share.count) * each; panel++)
            for (int c = 0; c < m.chunks; c++) {
                begin(quants + scales);
                copy_lines(ring.data(), &maps.quants[matrix], panel * PANEL, c * m.chunk, layer, ring.full(), policy);
                if constexpr (T != F16)
                    copy_scales(ring.data() + quants, &maps.scales[matrix], c * m.chunk * Scales<T>::WORDS, panel * PANEL,
                                layer, ring.full(), policy);
                ring.advance();
            }
    }

    // The keys and values of a head in one block of the cache.
    __device__ void stream_cache(int layer, int block, int head) {
        const int bytes = args.kv == KV_BF16 ? BLOCK * HEAD * 2 : BLOCK * HEAD;
        begin(2 * bytes + (args.kv == KV_BF16 ? 0 : 2 * BLOCK * 4));
        for (int v = 0; v < 2; v++) {
            size_t row = cache_row((2 * layer + v) * args.blocks + block, head);
            copy_rows(ring.data() + v * bytes, &maps.cache, row, ring.full(), policy);
            if (args.kv != KV_BF16)
                bulk_load(ring.data() + 2 * bytes + v * BLOCK * 4, args.pool.scales + row, BLOCK * 4, ring.full(), policy);
        }
        ring.advance();
    }
};

// Everything that a block will need, in the order in which it does; no activation is waited for.
template <Type T, Type H>
__device__ void produce(Producer& p, Dealer dealer, int position, const int* table) {
    const DecodeArgs& args = p.args;
    const Context context(position);
    const Deal parts(KV_HEADS * context.splits, dealer.blocks), merges(args.heads, dealer.blocks);
    for (int layer = 0; layer < args.layers; layer++) {
        p.stream<T>(QKV, layer, dealer.share(deal_of(args, QKV)));
        int part = dealer.rank(parts);
        if (part < parts.units) {
            int head = part / context.splits, split = part % context.splits;
            for (int u = context.begin(split); u < context.begin(split + 1); u++) p.stream_cache(layer, table[u], head);
        }
        if (context.splits > 1) dealer.rank(merges);
        for (int matrix = OUT; matrix <= DOWN; matrix++) p.stream<T>(matrix, layer, dealer.share(deal_of(args, matrix)));
    }
    p.stream<H>(VOCABULARY, 0, dealer.share(deal_of(args, VOCABULARY)));
}

#endif
