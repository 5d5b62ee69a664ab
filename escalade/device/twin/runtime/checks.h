// State of the checks: the last accesses to each byte.
#pragma once

#include "relocation.h"
#include "state.h"

#include <array>
#include <unordered_map>

namespace twin::checks {

// A location in the kernel: an offset in its library, or, with the highest bit, an index into `wheres`.
typedef uint32_t Site;

constexpr uint8_t ATOMIC = 1, ASYNCHRONOUS = 2;
constexpr uint8_t UNCOUNTED = 4;  // not a separate access
constexpr uint8_t IN_BLOCK = 8;   // atomic only for the threads of a block
constexpr uint8_t VOLATILE = 16;

struct Touch {
    uint32_t cluster = 0;  // numbered from 1; 0: none
    uint32_t clock = 0;
    Site site = 0;
    uint16_t slot = 0;
    uint8_t bytes = 0;  // index among the cell's two readers
    uint8_t kind = 0;
};

struct Readers {  // up to 32 slots that accessed a cell at equal counts of their own clocks
    Touch touch;         // of the first slot, a multiple of 32
    uint32_t lanes = 0;  // mask of slots from there on; 0: none
};

struct Cell {  // two bytes of memory
    Touch written;
    // Unordered readers since then: all of the running cluster, and two of others.
    Readers read;
    Site flight = 0;  // the asynchronous copy that will still write it
    std::vector<Readers>* more = nullptr;
    Cell* halves = nullptr;  // one per byte, once they were accessed separately: then this cell is unused
};

struct Access {
    uintptr_t address;
    uint32_t bytes;
    bool write;
    uint8_t kind;
    Site site;
    Stamp stamp = {};
};

class Visitors {  // visits to locations in a kernel, in this cluster
  public:
    void add(Site site, const Thread& thread);
    bool have(Site site, const Thread& thread) const;
    void clear() { lanes.clear(); }

  private:
    std::unordered_map<uint64_t, uint32_t> lanes;  // by site and warp
};

struct Released {  // what fences published before an atomic
    std::map<uint32_t, std::vector<uint32_t>> to_all;             // by cluster
    std::map<std::pair<uint32_t, uint32_t>, Clock> to_block;      // by cluster and rank
};

struct State {
    const Launch* launch = nullptr;
    std::vector<std::vector<Cell>> shared;                               // by rank
    std::deque<std::array<Cell, 2>> shared_halves, global_halves;
    std::deque<std::vector<Readers>> shared_readers, global_readers;
    std::unordered_map<uintptr_t, std::unique_ptr<std::vector<Cell>>> pages;  // of global memory
    std::unordered_map<uintptr_t, Released> released;  // by atomics, at an address
    std::vector<Relocation::Move> moves;  // moves of the buffers, for queries after the launch
    std::vector<Unwritten> unwritten;     // current addresses of the buffers
    std::vector<Range> weights_ready;     // likewise
    std::vector<Where> wheres;
    Visitors visitors;
};

// State of the launch that this OS thread runs, or ran last.
extern thread_local State* state __attribute__((tls_model("initial-exec")));

Site site_of(Where where);
std::string place(Site site);
std::string memory_name(uintptr_t address);  // "byte 4 of buffer 1"
const Touch* written_by(uintptr_t address);  // the last in this launch; null if there is none
[[noreturn]] void report(Site site, const std::string& message);
void access(const Access& access);
void check_written(const Access& access);  // unwritten.cpp
void volatile_access(const Access& access);
// Accesses of an instrumented kernel, by address and by the address of the reporting call.
void hook(const volatile void* pointer, uint32_t bytes, bool write, bool aligned, uint8_t kind, void* caller);

}  // namespace twin::checks
