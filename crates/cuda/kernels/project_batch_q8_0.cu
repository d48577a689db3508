// project_batch.cuh for q8_0 weights.
#include "project_batch.cuh"
WIDTHS(Q8_0)
