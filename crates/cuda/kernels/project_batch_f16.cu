// project_batch.cuh for fp16 weights.
#include "project_batch.cuh"
WIDTHS(F16)
