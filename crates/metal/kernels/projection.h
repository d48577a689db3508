// What projections share: up to three weight matrices of one width are multiplied in one launch, as if they lay on top
// of each other (Q, K and V; gate and up), though each is where the file has it.
#pragma once

#include "weights.h"

// A launch's sizes (src/kernels.rs).
struct Projection {
    int rows[3];   // of each matrix; 0 where there is none
    int first;     // row of the first matrix at which the launch begins
    int width;     // elements of a token in `out`
    int tokens;
    int residual;  // whether sums are added to `out` instead of stored
};

// The rows of one threadgroup.
struct Rows {
    device const uchar* weights;  // the matrix
    int first, end;               // rows of it: where the threadgroup's begin, and where the matrix ends
    int at;                       // column of `out` that the matrix's row 0 becomes
};

// Rows of threadgroup number `tile`, if each takes `size`.
inline Rows locate(int tile, int size, device const uchar* a, device const uchar* b, device const uchar* c,
                   constant Projection& shape) {
    int tiles = (shape.rows[0] - shape.first + size - 1) / size;
    if (tile < tiles) return {a, shape.first + tile * size, shape.rows[0], 0};
    tile -= tiles;
    tiles = (shape.rows[1] + size - 1) / size;
    if (tile < tiles) return {b, tile * size, shape.rows[1], shape.rows[0]};
    return {c, (tile - tiles) * size, shape.rows[2], shape.rows[0] + shape.rows[1]};
}
