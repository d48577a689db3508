// The decode kernels for layers of type Q8_0; decode.cuh says it all.
#include "decode.cuh"

CHECKPOINTS(Q8_0, Q8_0)
