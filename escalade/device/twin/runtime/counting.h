// What a launch is counted by. Only a kernel that was compiled for it, and a launch that asks, gets here.
//
// The threads of a warp run one after another here, and together on the card. What each does is noted, block of code by
// block of code, and put together again when all have come to a barrier of their block or have returned: of lanes that
// have parted, those in the deepest call go first, and among them those at the lowest address. Compilers lay code out so
// that lanes which took different sides of a branch meet again behind it.
#pragma once

#include "state.h"

namespace twin::counting {

enum class Kind : uint8_t {
    block,  // of code: no access, but where those behind it belong
    global_load, global_store, global_atomic, global_copy,
    shared_load, shared_store, shared_atomic, shared_copy,
    cluster_load, cluster_store,
    barrier,
};

// What the running thread does. `site` is a place in its library, or one that `site_of` made.
void enter_block(uint32_t site, const void* frame);
void access(uintptr_t address, uint32_t bytes, bool write, uint32_t site);
void atomic(uintptr_t address, uint32_t bytes, Where where);
void copy(const void* global, uint32_t shared, uint32_t bytes, Where where);  // cp.async; null: zeros
void push(uint32_t bytes, Where where);                                        // st.async
void barrier(Where where);

// What a warp does together, or one thread has a unit do.
void matrices(const uint32_t* rows, int count, bool write, Where where);  // ldmatrix and stmatrix: 8 rows each
void product(uint64_t multiplications);                                   // a warp's mma, or its part of a wgmma
void shuffle();
void bulk(bool write);
void bulk_row(const void* address, uint32_t bytes, bool write);

void begin_launch();
void begin_cluster();
void end_warps(const Block& block);  // its threads have all come to one place
void end_warp(const Block& block, unsigned warp);

}  // namespace twin::counting
