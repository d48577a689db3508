// Copy-on-write: duplicates KV blocks in every layer before a step reads or writes them.
//
// Floor: twice the blocks' bytes. The pool is planes (a layer's keys or values, or their scales), each [blocks][words x 4
// bytes]; group.y is the plane. A block may be the source of one copy and the target of a later one, so a thread makes
// all copies of its own words, in order. Grid: (words / 256, planes), 256 threads.
#include "common.h"

struct CopyShape {
    int copies, blocks, words;  // copies to make; blocks of a plane; 4-byte words of a block
};

kernel void copy_blocks(device uint* pool [[buffer(0)]], device const int* step [[buffer(1)]],
                        constant CopyShape& shape [[buffer(2)]], uint3 group [[threadgroup_position_in_grid]],
                        uint thread_index [[thread_index_in_threadgroup]]) {
    device uint* plane = pool + ulong(group.y) * shape.blocks * shape.words;
    int i = group.x * 256 + thread_index;
    if (i >= shape.words) return;
    device const int* pairs = step + step[COPY_AT];
    for (int copy = 0; copy < shape.copies; copy++)
        plane[ulong(pairs[2 * copy + 1]) * shape.words + i] = plane[ulong(pairs[2 * copy]) * shape.words + i];
}
