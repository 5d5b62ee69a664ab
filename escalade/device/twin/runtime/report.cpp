// Names in reports, and the layout of shared memory that they refer to.
#include "state.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>

namespace twin {

std::string text(const char* format, ...) {
    char result[1024];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(result, sizeof result, format, arguments);
    va_end(arguments);
    return result;
}

std::string place(Where where) { return text("%s:%d", where.file, where.line); }

std::string name(const uint3& block) { return text("block (%u, %u, %u)", block.x, block.y, block.z); }

std::string name(const Thread& thread) { return text("thread %u of ", thread.number) + name(thread.block); }

// ------------------------------------------------------------------ waiting threads

namespace {

std::string numbers(const std::vector<unsigned>& list) {  // ascending: "0-31, 64"
    std::string result;
    int ranges = 0;
    for (size_t i = 0; i < list.size();) {
        if (++ranges > 8) return result + " ... (" + std::to_string(list.size()) + " threads)";
        size_t end = i + 1;
        while (end < list.size() && list[end] == list[end - 1] + 1) ++end;
        result += (result.empty() ? "" : ", ") + std::to_string(list[i]);
        if (end > i + 1) result += "-" + std::to_string(list[end - 1]);
        i = end;
    }
    return result;
}

}  // namespace

std::string thread_states() {
    std::string report;
    for (Block& block : machine->blocks) {
        std::map<std::string, std::vector<unsigned>> groups;
        for (Thread& thread : machine->threads) {
            if (thread.owner != &block) continue;
            const Waiting& waiting = thread.waiting;
            std::string what = thread.done ? "have returned" : &thread == here ? "run now" : "can run";
            if (thread.asleep) {
                what = std::string("wait at ") + place(waiting.where) + ": " + waiting.operation;
                if (waiting.state) what += ", " + waiting.state(waiting);
            }
            groups[what].push_back(thread.number);
        }
        for (auto& [what, list] : groups)
            report += "\n  " + name(block.index) + ": threads " + numbers(list) + " " + what;
    }
    return report;
}

// ------------------------------------------------------------------ shared memory
//
// guard | dynamic array | guard | static variables, with gaps between them | guard
//
// The dynamic array starts at 1024, as on Hopper, where the driver reserves the first KiB.

namespace {

// Larger than shared memory, so that an overrun of one part does not reach another. Address space only.
constexpr uint32_t FAR_BYTES = 1u << 18;

uint32_t round_up(uint32_t value) { return (value + GUARD_BYTES - 1) / GUARD_BYTES * GUARD_BYTES; }

}  // namespace

SharedLayout::SharedLayout(const Request& request)
    : dynamic_start(GUARD_BYTES), dynamic_bytes(request.shared_bytes),
      static_start(dynamic_start + round_up(dynamic_bytes) + GUARD_BYTES),
      arena_bytes((static_start + round_up(request.static_bytes) + GUARD_BYTES + 4095) / 4096 * 4096),
      part_gap(request.descriptors ? GUARD_BYTES : FAR_BYTES), room_bytes(arena_bytes) {
    constexpr uint32_t MOST_PARTS = 32;
    if (request.checks && dynamic_bytes) room_bytes += round_up(dynamic_bytes) + MOST_PARTS * (part_gap + GUARD_BYTES);
    parts.push_back({"the dynamic shared memory", dynamic_start, dynamic_bytes});
    for (uint32_t i = 0; i < request.variable_count; ++i) {
        parts.push_back(request.variables[i]);
        parts.back().offset += static_start;
    }
}

uint32_t SharedLayout::taken() const {
    uint32_t bytes = 0;
    for (const Variable& part : parts) bytes += part.bytes;
    return bytes;
}

const Variable* SharedLayout::part_of(uint32_t offset) const {  // the last one that starts at or before it
    const Variable* found = nullptr;
    for (const Variable& part : parts) {
        if (part.offset > offset) break;
        found = &part;
    }
    return found;
}

bool SharedLayout::inside(uint32_t offset, uint32_t bytes) const {
    if (offset >= arena_bytes) return inside_part(offset, bytes);
    if (!machine->parts.empty() && moved_from(offset, bytes)) return false;
    const Variable* part = part_of(offset);
    return part && offset + bytes <= part->offset + part->bytes;
}

std::string SharedLayout::describe(uint32_t offset) const {
    if (offset >= arena_bytes) return describe_part(offset);
    if (const Part* part = moved_from(offset, 1)) return describe_moved(offset, *part);
    const Variable* part = part_of(offset);
    if (!part) return text("%u bytes before %s", parts[0].offset - offset, parts[0].name);
    const uint32_t end = part->offset + part->bytes;
    if (offset < end) return text("%s+%u", part->name, offset - part->offset);
    std::string result = text("%u bytes past the end of %s (%u bytes)", offset - end, part->name, part->bytes);
    if (part != &parts.back() && part[1].bytes) result += text(", %u before %s", part[1].offset - offset, part[1].name);
    return result;
}

uint32_t shared_offset(const void* pointer, Where where) {
    const ptrdiff_t offset = static_cast<const unsigned char*>(pointer) - self()->owner->arena;
    if (offset < 0 || offset >= ptrdiff_t(machine->launch->layout.room_bytes))
        fail(where, "%p is no address in this block's shared memory", pointer);
    return offset;
}

}  // namespace twin
