// CUDA's keywords for g++, and how a running thread finds itself.
#pragma once

#include <cstddef>

// libstdc++ adds Bessel functions and similar to <cmath>, which take longer to compile than everything else here.
#undef _GLIBCXX_USE_STD_SPEC_FUNCS

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <type_traits>
#include <utility>

#include <vector_types.h>

#include <vector_functions.h>

// After all includes: standard headers use some of these words themselves, and NVIDIA's define some.
#undef __global__
#undef __device__
#undef __host__
#undef __grid_constant__
#undef __launch_bounds__
#undef __cluster_dims__
#undef __maxnreg__
#undef __forceinline__
#undef __constant__
#undef __managed__
#undef __align__
#undef __shared__

#define __global__
#define __device__
#define __host__
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)  // the launch sets the cluster size
#define __maxnreg__(...)
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
// `used`, because the host fills it where the compiler cannot see it.
#define __constant__ __attribute__((used))
#define __managed__

// nvcc accepts an alignment between other specifiers (`__shared__ alignas(128) float x[32];`), g++ only
// this spelling of it.
#define __align__(...) __attribute__((aligned(__VA_ARGS__)))
#define alignas(...) __attribute__((aligned(__VA_ARGS__)))

// thread_local is the only specifier that makes a local variable static and is allowed with extern. In a
// shared library the compiler then calls __tls_get_addr for each variable's address; launch.h defines that
// function, which returns the running block's shared memory.
#define __shared__ thread_local

namespace twin {

// A call's location in the kernel's source, for reports: the default argument of everything that can fail.
struct Where {
    const char* file;
    int line;
};
#define TWIN_WHERE ::twin::Where where = {__builtin_FILE(), __builtin_LINE()}

struct Sizes {
    dim3 grid, block;
    uint3 cluster;
};

struct Place {  // of one CUDA thread
    uint3 thread, block;
    const Sizes* sizes;
    unsigned char *static_shared, *dynamic_shared;
};

// The running CUDA thread of this OS thread; null if none runs. initial-exec, because that access needs no
// call of __tls_get_addr.
extern thread_local const Place* here __attribute__((tls_model("initial-exec")));

[[noreturn]] void fail(Where where, const char* format, ...) __attribute__((format(printf, 2, 3)));

}  // namespace twin

#define threadIdx (::twin::here->thread)
#define blockIdx (::twin::here->block)
#define blockDim (::twin::here->sizes->block)
#define gridDim (::twin::here->sizes->grid)
constexpr int warpSize = 32;
