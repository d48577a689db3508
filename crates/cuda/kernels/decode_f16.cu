// The decode kernels for layers of type F16; decode.cuh says it all.
#include "decode.cuh"

CHECKPOINTS(F16, F16)
