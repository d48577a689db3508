// Copy-on-write: duplicates KV blocks in every layer before a step reads or writes them.
//
// Floor: twice the blocks' bytes over the memory's bandwidth. The pool is one allocation of planes (a layer's keys or
// values, or their scales), each [blocks][`bytes`]; blockIdx.y is the plane. Grid: (copies, planes), 256 threads.
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256)
    copy_blocks(uint8_t* pool, const int* step, int blocks, int bytes) {
    release();
    depend();
    if (blockIdx.x >= step[COPIES]) return;
    const int* pair = step + step[COPY_AT] + blockIdx.x * 2;
    uint8_t* plane = pool + size_t(blockIdx.y) * blocks * bytes;
    const uint4* from = reinterpret_cast<const uint4*>(plane + size_t(pair[0]) * bytes);
    uint4* to = reinterpret_cast<uint4*>(plane + size_t(pair[1]) * bytes);
    for (int i = threadIdx.x; i < bytes / 16; i += blockDim.x) to[i] = from[i];
}
