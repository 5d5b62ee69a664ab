// Accumulator registers of wgmma. In a kernel compiled with checks they are on the threads' stacks, because wgmma takes
// their address, and every other access to them calls a hook. For each stack word this file records the time of the
// last access, and whether a wgmma in flight will still write it.
#include "units.h"

#include "checks.h"

namespace twin {
namespace {

constexpr u32 IN_FLIGHT = 1u << 31;
constexpr u32 UNTOUCHED = 0xFEFEFEFE;  // g++'s fill of uninitialized variables (-ftrivial-auto-var-init)

bool same(const Fragment& fragment, const float* d, int registers) {
    return fragment.d == d && fragment.registers == registers;
}

bool overlaps(const Fragment& fragment, const float* d, int registers) {
    return fragment.d < d + registers && d < fragment.d + fragment.registers;
}

void mark(const Fragment& fragment) {
    for (int i = 0; i < fragment.registers; ++i)
        if (u32* word = machine->stacks.touched(reinterpret_cast<uintptr_t>(fragment.d + i))) *word |= IN_FLIGHT;
}

}  // namespace

void registers::fence() {
    mine().wgmma_fence = ++machine->fences;
    machine->follows_registers = checking();
}

void registers::touch(uintptr_t address, uint32_t bytes, uint32_t site) {
    for (uintptr_t at = address & ~uintptr_t(3); at < address + bytes; at += 4) {
        u32* word = machine->stacks.touched(at);
        if (!word) return;
        if (*word & IN_FLIGHT) {
            const auto* register_at = reinterpret_cast<const float*>(at);
            for (const Fragment& fragment : mine().fragments)
                if (overlaps(fragment, register_at, 1))
                    checks::report(site, text("uses accumulator register %d of the wgmma of %s, which was not waited"
                                              " for", int(register_at - fragment.d), place(fragment.where).c_str()));
        }
        *word = machine->fences;
    }
}

void registers::begin(const Fragment& fragment, const u32* rows) {
    const ThreadUnits& unit = mine();
    if (!unit.wgmma_fence) fail(fragment.where, "the first wgmma of a warpgroup, with no wgmma.fence before it");
    if (!checking()) return;
    bool follows_another = false;  // wgmma of one shape on the same registers need no fence in between
    for (const Fragment& other : unit.fragments) {
        if (same(other, fragment.d, fragment.registers)) follows_another = true;
        else if (overlaps(other, fragment.d, fragment.registers) && other.fence == unit.wgmma_fence)
            fail(fragment.where, "adds to registers that the wgmma of %s adds to, in another shape, with no wgmma.fence "
                 "between the two", place(other.where).c_str());
    }
    for (int i = 0; i < fragment.registers && !follows_another; ++i) {
        const u32* word = machine->stacks.touched(reinterpret_cast<uintptr_t>(fragment.d + i));
        const bool untouched = __builtin_bit_cast(u32, fragment.d[i]) == UNTOUCHED;
        if (word && *word >= unit.wgmma_fence && !(*word & IN_FLIGHT) && !untouched)
            fail(fragment.where, "accumulator register %d was read or written after the last wgmma.fence", i);
        if (fragment.accumulate && untouched)
            fail(fragment.where, "adds to accumulator register %d, which nothing wrote", i);
    }
    for (int i = 0; i < ROWS_REGISTERS && rows; ++i) {
        const u32* word = machine->stacks.touched(reinterpret_cast<uintptr_t>(rows + i));
        if (word && *word >= unit.wgmma_fence && !(*word & IN_FLIGHT))
            fail(fragment.where, "register %d of its rows was read or written after the last wgmma.fence", i);
    }
    mark(fragment);
}

void registers::end(const Fragment& fragment) {
    for (const Fragment& other : mine().fragments)
        if (same(other, fragment.d, fragment.registers)) return;  // still in flight
    for (int i = 0; i < fragment.registers; ++i)
        if (u32* word = machine->stacks.touched(reinterpret_cast<uintptr_t>(fragment.d + i))) *word &= ~IN_FLIGHT;
    for (const Fragment& other : mine().fragments)
        if (overlaps(other, fragment.d, fragment.registers)) mark(other);
}

}  // namespace twin
