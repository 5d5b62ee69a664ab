// What a kernel cannot report itself: signals that its instructions raise, and runs without an end.
#pragma once

#include <csetjmp>
#include <csignal>
#include <cstdint>
#include <string>

namespace twin {

struct Launch;

namespace faults {

enum class Reason { none, endless, interrupted, superfluous };

struct Watch {  // of one operating-system thread's work
    volatile sig_atomic_t asked_to_stop = 0;  // a Reason
    volatile uint64_t returned = 0;           // CUDA threads, so far
    uint64_t seen = 0, since = 0;             // what the last tick found: `returned`, and the CPU time when it changed
    bool guarded = false;                     // `rescue` is set
    sigjmp_buf rescue;                        // where a fault of the runtime itself goes on
    int signal = 0;                           // the fault that is being reported
    uintptr_t address = 0, site = 0;          // what it was about, and where
    void* stack = nullptr;                    // the handlers'
};

// While one is there, the process's handlers are the twin's; what is not a kernel's fault they pass on to those before.
class Handlers {
  public:
    explicit Handlers(bool interruptible);
    ~Handlers();
};

// While one is there, this operating-system thread has a stack for handlers, and is looked at every now and then.
class Watching {
  public:
    explicit Watching(Watch& watch, bool ticking);
    ~Watching();

  private:
    stack_t stack_before;
    sigset_t mask_before;
    timer_t timer;
    bool ticking;
};

int interrupts();              // so far, by the keyboard
bool stack_nearly_full();      // the running thread's; the runtime's own functions must not overflow it
std::string overflow_text();   // what to report then
std::string stop_text();       // what to report when the watch is asked to stop

}  // namespace faults
}  // namespace twin
