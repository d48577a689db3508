// One token of one sequence: what lies where, which block does what, and the producer that streams it (decode.cuh).
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

constexpr int UNIT = 64;                                // columns that a warp multiplies at a time
constexpr int WHOLE_LINES = 24;                         // rows of up to so many lines come as a whole
constexpr int BOX_LINES = 16;                           // lines of each of a panel's rows in a slot otherwise, or some more
constexpr int SLOTS = 32;                               // of the ring, at most

// Bytes of a slot's data: swizzled boxes lie at multiples of a group.
__device__ constexpr int padded(int bytes) { return (bytes + GROUP - 1) / GROUP * GROUP; }

// A head's keys, or values, in one block of the cache, and those with their scales. A slot has one block of fp16 or two of bytes: the
// producer takes as long for a slot as 8 KB take to arrive.
__device__ constexpr int rows_bytes(Kv kind) { return kind == KV_BF16 ? BLOCK * HEAD * 2 : BLOCK * HEAD; }
__device__ constexpr int cache_bytes(Kv kind) { return 2 * (rows_bytes(kind) + (kind == KV_BF16 ? 0 : BLOCK * 4)); }
__device__ constexpr int slot_blocks(Kv kind) { return kind == KV_BF16 ? 1 : 2; }
__device__ constexpr int cache_slot(Kv kind) { return padded(slot_blocks(kind) * cache_bytes(kind)); }
// Where the scales of a slot's first block lie, behind all keys and values; those of the next follow.
__device__ constexpr int slot_scales(Kv kind) { return slot_blocks(kind) * 2 * rows_bytes(kind); }

// The matrices of a step; all but the last in every layer.
enum Matrix { QKV, OUT, GATE_UP, DOWN, VOCABULARY, MATRICES };

// Exchanges of a layer, each with a counter.
enum Exchange { QKV_READY, PARTS_READY, ATTENTION_READY, Y_READY, H_READY, X_READY, EXCHANGES };

// How a matrix is dealt out to the blocks, in units of UNIT_PANELS panels: `base` a block, one more for `rest` of them.
struct Deal {
    int units, base, rest;
    uint32_t arrivals;  // warps that publish results, in all blocks
};

// Boxes of 128 bytes x 8 rows x some lines of each matrix in its layers, the scales that belong to one, and boxes of 32 head rows of
// the cache's keys and values with theirs. Laid out by decode.rs, like what follows.
struct DecodeMaps {
    CUtensorMap quants[MATRICES], scales[MATRICES], cache, cache_scales;
};

struct DecodeArgs {
    Deal deals[MATRICES];
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
    int layers;
    int blocks;                    // of the cache, in a plane
    int kv;                        // enum Kv
    int x, y, qkv, attention, h, parts;
    // Shared memory, in bytes from its 1,024-aligned start: the ring's data, then the rest.
    int ring, vector, sums, fixed;
    int sum_rows;                  // of each warp's sums
    int flying, hurried;           // slots of weights that are on their way to a block at once, at most, and for one that lags behind
    int early;                     // arrivals that a vector's readers do not wait for
};

// A checkpoint's dimensions. `merge` and parts of attention are dealt out only while there are fewer of them than blocks.
template <int HIDDEN_, int FFN_, int HEADS_>
struct Checkpoint {
    static constexpr int HIDDEN = HIDDEN_, FFN = FFN_, HEADS = HEADS_, Q = HEADS * HEAD, MATES = HEADS / KV_HEADS;
};

template <Type T>
struct Format {
    static constexpr int COLUMNS = 128 * Layout<T>::PER16 / 16;                 // of a line
    static constexpr int WORDS = T == F16 ? 0 : COLUMNS / 64 * Layout<T>::SCALES;  // of a line's scales
};

// Lines of a chunk of a row of `lines`, a multiple of `evenly`: those that leave the least of the last chunk empty.
__device__ constexpr int box_lines(int lines, int evenly) {
    int best = BOX_LINES;
    auto covered = [&](int box) { return (lines + box - 1) / box * box; };
    for (int box = BOX_LINES + evenly; box <= WHOLE_LINES; box += evenly)
        if (covered(box) < covered(best)) best = box;
    return best;
}

// How a panel of K columns comes: in chunks of BOX lines, of which unit i belongs to warp i % CONSUMERS.
template <Type T, int K>
struct Columns {
    static constexpr int LINES = K / Format<T>::COLUMNS;
    // So many lines are as many operands of every warp (decode_product.cuh).
    static constexpr int EVENLY = (T == F16 ? 1 : 2) * CONSUMERS * UNIT / Format<T>::COLUMNS;
    static constexpr int BOX = LINES <= WHOLE_LINES ? LINES : box_lines(LINES, EVENLY);
    static constexpr int CHUNKS = (LINES + BOX - 1) / BOX;
    // Words of a row of scales in a slot; the four more than needed spread the rows over the banks.
    static constexpr int PITCH = BOX * Format<T>::WORDS + 4;
    static constexpr int QUANTS = BOX * GROUP, SCALES = T == F16 ? 0 : PANEL * PITCH * 4;  // bytes of a chunk
    static constexpr int SLOT = padded(QUANTS + SCALES);
    static constexpr int UNITS = K / UNIT;
    static constexpr int CHUNK_UNITS = BOX * Format<T>::COLUMNS / UNIT;
    static constexpr int MINE = (UNITS + CONSUMERS - 1) / CONSUMERS;                    // of a warp, at most
    static constexpr int CHUNK_MINE = (CHUNK_UNITS + CONSUMERS - 1) / CONSUMERS;
    static constexpr bool EVEN = UNITS % CONSUMERS == 0;                                // all warps have as many
    static_assert(K % Format<T>::COLUMNS == 0 && (CHUNKS == 1 || BOX % EVENLY == 0));
    // Units of a warp that a vector has room for: whole loads of 16 bytes a lane, of pairs of fp16 or of floats.
    template <bool PAIRS>
    static __device__ constexpr int padded_units() {
        constexpr int EACH = PAIRS ? 4 : 2;
        return (MINE + EACH - 1) / EACH * EACH;
    }
    // Whether a warp has its n-th unit.
    static __device__ bool has(int warp, int n) { return n < MINE && (EVEN || CONSUMERS * n + warp < UNITS); }
    // Units of a warp in a chunk.
    static __device__ constexpr int mine(int chunk) { return chunk + 1 < CHUNKS ? CHUNK_MINE : MINE - chunk * CHUNK_MINE; }
};

#if HOPPER

// A contiguous part of some units of work.
struct Share {
    int first, count;
};

// Deals out the work of each phase. The blocks that get one unit more rotate from phase to phase, so that over a few
// layers all stream the same number of bytes.
struct Dealer {
    int block, blocks, offset;

    __device__ int rank(int rest) {
        int r = block - offset;
        offset += rest;
        if (offset >= blocks) offset -= blocks;
        return r < 0 ? r + blocks : r;
    }
    __device__ Share share(const Deal& deal) {
        int r = rank(deal.rest);
        return {r * deal.base + min(r, deal.rest), deal.base + (r < deal.rest)};
    }
};

// How the context is split: KV blocks that hold a position, and the parts that they are cut into. Part i is of KV head i % KV_HEADS.
struct Context {
    int units, splits, base, rest;  // `base` units a split, one more for `rest` of them

    __device__ explicit Context(int position)
        : units(position / BLOCK + 1),
          splits(min(min(CONTEXT_PARTS, int(gridDim.x) / KV_HEADS), (units + UNITS_A_PART - 1) / UNITS_A_PART)),
          base(units / splits),
          rest(units % splits) {}

    __device__ Share share(int split) const { return {split * base + min(split, rest), base + (split < rest)}; }
};

// The ring in shared memory, seen from one side: a turn of SLOTS barriers, and as many bytes of data for each slot as what comes in
// it needs. Both sides place a slot in the same way, so nobody tells the other where it lies.
struct Ring {
    uint32_t data_at, full_at, empty_at;  // shared addresses
    int bytes;                            // of data in all
    int at;                               // where the next slot's data may begin
    uint32_t passed;                      // slots before it

    // The data of the next slot, `size` bytes in one piece.
    __device__ uint32_t data(int size) {
        if (at + size > bytes) at = 0;
        return data_at + at;
    }
    __device__ void advance(int size) { at += size, passed++; }
    // What lies `by` slots further; its data are not known.
    __device__ Ring ahead(int by) const { return {data_at, full_at, empty_at, bytes, at, passed + by}; }

    __device__ uint32_t full() const { return full_at + passed % SLOTS * 8; }
    __device__ uint32_t empty() const { return empty_at + passed % SLOTS * 8; }
    __device__ uint32_t parity() const { return passed / SLOTS & 1; }
    __device__ void wait_full() const { barrier_wait(full(), parity()); }
    __device__ void wait_empty() const { barrier_wait(empty(), parity()); }
    __device__ void release() const { barrier_arrive(empty()); }
    __device__ bool given_back() const { return barrier_passed(empty(), parity()); }
};

// ---- producer, a warp of which one thread copies

// How many slots may be on their way, and how many while the consumers have few left: others may wait for such a block. More would
// lengthen the queues that the exchanges stand in.
struct Pace {
    int flying, hurried;
    static constexpr int FEW = 4;  // slots left, those on their way included
};

struct Producer {
    Ring ring, held;  // `held` is the oldest slot that was not given back
    int room;         // bytes of data that are free
    int* taken;       // [SLOTS] bytes of data that a slot takes, with those left out before it
    uint64_t policy;
    const DecodeArgs& args;
    const DecodeMaps& maps;

    // The next slot's data, whose copies bring `bytes`.
    __device__ uint32_t begin(int bytes, int size, const Pace& pace) {
        const bool hurry = ring.passed < pace.FEW || ring.ahead(-pace.FEW).given_back();
        const int most = hurry ? pace.hurried : pace.flying;
        if (ring.passed >= most) ring.ahead(-most).wait_full();
        const int before = ring.at, slot = ring.passed % SLOTS;
        const uint32_t data = ring.data(size);
        const int takes = size + (ring.at < before ? ring.bytes - before : 0);
        while (room < takes || ring.passed - held.passed == SLOTS) {
            const int freed = taken[held.passed % SLOTS];
            held.wait_empty();
            room += freed, held.passed++;
        }
        room -= takes, taken[slot] = takes;
        expect(ring.full(), bytes);
        return data;
    }

    // A block's share of a matrix of K columns, in units of EACH panels.
    template <Type T, int K, int EACH = 1>
    __device__ void stream(int matrix, int layer, Share share, const Pace& pace) {
        using C = Columns<T, K>;
#pragma unroll 1
        for (int panel = share.first * EACH; panel < (share.first + share.count) * EACH; panel++)
#pragma unroll 1
            for (int c = 0; c < C::CHUNKS; c++) {
                const uint32_t data = begin(C::QUANTS + C::SCALES, C::SLOT, pace);
                copy_lines(data, &maps.quants[matrix], panel * PANEL, c * C::BOX, layer, ring.full(), policy);
                if constexpr (T != F16)
                    copy_scales(data + C::QUANTS, &maps.scales[matrix], c * C::BOX * Format<T>::WORDS, panel * PANEL, layer,
                                ring.full(), policy);
                ring.advance(C::SLOT);
            }
    }

    // The keys and values of a head in some blocks of the cache.
    template <Kv KIND>
    __device__ void stream_cache(int layer, const int* table, Share units, int head) {
        const Pace pace{3, 5};  // long runs, whatever the model
#pragma unroll 1
        for (int u = 0; u < units.count; u += slot_blocks(KIND)) {
            const int count = min(slot_blocks(KIND), units.count - u);
            const uint32_t data = begin(count * cache_bytes(KIND), cache_slot(KIND), pace);
#pragma unroll
            for (int i = 0; i < slot_blocks(KIND); i++) {
                if (i >= count) break;
                const int row = cache_row(table[units.first + u + i], head);
                copy_lines(data + i * 2 * rows_bytes(KIND), &maps.cache, row, 0, 2 * layer, ring.full(), policy);
                if constexpr (KIND == KV_Q8_0)
                    copy_scales(data + slot_scales(KIND) + i * 2 * BLOCK * 4, &maps.cache_scales, row, 2 * layer, 0, ring.full(), policy);
            }
            ring.advance(cache_slot(KIND));
        }
    }
};

// Everything that a block will need, in the order in which it does; no activation is waited for.
template <class M, Type T, Type H>
__device__ void produce(Producer& p, Dealer dealer, int position, const int* table) {
    const DecodeArgs& args = p.args;
    const Context context(position);
    const int parts = KV_HEADS * context.splits;
    const Pace pace{args.flying, args.hurried};
    for (int layer = 0; layer < args.layers; layer++) {
        p.stream<T, M::HIDDEN>(QKV, layer, dealer.share(args.deals[QKV]), pace);
        int part = dealer.rank(parts);
        if (part < parts) {
            const Share units = context.share(part / KV_HEADS);
            if (args.kv == KV_BF16) p.template stream_cache<KV_BF16>(layer, table, units, part % KV_HEADS);
            else p.template stream_cache<KV_Q8_0>(layer, table, units, part % KV_HEADS);
        }
        if (context.splits > 1) dealer.rank(M::HEADS);
        p.stream<T, M::Q>(OUT, layer, dealer.share(args.deals[OUT]), pace);
        p.stream<T, M::HIDDEN, 2>(GATE_UP, layer, dealer.share(args.deals[GATE_UP]), pace);
        p.stream<T, M::FFN>(DOWN, layer, dealer.share(args.deals[DOWN]), pace);
    }
    // Nothing is exchanged any more.
    p.stream<H, M::HIDDEN>(VOCABULARY, 0, dealer.share(args.deals[VOCABULARY]), {SLOTS - 1, SLOTS - 1});
}

#endif
