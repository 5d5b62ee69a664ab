// Counts of a launch. Only kernels compiled for counting, in launches that request it, call this.
//
// The threads of a warp run one after another here, and together on the card. The events of each are recorded per basic
// block, and merged when all have arrived at a barrier of their block or have returned: of diverged lanes, those in the
// deepest call go first, and among them those at the lowest address. Compilers lay out code so that lanes which took
// different sides of a branch reconverge after it.
#pragma once

#include "state.h"

namespace twin::counting {

enum class Kind : uint8_t {
    block,  // start of a basic block: no access, but the owner of the following events
    global_load, global_store, global_atomic, global_copy,
    shared_load, shared_store, shared_atomic, shared_copy,
    cluster_load, cluster_store,
    barrier,
};

// Events of the running thread. `site` is a location in its library, or a result of `site_of`.
void enter_block(uint32_t site, const void* frame);
void access(uintptr_t address, uint32_t bytes, bool write, uint32_t site);
void atomic(uintptr_t address, uint32_t bytes, Where where);
void copy(const void* global, uint32_t shared, uint32_t bytes, Where where);  // cp.async; null: zeros
void push(uint32_t bytes, Where where);                                        // st.async
void barrier(Where where);

// Events of a whole warp, or of a unit started by one thread.
void matrices(const uint32_t* rows, int count, bool write, Where where);  // ldmatrix and stmatrix: 8 rows each
void product(uint64_t multiplications);                                   // a warp's mma, or its part of a wgmma
void shuffle();
void bulk(bool write);
void bulk_row(const void* address, uint32_t bytes, bool write);

void begin_launch();
void begin_cluster();
void end_warps(const Block& block);  // its threads have all reached one point
void end_warp(const Block& block, unsigned warp);

}  // namespace twin::counting
