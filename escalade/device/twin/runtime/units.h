// The state of the asynchronous units while a cluster runs, and what they share.
#pragma once

#include "state.h"  // first: standard headers must not see CUDA's keywords

#include "../include/common/hopper.cuh"

namespace twin {

struct Copy {  // one thread's cp.async
    u32 destination, bytes, group;
    const void* source;  // null: zeros
    Where where;
};

struct MapFields {  // what tensor_map.py writes into a TensorMap; innermost dimension first
    u64 base, stride[4];     // bytes, of dimensions 1 to 4
    u32 size[5];             // elements
    u16 box[5], pixels;      // tiled: the box; im2col: box[0] channels of `pixels` pixels
    int16_t lower[3], upper[3];
    uint8_t step[5], rank, element_bytes, swizzle, im2col;  // swizzle: 2^it chunks of 16 bytes change places
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
    u32 issued;  // the issuer's own count
};

struct Mbarrier {
    u32 expected = 0, pending = 0, phase = 0;  // phases completed
    long long bytes = 0;                       // still to come in this phase
    Sleepers sleepers;
    Clock arriving, completed;
};

struct Product {  // one wgmma of a warpgroup: 64 x n, without the accumulators
    Element element;
    u64 a, b;
    int n;
    bool rows_transposed, columns_transposed;  // which operands are MN-major
    Where where;
    int taken = 0;
    std::vector<float> values;  // empty: not computed yet
};

struct Fragment {  // a thread's part of a product that it has yet to take
    float* d;
    u64 product;
    bool accumulate;
    u32 group;
};

struct Warpgroup {
    u64 first = 0;  // number of products.front()
    std::deque<Product> products;
};

struct ThreadUnits {
    std::vector<Copy> copies;
    u32 copy_group = 0;
    std::vector<Store> stores;
    u32 store_group = 0;
    std::vector<Fragment> fragments;
    u64 products = 0;
    u32 product_group = 0;
};

struct BlockUnits {
    std::map<u32, Mbarrier> barriers;
    std::vector<Warpgroup> warpgroups;
    std::map<u32, Push> pushes;  // in flight to this block, by destination
    unsigned exited = 0;         // threads
};

struct Units {
    std::vector<ThreadUnits> threads;  // by slot
    std::vector<BlockUnits> blocks;    // by rank
    std::vector<Load> loads;           // in flight
    Gathering cluster;
    int exited = 0;          // threads of the cluster
    int exited_arrived = 0;  // more of them, which had come to its barrier before
};

inline Units& units_state() { return *machine->units; }
inline ThreadUnits& mine() { return units_state().threads[self()->slot]; }

// Ends the run if the bytes are outside shared memory, or in use by an operation in flight; tells the checks.
void use_shared(u32 rank, u32 offset, u32 bytes, bool write, bool asynchronous, const char* what, Where where);

Mbarrier& barrier_at(u32 barrier, u32 rank, const char* what, Where where);
void complete_if_done(Mbarrier& barrier);
void perform(const Load& load);
void perform(u32 destination, u32 rank, const Push& push);
bool still_reads(const Product& product, u32 offset, u32 bytes);
void leave_cluster(const Thread& thread);

inline u32 swizzled(u32 address, u32 mode) { return address ^ (((address >> 7) & ((1u << mode) - 1)) << 4); }
inline bool overlap(u32 a, u32 a_bytes, u32 b, u32 b_bytes) { return a < b + b_bytes && b < a + a_bytes; }

}  // namespace twin
