// project_tiles for weights of type F16; project_tiles.cuh says it all.
#include "project_tiles.cuh"

WIDTHS(F16)
