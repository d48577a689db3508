// The decode kernels for layers of type Q4_0; decode.cuh says it all.
#include "decode.cuh"

CHECKPOINTS(Q4_0, Q8_0)
