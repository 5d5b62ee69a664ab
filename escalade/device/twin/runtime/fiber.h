// A separate stack for every CUDA thread, and the switch between two of them.
#pragma once

#include <cstddef>
#include <vector>

namespace twin {

struct Fiber {
    void* stack_pointer = nullptr;  // of a fiber that is not running
    char* stack = nullptr;          // its lowest byte; null for the operating system's own stack
};

constexpr size_t STACK_BYTES = 256 << 10;

// `start` is called on the fiber's stack by the first switch to it, and must never return.
void prepare(Fiber& fiber, void (*start)());
void switch_fiber(Fiber& from, Fiber& to);
// Called first by `start`; the switches themselves need no such call.
void fiber_started();

class Stacks {  // reused across launches
  public:
    char* at(size_t number);
    bool holds(size_t address) const;
    // One word per word of the stacks, initially zero: the state of registers.cpp. Null outside the stacks.
    unsigned* touched(size_t address);
    void forget_touches();

  private:
    struct Slab { char *start, *touched; size_t stacks; };
    std::vector<Slab> slabs;
    size_t count = 0;
};

}  // namespace twin
