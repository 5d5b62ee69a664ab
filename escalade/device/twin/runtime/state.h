// Internal state of the twin, shared by the scheduler, the barriers, the asynchronous units and the checks.
// Kernels do not see it.
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

// ------------------------------------------------------------------ description of a launch

struct Variable {  // a static __shared__ variable
    const char* name;
    uint32_t offset, bytes;  // in the library's thread-local segment
};

struct Range {
    uintptr_t start;
    uint64_t bytes;
    uint32_t index;  // among the caller's buffers
};

struct Unwritten {  // memory that a kernel must write before it reads
    uintptr_t start;
    uint64_t bytes;
    unsigned char* written;  // per byte, nonzero once it was written; kept by the caller across launches
};

struct Fill {  // bytes of the kernel's code or constants used to fill unset variables (assembly.py)
    uintptr_t start;
    uint64_t bytes;
};

struct Request {  // filled by launch.py, in this order
    uint32_t grid[3], block[3], cluster[3];
    uint32_t shared_bytes;  // dynamic
    uint32_t seed;          // 0: sequential; otherwise threads, warps and blocks in a random order with that seed
    uint32_t late;          // asynchronous operations as late as allowed, else at once
    uint32_t checks;        // the kernel reports every load and store, and each is checked
    uint32_t counts;        // it reports them and its basic blocks, and they are counted
    uint32_t fibers;        // 0: the kernel never waits
    uint32_t workers;       // OS threads
    uint32_t limit_ms;      // limit of CPU time in which no thread of a cluster returns; 0: none
    uint32_t interruptible; // interrupted by SIGINT, whose handler is called as well
    uint32_t descriptors;   // it uses descriptors of wgmma, whose address range is limited
    uint32_t paths;         // lanes that meet must have arrived by the same calls; launch.py relaunches without this
    uint32_t overlap;       // may start before the previous launch has ended (programmatic dependent launch)
    uint32_t variable_count, static_bytes, buffer_count, parameter_count, unwritten_count, weights_ready_count, fill_count;
    void (*entry)(void**);
    void** parameters;
    const uint32_t* parameter_bytes;  // only for the checks
    const Variable* variables;  // ascending
    const Range* buffers;       // ascending; empty: any address is allowed
    const Unwritten* unwritten;
    const Range* weights_ready;  // weights that no previous launch writes
    const Fill* fills;
    Range library;         // the kernel's own code and constants
    Range code;            // the functions among these, without the linker's stubs for calls of other libraries
};

// Layout of a block's shared memory. Offsets from the arena's start are the block's shared addresses.
struct SharedLayout {
    uint32_t dynamic_start, dynamic_bytes, static_start, arena_bytes;
    uint32_t part_gap;    // before each relocated part
    uint32_t room_bytes;  // including relocated parts
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
    bool waited = false;  // fence of a thread for the previous launch; kept only for the checks
    const int interrupts = faults::interrupts();
    Relocation* relocation = nullptr;  // only with checks
    std::mutex mutex;
    std::string error;
    explicit Launch(const Request& request);
    unsigned block_threads() const { return sizes.block.x * sizes.block.y * sizes.block.z; }
    unsigned cluster_blocks() const { return sizes.cluster.x * sizes.cluster.y * sizes.cluster.z; }
    unsigned cluster_threads() const { return cluster_blocks() * block_threads(); }
};

// ------------------------------------------------------------------ running threads

// A thread's vector clock: a count per thread of its cluster, then one per agent (see below), and per thread of other
// clusters whose atomics it has seen. Kept only for the checks.
struct Clock {
    std::vector<uint32_t> at;
    std::map<uint32_t, std::vector<uint32_t>> others;  // by cluster
    void join(const Clock& other);
    void raise(uint32_t slot, uint32_t count);  // at least that count
    bool knows(uint32_t slot, uint32_t count) const { return slot < at.size() && at[slot] >= count; }
};

// Something other than a thread that accesses memory: writes of an mbarrier's copies, reads of a warpgroup's products
// or of a thread's bulk stores. An agent has a slot in the clocks like a thread. Its count is the number of its
// completed operations (phases, products, store groups), and a thread learns it only by waiting.
struct Stamp {
    uint16_t agent = 0;  // 0: the running thread itself
    uint32_t count = 0;
};

struct Block;
struct Thread;
namespace checks {
struct Stray;
}

struct Waiting {  // reason of a thread's wait, for reports
    const char* operation = "";
    Where where = {};
    const void* object = nullptr;
    uint32_t detail = 0;
    std::string (*state)(const Waiting&) = nullptr;
};

// A call path to a barrier or collective: a hash of the return addresses on the stack. Two calls of one helper differ,
// two iterations of a loop do not. Kept only for the checks; 0 without them.
typedef uint64_t Path;

struct Bypass {  // a barrier or collective that completed without some threads, which had returned
    const char* operation;
    Where where;
    std::vector<Thread*> without;  // those of them that never arrived at it
};

struct Thread : Place, Fiber {
    Block* owner = nullptr;
    unsigned number = 0;  // number in its block
    unsigned slot = 0;    // number in its cluster
    bool done = false, asleep = false;
    int cluster_phase = 0;      // phase of the cluster barrier that it has arrived for
    int cluster_seen = 0;       // the last phase that it has waited for
    uint32_t cluster_seen_at = 0;  // its own count at that time
    uint32_t met = 0;           // blocks of the cluster that are known to have started
    std::vector<uint32_t> proxy_fences;  // its own counts at each fence.proxy.async, ascending
    Waiting waiting;
    Clock clock;
    Clock fenced, fenced_in_block;  // clock at its last fence of device scope, and of block scope at least
    Clock observed;                 // clocks seen by volatile reads, which a fence acquires
    bool waited = false;            // waited for the previous launch (griddepcontrol.wait)
    uint32_t waited_at = 0;         // its own count at that time
    std::vector<Where> barriers;  // barriers of its block that it has arrived at; kept only for the checks
    Path path = 0;                // path to its last barrier or collective
    std::vector<uintptr_t> calls;  // the same path: return addresses, the innermost first
    std::shared_ptr<const Bypass> bypass, warp_bypass;  // the last barrier of its block, and collective of its warp
    const checks::Stray* stray = nullptr;  // an index outside an array that it has just computed
    uint64_t stray_index = 0;
};

typedef std::vector<Thread*> Sleepers;

struct Gathering {  // a barrier that opens when `expected` threads have arrived
    int expected = 0, arrived = 0, votes = 0;
    int result = 0, came = 0;  // results of its last completion: votes and threads
    bool whole = false;        // the whole block's: returned threads count as arrived
    Where where = {};
    struct WarpArrival {       // at a named barrier, which counts whole warps
        unsigned lanes = 0;    // lanes that have arrived in this round
        Where where = {};
        Path path = 0;         // of the first of them: after bar.arrive a thread continues, to calls on other paths
        std::vector<uintptr_t> calls;
    };
    std::vector<WarpArrival> warps;
    Sleepers sleepers;
    Clock clock, completed;
    struct Visitor {  // of a named barrier, for the checks
        uint32_t came = 0, waited = 0;  // the last of the barrier's rounds that it arrived at, and waited in
        uint32_t count = 0;             // its own count on arrival
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

struct Visits {  // visits of a warp's lanes to a collective
    uint32_t count[32] = {};
    unsigned mask[32] = {};  // the mask of a lane's last visit
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
    Clock returned_clock;  // their accesses
};

struct Part {  // a part of dynamic shared memory, as declared by a kernel
    uint32_t from, bytes, to;  // offsets in the arena
    Where where;
};

struct Units;  // state of the asynchronous instructions, in units.h

struct Machine {  // state of one OS thread
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
    uint32_t cluster = 0;  // numbered from 1; 0: none
    faults::Watch watch;
    // Time for wgmma's registers: the number of wgmma.fence so far. It never decreases, so accesses of an earlier
    // cluster on the stacks are older than every fence of a later one.
    uint32_t fences = 0;
    bool follows_registers = false;  // there was one in this launch
};

extern thread_local Machine* machine __attribute__((tls_model("initial-exec")));

inline Thread* self() { return static_cast<Thread*>(const_cast<Place*>(here)); }
inline const Request& settings() { return machine->launch->request; }

// ------------------------------------------------------------------ scheduling

void sleep(Sleepers& list, const Waiting& waiting);
void wake(Sleepers& list, const Clock& clock);  // the woken threads acquire `clock`
void release(Clock& clock);                     // `clock` acquires the running thread's clock
void acquire(const Clock& clock);
void leave_block(Thread& thread);  // on its return: the others no longer wait for it
// Returns true if a write of a thread at that count is known to precede a fence.proxy.async of the same thread. A fence
// of the thread that starts the copy does not count: it does not cover writes of others.
bool knows_proxy_fence(uint32_t slot, uint32_t count);
uint32_t random_below(uint32_t limit);

// Locations after the arena of relocated parts.
bool inside_part(uint32_t offset, uint32_t bytes);
uint32_t home_of(uint32_t offset);  // the byte's address before its part was relocated, or its own
const Part* moved_from(uint32_t offset, uint32_t bytes);  // null: those bytes were not relocated
std::string describe_part(uint32_t offset);
std::string describe_moved(uint32_t offset, const Part& part);

[[noreturn]] void fail_at(const std::string& place, const std::string& message, const Thread* who = self());
std::string text(const char* format, ...) __attribute__((format(printf, 1, 2)));
std::string place(Where where);            // "kernel.cu:12"
std::string name(const Thread& thread);    // "thread 3 of block (0, 1, 0)"
std::string name(const uint3& block);
std::string thread_states();               // of the running cluster: one line per group of threads that wait together

// ------------------------------------------------------------------ called by the scheduler

namespace units {  // asynchronous copies and products (async.cpp, hopper)
void begin_cluster();
bool idle();  // no thread can run: finishes one pending transfer; false if there is none
void end_cluster();
void exit_thread(Thread& thread);
}  // namespace units

namespace registers {  // of wgmma (registers.cpp)
void touch(uintptr_t address, uint32_t bytes, uint32_t site);
}

namespace checks {  // checks.cpp; called only if the launch asks for them
extern std::mutex one_launch;  // one checked launch at a time: query results belong to its thread
void begin_launch(const Launch& launch);
void begin_cluster();
void end_launch();
// The running thread accesses shared memory of the cluster's block `rank`, or starts an operation that does.
// `asynchronous`: by TMA or the tensor cores, which need a proxy fence after a thread's own stores.
// With a stamp, an agent makes the access, and its bytes are in use until the stamp is known.
void touch_shared(uint32_t rank, uint32_t offset, uint32_t bytes, bool write, bool asynchronous, Where where,
                  Stamp stamp = {});
void touch_global(const void* address, uint32_t bytes, bool write, Where where, Stamp stamp = {});
// Bytes that an asynchronous copy will write are in use until it is waited for.
void begin_copy(uint32_t rank, uint32_t offset, uint32_t bytes, Where where);
void end_copy(uint32_t rank, uint32_t offset, uint32_t bytes);
std::string near_buffer(uintptr_t address, uint32_t bytes);  // "4 bytes past the end of buffer 1 (64 bytes)"
// The last store to that byte in the last launch with checks: "kernel.cu:12: thread 3 of block (0, 0, 0)".
std::string writer_of(uintptr_t address, const Request& request);
void check_stray();  // ends the run if the running thread has computed an index outside an array
}  // namespace checks

inline bool checking() { return settings().checks; }
inline bool is_counted() { return settings().counts; }

}  // namespace twin
