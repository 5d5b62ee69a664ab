// The twin's inside: what the scheduler, the barriers, the asynchronous units and the checks share. Kernels
// never see it.
#pragma once

#include <algorithm>
#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

#include "collectives.h"
#include "faults.h"
#include "fiber.h"
#include "language.h"
#undef alignas  // a keyword again: the rest is plain C++
#undef __noinline__

namespace twin {

// ------------------------------------------------------------------ what a launch is

struct Variable {  // a static __shared__ variable
    const char* name;
    uint32_t offset, bytes;  // in the library's thread-local segment
};

struct Range {
    uintptr_t start;
    uint64_t bytes;
    uint32_t index;  // among what the caller gave
};

struct Unwritten {  // memory that a kernel must write before it reads it
    uintptr_t start;
    uint64_t bytes;
    unsigned char* written;  // for each byte, whether somebody has: kept by the caller, from launch to launch
};

struct Fill {  // bytes of the kernel's code or constants that it fills unset variables with (assembly.py)
    uintptr_t start;
    uint64_t bytes;
};

struct Request {  // filled by launch.py, in this order
    uint32_t grid[3], block[3], cluster[3];
    uint32_t shared_bytes;  // dynamic
    uint32_t seed;          // 0: in turn; otherwise threads, warps and blocks in an order of that seed
    uint32_t late;          // asynchronous operations as late as allowed, else at once
    uint32_t checks;        // the kernel tells of every load and store, and each is looked at
    uint32_t counts;        // it tells of them and of its blocks of code, and they are counted
    uint32_t fibers;        // 0: the kernel never waits
    uint32_t workers;       // operating-system threads
    uint32_t limit_ms;      // of CPU time in which no thread of a cluster returns; 0: none
    uint32_t interruptible; // by SIGINT, whose handler is called as well
    uint32_t descriptors;   // it names shared memory by descriptors of wgmma, which reach only so far
    uint32_t paths;         // lanes that meet must have come by the same calls; launch.py asks again without
    uint32_t overlap;       // may start before the launch in front has ended (programmatic dependent launch)
    uint32_t variable_count, static_bytes, buffer_count, parameter_count, unwritten_count, weights_ready_count, fill_count;
    void (*entry)(void**);
    void** parameters;
    const uint32_t* parameter_bytes;  // for the checks
    const Variable* variables;  // ascending
    const Range* buffers;       // ascending; none: any address is taken for one
    const Unwritten* unwritten;
    const Range* weights_ready;  // weights that no launch in front writes
    const Fill* fills;
    Range library;         // the kernel's own code and constants
    Range code;            // of these the functions, without the linker's stubs for calls of other libraries
};

// The parts of a block's shared memory. Offsets from the arena's start are the block's shared addresses.
struct SharedLayout {
    uint32_t dynamic_start, dynamic_bytes, static_start, arena_bytes;
    uint32_t part_gap;    // in front of each place that a declared part is moved to
    uint32_t room_bytes;  // with those places
    std::vector<Variable> parts;  // dynamic and static, ascending, offsets in the arena
    explicit SharedLayout(const Request& request);
    uint32_t taken() const;  // without the gaps
    const Variable* part_of(uint32_t offset) const;
    bool inside(uint32_t offset, uint32_t bytes) const;
    std::string describe(uint32_t offset) const;  // "tile+0x40"
};

class Relocation;

struct Launch {
    const Request& request;
    Sizes sizes;
    SharedLayout layout;
    std::vector<uint32_t> order;  // of clusters
    std::atomic<size_t> next{0};
    std::atomic<bool> failed{false};
    bool waited = false;  // a thread did, for the launch in front; kept only for the checks
    const int interrupts = faults::interrupts();
    Relocation* relocation = nullptr;  // only with checks
    std::mutex mutex;
    std::string error;
    explicit Launch(const Request& request);
    unsigned block_threads() const { return sizes.block.x * sizes.block.y * sizes.block.z; }
    unsigned cluster_blocks() const { return sizes.cluster.x * sizes.cluster.y * sizes.cluster.z; }
    unsigned cluster_threads() const { return cluster_blocks() * block_threads(); }
};

// ------------------------------------------------------------------ who runs

// What a thread knows to have happened: a count for each thread of its cluster, behind them one for each agent (see
// below), and for threads of other clusters whose atomics it has seen. Kept only for the checks.
struct Clock {
    std::vector<uint32_t> at;
    std::map<uint32_t, std::vector<uint32_t>> others;  // by cluster
    void join(const Clock& other);
    void raise(uint32_t slot, uint32_t count);  // at least that count
    bool knows(uint32_t slot, uint32_t count) const { return slot < at.size() && at[slot] >= count; }
};

// Somebody else than a thread who touches memory: what an mbarrier's copies write, what a warpgroup's products or a
// thread's bulk stores read. An agent has a place in the clocks as a thread has. Its count is that of what must be waited
// for (the barrier's phases, the products, the groups of stores), and a thread learns it by waiting and in no other way.
struct Stamp {
    uint16_t agent = 0;  // 0: the running thread itself
    uint32_t count = 0;
};

struct Block;
struct Thread;
namespace checks {
struct Stray;
}

struct Waiting {  // what a thread waits for, for the reports
    const char* operation = "";
    Where where = {};
    const void* object = nullptr;
    uint32_t detail = 0;
    std::string (*state)(const Waiting&) = nullptr;
};

// A way to reach a barrier or collective: a hash of the return addresses on the stack. Two calls of one helper differ in
// it, two trips of a loop do not. Kept only for the checks; 0 without them.
typedef uint64_t Path;

struct Bypass {  // a barrier or collective that went ahead without some threads, which had returned
    const char* operation;
    Where where;
    std::vector<Thread*> without;  // those of them that never came to it
};

struct Thread : Place, Fiber {
    Block* owner = nullptr;
    unsigned number = 0;  // in its block
    unsigned slot = 0;    // in its cluster
    bool done = false, asleep = false;
    int cluster_phase = 0;      // of the cluster's barrier, that it has arrived for
    int cluster_seen = 0;       // the last phase that it has waited for
    uint32_t cluster_seen_at = 0;  // its own count then
    uint32_t met = 0;           // blocks of the cluster that it knows to have started
    std::vector<uint32_t> proxy_fences;  // its own counts at each fence.proxy.async, ascending
    Waiting waiting;
    Clock clock;
    Clock fenced, fenced_in_block;  // as of its last fence for the device, and for its block at least
    Clock observed;                 // what volatile reads have shown it, which a fence makes it know
    bool waited = false;            // for the launch in front (griddepcontrol.wait)
    uint32_t waited_at = 0;         // its own count then
    std::vector<Where> barriers;  // of its block, that it has come to; kept only for the checks
    Path path = 0;                // of the barrier or collective that it came to last
    std::vector<uintptr_t> calls;  // that path: return addresses, the innermost first
    std::shared_ptr<const Bypass> bypass, warp_bypass;  // the last barrier of its block, and collective of its warp
    const checks::Stray* stray = nullptr;  // the index outside an array that it has just computed
    uint64_t stray_index = 0;
};

typedef std::vector<Thread*> Sleepers;

struct Gathering {  // a barrier that opens when `expected` threads have come
    int expected = 0, arrived = 0, votes = 0;
    int result = 0, came = 0;  // of the last time that it opened: votes and threads
    bool whole = false;        // it is the block's: threads that have returned count as come
    Where where = {};
    struct WarpArrival {       // at a named barrier, which counts whole warps
        unsigned lanes = 0;    // that have come in this round
        Where where = {};
        Path path = 0;         // of the first of them: after bar.arrive a thread goes on, to calls of other paths
        std::vector<uintptr_t> calls;
    };
    std::vector<WarpArrival> warps;
    Sleepers sleepers;
    Clock clock, completed;
    struct Visitor {  // of a named barrier, for the checks
        uint32_t came = 0, waited = 0;  // the last of the barrier's rounds that it came to, and waited in
        uint32_t count = 0;             // its own when it came
    };
    std::vector<Visitor> visitors;  // by thread
    uint32_t round = 1;
};

struct Meeting {  // a warp's collective
    const char* operation = nullptr;
    Where where = {};
    unsigned arrived = 0;
    wait::Perform perform = nullptr;
    void* payloads[32];
    Sleepers sleepers;
    Clock clock;
};

struct Visits {  // of a warp's lanes to a collective
    uint32_t count[32] = {};
    unsigned mask[32] = {};  // that a lane came with last
};

struct Warp {
    Meeting whole;                        // of all lanes
    std::map<unsigned, Meeting> partial;  // by lane mask
    unsigned returned = 0;                // lanes
    std::unordered_map<Path, Visits> visits;  // kept only for the checks
};

constexpr uint32_t GUARD_BYTES = 1024;
constexpr unsigned char POISON = 0xFF;  // a NaN in every float format

struct Block {
    uint3 index{};
    unsigned rank = 0;               // in its cluster
    unsigned char* arena = nullptr;  // shared memory
    Gathering barriers[16];
    std::vector<Warp> warps;
    std::unordered_map<Path, std::vector<uint32_t>> visits;  // to __syncthreads, by thread; kept only for the checks
    int returned = 0;      // threads
    Clock returned_clock;  // what those have done
};

struct Part {  // of dynamic shared memory, as a kernel declares it
    uint32_t from, bytes, to;  // offsets in the arena
    Where where;
};

struct Units;  // of the asynchronous instructions, in units.h

struct Machine {  // one operating-system thread's
    Launch* launch = nullptr;
    std::vector<Thread> threads;  // of the running cluster
    std::vector<Block> blocks;
    std::deque<Thread*> ready;
    Fiber scheduler;
    Stacks stacks;
    std::vector<unsigned char*> arenas;
    std::vector<Part> parts;  // of the running cluster's blocks
    size_t arena_bytes = 0;
    std::mt19937 generator;
    std::string error;
    std::shared_ptr<Units> units;
    uint32_t cluster = 0;  // its number, from 1: 0 is nobody
    faults::Watch watch;
    // The time of wgmma's registers: the number of wgmma.fence so far. It never goes back, so what an earlier cluster
    // left on the stacks is older than every fence of a later one.
    uint32_t fences = 0;
    bool follows_registers = false;  // there was one in this launch
};

extern thread_local Machine* machine __attribute__((tls_model("initial-exec")));

inline Thread* self() { return static_cast<Thread*>(const_cast<Place*>(here)); }
inline const Request& settings() { return machine->launch->request; }

// ------------------------------------------------------------------ scheduling

void sleep(Sleepers& list, const Waiting& waiting);
void wake(Sleepers& list, const Clock& clock);  // the woken have seen all that `clock` has
void release(Clock& clock);                     // `clock` learns what the running thread did
void acquire(const Clock& clock);
void leave_block(Thread& thread);  // it returns: whom the others no longer wait for
// Whether what a thread wrote at that count of its own is known to precede a fence.proxy.async of that same thread. A
// fence of the thread that starts the copy is none: it does not cover what others have written.
bool knows_proxy_fence(uint32_t slot, uint32_t count);
uint32_t random_below(uint32_t limit);

// Places behind the arena, of parts that were moved there.
bool inside_part(uint32_t offset, uint32_t bytes);
uint32_t home_of(uint32_t offset);  // where that byte was before its part was moved, or is still
const Part* moved_from(uint32_t offset, uint32_t bytes);  // null: those bytes are where they were
std::string describe_part(uint32_t offset);
std::string describe_moved(uint32_t offset, const Part& part);

[[noreturn]] void fail_at(const std::string& place, const std::string& message, const Thread* who = self());
std::string text(const char* format, ...) __attribute__((format(printf, 1, 2)));
std::string place(Where where);            // "kernel.cu:12"
std::string name(const Thread& thread);    // "thread 3 of block (0, 1, 0)"
std::string name(const uint3& block);
std::string thread_states();               // of the running cluster: a line for those of a block that wait together

// ------------------------------------------------------------------ called by the scheduler

namespace units {  // asynchronous copies and products (async.cpp, hopper)
void begin_cluster();
bool idle();  // nobody can run: finishes one pending transfer; false if there is none
void end_cluster();
void exit_thread(Thread& thread);
}  // namespace units

namespace registers {  // of wgmma (registers.cpp)
void touch(uintptr_t address, uint32_t bytes, uint32_t site);
}

namespace checks {  // checks.cpp; called only if the launch asks for them
extern std::mutex one_launch;  // at a time, of those with checks: what is known of it is its thread's
void begin_launch(const Launch& launch);
void begin_cluster();
void end_launch();
// The running thread touches shared memory of the cluster's block `rank`, or has it touched.
// `asynchronous`: by TMA or the tensor cores, which need a proxy fence after a thread's own stores.
// With a stamp an agent does the touching, and what it touches is its own until the stamp is known.
void touch_shared(uint32_t rank, uint32_t offset, uint32_t bytes, bool write, bool asynchronous, Where where,
                  Stamp stamp = {});
void touch_global(const void* address, uint32_t bytes, bool write, Where where, Stamp stamp = {});
// Bytes that an asynchronous copy will write belong to nobody until it is waited for.
void begin_copy(uint32_t rank, uint32_t offset, uint32_t bytes, Where where);
void end_copy(uint32_t rank, uint32_t offset, uint32_t bytes);
std::string near_buffer(uintptr_t address, uint32_t bytes);  // "4 bytes past the end of buffer 1 (64 bytes)"
// The store that came last to that byte, in the last launch with checks: "kernel.cu:12: thread 3 of block (0, 0, 0)".
std::string writer_of(uintptr_t address, const Request& request);
void check_stray();  // ends the run if the running thread has used an index outside an array
}  // namespace checks

inline bool checking() { return settings().checks; }
inline bool is_counted() { return settings().counts; }

}  // namespace twin
