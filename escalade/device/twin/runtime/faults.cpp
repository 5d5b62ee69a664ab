// Signals while a kernel runs (null and wild pointers, stack overflows, divisions by zero, traps), and a periodic check
// for progress.
//
// A handler never jumps. It redirects the interrupted thread to `leave`, which reports like any other check and
// abandons the CUDA thread.
#include "state.h"

#include <cerrno>
#include <ctime>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

namespace twin::faults {
namespace {

constexpr int FAULTS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP};
const int TICK = SIGRTMAX - 5;
constexpr long TICK_NANOSECONDS = 100'000'000;
constexpr size_t HANDLER_STACK_BYTES = 256 << 10;
constexpr size_t STACK_RESERVE = 24 << 10;  // stack space that the runtime's own functions may need
constexpr size_t NULL_BYTES = 1 << 16;
constexpr uintptr_t UNKNOWN = ~uintptr_t(0);

std::mutex handlers_mutex;
int handlers_count = 0;
struct sigaction previous[_NSIG];
bool replaced[_NSIG];
volatile sig_atomic_t interrupt_count = 0;

// ------------------------------------------------------------------ the interrupted thread

#if defined(__x86_64__)
uintptr_t program_counter(const ucontext_t& context) { return uintptr_t(context.uc_mcontext.gregs[REG_RIP]); }
uintptr_t stack_pointer(const ucontext_t& context) { return uintptr_t(context.uc_mcontext.gregs[REG_RSP]); }
void continue_at(ucontext_t& context, void (*function)(), uintptr_t stack) {
    context.uc_mcontext.gregs[REG_RIP] = greg_t(function);
    context.uc_mcontext.gregs[REG_RSP] = greg_t(stack - 8);  // as if it had been called
    context.uc_mcontext.gregs[REG_EFL] &= ~0x400;            // direction flag clear, as the ABI requires
}
#else
uintptr_t program_counter(const ucontext_t& context) { return uintptr_t(context.uc_mcontext.pc); }
uintptr_t stack_pointer(const ucontext_t& context) { return uintptr_t(context.uc_mcontext.sp); }
void continue_at(ucontext_t& context, void (*function)(), uintptr_t stack) {
    context.uc_mcontext.pc = uintptr_t(function);
    context.uc_mcontext.sp = stack;
    context.uc_mcontext.regs[29] = context.uc_mcontext.regs[30] = 0;
}
#endif

uint64_t cpu_time() {
    timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return uint64_t(now.tv_sec) * 1'000'000'000 + uint64_t(now.tv_nsec);
}

bool in_kernel(uintptr_t address) {
    const Range& code = settings().code;
    return address - code.start < code.bytes;
}

// Returns the kernel's program counter: the interrupted one, or that of the call into the code that runs there. The
// latter is the first word on the stack that could be a return address.
uintptr_t site_of(const ucontext_t& context) {
    const uintptr_t counter = program_counter(context);
    if (in_kernel(counter) || !here) return counter;
#if defined(__aarch64__)
    if (in_kernel(context.uc_mcontext.regs[30])) return context.uc_mcontext.regs[30] - 1;
#endif
    const auto bottom = reinterpret_cast<uintptr_t>(self()->stack) + STACK_BYTES;
    for (uintptr_t at = stack_pointer(context); bottom - at - 8 < STACK_BYTES; at += 8)
        if (const auto word = *reinterpret_cast<const uintptr_t*>(at); in_kernel(word)) return word - 1;
    return counter;
}

std::string place_of(uintptr_t site) {
    return in_kernel(site) ? text("[+%#zx]", size_t(site - settings().library.start)) : "";
}

std::string limit_text() {
    return text("no thread of the block has returned in %g s of CPU time: an endless loop, or a wait for a block that "
                "starts only when this one has ended (ESCALADE_TWIN_LIMIT sets the seconds, 0 no limit)",
                settings().limit_ms / 1000.) + thread_states();
}

bool in_guard(uintptr_t address) {  // guard page of the running thread's stack
    return here && address - reinterpret_cast<uintptr_t>(self()->stack) < size_t(sysconf(_SC_PAGESIZE));
}

std::string fault_text(const Watch& watch) {
    switch (watch.signal) {
        case SIGSEGV:
        case SIGBUS:
            if (in_guard(watch.address)) return overflow_text();
            if (watch.address == UNKNOWN) return "accesses a non-canonical address";
            return text("accesses unmapped memory at 0x%zx: ", size_t(watch.address))
                   + (watch.address < NULL_BYTES                  ? "a null pointer"
                      : checking() && settings().buffer_count ? checks::near_buffer(watch.address, 1)
                                                              : "a wild pointer");
        case SIGFPE: return "divides an integer by zero, or the smallest one by -1";
        default: return "executes a trap instruction, or code that g++ proved to be undefined";
    }
}

[[noreturn]] void leave() {
    Watch& watch = machine->watch;
    if (here && watch.signal) checks::check_stray();  // the likely cause
    const std::string message = watch.signal ? fault_text(watch) : stop_text();
    if (here) fail_at(place_of(watch.site), message);
    machine->error = message;
    siglongjmp(watch.rescue, 1);
}

// Continues the thread in `leave`, at the base of its stack, since it never returns to the interrupted code.
void divert(ucontext_t& context) {
    machine->watch.site = site_of(context);
    const uintptr_t stack = here ? reinterpret_cast<uintptr_t>(self()->stack) + STACK_BYTES : stack_pointer(context);
    continue_at(context, leave, (stack - 512) / 16 * 16);
}

// ------------------------------------------------------------------ handlers

void pass_on(int signal, siginfo_t* info, void* context) {
    const struct sigaction& before = previous[signal];
    if (before.sa_flags & SA_SIGINFO) return before.sa_sigaction(signal, info, context);
    if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) return before.sa_handler(signal);
    const bool sent = info->si_code <= 0;  // by a process; an instruction that raised it would be re-executed
    if (before.sa_handler == SIG_IGN && sent) return;
    struct sigaction usual {};
    usual.sa_handler = SIG_DFL;
    sigaction(signal, &usual, nullptr);
    if (sent) raise(signal);
}

void on_fault(int signal, siginfo_t* info, void* context) {
    if (!machine || !machine->watch.guarded || machine->watch.signal || info->si_code <= 0)
        return pass_on(signal, info, context);
    machine->watch.signal = signal;
    // x86-64 does not report non-canonical addresses.
    machine->watch.address = info->si_code == SI_KERNEL ? UNKNOWN : reinterpret_cast<uintptr_t>(info->si_addr);
    divert(*static_cast<ucontext_t*>(context));
}

Reason reason_to_stop(Watch& watch) {
    const Launch& launch = *machine->launch;
    if (launch.interrupts != interrupt_count) return Reason::interrupted;
    if (launch.failed) return Reason::superfluous;
    if (!launch.request.limit_ms) return Reason::none;
    const uint64_t now = cpu_time();
    if (watch.seen != watch.returned || !watch.since) watch.seen = watch.returned, watch.since = now;
    return now - watch.since > launch.request.limit_ms * uint64_t(1'000'000) ? Reason::endless : Reason::none;
}

// Kernel code can be abandoned anywhere. The runtime and libraries may hold locks or partial state; there the runtime
// polls `asked_to_stop` itself, or a later tick interrupts the kernel.
void on_tick(int, siginfo_t*, void* context) {
    if (!machine || !machine->watch.guarded || machine->watch.signal) return;
    const int error = errno;
    Watch& watch = machine->watch;
    if (!watch.asked_to_stop) watch.asked_to_stop = sig_atomic_t(reason_to_stop(watch));
    auto& interrupted = *static_cast<ucontext_t*>(context);
    if (watch.asked_to_stop && here && in_kernel(program_counter(interrupted))) divert(interrupted);
    errno = error;
}

void on_interrupt(int signal, siginfo_t* info, void* context) {
    interrupt_count = interrupt_count + 1;
    pass_on(signal, info, context);
}

void replace(int signal, void (*handler)(int, siginfo_t*, void*)) {
    struct sigaction action {};
    action.sa_sigaction = handler;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
    sigemptyset(&action.sa_mask);
    replaced[signal] = !sigaction(signal, &action, &previous[signal]);
}

void put_back(int signal, void (*handler)(int, siginfo_t*, void*)) {
    struct sigaction now;
    // A handler that other code installed in the meantime stays.
    if (replaced[signal] && !sigaction(signal, nullptr, &now) && now.sa_flags & SA_SIGINFO && now.sa_sigaction == handler)
        sigaction(signal, &previous[signal], nullptr);
    replaced[signal] = false;
}

}  // namespace

Handlers::Handlers(bool interruptible) {
    std::lock_guard lock(handlers_mutex);
    if (interruptible && !replaced[SIGINT]) replace(SIGINT, on_interrupt);
    if (handlers_count++) return;
    for (int signal : FAULTS) replace(signal, on_fault);
    replace(TICK, on_tick);
}

Handlers::~Handlers() {
    std::lock_guard lock(handlers_mutex);
    if (--handlers_count) return;
    for (int signal : FAULTS) put_back(signal, on_fault);
    put_back(TICK, on_tick);
    put_back(SIGINT, on_interrupt);
}

Watching::Watching(Watch& watch, bool ticking) : ticking(ticking) {
    watch.asked_to_stop = 0;
    watch.signal = 0;
    watch.since = 0;
    if (!watch.stack) {
        void* memory = mmap(nullptr, HANDLER_STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory != MAP_FAILED) watch.stack = memory;
    }
    stack_t stack{watch.stack, 0, HANDLER_STACK_BYTES};
    if (!watch.stack) stack.ss_flags = SS_DISABLE;
    sigaltstack(&stack, &stack_before);
    sigset_t ours;  // a fault with its signal blocked would kill the process
    sigemptyset(&ours);
    for (int signal : FAULTS) sigaddset(&ours, signal);
    sigaddset(&ours, TICK);
    pthread_sigmask(SIG_UNBLOCK, &ours, &mask_before);
    sigevent event{};
    event.sigev_notify = SIGEV_THREAD_ID;
    event.sigev_signo = TICK;
    event._sigev_un._tid = int(syscall(SYS_gettid));
    const itimerspec often{{0, TICK_NANOSECONDS}, {0, TICK_NANOSECONDS}};
    this->ticking = ticking && !timer_create(CLOCK_MONOTONIC, &event, &timer);
    if (this->ticking) timer_settime(timer, 0, &often, nullptr);
}

Watching::~Watching() {
    if (ticking) timer_delete(timer);
    pthread_sigmask(SIG_SETMASK, &mask_before, nullptr);
    sigaltstack(&stack_before, nullptr);
}

int interrupts() { return interrupt_count; }

bool stack_nearly_full() {
    return size_t(static_cast<char*>(__builtin_frame_address(0)) - self()->stack) < STACK_RESERVE;
}

std::string overflow_text() {
    return text("overflows its stack: local variables and calls take more than %zu KiB", STACK_BYTES >> 10);
}

std::string stop_text() {
    switch (Reason(sig_atomic_t(machine->watch.asked_to_stop))) {
        case Reason::endless: return limit_text();
        case Reason::interrupted: return "interrupted";
        default: return "stopped: another block has failed";
    }
}

}  // namespace twin::faults

// Called before a division by zero: -fsanitize=integer-divide-by-zero, without the sanitizer's runtime.
extern "C" void __ubsan_handle_divrem_overflow(const twin::Where* where, uintptr_t, uintptr_t) {
    if (twin::here) twin::fail(*where, "divides an integer by zero");
}
