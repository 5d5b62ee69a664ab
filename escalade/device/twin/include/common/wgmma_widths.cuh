// The widths of escalade/kernels/common/wgmma_widths.cuh: here wgmma is one function for all of them.
#pragma once

#include "common/hopper.cuh"
