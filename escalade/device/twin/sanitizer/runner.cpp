// One launch of one kernel in a process of its own, under AddressSanitizer and UndefinedBehaviorSanitizer.
//
// runner RUNTIME LIBRARY INPUT OUTPUT: reads a description and the buffers' contents from a file, gives each buffer
// memory of exactly its size (so that red zones follow it directly), runs, and writes the buffers back. See
// checks.py, which writes the file.
#include "../runtime/state.h"

#include <cstdio>
#include <cstdlib>
#include <dlfcn.h>

namespace {

struct File {
    FILE* stream;
    void read(void* to, size_t bytes) {
        if (bytes && std::fread(to, 1, bytes, stream) != bytes) {
            std::fputs("the runner's input is too short\n", stderr);
            std::exit(2);
        }
    }
    template <class T>
    T value() {
        T result;
        read(&result, sizeof result);
        return result;
    }
    std::vector<char> bytes() {
        std::vector<char> result(value<uint64_t>());
        read(result.data(), result.size());
        return result;
    }
};

}  // namespace

int main(int, char** arguments) {
    using namespace twin;
    void* runtime = dlopen(arguments[1], RTLD_NOW);
    void* library = runtime ? dlopen(arguments[2], RTLD_NOW) : nullptr;
    if (!library) return std::fprintf(stderr, "%s\n", dlerror()), 2;
    File input{std::fopen(arguments[3], "rb")};
    Request request{};
    input.read(&request, offsetof(Request, entry));  // the numbers, which precede the pointers
    request.library.bytes = input.value<uint64_t>();
    request.code.start = input.value<uint64_t>();
    request.code.bytes = input.value<uint64_t>();

    std::vector<std::vector<char>> names;
    std::vector<Variable> variables;
    for (uint32_t i = 0; i < request.variable_count; ++i) {
        names.push_back(input.bytes());
        const auto offset = input.value<uint32_t>(), bytes = input.value<uint32_t>();
        variables.push_back({names.back().data(), offset, bytes});
    }
    std::vector<std::pair<char*, uint64_t>> buffers;
    for (uint32_t i = 0; i < request.buffer_count; ++i) {
        const std::vector<char> content = input.bytes();
        auto* memory = static_cast<char*>(std::malloc(content.size()));
        std::memcpy(memory, content.data(), content.size());
        buffers.push_back({memory, content.size()});
    }
    // An argument is given as bytes, of which 8 at a given offset may be a buffer's address.
    std::vector<std::vector<char>> values;
    const auto argument_count = input.value<uint32_t>();
    for (uint32_t i = 0; i < argument_count; ++i) {
        values.push_back(input.bytes());
        const auto pointers = input.value<uint32_t>();
        for (uint32_t p = 0; p < pointers; ++p) {
            const auto at = input.value<uint32_t>(), buffer = input.value<uint32_t>();
            const auto offset = input.value<uint64_t>();
            char* address = buffers[buffer].first + offset;
            std::memcpy(values.back().data() + at, &address, sizeof address);
        }
    }
    std::fclose(input.stream);

    // Aligned for the strictest parameter, a TensorMap.
    std::vector<void*> parameters;
    for (const std::vector<char>& value : values) {
        parameters.push_back(std::aligned_alloc(64, (value.size() + 63) / 64 * 64));
        std::memcpy(parameters.back(), value.data(), value.size());
    }
    request.entry = reinterpret_cast<void (*)(void**)>(dlsym(library, "twin_entry"));
    Dl_info loaded{};
    dladdr(reinterpret_cast<void*>(request.entry), &loaded);
    request.library.start = reinterpret_cast<uintptr_t>(loaded.dli_fbase);
    request.code.start += request.library.start;
    request.parameters = parameters.data();
    request.variables = variables.data();
    request.buffer_count = 0;
    const auto launch = reinterpret_cast<char* (*)(const Request*)>(dlsym(runtime, "twin_launch"));
    char* report = launch(&request);
    if (report) {
        std::fprintf(stderr, "%s\n", report);
        return 1;
    }
    FILE* output = std::fopen(arguments[4], "wb");
    for (auto& [memory, bytes] : buffers) std::fwrite(memory, 1, bytes, output);
    return std::fclose(output) ? 2 : 0;
}
