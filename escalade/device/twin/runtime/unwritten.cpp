// Global memory that is uninitialized at launch: outputs and workspaces, as declared by the caller.
#include "checks.h"

namespace twin::checks {

void check_written(const Access& access) {
    for (const Unwritten& range : state->unwritten) {
        const uintptr_t end = access.address + access.bytes;
        if (access.address >= range.start + range.bytes || end <= range.start) continue;
        const uintptr_t first = std::max(access.address, range.start), last = std::min(end, range.start + range.bytes);
        for (uintptr_t at = first; at < last; ++at) {
            unsigned char& written = range.written[at - range.start];
            if (!written && (!access.write || access.kind & ATOMIC))
                report(access.site, "reads " + memory_name(at) + ", which nothing wrote");
            written |= access.write;
        }
    }
}

}  // namespace twin::checks

namespace twin {

namespace {

uintptr_t moved_to(uintptr_t address) {
    for (const Relocation::Move& move : checks::state->moves)
        if (address - move.from < move.bytes) return address - move.from + move.to;
    return address;
}

}  // namespace

// Returns where the last launch wrote that byte; the caller frees the string.
extern "C" char* twin_writer(uintptr_t address) {
    const checks::Touch* writer = checks::state ? checks::written_by(moved_to(address)) : nullptr;
    return strdup(writer ? checks::place(writer->site).c_str() : "somewhere");
}

// Returns the first unwritten byte from `from` on, or `bytes` if the last launch wrote them all.
extern "C" uint64_t twin_unwritten(uintptr_t start, uint64_t bytes, uint64_t from) {
    using namespace checks;
    if (!state) return from;
    start = moved_to(start);
    for (; from < bytes; ++from)
        if (!written_by(start + from)) return from;
    return bytes;
}

}  // namespace twin
