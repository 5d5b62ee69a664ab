// The twin's predicated loads.
#pragma once

#include "common/ptx.cuh"

inline uint4 load_16_if(bool wanted, const void* global) {
    return wanted ? *static_cast<const uint4*>(global) : uint4{};
}
