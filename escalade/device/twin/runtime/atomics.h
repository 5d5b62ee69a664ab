// Atomics: really atomic, because blocks run on several cores.
#pragma once

#include "collectives.h"
#include "language.h"

namespace twin {

void atomic_access(void* address, unsigned bytes, Scope scope, Where where);  // reported to the checks

template <class T>
using Bits = std::conditional_t<sizeof(T) == 2, uint16_t, std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>;

// Stores change(old) atomically; returns the old value. Works on bits, so that any small type will do.
template <class T, class Change>
__attribute__((no_sanitize("thread"), no_sanitize_coverage, noinline)) T atomic_update(T* address, Change change, Scope scope, Where where) {
    static_assert(sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8);
#if defined TWIN_CHECKS || defined TWIN_COUNTS
    atomic_access(address, sizeof(T), scope, where);
#endif
    (void)scope, (void)where;
    auto* bits = reinterpret_cast<Bits<T>*>(address);
    Bits<T> seen = __atomic_load_n(bits, __ATOMIC_RELAXED), wanted;
    T old, fresh;
    do {
        std::memcpy(static_cast<void*>(&old), &seen, sizeof old);
        fresh = change(old);
        std::memcpy(&wanted, static_cast<const void*>(&fresh), sizeof fresh);
    } while (!__atomic_compare_exchange_n(bits, &seen, wanted, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE));
    std::memcpy(static_cast<void*>(&old), &seen, sizeof old);
    return old;
}

// The second parameter is not deduced: `atomicAdd(&counter, 1)` with an unsigned counter is valid CUDA.
template <class T>
using Same = std::type_identity_t<T>;

}  // namespace twin

#define TWIN_SCOPED_ATOMIC(name, expression, scope)                                               \
    template <class T>                                                                            \
    T name(T* address, twin::Same<T> value, TWIN_WHERE) {                                         \
        return twin::atomic_update(                                                               \
            address, [&](T old) __attribute__((no_sanitize("thread"))) -> T { return expression; }, scope, where); \
    }
#define TWIN_ATOMIC(name, expression)                                   \
    TWIN_SCOPED_ATOMIC(name, expression, twin::Scope::device)           \
    TWIN_SCOPED_ATOMIC(name##_system, expression, twin::Scope::device)  \
    TWIN_SCOPED_ATOMIC(name##_block, expression, twin::Scope::block)
TWIN_ATOMIC(atomicAdd, old + value)
TWIN_ATOMIC(atomicSub, old - value)
TWIN_ATOMIC(atomicMin, value < old ? value : old)
TWIN_ATOMIC(atomicMax, old < value ? value : old)
TWIN_ATOMIC(atomicExch, value)
TWIN_ATOMIC(atomicAnd, old & value)
TWIN_ATOMIC(atomicOr, old | value)
TWIN_ATOMIC(atomicXor, old ^ value)
TWIN_ATOMIC(atomicInc, old >= value ? 0 : old + 1)
TWIN_ATOMIC(atomicDec, old == 0 || old > value ? value : old - 1)
#undef TWIN_ATOMIC
#undef TWIN_SCOPED_ATOMIC

#define TWIN_COMPARE_AND_SWAP(name, scope)                                                     \
    template <class T>                                                                         \
    T name(T* address, twin::Same<T> expected, twin::Same<T> value, TWIN_WHERE) {              \
        return twin::atomic_update(address, [&](T old) __attribute__((no_sanitize("thread"))) -> T { \
            return old == expected ? value : old;                                              \
        }, scope, where);                                                                      \
    }
TWIN_COMPARE_AND_SWAP(atomicCAS, twin::Scope::device)
TWIN_COMPARE_AND_SWAP(atomicCAS_system, twin::Scope::device)
TWIN_COMPARE_AND_SWAP(atomicCAS_block, twin::Scope::block)
#undef TWIN_COMPARE_AND_SWAP

// Two or four floats, each added atomically by itself, as the card does.
inline float2 atomicAdd(float2* address, float2 value, TWIN_WHERE) {
    return {atomicAdd(&address->x, value.x, where), atomicAdd(&address->y, value.y, where)};
}
inline float4 atomicAdd(float4* address, float4 value, TWIN_WHERE) {
    return {atomicAdd(&address->x, value.x, where), atomicAdd(&address->y, value.y, where),
            atomicAdd(&address->z, value.z, where), atomicAdd(&address->w, value.w, where)};
}
