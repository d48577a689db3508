// project_tiles for weights of type Q8_0; project_tiles.cuh says it all.
#include "project_tiles.cuh"

WIDTHS(Q8_0)
