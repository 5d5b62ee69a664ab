// Errors that a kernel cannot report itself: signals raised by its instructions, and endless runs.
#pragma once

#include <csetjmp>
#include <csignal>
#include <cstdint>
#include <string>

namespace twin {

struct Launch;

namespace faults {

enum class Reason { none, endless, interrupted, superfluous };

struct Watch {  // state of one OS thread
    volatile sig_atomic_t asked_to_stop = 0;  // a Reason
    volatile uint64_t returned = 0;           // CUDA threads, so far
    uint64_t seen = 0, since = 0;             // findings of the last tick: `returned`, and the CPU time when it changed
    bool guarded = false;                     // `rescue` is set
    sigjmp_buf rescue;                        // where execution continues after a fault of the runtime itself
    int signal = 0;                           // the fault being reported
    uintptr_t address = 0, site = 0;          // its reason and location
    void* stack = nullptr;                    // the handlers'
};

// While one exists, the process's handlers are the twin's; other faults than a kernel's are passed on to the previous
// ones.
class Handlers {
  public:
    explicit Handlers(bool interruptible);
    ~Handlers();
};

// While one exists, this OS thread has a signal stack, and its progress is checked periodically.
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

int interrupts();              // interrupts by the keyboard so far
bool stack_nearly_full();      // of the running thread; the runtime's own functions must not overflow it
std::string overflow_text();   // report for that case
std::string stop_text();       // what to report when the watch is asked to stop

}  // namespace faults
}  // namespace twin
