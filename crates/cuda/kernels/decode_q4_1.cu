// The decode kernels for layers of type Q4_1; decode.cuh says it all.
#include "decode.cuh"

CHECKPOINTS(Q4_1, Q8_0)
