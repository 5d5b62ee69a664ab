// libcuda.so.1 for tests: memory on the host, and every call checked and logged to the file that STUB_LOG names.
// Hooks, where they are set, load machine code, encode tensor maps and run kernels.

#include <cuda.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

namespace {

struct Module {
    long number;
};
struct Function {
    Module* module;
    std::string name;
    int shared = 48 * 1024;
};

using LoadHook = long (*)(const void* image);
using LaunchHook = int (*)(long module, const unsigned* sizes, unsigned shared, int overlap, void** parameters);
using TiledHook = int (*)(void* map, int type, unsigned rank, unsigned long long address, const cuuint64_t* sizes,
                          const cuuint64_t* strides, const cuuint32_t* box, int swizzle);
LoadHook load_hook;
LaunchHook launch_hook;
TiledHook tiled_hook;

std::map<CUdeviceptr, std::size_t> memory;
std::vector<std::unique_ptr<Module>> modules;
std::vector<std::unique_ptr<Function>> functions;
CUcontext current = nullptr;
const CUcontext context = reinterpret_cast<CUcontext>(0x1234);

void log(const char* form, ...) {
    static std::FILE* file = std::getenv("STUB_LOG") ? std::fopen(std::getenv("STUB_LOG"), "w") : nullptr;
    if (!file) return;
    std::va_list values;
    va_start(values, form);
    std::vfprintf(file, form, values);
    va_end(values);
    std::fputc('\n', file);
    std::fflush(file);
}

bool in_range(CUdeviceptr address, std::size_t bytes) {
    auto found = memory.upper_bound(address);
    if (found == memory.begin()) return false;
    --found;
    return address + bytes <= found->first + found->second;
}

CUresult fail(const char* what) {
    log("fault: %s", what);
    return CUDA_ERROR_INVALID_VALUE;
}

#define NEED(holds, what) \
    if (!(holds)) return fail(what)
#define NEED_CONTEXT NEED(current == context, "no current context")

void* host(CUdeviceptr address) { return reinterpret_cast<void*>(static_cast<std::uintptr_t>(address)); }

}  // namespace

extern "C" {

void stub_hooks(LoadHook load, LaunchHook launch, TiledHook tiled) {
    load_hook = load;
    launch_hook = launch;
    tiled_hook = tiled;
}
long stub_allocations() { return static_cast<long>(memory.size()); }

CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice* device, int index) {
    NEED(index == 0, "there is one GPU");
    *device = 0;
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetName(char* name, int size, CUdevice) {
    std::snprintf(name, static_cast<std::size_t>(size), "stub");
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
    const char* smaller = std::getenv("STUB_SMS");
    *value = attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR   ? 9
             : attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR ? 0
                                                                         : (smaller ? std::atoi(smaller) : 132);
    return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* made, CUdevice) {
    *made = context;
    return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRelease(CUdevice) {
    log("release with %zu allocations", memory.size());
    return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext wanted) {
    current = wanted;
    return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext* found) {
    *found = current;
    return CUDA_SUCCESS;
}
CUresult cuCtxSynchronize() {
    NEED_CONTEXT;
    log("synchronize");
    return CUDA_SUCCESS;
}
CUresult cuStreamSynchronize(CUstream) { return cuCtxSynchronize(); }

CUresult cuModuleLoadData(CUmodule* module, const void* image) {
    NEED_CONTEXT;
    NEED(std::memcmp(image, "\177ELF", 4) == 0, "machine code is no ELF file");
    modules.push_back(std::make_unique<Module>(Module{load_hook ? load_hook(image) : 0}));
    *module = reinterpret_cast<CUmodule>(modules.back().get());
    return CUDA_SUCCESS;
}
CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
    functions.push_back(std::make_unique<Function>(Function{reinterpret_cast<Module*>(module), name}));
    *function = reinterpret_cast<CUfunction>(functions.back().get());
    return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
    NEED(attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES && value <= 227 * 1024, "shared memory");
    auto* known = reinterpret_cast<Function*>(function);
    known->shared = std::max(known->shared, value);
    return CUDA_SUCCESS;
}

CUresult cuMemAlloc_v2(CUdeviceptr* address, std::size_t bytes) {
    NEED_CONTEXT;
    NEED(bytes, "an allocation of no bytes");
    void* made = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
    std::memset(made, 0xA5, bytes);
    *address = reinterpret_cast<std::uintptr_t>(made);
    memory[*address] = bytes;
    return CUDA_SUCCESS;
}
CUresult cuMemFree_v2(CUdeviceptr address) {
    NEED_CONTEXT;
    NEED(memory.erase(address), "freeing what was not allocated");
    std::free(host(address));
    return CUDA_SUCCESS;
}
CUresult cuMemcpyHtoD_v2(CUdeviceptr target, const void* source, std::size_t bytes) {
    NEED_CONTEXT;
    NEED(in_range(target, bytes), "a copy to the GPU is out of range");
    std::memcpy(host(target), source, bytes);
    return CUDA_SUCCESS;
}
CUresult cuMemcpyDtoH_v2(void* target, CUdeviceptr source, std::size_t bytes) {
    NEED_CONTEXT;
    NEED(in_range(source, bytes), "a copy from the GPU is out of range");
    std::memcpy(target, host(source), bytes);
    return CUDA_SUCCESS;
}
CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr target, CUdeviceptr source, std::size_t bytes, CUstream) {
    NEED_CONTEXT;
    NEED(in_range(target, bytes) && in_range(source, bytes), "a copy is out of range");
    log("copy %zu", bytes);
    std::memmove(host(target), host(source), bytes);
    return CUDA_SUCCESS;
}
CUresult cuMemsetD8_v2(CUdeviceptr target, unsigned char value, std::size_t bytes) {
    NEED_CONTEXT;
    NEED(in_range(target, bytes), "clearing out of range");
    log("clear %zu", bytes);
    std::memset(host(target), value, bytes);
    return CUDA_SUCCESS;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
                                const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                                const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
    const auto place = static_cast<CUdeviceptr>(reinterpret_cast<std::uintptr_t>(address));
    NEED(place % 16 == 0 && in_range(place, 1), "a tensor map is out of range");
    log("map of rank %u", rank);
    std::memset(map, 0, sizeof *map);
    return tiled_hook && tiled_hook(map, type, rank, place, sizes, strides, box, swizzle) ? CUDA_ERROR_INVALID_VALUE
                                                                                            : CUDA_SUCCESS;
}
CUresult cuTensorMapEncodeIm2col(CUtensorMap* map, CUtensorMapDataType, cuuint32_t rank, void* address,
                                 const cuuint64_t*, const cuuint64_t*, const int*, const int*, cuuint32_t, cuuint32_t,
                                 const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                                 CUtensorMapFloatOOBfill) {
    const auto place = static_cast<CUdeviceptr>(reinterpret_cast<std::uintptr_t>(address));
    NEED(place % 16 == 0 && in_range(place, 1) && (rank == 4 || rank == 5), "an im2col map is out of range");
    std::memset(map, 0, sizeof *map);
    return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** parameters, void** extra) {
    NEED_CONTEXT;
    const auto* known = reinterpret_cast<const Function*>(function);
    unsigned sizes[9] = {config->gridDimX,  config->gridDimY,  config->gridDimZ, config->blockDimX, config->blockDimY,
                         config->blockDimZ, 1,                 1,                1};
    int overlap = 0;
    for (unsigned index = 0; index < config->numAttrs; ++index) {
        const CUlaunchAttribute& attribute = config->attrs[index];
        if (attribute.id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) {
            sizes[6] = attribute.value.clusterDim.x;
            sizes[7] = attribute.value.clusterDim.y;
            sizes[8] = attribute.value.clusterDim.z;
        } else {
            NEED(attribute.id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, "an unknown attribute");
            overlap = 1;
        }
    }
    for (const unsigned size : sizes) NEED(size, "a size of zero");
    NEED(config->blockDimX * config->blockDimY * config->blockDimZ <= 1024, "too many threads");
    NEED(static_cast<int>(config->sharedMemBytes) <= known->shared, "more shared memory than allowed");
    NEED(!extra, "extra arguments");
    log("launch %s %u,%u,%u %u,%u,%u %u,%u,%u %u %d", known->name.c_str(), sizes[0], sizes[1], sizes[2], sizes[3],
        sizes[4], sizes[5], sizes[6], sizes[7], sizes[8], config->sharedMemBytes, overlap);
    if (!launch_hook) return CUDA_SUCCESS;
    return launch_hook(known->module->number, sizes, config->sharedMemBytes, overlap, parameters)
               ? CUDA_ERROR_LAUNCH_FAILED
               : CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char** name) {
    *name = error == CUDA_ERROR_INVALID_VALUE ? "CUDA_ERROR_INVALID_VALUE" : "CUDA_ERROR";
    return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult, const char** text) {
    *text = "as the stub says";
    return CUDA_SUCCESS;
}
}
