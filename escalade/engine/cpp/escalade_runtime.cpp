// The reader of plan files, and their launches through the CUDA driver, which is loaded at run time.

#include "escalade_runtime.h"

#include <cuda.h>
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>

namespace escalade {
namespace {

constexpr char kMagic[16] = {'E', 'S', 'C', 'A', 'L', 'A', 'D', 'E', '-', 'P', 'L', 'A', 'N', 'S', 0, 0};
constexpr std::uint32_t kVersion = 1;
constexpr std::size_t kAlignment = 16;  // bytes: the widest load of a kernel
constexpr std::size_t kMapAlignment = 64;

// ---- The driver ------------------------------------------------------------------------------------------------------

#define DRIVER_FUNCTIONS(F)                                                                                          \
    F(cuInit) F(cuDeviceGet) F(cuDeviceGetAttribute) F(cuDevicePrimaryCtxRetain) F(cuDevicePrimaryCtxRelease)        \
    F(cuCtxSetCurrent) F(cuCtxGetCurrent) F(cuCtxSynchronize) F(cuModuleLoadData) F(cuModuleGetFunction)             \
    F(cuModuleUnload) F(cuFuncSetAttribute) F(cuMemAlloc) F(cuMemFree) F(cuMemcpyHtoD) F(cuMemcpyDtoH)               \
    F(cuMemcpyDtoDAsync) F(cuMemsetD8) F(cuLaunchKernelEx) F(cuTensorMapEncodeTiled) F(cuTensorMapEncodeIm2col)      \
    F(cuStreamSynchronize) F(cuGetErrorName) F(cuGetErrorString)
#define TEXT_OF(name) #name
#define TEXT(name) TEXT_OF(name)  // expands the header's renaming, as of cuMemAlloc to cuMemAlloc_v2

struct Driver {
#define DECLARE(name) decltype(&::name) name##_ = nullptr;
    DRIVER_FUNCTIONS(DECLARE)
#undef DECLARE

    Driver() {
        void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
        if (!library) throw Error(std::string("the NVIDIA driver cannot be loaded: ") + dlerror());
#define FIND(name)                                                                    \
    name##_ = reinterpret_cast<decltype(&::name)>(dlsym(library, TEXT(name)));        \
    if (!name##_) throw Error("the NVIDIA driver is too old: it has no " TEXT(name));
        DRIVER_FUNCTIONS(FIND)
#undef FIND
    }

    void check(CUresult status, const std::string& what) const {
        if (status == CUDA_SUCCESS) return;
        const char *name = "unknown error", *text = "";
        cuGetErrorName_(status, &name);
        cuGetErrorString_(status, &text);
        throw Error(what + ": " + name + ": " + text);
    }
};

const Driver& driver() {
    static const Driver loaded;
    return loaded;
}

// Makes a context current for one call, and the previous one again afterwards.
class Current {
public:
    explicit Current(CUcontext context) {
        driver().check(driver().cuCtxGetCurrent_(&previous_), "finding the current context");
        if (previous_ != context) driver().check(driver().cuCtxSetCurrent_(context), "making the context current");
        changed_ = previous_ != context;
    }
    ~Current() {
        if (changed_) driver().cuCtxSetCurrent_(previous_);
    }
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;

private:
    CUcontext previous_ = nullptr;
    bool changed_ = false;
};

// ---- The file --------------------------------------------------------------------------------------------------------

// CRC-32 as of zlib.
std::uint32_t checksum(const unsigned char* data, std::size_t size) {
    static const std::array<std::uint32_t, 256> table = [] {
        std::array<std::uint32_t, 256> made{};
        for (std::uint32_t value = 0; value < 256; ++value) {
            std::uint32_t bits = value;
            for (int step = 0; step < 8; ++step) bits = bits & 1 ? 0xEDB88320u ^ (bits >> 1) : bits >> 1;
            made[value] = bits;
        }
        return made;
    }();
    std::uint32_t sum = 0xFFFFFFFFu;
    for (std::size_t at = 0; at < size; ++at) sum = table[(sum ^ data[at]) & 0xFF] ^ (sum >> 8);
    return ~sum;
}

// Reads little-endian fields; reading past the end is an error.
class Reader {
public:
    Reader(const unsigned char* data, std::size_t size, std::string path)
        : data_(data), left_(size), path_(std::move(path)) {}

    template <typename T>
    T number() {
        T value;
        std::memcpy(&value, take(sizeof(T)), sizeof(T));
        return value;
    }
    template <typename T>
    std::vector<T> numbers(std::size_t count) {
        if (count > left_ / sizeof(T)) fail();
        std::vector<T> values(count);
        if (count) std::memcpy(values.data(), take(count * sizeof(T)), count * sizeof(T));
        return values;
    }
    // The number of entries that follow, each of at least one byte.
    std::uint32_t count() {
        const auto value = number<std::uint32_t>();
        if (value > left_) fail();
        return value;
    }
    std::string text() {
        const auto size = count();
        return std::string(reinterpret_cast<const char*>(take(size)), size);
    }
    std::pair<const unsigned char*, std::size_t> blob() {
        const auto size = number<std::uint64_t>();
        return {take(size), static_cast<std::size_t>(size)};
    }
    const unsigned char* take(std::uint64_t size) {
        if (size > left_) fail();
        const unsigned char* found = data_;
        data_ += size;
        left_ -= static_cast<std::size_t>(size);
        return found;
    }
    bool at_end() const { return left_ == 0; }
    [[noreturn]] void fail() const { throw Error(path_ + " is damaged: it ends early or has invalid fields"); }

private:
    const unsigned char* data_;
    std::size_t left_;
    std::string path_;
};

enum class Region : std::uint8_t { null, arena, persistent, constants, input, output };
enum class Kind : std::uint8_t { value, pointer, pointers, tiled_map, im2col_map };

struct Location {
    Region region = Region::null;
    std::uint32_t index = 0;
    std::int64_t offset = 0;
    bool moves() const { return region == Region::input || region == Region::output; }
};

struct TensorMap {
    std::string type;
    std::uint32_t swizzle = 0;
    std::vector<std::uint64_t> sizes, strides;
    std::vector<std::uint32_t> box, steps;
    std::vector<std::int32_t> lower, upper;
    std::uint32_t channels = 0, pixels = 0;
    bool im2col = false;
};

// An argument that holds addresses, and where its bytes are among those of its launch.
struct Pointed {
    std::size_t place = 0;
    std::vector<Location> locations;
    std::shared_ptr<const TensorMap> map;  // none for plain pointers
    bool moves() const {
        return std::any_of(locations.begin(), locations.end(), [](const Location& each) { return each.moves(); });
    }
};

struct Launch {
    Launch() = default;
    Launch(Launch&&) = default;  // never copied: `parameters` point into `bytes`
    std::uint32_t program = 0;
    std::string label;
    std::array<std::uint32_t, 3> grid{}, block{}, cluster{};
    std::uint32_t shared_bytes = 0;
    bool overlap = false;
    std::vector<unsigned char> bytes;  // values of all arguments, from the first multiple of 64 on
    std::vector<Pointed> pointed;
    std::vector<void*> parameters;  // into `bytes`, as the driver takes them

    unsigned char* base() {
        const auto address = reinterpret_cast<std::uintptr_t>(bytes.data());
        return bytes.data() + (kMapAlignment - address % kMapAlignment) % kMapAlignment;
    }
};

struct Copy {
    Location source, target;
    std::uint64_t bytes = 0;
};

struct Program {
    std::string entry;
    CUmodule module = nullptr;
    CUfunction function = nullptr;
    std::uint32_t allowed_shared = 0;
};

Location read_location(Reader& reader) {
    Location found;
    const auto region = reader.number<std::uint8_t>();
    if (region > static_cast<std::uint8_t>(Region::output)) reader.fail();
    found.region = static_cast<Region>(region);
    found.index = reader.number<std::uint32_t>();
    found.offset = reader.number<std::int64_t>();
    return found;
}

std::vector<Tensor> read_tensors(Reader& reader) {
    std::vector<Tensor> found(reader.count());
    for (Tensor& tensor : found) {
        tensor.name = reader.text();
        tensor.dtype = reader.text();
        const auto rank = reader.count();
        tensor.shape = reader.numbers<std::int64_t>(rank);
        tensor.strides = reader.numbers<std::int64_t>(rank);
        tensor.bytes = static_cast<std::size_t>(reader.number<std::uint64_t>());
    }
    return found;
}

std::vector<Copy> read_copies(Reader& reader) {
    std::vector<Copy> found(reader.count());
    for (Copy& copy : found) {
        copy.source = read_location(reader);
        copy.target = read_location(reader);
        copy.bytes = reader.number<std::uint64_t>();
    }
    return found;
}

std::shared_ptr<TensorMap> read_map(Reader& reader, bool im2col) {
    auto map = std::make_shared<TensorMap>();
    map->im2col = im2col;
    map->type = reader.text();
    map->swizzle = reader.number<std::uint32_t>();
    const auto rank = reader.number<std::uint32_t>();
    if (rank < 1 || rank > 5 || (im2col && rank != 4 && rank != 5)) reader.fail();
    map->sizes = reader.numbers<std::uint64_t>(rank);
    map->strides = reader.numbers<std::uint64_t>(rank - 1);
    if (im2col) {
        map->lower = reader.numbers<std::int32_t>(rank - 2);
        map->upper = reader.numbers<std::int32_t>(rank - 2);
        map->channels = reader.number<std::uint32_t>();
        map->pixels = reader.number<std::uint32_t>();
        map->steps = reader.numbers<std::uint32_t>(rank);
    } else {
        map->box = reader.numbers<std::uint32_t>(rank);
        map->steps.assign(rank, 1);
    }
    return map;
}

Launch read_launch(Reader& reader, std::size_t programs) {
    Launch launch;
    launch.program = reader.number<std::uint32_t>();
    if (launch.program >= programs) reader.fail();
    launch.label = reader.text();
    for (auto* triple : {&launch.grid, &launch.block, &launch.cluster})
        for (auto& size : *triple) size = reader.number<std::uint32_t>();
    launch.shared_bytes = reader.number<std::uint32_t>();
    launch.overlap = reader.number<std::uint8_t>() != 0;
    std::vector<unsigned char> values;
    std::vector<std::size_t> places;
    const auto add = [&](const void* data, std::size_t size, std::size_t alignment) {
        const std::size_t place = (values.size() + alignment - 1) / alignment * alignment;
        values.resize(place + size);
        if (data && size) std::memcpy(values.data() + place, data, size);
        places.push_back(place);
        return place;
    };
    const auto arguments = reader.count();
    for (std::uint32_t index = 0; index < arguments; ++index) {
        const auto kind = static_cast<Kind>(reader.number<std::uint8_t>());
        Pointed pointed;
        if (kind == Kind::value) {
            const auto size = reader.count();
            add(reader.take(size), size, sizeof(std::int64_t));
            continue;
        }
        if (kind == Kind::tiled_map || kind == Kind::im2col_map) {
            pointed.locations.push_back(read_location(reader));
            pointed.map = read_map(reader, kind == Kind::im2col_map);
            pointed.place = add(nullptr, sizeof(CUtensorMap), kMapAlignment);
        } else if (kind == Kind::pointer || kind == Kind::pointers) {
            const auto count = kind == Kind::pointer ? 1 : reader.count();
            for (std::uint32_t each = 0; each < count; ++each) pointed.locations.push_back(read_location(reader));
            pointed.place = add(nullptr, count * sizeof(CUdeviceptr), sizeof(CUdeviceptr));
        } else {
            reader.fail();
        }
        launch.pointed.push_back(std::move(pointed));
    }
    launch.bytes.assign(values.size() + kMapAlignment, 0);
    if (!values.empty()) std::memcpy(launch.base(), values.data(), values.size());
    for (const std::size_t place : places) launch.parameters.push_back(launch.base() + place);
    return launch;
}

std::vector<Launch> read_launches(Reader& reader, std::size_t programs) {
    std::vector<Launch> found;
    const auto count = reader.count();
    for (std::uint32_t index = 0; index < count; ++index) found.push_back(read_launch(reader, programs));
    return found;
}

CUtensorMap encode(const TensorMap& map, CUdeviceptr address, const std::string& what) {
    static const std::map<std::string, CUtensorMapDataType> types = {
        {"FLOAT16", CU_TENSOR_MAP_DATA_TYPE_FLOAT16},
        {"BFLOAT16", CU_TENSOR_MAP_DATA_TYPE_BFLOAT16},
        {"FLOAT32", CU_TENSOR_MAP_DATA_TYPE_FLOAT32},
        {"UINT8", CU_TENSOR_MAP_DATA_TYPE_UINT8},
    };
    static const std::map<std::uint32_t, CUtensorMapSwizzle> swizzles = {
        {0, CU_TENSOR_MAP_SWIZZLE_NONE},
        {32, CU_TENSOR_MAP_SWIZZLE_32B},
        {64, CU_TENSOR_MAP_SWIZZLE_64B},
        {128, CU_TENSOR_MAP_SWIZZLE_128B},
    };
    const auto type = types.find(map.type);
    const auto swizzle = swizzles.find(map.swizzle);
    if (type == types.end() || swizzle == swizzles.end()) throw Error(what + ": its tensor map is not supported");
    CUtensorMap encoded;
    const auto rank = static_cast<cuuint32_t>(map.sizes.size());
    const std::vector<cuuint64_t> sizes(map.sizes.begin(), map.sizes.end());
    const std::vector<cuuint64_t> strides(map.strides.begin(), map.strides.end());
    void* const pointer = reinterpret_cast<void*>(static_cast<std::uintptr_t>(address));
    const auto interleave = CU_TENSOR_MAP_INTERLEAVE_NONE;
    const auto promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
    const auto fill = CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE;
    const CUresult status =
        map.im2col ? driver().cuTensorMapEncodeIm2col_(
                         &encoded, type->second, rank, pointer, sizes.data(), strides.data(), map.lower.data(),
                         map.upper.data(), map.channels, map.pixels, map.steps.data(), interleave, swizzle->second,
                         promotion, fill)
                   : driver().cuTensorMapEncodeTiled_(&encoded, type->second, rank, pointer, sizes.data(),
                                                      strides.data(), map.box.data(), map.steps.data(), interleave,
                                                      swizzle->second, promotion, fill);
    driver().check(status, "encoding a tensor map of " + what);
    return encoded;
}

}  // namespace

// ---- Plans -----------------------------------------------------------------------------------------------------------

struct Plan::State {
    std::vector<Tensor> inputs, outputs;
    std::uint64_t arena_bytes = 0, persistent_bytes = 0;
    std::vector<Copy> copies_in, copies_out;
    std::vector<std::pair<std::uint64_t, std::uint64_t>> zeroed;  // offset and size, in the persistent memory
    std::vector<Launch> packing, calls;
    CUdeviceptr arena = 0, persistent = 0, constants = 0;
    std::uint64_t constant_bytes = 0;
    std::vector<DeviceAddress> bound_inputs, bound_outputs;
    bool ready = false;    // memory is allocated and weights are packed
    bool pointed = false;  // all arguments are set for the bound inputs and outputs

    State(Reader& reader, std::size_t programs) {
        arena_bytes = reader.number<std::uint64_t>();
        persistent_bytes = reader.number<std::uint64_t>();
        inputs = read_tensors(reader);
        outputs = read_tensors(reader);
        copies_in = read_copies(reader);
        copies_out = read_copies(reader);
        zeroed.resize(reader.count());
        for (auto& [offset, size] : zeroed) {
            offset = reader.number<std::uint64_t>();
            size = reader.number<std::uint64_t>();
            if (offset > persistent_bytes || size > persistent_bytes - offset) reader.fail();
        }
        packing = read_launches(reader, programs);
        calls = read_launches(reader, programs);
    }

    CUdeviceptr resolve(const Location& location) const {
        const auto within = [&](CUdeviceptr base, std::uint64_t bytes) {
            if (location.offset < 0 || static_cast<std::uint64_t>(location.offset) > bytes)
                throw Error("a plan is damaged: an address is outside of its memory");
            return base + static_cast<CUdeviceptr>(location.offset);
        };
        const auto of_caller = [&](const std::vector<DeviceAddress>& bound, const std::vector<Tensor>& tensors) {
            if (location.index >= tensors.size()) throw Error("a plan is damaged: it has no such input or output");
            return within(bound.at(location.index), tensors[location.index].bytes);
        };
        switch (location.region) {
            case Region::arena: return within(arena, arena_bytes);
            case Region::persistent: return within(persistent, persistent_bytes);
            case Region::constants: return within(constants, constant_bytes);
            case Region::input: return of_caller(bound_inputs, inputs);
            case Region::output: return of_caller(bound_outputs, outputs);
            default: return 0;
        }
    }

    // Sets the addresses in a launch's arguments: all of them, or those of inputs and outputs only.
    void point(Launch& launch, bool all) const {
        for (const Pointed& pointed : launch.pointed) {
            if (!all && !pointed.moves()) continue;
            unsigned char* place = launch.base() + pointed.place;
            if (pointed.map) {
                const CUtensorMap encoded = encode(*pointed.map, resolve(pointed.locations[0]), launch.label);
                std::memcpy(place, &encoded, sizeof encoded);
                continue;
            }
            for (std::size_t index = 0; index < pointed.locations.size(); ++index) {
                const CUdeviceptr address = resolve(pointed.locations[index]);
                std::memcpy(place + index * sizeof address, &address, sizeof address);
            }
        }
    }

    void copy(const std::vector<Copy>& copies, CUstream stream) const {
        for (const Copy& each : copies) {
            const CUdeviceptr target = resolve(each.target), source = resolve(each.source);
            driver().check(driver().cuMemcpyDtoDAsync_(target, source, each.bytes, stream), "copying a tensor");
        }
    }
};

Plan::Plan(std::unique_ptr<State> state) : state_(std::move(state)) {}
Plan::Plan(Plan&&) noexcept = default;
Plan::~Plan() = default;
const std::vector<Tensor>& Plan::inputs() const { return state_->inputs; }
const std::vector<Tensor>& Plan::outputs() const { return state_->outputs; }
std::size_t Plan::launches() const { return state_->calls.size(); }
std::int64_t Plan::batch() const {
    const auto& inputs = state_->inputs;
    return inputs.empty() || inputs[0].shape.empty() ? 1 : inputs[0].shape[0];
}

// ---- Engines ---------------------------------------------------------------------------------------------------------

struct Engine::State {
    CUdevice device = 0;
    CUcontext context = nullptr;
    std::string dtype;
    std::vector<Program> programs;
    std::vector<Plan> plans;
    std::vector<CUdeviceptr> allocated;

    State(const std::string& path, int device_index) {
        std::ifstream file(path, std::ios::binary);
        if (!file) throw Error(path + " cannot be read");
        const std::vector<char> contents((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
        Reader reader(reinterpret_cast<const unsigned char*>(contents.data()), contents.size(), path);
        if (contents.size() < sizeof kMagic || std::memcmp(reader.take(sizeof kMagic), kMagic, sizeof kMagic) != 0)
            throw Error(path + " is not a file of Escalade's plans; `escalade build --cpp` writes them");
        const auto version = reader.number<std::uint32_t>();
        if (version != kVersion)
            throw Error(path + " has format " + std::to_string(version) + ", and this runtime reads " +
                        std::to_string(kVersion) + "; use the runtime that was written beside it");
        const auto sum = reader.number<std::uint32_t>();
        const auto [body, size] = reader.blob();
        if (!reader.at_end() || checksum(body, size) != sum)
            throw Error(path + " is damaged: its contents do not match its checksum");
        driver().check(driver().cuInit_(0), "starting the driver");
        driver().check(driver().cuDeviceGet_(&device, device_index), "finding GPU " + std::to_string(device_index));
        Reader fields(body, size, path);
        const auto architecture = fields.text(), card = fields.text();
        require_card(architecture, card, fields.number<std::uint32_t>());
        driver().check(driver().cuDevicePrimaryCtxRetain_(&context, device), "creating a context");
        try {
            const Current current(context);
            load(fields);
        } catch (...) {
            release();
            throw;
        }
    }
    ~State() { release(); }

    void require_card(const std::string& architecture, const std::string& card, std::uint32_t multiprocessors) const {
        int major = 0, minor = 0, count = 0;
        const auto ask = [&](int& value, CUdevice_attribute attribute) {
            driver().check(driver().cuDeviceGetAttribute_(&value, attribute, device), "asking for the GPU's properties");
        };
        ask(major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
        ask(minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
        ask(count, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
        const int wanted = std::atoi(architecture.c_str() + std::min<std::size_t>(3, architecture.size()));
        const bool exact = !architecture.empty() && (architecture.back() == 'a' || architecture.back() == 'f');
        const bool fits = major == wanted / 10 && (exact ? minor == wanted % 10 : minor >= wanted % 10);
        if (fits && count >= static_cast<int>(multiprocessors)) return;
        throw Error("the plans are for " + card + " (" + architecture + ", " + std::to_string(multiprocessors) +
                    " SMs), and this GPU has compute capability " + std::to_string(major) + "." +
                    std::to_string(minor) + " and " + std::to_string(count) + " SMs; build them for this GPU");
    }

    void load(Reader& fields) {
        dtype = fields.text();
        programs.resize(fields.count());
        for (Program& program : programs) {
            program.entry = fields.text();
            const auto [code, size] = fields.blob();
            if (size < 64) fields.fail();
            driver().check(driver().cuModuleLoadData_(&program.module, code), "loading " + program.entry);
            driver().check(driver().cuModuleGetFunction_(&program.function, program.module, program.entry.c_str()),
                           "finding " + program.entry);
        }
        const auto [weights, weight_bytes] = fields.blob();
        const CUdeviceptr constants = allocate(weight_bytes);
        if (weight_bytes) driver().check(driver().cuMemcpyHtoD_(constants, weights, weight_bytes), "copying weights");
        const auto count = fields.count();
        for (std::uint32_t index = 0; index < count; ++index) {
            auto state = std::make_unique<Plan::State>(fields, programs.size());
            state->constants = constants;
            state->constant_bytes = weight_bytes;
            plans.push_back(Plan(std::move(state)));
        }
        if (!fields.at_end()) fields.fail();
    }

    CUdeviceptr allocate(std::uint64_t bytes) {
        CUdeviceptr address = 0;
        driver().check(driver().cuMemAlloc_(&address, std::max<std::size_t>(bytes, 1)),
                       "allocating " + std::to_string(bytes) + " bytes");
        allocated.push_back(address);
        return address;
    }

    void free(CUdeviceptr address) {
        const auto found = std::find(allocated.begin(), allocated.end(), address);
        if (found == allocated.end()) return;
        allocated.erase(found);
        const Current current(context);
        driver().cuMemFree_(address);
    }

    void release() {
        if (!context) return;
        CUcontext previous = nullptr;  // errors of the driver are ignored here: nothing could be done about them
        driver().cuCtxGetCurrent_(&previous);
        driver().cuCtxSetCurrent_(context);
        driver().cuCtxSynchronize_();
        for (const CUdeviceptr address : allocated) driver().cuMemFree_(address);
        for (const Program& program : programs)
            if (program.module) driver().cuModuleUnload_(program.module);
        driver().cuCtxSetCurrent_(previous);
        driver().cuDevicePrimaryCtxRelease_(device);
        context = nullptr;
    }

    void launch(Launch& launch, CUstream stream) {
        const std::string what = "launching " + programs[launch.program].entry + " for " + launch.label;
        CUlaunchAttribute attributes[2];
        std::memset(attributes, 0, sizeof attributes);
        CUlaunchConfig config;
        std::memset(&config, 0, sizeof config);
        config.gridDimX = launch.grid[0], config.gridDimY = launch.grid[1], config.gridDimZ = launch.grid[2];
        config.blockDimX = launch.block[0], config.blockDimY = launch.block[1], config.blockDimZ = launch.block[2];
        config.sharedMemBytes = launch.shared_bytes;
        config.hStream = stream;
        config.attrs = attributes;
        if (launch.cluster != std::array<std::uint32_t, 3>{1, 1, 1}) {
            CUlaunchAttribute& attribute = attributes[config.numAttrs++];
            attribute.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
            attribute.value.clusterDim.x = launch.cluster[0];
            attribute.value.clusterDim.y = launch.cluster[1];
            attribute.value.clusterDim.z = launch.cluster[2];
        }
        if (launch.overlap) {
            CUlaunchAttribute& attribute = attributes[config.numAttrs++];
            attribute.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
            attribute.value.programmaticStreamSerializationAllowed = 1;
        }
        const CUfunction function = programs[launch.program].function;
        driver().check(driver().cuLaunchKernelEx_(&config, function, launch.parameters.data(), nullptr), what);
    }

    // Raises a kernel's limit of dynamic shared memory, as is necessary above 48 KiB.
    void allow_shared(const Launch& launch) {
        Program& program = programs[launch.program];
        if (launch.shared_bytes <= program.allowed_shared) return;
        program.allowed_shared = launch.shared_bytes;
        const auto attribute = CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        driver().check(
            driver().cuFuncSetAttribute_(program.function, attribute, static_cast<int>(launch.shared_bytes)),
            "preparing " + program.entry);
    }

    void prepare(Plan::State& plan) {
        if (plan.ready) return;
        if (!plan.arena) plan.arena = allocate(plan.arena_bytes);
        if (!plan.persistent) plan.persistent = allocate(plan.persistent_bytes);
        for (const auto& [offset, size] : plan.zeroed)
            driver().check(driver().cuMemsetD8_(plan.persistent + offset, 0, size), "clearing counters");
        for (Launch& each : plan.packing) {
            plan.point(each, true);
            allow_shared(each);
            launch(each, nullptr);
        }
        for (const Launch& each : plan.calls) allow_shared(each);
        driver().check(driver().cuCtxSynchronize_(), "packing weights");
        plan.ready = true;
    }
};

Engine::Engine(const std::string& path, int device) : state_(std::make_unique<State>(path, device)) {}
Engine::~Engine() = default;
const std::vector<Plan>& Engine::plans() const { return state_->plans; }
const std::string& Engine::dtype() const { return state_->dtype; }

const Plan& Engine::plan_for_batch(std::int64_t batch) const {
    std::string known;
    for (const Plan& plan : state_->plans) {
        if (plan.batch() == batch) return plan;
        known += (known.empty() ? "" : ", ") + std::to_string(plan.batch());
    }
    throw Error("there is no plan for batch size " + std::to_string(batch) + "; there is " + known);
}

void Engine::prepare(const Plan& plan) {
    const Current current(state_->context);
    state_->prepare(*plan.state_);
}

void Engine::run(const Plan& plan, const std::vector<DeviceAddress>& inputs,
                 const std::vector<DeviceAddress>& outputs, Stream stream) {
    Plan::State& state = *plan.state_;
    const auto require = [](const std::vector<DeviceAddress>& given, const std::vector<Tensor>& tensors,
                            const char* what) {
        if (given.size() != tensors.size())
            throw Error(std::to_string(given.size()) + " " + what + " passed; the plan takes " +
                        std::to_string(tensors.size()));
        for (std::size_t index = 0; index < given.size(); ++index)
            if (given[index] % kAlignment || (!given[index] && tensors[index].bytes))
                throw Error("the address of " + tensors[index].name + " is " +
                            (given[index] ? "not a multiple of 16 bytes" : "null"));
    };
    require(inputs, state.inputs, "inputs");
    require(outputs, state.outputs, "outputs");
    const Current current(state_->context);
    state_->prepare(state);
    if (!state.pointed || inputs != state.bound_inputs || outputs != state.bound_outputs) {
        const bool all = !state.pointed;
        state.pointed = false;  // until all are set
        state.bound_inputs = inputs;
        state.bound_outputs = outputs;
        for (Launch& each : state.calls) state.point(each, all);
        state.pointed = true;
    }
    const auto on = static_cast<CUstream>(stream);
    state.copy(state.copies_in, on);
    for (Launch& each : state.calls) state_->launch(each, on);
    state.copy(state.copies_out, on);
}

void Engine::synchronize(Stream stream) {
    const Current current(state_->context);
    driver().check(driver().cuStreamSynchronize_(static_cast<CUstream>(stream)), "running the network");
}

// ---- Memory ----------------------------------------------------------------------------------------------------------

DeviceMemory::DeviceMemory(Engine& engine, std::size_t bytes) : engine_(engine), bytes_(bytes) {
    const Current current(engine.state_->context);
    address_ = engine.state_->allocate(bytes);
}

DeviceMemory::~DeviceMemory() { engine_.state_->free(address_); }

void DeviceMemory::upload(const void* host) {
    const Current current(engine_.state_->context);
    driver().check(driver().cuMemcpyHtoD_(address_, host, bytes_), "copying to the GPU");
}

void DeviceMemory::download(void* host) const {
    const Current current(engine_.state_->context);
    driver().check(driver().cuCtxSynchronize_(), "running the network");
    driver().check(driver().cuMemcpyDtoH_(host, address_, bytes_), "copying from the GPU");
}

}  // namespace escalade
