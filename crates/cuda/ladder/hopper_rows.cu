// What lies between the matrix products of a prefill: embedding rows, RMSNorm into panels, and the heads' norm, rotation and cache.
//
// Floor: bytes. embed_rows reads 2 and writes 4 bytes a value; norm_rows reads 4 and writes 2; place_heads reads 4 and writes 2.

#include "hopper.cuh"

namespace hopper {

constexpr int ROW_WARPS = 8;

}  // namespace hopper

// x[rows][hidden] = rows of the embedding panels. Grid: rows; any number of threads.
extern "C" __global__ void embed_rows(const hopper::bf16* embedding, const uint32_t* tokens, float* x, int hidden) {
    const uint32_t token = tokens[blockIdx.x];
    const hopper::bf16* row = embedding + (size_t(token / 8) * hidden + token % 8) * 8;
    for (int i = threadIdx.x * 8; i < hidden; i += blockDim.x * 8) {
        const uint4 v = *reinterpret_cast<const uint4*>(row + i * 8);
        float4* to = reinterpret_cast<float4*>(x + size_t(blockIdx.x) * hidden + i);
        to[0] = make_float4(__uint_as_float(v.x << 16), __uint_as_float(v.x & 0xffff0000u), __uint_as_float(v.y << 16), __uint_as_float(v.y & 0xffff0000u));
        to[1] = make_float4(__uint_as_float(v.z << 16), __uint_as_float(v.z & 0xffff0000u), __uint_as_float(v.w << 16), __uint_as_float(v.w & 0xffff0000u));
    }
}

// out = norm(x) * weight as bf16 panels; `index` (or null) names the rows of x to take. Grid: ceil(rows / 8); 256 threads. A warp
// covers 32 columns of eight rows at a time, so that it reads whole lines and writes 512 bytes in a piece.
extern "C" __global__ void __launch_bounds__(hopper::ROW_WARPS * 32) norm_rows(const float* x, const uint32_t* index, const float* weight, hopper::bf16* out,
                                                                            int rows, int hidden) {
    using namespace hopper;
    __shared__ float squares[ROW_WARPS][8];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, r = lane % 8, row = blockIdx.x * 8 + r;
    const bool exists = row < rows;
    const float* from = x + size_t(exists ? (index ? index[row] : row) : 0) * hidden;
    float sum = 0;
    for (int i = warp * 32 + lane / 8 * 8; i < hidden; i += ROW_WARPS * 32) {
        const float4 a = *reinterpret_cast<const float4*>(from + i), b = *reinterpret_cast<const float4*>(from + i + 4);
        sum += (a.x * a.x + a.y * a.y + a.z * a.z + a.w * a.w) + (b.x * b.x + b.y * b.y + b.z * b.z + b.w * b.w);
    }
    sum += __shfl_xor_sync(0xffffffffu, sum, 8);
    sum += __shfl_xor_sync(0xffffffffu, sum, 16);
    if (lane < 8) squares[warp][lane] = sum;
    __syncthreads();
    sum = 0;
    for (int w = 0; w < ROW_WARPS; w++) sum += squares[w][r];
    const float scale = exists ? rsqrtf(sum / hidden + EPSILON) : 0;
    for (int i = warp * 32 + lane / 8 * 8; i < hidden; i += ROW_WARPS * 32) {
        const float4 a = *reinterpret_cast<const float4*>(from + i), b = *reinterpret_cast<const float4*>(from + i + 4);
        const float4 u = *reinterpret_cast<const float4*>(weight + i), v = *reinterpret_cast<const float4*>(weight + i + 4);
        const uint4 both = make_uint4(pack(a.x * scale * u.x, a.y * scale * u.y), pack(a.z * scale * u.z, a.w * scale * u.w),
                                      pack(b.x * scale * v.x, b.y * scale * v.y), pack(b.z * scale * v.z, b.w * scale * v.w));
        *reinterpret_cast<uint4*>(out + (size_t(blockIdx.x) * hidden + i) * 8 + r * 8) = both;
    }
}

// Of qkv[rows][(heads + 16) * 128]: the queries normed and rotated into bf16 panels [rows][heads * 128]; the keys normed and rotated
// and the values into the layer's cache, at slot (block * 32 + position % 32) of each row. Grid: (rows, ceil((heads + 16) / 8)); 256
// threads, a warp a head.
extern "C" __global__ void __launch_bounds__(hopper::ROW_WARPS * 32) place_heads(const float* qkv, const uint32_t* positions, const uint32_t* slots,
                                                                              const float* q_norm, const float* k_norm, const float2* rope, hopper::bf16* q,
                                                                              hopper::bf16* cache, int heads) {
    using namespace hopper;
    const int row = blockIdx.x, head = blockIdx.y * ROW_WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (head >= heads + 2 * KV_HEADS) return;
    const float* from = qkv + (size_t(row) * (heads + 2 * KV_HEADS) + head) * HEAD;
    float2 a = reinterpret_cast<const float2*>(from)[lane], b = reinterpret_cast<const float2*>(from)[lane + 32];
    if (head < heads + KV_HEADS) {
        const float2* norm = reinterpret_cast<const float2*>(head < heads ? q_norm : k_norm);
        const float2 na = norm[lane], nb = norm[lane + 32];
        const float4 turn = reinterpret_cast<const float4*>(rope + size_t(positions[row]) * 64)[lane];
        const float r = rsqrtf(warp_sum(a.x * a.x + a.y * a.y + b.x * b.x + b.y * b.y) / HEAD + EPSILON);
        a.x *= r * na.x, a.y *= r * na.y, b.x *= r * nb.x, b.y *= r * nb.y;
        const float2 ra = make_float2(a.x * turn.x - b.x * turn.y, a.y * turn.z - b.y * turn.w);
        const float2 rb = make_float2(b.x * turn.x + a.x * turn.y, b.y * turn.z + a.y * turn.w);
        a = ra, b = rb;
    }
    bf16* to;  // channel 0 of the head's row; the next eight channels lie 64 elements on
    if (head < heads) {
        to = q + (size_t(row / 8) * (heads * HEAD / 8) + head * (HEAD / 8)) * 64 + row % 8 * 8;
    } else {
        const uint32_t slot = slots[row], p = slot % BLOCK, kv = head - heads;
        to = cache + ((size_t(slot / BLOCK) * KV_HEADS + kv % KV_HEADS) * 2 + kv / KV_HEADS) * (BLOCK * HEAD) + p / 8 * (HEAD * 8) + p % 8 * 8;
    }
    *reinterpret_cast<uint32_t*>(to + lane / 4 * 64 + lane % 4 * 2) = pack(a.x, a.y);
    *reinterpret_cast<uint32_t*>(to + (lane / 4 + 8) * 64 + lane % 4 * 2) = pack(b.x, b.y);
}
