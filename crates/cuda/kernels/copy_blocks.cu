// Copy-on-write: duplicates KV blocks in every layer before a step reads or writes them.
//
// Floor: twice the blocks' bytes over the memory's bandwidth. The pool is one allocation of planes (a layer's keys or
// values, or their scales), each [blocks][`bytes`]; blockIdx.y is the plane. A block may be the source of one copy and the
// target of a later one, so a thread makes all copies of its own bytes, in order. Grid: (bytes / 4096, planes), 256 threads.
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256)
    copy_blocks(uint8_t* pool, const int* step, int blocks, int bytes) {
    release();
    depend();
    uint8_t* plane = pool + size_t(blockIdx.y) * blocks * bytes;
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= bytes / 16) return;
    const int* pairs = step + step[COPY_AT];
    for (int copy = 0; copy < step[COPIES]; copy++) {
        const uint4* from = reinterpret_cast<const uint4*>(plane + size_t(pairs[2 * copy]) * bytes);
        uint4* to = reinterpret_cast<uint4*>(plane + size_t(pairs[2 * copy + 1]) * bytes);
        to[i] = from[i];
    }
}
