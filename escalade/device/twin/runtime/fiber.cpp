#include "fiber.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <sys/mman.h>
#include <unistd.h>

// twin_switch(void** save, void* to): pushes the callee-saved registers, stores the stack pointer in *save, and
// restores both from the new stack.
#if defined(__x86_64__)
asm(R"(
    .text
    .p2align 4
    .hidden twin_switch
    .globl twin_switch
    .type twin_switch, @function
twin_switch:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
    .size twin_switch, .-twin_switch
)");
constexpr size_t SAVED_WORDS = 8;

// Seven words are popped; above them is a return address of zero, which ends a stack trace. At function entry rsp + 8
// is 16-byte aligned.
static void set_start(void** saved, void (*start)()) { saved[6] = reinterpret_cast<void*>(start); }
#elif defined(__aarch64__)
asm(R"(
    .text
    .p2align 4
    .hidden twin_switch
    .globl twin_switch
    .type twin_switch, %function
twin_switch:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
    .size twin_switch, .-twin_switch
    // A fiber's first function has no caller, so a stack trace ends there.
    .hidden twin_begin
    .globl twin_begin
    .type twin_begin, %function
twin_begin:
    mov x29, xzr
    mov x30, xzr
    br x19
    .size twin_begin, .-twin_begin
)");
extern "C" void twin_begin();
constexpr size_t SAVED_WORDS = 20;

static void set_start(void** saved, void (*start)()) {
    saved[0] = reinterpret_cast<void*>(start);        // x19
    saved[11] = reinterpret_cast<void*>(twin_begin);  // x30
}
#else
#error "the twin knows x86-64 and aarch64"
#endif
extern "C" void twin_switch(void** save, void* to);

// AddressSanitizer, if the process has it, must know which stack is in use.
extern "C" void __sanitizer_start_switch_fiber(void** save, const void* bottom, size_t size) __attribute__((weak));
extern "C" void __sanitizer_finish_switch_fiber(void* save, const void** bottom, size_t* size) __attribute__((weak));
extern "C" void __asan_unpoison_memory_region(const volatile void* start, size_t bytes) __attribute__((weak));

namespace twin {
namespace {

const size_t PAGE = size_t(sysconf(_SC_PAGESIZE));

thread_local const void* thread_stack;  // the OS thread's, recorded at the first switch away from it
thread_local size_t thread_stack_bytes;
thread_local bool from_thread;

}  // namespace

void prepare(Fiber& fiber, void (*start)()) {
    void** saved = reinterpret_cast<void**>(fiber.stack + STACK_BYTES) - SAVED_WORDS;
    // The previous user of this stack may have been abandoned, leaving red zones poisoned.
    if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(fiber.stack + PAGE, STACK_BYTES - PAGE);
    std::fill_n(saved, SAVED_WORDS, nullptr);
    set_start(saved, start);
    fiber.stack_pointer = saved;
}

void fiber_started() {
    if (!__sanitizer_finish_switch_fiber) return;
    const void* bottom;
    size_t bytes;
    __sanitizer_finish_switch_fiber(nullptr, &bottom, &bytes);
    if (from_thread) thread_stack = bottom, thread_stack_bytes = bytes;
}

void switch_fiber(Fiber& from, Fiber& to) {
    if (!__sanitizer_start_switch_fiber) return twin_switch(&from.stack_pointer, to.stack_pointer);
    void* fake = nullptr;
    from_thread = !from.stack;
    __sanitizer_start_switch_fiber(&fake, to.stack ? to.stack : thread_stack,
                                   to.stack ? STACK_BYTES : thread_stack_bytes);
    twin_switch(&from.stack_pointer, to.stack_pointer);
    const void* bottom;
    size_t bytes;
    __sanitizer_finish_switch_fiber(fake, &bottom, &bytes);
}

namespace {

char* reserve(size_t bytes) {  // zero pages, allocated on first touch
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (memory != MAP_FAILED) return static_cast<char*>(memory);
    std::fputs("the twin could not reserve stacks for the threads of a block\n", stderr);
    std::abort();
}

}  // namespace

char* Stacks::at(size_t number) {
    while (count <= number) {
        const size_t stacks = std::max<size_t>(64, count);
        char* start = reserve(stacks * STACK_BYTES);
        // The lowest page of a stack is a guard: an overflow faults instead of reaching the next stack.
        for (size_t i = 0; i < stacks; ++i) mprotect(start + i * STACK_BYTES, PAGE, PROT_NONE);
        slabs.push_back({start, nullptr, stacks});
        count += stacks;
    }
    for (const Slab& slab : slabs) {
        if (number < slab.stacks) return slab.start + number * STACK_BYTES;
        number -= slab.stacks;
    }
    std::abort();
}

unsigned* Stacks::touched(size_t address) {
    for (Slab& slab : slabs) {
        const size_t offset = address - reinterpret_cast<uintptr_t>(slab.start);
        if (offset >= slab.stacks * STACK_BYTES) continue;
        if (!slab.touched) slab.touched = reserve(slab.stacks * STACK_BYTES);
        return reinterpret_cast<unsigned*>(slab.touched + offset / 4 * 4);
    }
    return nullptr;
}

void Stacks::forget_touches() {
    for (Slab& slab : slabs)
        if (slab.touched) madvise(slab.touched, slab.stacks * STACK_BYTES, MADV_DONTNEED);
}

bool Stacks::holds(size_t address) const {
    for (const Slab& slab : slabs)
        if (address - reinterpret_cast<uintptr_t>(slab.start) < slab.stacks * STACK_BYTES) return true;
    return false;
}

}  // namespace twin
