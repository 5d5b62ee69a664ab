// Every load and store of a kernel that was compiled with -fsanitize=thread: g++ puts a call before each, and
// these are the called functions, in place of the sanitizer's runtime.
#include "checks.h"

namespace {

using namespace twin;

void hook(void* pointer, uint32_t bytes, bool write, bool aligned, void* caller) {
    if (!here) return;
    const auto address = reinterpret_cast<uintptr_t>(pointer);
    // The call's own address, not the one it returns to, which may belong to the next line.
    const auto site = checks::Site(reinterpret_cast<uintptr_t>(caller) - 1 - settings().library.start);
    if (faults::stack_nearly_full()) checks::report(site, faults::overflow_text());
    if (machine->watch.asked_to_stop) checks::report(site, faults::stop_text());
    if (aligned && address % bytes)
        checks::report(site, text("%s %u bytes at %#zx, which is no multiple of %u", write ? "writes" : "reads", bytes,
                                  size_t(address), bytes));
    checks::access({address, bytes, write, 0, site});
}

}  // namespace

extern "C" {

#define CALLER __builtin_return_address(0)
#define TWIN_HOOKS(N)                                                                       \
    void __tsan_read##N(void* p) { hook(p, N, false, true, CALLER); }                       \
    void __tsan_write##N(void* p) { hook(p, N, true, true, CALLER); }                       \
    void __tsan_volatile_read##N(void* p) { hook(p, N, false, true, CALLER); }              \
    void __tsan_volatile_write##N(void* p) { hook(p, N, true, true, CALLER); }              \
    void __tsan_unaligned_read##N(void* p) { hook(p, N, false, false, CALLER); }            \
    void __tsan_unaligned_write##N(void* p) { hook(p, N, true, false, CALLER); }            \
    void __tsan_unaligned_volatile_read##N(void* p) { hook(p, N, false, false, CALLER); }   \
    void __tsan_unaligned_volatile_write##N(void* p) { hook(p, N, true, false, CALLER); }
TWIN_HOOKS(1)
TWIN_HOOKS(2)
TWIN_HOOKS(4)
TWIN_HOOKS(8)
TWIN_HOOKS(16)
void __tsan_read_range(void* p, size_t n) { hook(p, uint32_t(n), false, false, CALLER); }
void __tsan_write_range(void* p, size_t n) { hook(p, uint32_t(n), true, false, CALLER); }
void __tsan_vptr_read(void*) {}
void __tsan_vptr_update(void*, void*) {}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

}
