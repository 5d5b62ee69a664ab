// Hooks for every load and store: with -fsanitize=thread g++ inserts a call before each, and these functions replace
// the sanitizer's runtime.
#include "checks.h"
#include "counting.h"

namespace twin {

void checks::hook(const volatile void* pointer, uint32_t bytes, bool write, bool aligned, uint8_t kind, void* caller) {
    if (!here) return;
    const auto address = reinterpret_cast<uintptr_t>(pointer);
    // The address of the call itself: the return address may belong to the next line.
    const auto site = Site(reinterpret_cast<uintptr_t>(caller) - 1 - settings().library.start);
    if (faults::stack_nearly_full()) report(site, faults::overflow_text());
    if (machine->watch.asked_to_stop) report(site, faults::stop_text());
    if (is_counted()) {
        if (!(kind & UNCOUNTED)) counting::access(address, bytes, write, site);
        return;
    }
    if (!checking()) return check_stray();
    if (aligned && address % bytes)
        report(site, text("%s %u bytes at %#zx, which is no multiple of %u", write ? "writes" : "reads", bytes,
                          size_t(address), bytes));
    (kind & VOLATILE ? volatile_access : access)({address, bytes, write, kind, site});
    check_stray();
}

// An index outside an array of known size. For shared memory the hook of the access itself reports more; accesses to
// local arrays have no hook.
struct checks::Stray {  // g++'s layout: source location, array type, index type
    const char* file;
    int line, column;
    const struct Type { uint16_t kind, layout; char name[]; } *array, *index;
};

void checks::check_stray() {
    const Stray* stray = self()->stray;
    if (!stray) return;
    const int unused = std::max(0, 64 - (1 << (stray->index->layout >> 1)));  // high bits that the index does not use
    fail({stray->file, stray->line}, "index %lld is outside an array of type %s",
         static_cast<long long>(self()->stray_index << unused) >> unused, stray->array->name);
}

}  // namespace twin

namespace {

void hook(void* pointer, size_t bytes, bool write, bool aligned, void* caller, bool is_volatile = false) {
    twin::checks::hook(pointer, uint32_t(bytes), write, aligned, is_volatile ? twin::checks::VOLATILE : 0, caller);
}

}  // namespace

extern "C" {

#define CALLER __builtin_return_address(0)
#define TWIN_HOOKS(N)                                                                       \
    void __tsan_read##N(void* p) { hook(p, N, false, true, CALLER); }                       \
    void __tsan_write##N(void* p) { hook(p, N, true, true, CALLER); }                       \
    void __tsan_volatile_read##N(void* p) { hook(p, N, false, true, CALLER, true); }        \
    void __tsan_volatile_write##N(void* p) { hook(p, N, true, true, CALLER, true); }        \
    void __tsan_unaligned_read##N(void* p) { hook(p, N, false, false, CALLER); }            \
    void __tsan_unaligned_write##N(void* p) { hook(p, N, true, false, CALLER); }            \
    void __tsan_unaligned_volatile_read##N(void* p) { hook(p, N, false, false, CALLER, true); }   \
    void __tsan_unaligned_volatile_write##N(void* p) { hook(p, N, true, false, CALLER, true); }
TWIN_HOOKS(1)
TWIN_HOOKS(2)
TWIN_HOOKS(4)
TWIN_HOOKS(8)
TWIN_HOOKS(16)
void __tsan_read_range(void* p, size_t n) { hook(p, n, false, false, CALLER); }
void __tsan_write_range(void* p, size_t n) { hook(p, n, true, false, CALLER); }
void __tsan_vptr_read(void*) {}
void __tsan_vptr_update(void*, void*) {}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

// -fsanitize-coverage=trace-pc: called at the start of each basic block
void __sanitizer_cov_trace_pc() {
    if (!twin::here) return;
    const auto site = uint32_t(reinterpret_cast<uintptr_t>(CALLER) - twin::settings().library.start);
    if (twin::machine->watch.asked_to_stop) twin::checks::report(site, twin::faults::stop_text());
    twin::counting::enter_block(site, __builtin_frame_address(0));
}

// -fsanitize=bounds
void __ubsan_handle_out_of_bounds(const twin::checks::Stray* stray, uintptr_t index) {
    if (!twin::here) return;
    twin::checks::check_stray();
    twin::self()->stray = stray;
    twin::self()->stray_index = index;
}

}
