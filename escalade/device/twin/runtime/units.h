// State of the asynchronous units while a cluster runs, and functions that they share.
#pragma once

#include "state.h"  // first: standard headers must not see CUDA's keywords

#include "../include/common/hopper.cuh"

namespace twin {

struct Copy {  // one thread's cp.async
    u32 destination, bytes, group;
    const void* source;  // null: zeros
    Where where;
};

struct MapFields {  // contents of a TensorMap, written by tensor_map.py; innermost dimension first
    u64 base, stride[4];     // bytes, of dimensions 1 to 4
    u32 size[5];             // elements
    u16 box[5], pixels;      // tiled: the box; im2col: box[0] channels of `pixels` pixels
    int16_t lower[3], upper[3];
    uint8_t step[5], rank, element_bytes, swizzle, im2col;  // swizzle: 2^it chunks of 16 bytes are permuted
    char mark[3];
};

struct Load {
    MapFields map;
    int at[5];
    u16 taps[3];
    u32 destination, barrier, blocks, bytes;
    Where where;
    std::string issuer;
    Clock clock;
};

struct Store {
    MapFields map;
    int at[5];
    u32 source, bytes, group;
    Where where;
};

struct Push {  // one thread's st.async of 16 bytes
    float4 value;
    u32 barrier;
    Where where;
    const Thread* issuer;
};

struct Mbarrier {
    u32 expected = 0, pending = 0, phase = 0;  // phases completed
    long long bytes = 0;                       // outstanding in this phase
    u32 agent = 0;                             // agent of the copies that it counts, in the clocks; 0: none yet
    u32 initializer = 0, initialized = 0;      // a thread, and its count at that time
    u32 fenced = 0;                            // its count at the following fence.mbarrier_init; 0: none
    u32 shown = 0;                             // the cluster barrier after that fence, which publishes it; 0: none
    Where where = {};                          // location of the initialization
    Sleepers sleepers;
    Clock arriving, completed;
};

constexpr int PRODUCT_ROWS = 64, ROWS_REGISTERS = 4, WARPGROUP_WARPS = 4;

struct Product {  // one wgmma of a warpgroup: 64 x n, without the accumulators
    Element element;
    u64 a, b;
    int n;
    bool rows_transposed, columns_transposed;  // the MN-major operands
    bool rows_in_registers;
    Where where;
    int taken = 0;
    unsigned computed = 0;        // the warps whose rows these are
    std::vector<float> values;
    std::vector<u32> registers;   // fragments of all 128 threads, if the rows are in registers
};

struct Fragment {  // a thread's part of a product that it has not waited for yet
    float* d;
    int registers;
    u64 product;
    bool accumulate;
    u32 group, fence;  // the thread's last preceding wgmma.fence
    Where where;
};

struct Warpgroup {
    u64 first = 0;  // number of products.front()
    u32 agents[WARPGROUP_WARPS] = {};  // agent of each warp's part of its products, in the clocks
    std::deque<Product> products;
};

struct ThreadUnits {
    std::vector<Copy> copies;
    u32 copy_group = 0;
    std::vector<Store> stores;
    u32 store_group = 0;
    u32 store_reader = 0, store_writer = 0;  // agents of its stores
    std::vector<Fragment> fragments;
    u64 products = 0;
    u32 product_group = 0;
    u32 wgmma_fence = 0;  // time of the last one; 0: none
    u32 registers = 0;    // by setmaxnreg; 0: the number that the kernel started with
};

struct Visit {  // access to a block's shared memory by another block's thread or by an agent
    u32 count;
    Where where;
};

struct BlockUnits {
    std::map<u32, Mbarrier> barriers;
    std::vector<Warpgroup> warpgroups;
    std::map<u32, Push> pushes;  // in flight to this block, by destination
    std::map<u32, Visit> visits;  // the last access of each slot
    unsigned exited = 0;          // threads
    Clock left;                   // their clocks
};

struct Units {
    std::vector<ThreadUnits> threads;  // by slot
    std::vector<BlockUnits> blocks;    // by rank
    std::vector<Load> loads;           // in flight
    u32 agents = 0;                    // in use
    Gathering cluster;
    int exited = 0;          // threads of the cluster
    int exited_arrived = 0;  // of those, threads that had arrived at its barrier before
};

inline Units& units_state() { return *machine->units; }
inline ThreadUnits& mine() { return units_state().threads[self()->slot]; }

// An agent's slot in the clocks, assigned on first use.
u32 agent_at(u32& agent);

// Stops the run if the bytes are outside shared memory, or in use by an operation in flight.
void check_flights(u32 rank, u32 offset, u32 bytes, bool write, const char* what, Where where);
// The same, and reports the access to the checks.
void use_shared(u32 rank, u32 offset, u32 bytes, bool write, bool asynchronous, const char* what, Where where,
                Stamp stamp = {});
inline bool following() { return settings().late || checking(); }  // operations not waited for

// Stops the run if another block of the cluster may not have started, or has exited.
void check_present(u32 rank, const char* what, Where where);
// The running thread accesses shared memory of another block, or an agent any block's: the block must not exit before.
void visit(u32 rank, Stamp stamp, Where where);
Mbarrier& barrier_at(u32 barrier, u32 rank, const char* what, Where where);
// Stops the run if the running thread cannot know that the barrier has been initialized; `asynchronous`: nor can
// TMA.
void check_initialized(const Mbarrier& barrier, u32 address, u32 rank, bool asynchronous, const char* what, Where where);
Stamp arrival_stamp(Mbarrier& barrier);
void complete_if_done(Mbarrier& barrier);
void perform(const Load& load);
void perform(u32 destination, u32 rank, const Push& push);
bool still_reads(const Product& product, u32 offset, u32 bytes);
void leave_cluster(const Thread& thread);

namespace registers {  // of accumulators, registers.cpp
void fence();
void begin(const Fragment& fragment, const u32* rows);  // a wgmma will write them
void end(const Fragment& fragment);                     // it has been waited for, and is no longer in the thread's list
}  // namespace registers

inline u32 swizzled(u32 address, u32 mode) { return address ^ (((address >> 7) & ((1u << mode) - 1)) << 4); }
inline bool overlap(u32 a, u32 a_bytes, u32 b, u32 b_bytes) { return a < b + b_bytes && b < a + a_bytes; }

}  // namespace twin
