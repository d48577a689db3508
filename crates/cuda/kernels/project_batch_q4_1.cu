// project_batch.cuh for q4_1 weights.
#include "project_batch.cuh"
WIDTHS(Q4_1)
