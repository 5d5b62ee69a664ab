// Parts of the dynamic shared memory, which kernels declare by `shared_part` of common/ptx.cuh.
//
// With checks, each part is moved behind the arena, between guards, and its old bytes become inaccessible. A part
// inside an earlier one belongs to that one, so memory that is reused is declared once.
#include "checks.h"
#include "units.h"

namespace twin {
namespace {

constexpr uint32_t PART_ALIGNMENT = 1024;           // largest swizzle period: moves are by multiples of it
constexpr uint32_t NAMED_BYTES = 1u << 18;       // address range of wgmma descriptors

const Part* part_with(uint32_t offset, uint32_t Part::*start) {
    for (const Part& part : machine->parts)
        if (offset - part.*start < part.bytes) return &part;
    return nullptr;
}

std::string name_of(const Part& part) {
    return text("the part of %u bytes of %s", part.bytes, place(part.where).c_str());
}

// All blocks of the cluster have a part at the same shared address.
const Part& declare(uint32_t offset, uint32_t bytes, Where where) {
    const SharedLayout& layout = machine->launch->layout;
    for (const Part& part : machine->parts)
        if (offset < part.from + part.bytes && part.from < offset + bytes)
            fail(where, "declares a part of shared memory that overlaps %s and is not inside it", name_of(part).c_str());
    uint32_t begin = layout.arena_bytes;
    for (const Part& part : machine->parts) begin = std::max(begin, part.to + part.bytes);
    uint32_t to = begin + layout.part_gap;
    to += (offset - to) % PART_ALIGNMENT;
    const uint32_t room = settings().descriptors ? std::min(layout.room_bytes, NAMED_BYTES) : layout.room_bytes;
    if (to + bytes + GUARD_BYTES > room) to = offset;  // no room: do not move it
    machine->parts.push_back({offset, bytes, to, where});
    if (to != offset)
        for (Block& block : machine->blocks) {
            std::memset(block.arena + to - GUARD_BYTES, POISON, bytes + 2 * GUARD_BYTES);
            std::memcpy(block.arena + to, block.arena + offset, bytes);
        }
    return machine->parts.back();
}

}  // namespace

void* shared_part(void* start, size_t count, size_t element_bytes, Where where) {
    if (!checking()) return start;
    const SharedLayout& layout = machine->launch->layout;
    const uint32_t offset = shared_offset(start, where);
    const uint32_t end = layout.dynamic_start + layout.dynamic_bytes;
    const uint64_t bytes = count == REST ? end - offset : count * element_bytes;
    if (!bytes) return start;
    if (const Part* part = part_with(offset, &Part::from); part && offset + bytes <= part->from + part->bytes)
        return self()->owner->arena + offset - part->from + part->to;
    if (offset < layout.dynamic_start || offset + bytes > end)
        fail(where, "declares %llu bytes of dynamic shared memory from byte %lld on; there are %u",
             (unsigned long long)bytes, (long long)offset - layout.dynamic_start, layout.dynamic_bytes);
    return self()->owner->arena + declare(offset, uint32_t(bytes), where).to;
}

// ------------------------------------------------------------------ for the layout

bool inside_part(uint32_t offset, uint32_t bytes) {
    const Part* part = part_with(offset, &Part::to);
    return part && offset + bytes <= part->to + part->bytes;
}

uint32_t home_of(uint32_t offset) {
    if (offset < machine->launch->layout.arena_bytes) return offset;
    const Part* part = part_with(offset, &Part::to);
    return part ? offset - part->to + part->from : offset;
}

const Part* moved_from(uint32_t offset, uint32_t bytes) {
    for (const Part& part : machine->parts)
        if (part.to != part.from && offset < part.from + part.bytes && part.from < offset + bytes) return &part;
    return nullptr;
}

std::string describe_part(uint32_t offset) {
    const Part* last = nullptr;  // the last one that starts at or before the offset
    for (const Part& part : machine->parts)
        if (part.to <= offset && (!last || last->to < part.to)) last = &part;
    if (!last) return "before the first part of the dynamic shared memory";
    if (offset - last->to < last->bytes) return text("byte %u of ", offset - last->to) + name_of(*last);
    return text("%u bytes past the end of ", offset - last->to - last->bytes) + name_of(*last);
}

std::string describe_moved(uint32_t offset, const Part& part) {
    return text("byte %u of ", offset - part.from) + name_of(part) + ", by another pointer than its declaration gave";
}

}  // namespace twin
