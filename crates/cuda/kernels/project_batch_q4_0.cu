// project_batch.cuh for q4_0 weights.
#include "project_batch.cuh"
WIDTHS(Q4_0)
