// Causal attention of one sequence's new tokens over its paged KV cache (prefill), head width 128, grouped queries.
//
// Floor: 4 x 128 operations a (query head, query, visible key) at the rate of wgmma; the softmax's exponentials overlap with the
// products of the other warpgroup.
//
// A block takes 128 queries of one head. Its producer copies 128 keys and 128 values at a time, four KV blocks of 8 KB each, into
// two stages of each. The cache's panels are wgmma operands as they lie: keys K-major, values transposed. Two warpgroups
// of 64 queries keep their output in registers, and the probabilities too, which go from accumulators to operand unchanged.
// The blocks with the longest contexts start first.
//
// Launch: grid (query heads, ceil(tokens / 128)), ATTENTION_THREADS threads, ATTENTION_BYTES of dynamic shared memory. Positions
// after a sequence's last may hold any finite values in the cache, but no NaN.

#include "hopper.cuh"
#include "hopper_wgmma.cuh"

namespace hopper {

constexpr int ATTENTION_THREADS = 384;
constexpr int QUERIES = 128, KEYS = 128;
constexpr int TILE_BYTES = KEYS * HEAD * 2;  // of queries, keys or values
constexpr int ATTENTION_BYTES = 1024 + 5 * TILE_BYTES + 128;
static_assert(ATTENTION_BYTES == 164992);  // the host has to know

struct AttentionArgs {
    const bf16* q;          // [rows][heads * 128] panels, normed and rotated
    bf16* out;              // the same layout
    const bf16* cache;      // the layer's blocks
    const uint32_t* table;  // the sequence's blocks
    int row;                // of the sequence's first new token
    int tokens;             // new tokens
    int position;           // of the first
};

__device__ __forceinline__ size_t cell(int row, int column, int width) { return (size_t(row / 8) * (width / 8) + column / 8) * 64 + row % 8 * 8; }

struct Stages {
    uint32_t keys, values;                                 // shared addresses of two tiles each
    uint32_t keys_full, keys_empty, values_full, values_empty;  // of two barriers each
};

__device__ __forceinline__ void produce_keys(const AttentionArgs& args, Stages s, int head, int tiles) {
    const int last = (args.position + args.tokens - 1) / BLOCK;
    const uint64_t policy = evict_last();
    for (int j = 0; j < tiles; j++) {
        const int stage = j % 2;
        const uint32_t parity = (j / 2 & 1) ^ 1;
        for (int v = 0; v < 2; v++) {
            const uint32_t full = (v ? s.values_full : s.keys_full) + stage * 8, to = (v ? s.values : s.keys) + stage * TILE_BYTES;
            barrier_wait((v ? s.values_empty : s.keys_empty) + stage * 8, parity);
            barrier_expect(full, TILE_BYTES);
            for (int b = 0; b < KEYS / BLOCK; b++) {
                const size_t block = args.table[min(j * (KEYS / BLOCK) + b, last)];
                bulk_load(to + b * (KV_TILE / 2), args.cache + ((block * KV_HEADS + head) * 2 + v) * (KV_TILE / 4), KV_TILE / 2, full, policy);
            }
        }
    }
}

// 64 queries of a warpgroup; `queries` is the shared address of its panels, `first` the position of its first query.
__device__ __forceinline__ void consume_keys(const AttentionArgs& args, Stages s, uint32_t queries, int first, int tiles, float (&o)[16][4], float (&total)[2]) {
    constexpr float SCALE = 0.08838834764831845f * 1.4426950408889634f;  // exp(x / sqrt(128)) as a power of two
    const int lane = threadIdx.x % 32, row = first + threadIdx.x % 128 / 32 * 16 + lane / 4;
    float highest[2] = {-INFINITY, -INFINITY};
    for (int j = 0; j < tiles; j++) {
        const int stage = j % 2;
        const uint32_t parity = j / 2 & 1;
        float p[16][4];
        barrier_wait(s.keys_full + stage * 8, parity);
        wgmma_begin();
#pragma unroll
        for (int k = 0; k < HEAD / 16; k++)
            wgmma<128>(p, descriptor(queries + k * 256, 128, 2048), descriptor(s.keys + stage * TILE_BYTES + k * 256, 128, 2048), k > 0);
        wgmma_commit();
        wgmma_wait<0>();
        if (threadIdx.x % 128 == 0) barrier_arrive(s.keys_empty + stage * 8);

        if ((j + 1) * KEYS > first)  // some key may come after some query
#pragma unroll
            for (int n = 0; n < 16; n++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    if (j * KEYS + n * 8 + lane % 4 * 2 + i % 2 > row + i / 2 * 8) p[n][i] = -INFINITY;
        float rescale[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float top = highest[r];
#pragma unroll
            for (int n = 0; n < 16; n++) top = fmaxf(top, fmaxf(p[n][2 * r], p[n][2 * r + 1]));
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
            rescale[r] = exp2_fast((highest[r] - top) * SCALE);
            highest[r] = top;
            total[r] *= rescale[r];
            const float offset = top * SCALE;
#pragma unroll
            for (int n = 0; n < 16; n++)
#pragma unroll
                for (int i = 2 * r; i < 2 * r + 2; i++) total[r] += p[n][i] = exp2_fast(fmaf(p[n][i], SCALE, -offset));
        }
#pragma unroll
        for (int n = 0; n < 16; n++) o[n][0] *= rescale[0], o[n][1] *= rescale[0], o[n][2] *= rescale[1], o[n][3] *= rescale[1];
        uint32_t a[KEYS / 16][4];
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++)
#pragma unroll
            for (int i = 0; i < 4; i++) a[k][i] = pack(p[2 * k + i / 2][i % 2 * 2], p[2 * k + i / 2][i % 2 * 2 + 1]);

        barrier_wait(s.values_full + stage * 8, parity);
        wgmma_begin();
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++) wgmma_transposed(o, a[k], descriptor(s.values + stage * TILE_BYTES + k * 4096, 2048, 128));
        wgmma_commit();
        wgmma_wait<0>();
        if (threadIdx.x % 128 == 0) barrier_arrive(s.values_empty + stage * 8);
    }
}

}  // namespace hopper

extern "C" __global__ void __launch_bounds__(hopper::ATTENTION_THREADS, 1) attention_prefill(const __grid_constant__ hopper::AttentionArgs args) {
    using namespace hopper;
    extern __shared__ uint8_t dynamic[];
    const uint32_t base = (shared_address(dynamic) + 1023) / 1024 * 1024, barriers = base + 5 * TILE_BYTES;
    const Stages s{base + TILE_BYTES, base + 3 * TILE_BYTES, barriers, barriers + 16, barriers + 32, barriers + 48};
    const int heads = gridDim.x, head = blockIdx.x, width = heads * HEAD;
    const int first = (gridDim.y - 1 - blockIdx.y) * QUERIES;  // the longest first
    const int end = args.position + min(first + QUERIES, args.tokens);
    const int tiles = (end + KEYS - 1) / KEYS;
    if (threadIdx.x == 0)
        for (int i = 0; i < 2; i++) {
            barrier_init(s.keys_full + i * 8, 1), barrier_init(s.values_full + i * 8, 1);
            barrier_init(s.keys_empty + i * 8, 2), barrier_init(s.values_empty + i * 8, 2);
        }
    fence_bulk();
    __syncthreads();
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == 0) produce_keys(args, s, head / (heads / KV_HEADS), tiles);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        const int group = threadIdx.x / 128 - 1, thread = threadIdx.x % 128, offset = first + group * 64;
        const uint32_t queries = base + group * 64 * HEAD * 2;
        // The queries, from any row, as panels.
        for (int i = thread; i < 64 * HEAD / 8; i += 128) {
            const int r = i / (HEAD / 8), d = i % (HEAD / 8), token = min(offset + r, args.tokens - 1);
            const uint4 v = *reinterpret_cast<const uint4*>(args.q + cell(args.row + token, head * HEAD + d * 8, width));
            asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(queries + (r / 8 * (HEAD / 8) + d) * 128 + r % 8 * 16), "r"(v.x), "r"(v.y), "r"(v.z),
                         "r"(v.w)
                         : "memory");
        }
        fence_bulk();
        sync_named(1 + group, 128);
        float o[16][4] = {}, total[2] = {};
        consume_keys(args, s, queries, args.position + offset, tiles, o, total);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            total[r] += __shfl_xor_sync(0xffffffffu, total[r], 1);
            total[r] += __shfl_xor_sync(0xffffffffu, total[r], 2);
            const int token = offset + thread / 32 * 16 + thread % 32 / 4 + r * 8;
            if (token >= args.tokens) continue;
            const float scale = 1 / total[r];
#pragma unroll
            for (int n = 0; n < 16; n++)
                *reinterpret_cast<uint32_t*>(args.out + cell(args.row + token, head * HEAD + n * 8, width) + thread % 4 * 2) =
                    pack(o[n][2 * r] * scale, o[n][2 * r + 1] * scale);
        }
    }
}
