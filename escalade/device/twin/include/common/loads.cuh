// The twin's predicated loads.
#pragma once

#include "common/ptx.cuh"

inline uint4 load_16_if(bool wanted, const void* global) {
    return wanted ? *static_cast<const uint4*>(global) : uint4{};
}
template <bool EVICT_FIRST>
inline uint4 load_16_once_if(bool wanted, const void* global) {
    return load_16_if(wanted, global);
}
