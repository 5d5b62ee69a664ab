// Barriers, shuffles and votes.
#pragma once

#include "language.h"

namespace twin {

// Number of the running thread in its warp, and the lanes of its warp.
unsigned lane();
unsigned warp_lanes();
uint32_t shared_offset(const void* pointer, Where where);
// Scope of a fence or an atomic.
enum class Scope { block, device };
void fence(Scope scope);

// Functions that may switch to another thread are in this namespace. A kernel whose object file names none of
// it runs as a plain loop over its threads (see build.py).
namespace wait {

enum class Vote { count, all, any };

int block_barrier(int id, int threads, bool predicate, Vote vote, Where where);  // threads 0: all of the block
void block_arrive(int id, int threads, Where where);

// The lanes of `mask` meet; the last to arrive calls `perform` with the payloads of all, then all continue. This
// does not order their earlier writes to memory.
typedef void (*Perform)(void* const* lanes, unsigned mask, Where where);
void collective(unsigned mask, void* payload, Perform perform, const char* operation, Where where);
void warp_barrier(unsigned mask, const char* operation, Where where);  // this one orders memory

unsigned ballot(unsigned mask, bool predicate, const char* operation, Where where);

void yield(Where where);

}  // namespace wait

template <class T>
struct Shuffled {
    T value, result;
    int source;  // -1: keeps its own
};

// Not accesses of the kernel, so hidden from the checks.
template <class T>
__attribute__((no_sanitize("thread"))) void perform_shuffle(void* const* lanes, unsigned mask, Where where) {
    for (int lane = 0; lane < 32; ++lane) {
        if (!(mask >> lane & 1)) continue;
        auto& mine = *static_cast<Shuffled<T>*>(lanes[lane]);
        if (mine.source >= 0 && !(mask >> mine.source & 1))
            fail(where, "lane %d shuffles from lane %d, which is not among the lanes %08x that take part", lane,
                 mine.source, mask);
        mine.result = mine.source < 0 ? mine.value : static_cast<Shuffled<T>*>(lanes[mine.source])->value;
    }
}

template <class T>
T shuffle(unsigned mask, const T& value, int source, const char* operation, Where where) {
    static_assert(std::is_trivially_copyable_v<T> || sizeof(T) <= 4);
    Shuffled<T> mine{value, value, source};
    wait::collective(mask, &mine, perform_shuffle<T>, operation, where);
    return mine.result;
}

}  // namespace twin

inline void __syncthreads(TWIN_WHERE) { twin::wait::block_barrier(0, 0, false, twin::wait::Vote::any, where); }
inline int __syncthreads_count(int predicate, TWIN_WHERE) {
    return twin::wait::block_barrier(0, 0, predicate, twin::wait::Vote::count, where);
}
inline int __syncthreads_and(int predicate, TWIN_WHERE) {
    return twin::wait::block_barrier(0, 0, predicate, twin::wait::Vote::all, where);
}
inline int __syncthreads_or(int predicate, TWIN_WHERE) {
    return twin::wait::block_barrier(0, 0, predicate, twin::wait::Vote::any, where);
}
inline void __syncwarp(unsigned mask = ~0u, TWIN_WHERE) {
    twin::wait::warp_barrier(mask, "__syncwarp", where);
}
inline void __threadfence() { twin::fence(twin::Scope::device); }
inline void __threadfence_block() { twin::fence(twin::Scope::block); }
inline void __threadfence_system() { twin::fence(twin::Scope::device); }
inline void __nanosleep(unsigned, TWIN_WHERE) { twin::wait::yield(where); }
inline size_t __cvta_generic_to_shared(const void* pointer, TWIN_WHERE) { return twin::shared_offset(pointer, where); }
[[noreturn]] inline void __trap(TWIN_WHERE) { twin::fail(where, "__trap()"); }

// Lanes outside a shuffle's width keep their own value, as on the card.
template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, TWIN_WHERE) {
    const int first = twin::lane() / width * width;
    return twin::shuffle(mask, value, first + (source & (width - 1)), "__shfl_sync", where);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, TWIN_WHERE) {
    const int lane = twin::lane();
    return twin::shuffle(mask, value, lane % width >= int(delta) ? lane - int(delta) : -1, "__shfl_up_sync", where);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, TWIN_WHERE) {
    const int lane = twin::lane();
    return twin::shuffle(mask, value, lane % width + int(delta) < width ? lane + int(delta) : -1, "__shfl_down_sync",
                         where);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, TWIN_WHERE) {
    const int lane = twin::lane(), source = lane ^ bits;
    // A later group of `width` lanes cannot be read.
    return twin::shuffle(mask, value, source < 32 && source / width <= lane / width ? source : -1, "__shfl_xor_sync",
                         where);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, TWIN_WHERE) {
    return twin::wait::ballot(mask, predicate, "__ballot_sync", where);
}
inline int __any_sync(unsigned mask, int predicate, TWIN_WHERE) {
    return twin::wait::ballot(mask, predicate, "__any_sync", where) != 0;
}
inline int __all_sync(unsigned mask, int predicate, TWIN_WHERE) {
    return twin::wait::ballot(mask, !predicate, "__all_sync", where) == 0;
}
// The whole warp, for a warp that has not diverged. In a branch that not all lanes take, a collective with
// this mask is reported as a deadlock: it is undefined on the card, too.
inline unsigned __activemask() { return twin::warp_lanes(); }
