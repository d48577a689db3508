// Projection of a batch with quantised weights: Y = X W^T for 2 to 128 tokens, X fp16 [tokens][cols], W 8- or 4-bit
// [rows][cols].
//
// Floor: the weights' bytes over the memory's bandwidth, or 2 tokens rows cols operations over the tensor cores' rate
// through mma.sync, which meet near 64 tokens.
// The weights are the M side of mma m16n8k16, 16 rows a warp, the tokens N in tiles of 8. Weights go from memory
// straight to registers, AHEAD steps before they are needed, and become fp16 there; activations pass through a ring of
// stages of 128 columns that a warp of its own fills by bulk tensor copies and all others read. A warp's steps are a
// chain of latencies, so up to 16 tokens two warps share their rows and take every second stage; their sums meet in
// shared memory. The order of k within a dot product is free as long as both operands agree: a thread's 16 bytes of a
// row serve as its elements of consecutive instructions, and lanes whose activations would lie in the same banks take
// theirs in another order. Sums do not depend on batch mates.
// Grid: one block a multiprocessor at most; a warp, or two, for each 16 rows of the highest range, and one more.
// cols % 128 = 0.
#include "batch.cuh"
#include "hopper.cuh"
#include "weights.cuh"

// 16 bytes of weights; the rest of their 256 follow to the L2 cache.
__device__ __forceinline__ uint4 load_weights(const uint8_t* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

// 16 bytes of shared memory at a shared address.
__device__ __forceinline__ uint4 load_shared(uint32_t address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

#if HOPPER

constexpr int DEPTH = 128;  // columns of a stage
constexpr int MOST_STAGES = 16;

template <Type T, int WIDTH, Epilogue E>
__device__ __forceinline__ void project(const Weights& w, const CUtensorMap* x, const Shape& s) {
    constexpr int TEAMS = WIDTH <= 16 ? 2 : 1;  // warps that share their rows
    constexpr int HALF = WIDTH * 128;           // bytes of 64 columns of a stage
    constexpr int PER16 = Layout<T>::PER16;
    constexpr int STEP = 4 * PER16;      // columns of a step of a warp
    constexpr int PARTS = DEPTH / STEP;  // steps of a stage
    constexpr int AHEAD = TEAMS == 2 || T == Q4_1 ? 2 : 4;  // steps whose weights are in flight
    constexpr int EIGHTS = PER16 / 8;    // pieces of 8 elements in a thread's 16 bytes
    extern __shared__ __align__(1024) uint8_t ring[];
    __shared__ __align__(8) uint64_t barriers[2 * MOST_STAGES];
    uint32_t full = shared_address(barriers), empty = full + MOST_STAGES * 8, base = shared_address(ring);
    int units = (blockDim.x / 32 - 1) / TEAMS, items = s.ranges * s.splits;
    if (threadIdx.x == 0) {
        for (int i = 0; i < s.stages; i++) barrier_init(full + i * 8, 1), barrier_init(empty + i * 8, units);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    release();
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;

    if (warp == units * TEAMS) {
        if (lane != 0) return;
        depend();
        asm volatile("fence.proxy.async;" ::: "memory");
        Ring at(s.stages);
        int step = 0;
        for (int i = blockIdx.x; i < items; i += gridDim.x) {
            Item item(s, i, DEPTH);
            for (int k = item.begin; k < item.end; k++, step++, at.next()) {
                uint32_t to = base + at.stage * (2 * HALF), barrier = full + at.stage * 8;
                if (step >= s.stages) barrier_wait(empty + at.stage * 8, at.parity ^ 1);
                barrier_expect(barrier, 2 * HALF);
                copy_box(to, x, k * DEPTH, 0, barrier);
                copy_box(to + HALF, x, k * DEPTH + 64, 0, barrier);
            }
        }
        return;
    }

    int unit = warp % units, team = warp / units;
    uint4 a[AHEAD][2];
    __half2 scale[AHEAD][2];  // with Q4_1's minimum, else twice the same
    const uint8_t* quants;    // where this thread's row of the item begins, and its scales; the other row is 8 further
    const __half* scales;
    const int far = 8 * row_bytes<T>(s.cols);
    const int far_scales = 8 * (s.cols / 32) * Layout<T>::SCALES;
    auto fetch = [&](int slot, int step) {
        int column = (step / PARTS * TEAMS + team) * PARTS + step % PARTS;  // in steps of all teams
#pragma unroll
        for (int half = 0; half < 2; half++) {
            a[slot][half] = load_weights(quants + half * far + column * 64);
            const __half* from = scales + half * far_scales + column * (STEP / 32) * Layout<T>::SCALES;
            if constexpr (T == Q4_1) scale[slot][half] = __ldg(reinterpret_cast<const __half2*>(from));
            else scale[slot][half] = __half2half2(__ldg(from));
        }
    };
    auto steps_of = [&](const Item& item) { return (item.end - item.begin + TEAMS - 1 - team) / TEAMS * PARTS; };
    auto fetch_first = [&](const Item& item) {
        size_t row = item.row + unit * UNIT + g;
        int column = item.begin * DEPTH + t * PER16, steps = steps_of(item);
        quants = w.quants + row * row_bytes<T>(s.cols) + row_bytes<T>(column);
        scales = w.scales + (row * (s.cols / 32) + column / 32) * Layout<T>::SCALES;
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
            if (i < steps && unit * UNIT < item.rows) fetch(i, i);
    };
    fetch_first(Item(s, blockIdx.x, DEPTH));  // weights do not wait for the activations

    Ring at(s.stages);
    for (int i = blockIdx.x; i < items; i += gridDim.x) {
        Item item(s, i, DEPTH);
        bool live = unit * UNIT < item.rows;
        float sum[WIDTH / 2] = {};
        int steps = steps_of(item);
        Ring own = at;
        if (team == 1) own.next();
        for (int first = 0; first < steps; first += AHEAD) {
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                int step = first + i, part = i % PARTS;
                if (step >= steps) break;
                if (part == 0) barrier_wait(full + own.stage * 8, own.parity);
                __syncwarp();
                if (live) {
                    uint32_t stage = base + own.stage * (2 * HALF);
                    const uint32_t* low = &a[i][0].x;
                    const uint32_t* high = &a[i][1].x;
                    auto scale_of = [](__half2 h) {
                        if constexpr (T == Q4_1) return Scale{__low2half2(h), __high2half2(h)};
                        else return Scale{h, h};
                    };
                    Scale low_scale = scale_of(scale[i][0]), high_scale = scale_of(scale[i][1]);
#pragma unroll
                    for (int j = 0; j < EIGHTS; j++) {
                        // Eight of this thread's elements, and the 16-byte piece of a token's 128 that they meet.
                        uint32_t lows[4], highs[4], box, piece;
                        if constexpr (EIGHTS == 4) {
                            bool turned = t & 2;
                            expand<T>(turned ? low[j ^ 2] : low[j], low_scale, lows);
                            expand<T>(turned ? high[j ^ 2] : high[j], high_scale, highs);
                            box = stage + (t / 2) * HALF, piece = t % 2 * 4 + (j ^ (t & 2));
                        } else {
                            expand<T>(low[2 * j], low_scale, lows), expand<T>(low[2 * j + 1], low_scale, lows + 2);
                            expand<T>(high[2 * j], high_scale, highs), expand<T>(high[2 * j + 1], high_scale, highs + 2);
                            box = stage + part * HALF, piece = t * 2 + j;
                        }
                        uint32_t from = box + g * 128 + ((piece ^ g) << 4);
#pragma unroll
                        for (int tile = 0; tile < WIDTH / 8; tile++) {
                            uint4 b = load_shared(from + tile * 1024);
                            float(&d)[4] = *reinterpret_cast<float(*)[4]>(sum + tile * 4);
                            mma(d, lows[0], highs[0], lows[1], highs[1], b.x, b.y);
                            mma(d, lows[2], highs[2], lows[3], highs[3], b.z, b.w);
                        }
                    }
                    if (step + AHEAD < steps) fetch(i, step + AHEAD);
                }
                if (part == PARTS - 1) {
                    __syncwarp();
                    if (lane == 0) barrier_arrive(empty + own.stage * 8);
                    own.next();
                    if (TEAMS == 2) own.next();
                }
            }
        }
        for (int k = item.begin; k < item.end; k++) at.next();

        if constexpr (TEAMS == 2) {
            __shared__ float4 parts[11][WIDTH / 8][32];
            if (team == 1) {
#pragma unroll
                for (int tile = 0; tile < WIDTH / 8; tile++)
                    parts[unit][tile][lane] = make_float4(sum[tile * 4], sum[tile * 4 + 1], sum[tile * 4 + 2], sum[tile * 4 + 3]);
            }
            asm volatile("bar.sync %0, 64;" ::"r"(unit + 1) : "memory");
            if (team == 0) {
#pragma unroll
                for (int tile = 0; tile < WIDTH / 8; tile++) {
                    float4 other = parts[unit][tile][lane];
                    sum[tile * 4] += other.x, sum[tile * 4 + 1] += other.y;
                    sum[tile * 4 + 2] += other.z, sum[tile * 4 + 3] += other.w;
                }
            }
            asm volatile("bar.sync %0, 64;" ::"r"(unit + 1) : "memory");
        }
        if (live && team == 0) leave<E, WIDTH>(s, sum, item.row + unit * UNIT, item.split, min(*s.count, WIDTH));
        if (i + gridDim.x < items) fetch_first(Item(s, i + gridDim.x, DEPTH));
    }
}

#endif

#define KERNEL(type, width, threads, epilogue)                                                              \
    extern "C" __global__ void __launch_bounds__(threads, 1)                                                \
        project_batch_##type##_##width##_##epilogue(const Weights w, const __grid_constant__ CUtensorMap x, \
                                                    const Shape s) {                                        \
        RUN(type, width, epilogue)                                                                          \
    }
#if HOPPER
#define RUN(type, width, epilogue) project<type, width, epilogue>(w, &x, s);
#else
#define RUN(type, width, epilogue)
#endif
// Threads: as many warps as the registers of each width allow.
#define WIDTHS(type, epilogue)                                                                  \
    KERNEL(type, 16, 736, epilogue) KERNEL(type, 32, 384, epilogue) KERNEL(type, 64, 384, epilogue) \
    KERNEL(type, 128, 256, epilogue)
#define EPILOGUES(type) WIDTHS(type, STORE) WIDTHS(type, SWIGLU)
EPILOGUES(Q8_0)
EPILOGUES(Q4_0)
EPILOGUES(Q4_1)
