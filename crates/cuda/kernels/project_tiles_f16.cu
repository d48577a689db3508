// project_tiles for weights of type F16; project_tiles.cuh says it all.
#include "project_tiles.cuh"

WIDTHS(F16)
TALL(F16, 160)
TALL(F16, 192)
