#include "relocation.h"

#include <sys/mman.h>
#include <unistd.h>

namespace twin {
namespace {

constexpr size_t GAP_BYTES = size_t(64) << 20;  // address space only, no memory
constexpr uintptr_t ALIGNMENT = 256;            // copies keep the alignment of the original up to this
constexpr size_t PARAMETER_ALIGNMENT = 64;      // that of a TensorMap, the strictest
constexpr unsigned char MARGIN = 0xA5;

size_t whole(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace

Relocation::Relocation(const Request& request, bool move) : moved(request) {
    for (uint32_t i = 0; i < request.buffer_count; ++i) {
        const Range& range = request.buffers[i];
        if (all.empty() || range.start >= all.back().from + all.back().bytes)
            all.push_back({range.start, range.start, range.bytes});
        else
            all.back().bytes = std::max(all.back().bytes, range.start + range.bytes - all.back().from);
    }
    if (move && !all.empty() && reserve())
        for (const Move& each : all)
            std::memcpy(reinterpret_cast<void*>(each.to), reinterpret_cast<const void*>(each.from), each.bytes);
    for (uint32_t i = 0; i < request.buffer_count; ++i) {
        buffers.push_back(request.buffers[i]);
        buffers.back().start = moved_to(buffers.back().start);
    }
    moved.buffers = buffers.data();
    copy_parameters();
}

Relocation::~Relocation() {
    if (memory) munmap(memory, memory_bytes);
}

// gap | margin, copy, margin | gap | ...: the end of a copy is as close to the gap as its alignment allows.
bool Relocation::reserve() {
    const auto page = size_t(sysconf(_SC_PAGESIZE));
    memory_bytes = GAP_BYTES;
    for (const Move& each : all) memory_bytes += whole(each.bytes + ALIGNMENT, page) + GAP_BYTES;
    void* reserved = mmap(nullptr, memory_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (reserved == MAP_FAILED) return false;
    memory = reserved;
    uintptr_t at = reinterpret_cast<uintptr_t>(memory);
    std::vector<uintptr_t> places;
    for (const Move& each : all) {
        const uintptr_t start = at + GAP_BYTES, end = start + whole(each.bytes + ALIGNMENT, page);
        if (mprotect(reinterpret_cast<void*>(start), end - start, PROT_READ | PROT_WRITE)) return false;
        const uintptr_t latest = end - each.bytes;
        places.push_back(latest - (latest - each.from) % ALIGNMENT);
        margins.push_back({start, places.back()});
        margins.push_back({places.back() + each.bytes, end});
        at = end;
    }
    for (const Margin& margin : margins)
        std::memset(reinterpret_cast<void*>(margin.start), MARGIN, margin.end - margin.start);
    for (size_t i = 0; i < all.size(); ++i) all[i].to = places[i];
    return true;
}

uintptr_t Relocation::moved_to(uintptr_t address) const {
    for (const Move& each : all)
        if (address - each.from < each.bytes) return address - each.from + each.to;
    for (const Move& each : all)  // one past the end counts as inside: an empty slice starts there
        if (address == each.from + each.bytes) return each.to + each.bytes;
    return address;
}

bool Relocation::was_moved(uintptr_t address) const {
    const auto holds = [&](const Move& each) { return address - each.from < each.bytes; };
    return memory && std::any_of(all.begin(), all.end(), holds);
}

// Parameter words that point into a buffer are treated as pointers.
void Relocation::copy_parameters() {
    size_t bytes = 0;
    for (uint32_t i = 0; i < moved.parameter_count; ++i) bytes += whole(moved.parameter_bytes[i], PARAMETER_ALIGNMENT);
    parameter_bytes.resize(bytes + PARAMETER_ALIGNMENT);
    unsigned char* to = parameter_bytes.data() + (-parameters_start() & (PARAMETER_ALIGNMENT - 1));
    for (uint32_t i = 0; i < moved.parameter_count; ++i) {
        std::memcpy(to, moved.parameters[i], moved.parameter_bytes[i]);
        for (uint32_t at = 0; at + 8 <= moved.parameter_bytes[i]; at += 8) {
            uintptr_t word;
            std::memcpy(&word, to + at, 8);
            word = moved_to(word);
            std::memcpy(to + at, &word, 8);
        }
        parameters.push_back(to);
        to += whole(moved.parameter_bytes[i], PARAMETER_ALIGNMENT);
    }
    if (moved.parameter_count) moved.parameters = parameters.data();
}

std::string Relocation::overwritten() const {
    for (size_t i = 0; i < margins.size(); ++i)
        for (uintptr_t at = margins[i].start; at < margins[i].end; ++at)
            if (*reinterpret_cast<const unsigned char*>(at) != MARGIN) {
                const Move& move = all[i / 2];
                const auto owner = std::find_if(buffers.begin(), buffers.end(), [&](const Range& range) {
                    return range.start - move.to < move.bytes;
                });
                const std::string where = i % 2 ? text("%zu bytes past the end of", size_t(at - move.to - move.bytes))
                                                : text("%zu bytes before", size_t(move.to - at));
                return where + text(" buffer %u", owner->index);
            }
    return {};
}

std::optional<Relocation::Difference> Relocation::difference(const Relocation& other) const {
    for (size_t i = 0; i < buffers.size(); ++i) {
        const auto* own = reinterpret_cast<const unsigned char*>(buffers[i].start);
        const auto* others = reinterpret_cast<const unsigned char*>(other.buffers[i].start);
        if (!std::memcmp(own, others, buffers[i].bytes)) continue;
        const size_t byte = std::mismatch(own, own + buffers[i].bytes, others).first - own;
        return Difference{buffers[i].start + byte, buffers[i].index, byte};
    }
    return {};
}

// Copies only changed bytes: a buffer that the kernel only reads may be in read-only memory.
void Relocation::copy_back() const {
    constexpr uint64_t STEP = 4096;
    for (const Move& each : all)
        for (uint64_t at = 0; memory && at < each.bytes; at += STEP) {
            auto* original = reinterpret_cast<unsigned char*>(each.from + at);
            const auto* copy = reinterpret_cast<const unsigned char*>(each.to + at);
            const uint64_t bytes = std::min(STEP, each.bytes - at);
            if (std::memcmp(original, copy, bytes)) std::memcpy(original, copy, bytes);
        }
}

// Returns true if all of these addresses are mapped.
extern "C" bool twin_mapped(uintptr_t start, uint64_t bytes) {
    constexpr uintptr_t PAGES = 1024;  // per system call
    unsigned char present[PAGES];
    const auto page = uintptr_t(sysconf(_SC_PAGESIZE));
    const uintptr_t end = start + bytes;
    if (end < start) return false;
    for (uintptr_t at = start / page * page; at < end; at += PAGES * page)
        if (mincore(reinterpret_cast<void*>(at), std::min(PAGES * page, end - at), present)) return false;
    return true;
}

}  // namespace twin
