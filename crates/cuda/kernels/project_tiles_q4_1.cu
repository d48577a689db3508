// project_tiles for weights of type Q4_1; project_tiles.cuh says it all.
#include "project_tiles.cuh"

WIDTHS(Q4_1)
