// Appended to a kernel's source by the twin: its entry point, and the location of its shared memory.
#pragma once

#include "language.h"

namespace twin {

// A parameter's value. Its address need not be aligned for its type, and x86 faults on aligned moves from there.
template <class P>
__attribute__((no_sanitize("thread", "address", "undefined"), always_inline)) inline P parameter(const void* address) {
    P value;
    __builtin_memcpy(&value, address, sizeof value);
    return value;
}

// Calls the kernel with parameters as for cuLaunchKernel: the address of each.
template <class... P>
__attribute__((no_sanitize("thread", "address", "undefined"))) void call(void (*kernel)(P...), void** parameters) {
    [&]<size_t... I>(std::index_sequence<I...>) __attribute__((no_sanitize("thread"))) {
        kernel(parameter<std::remove_const_t<P>>(parameters[I])...);
    }(std::index_sequence_for<P...>{});
}

}  // namespace twin

// The identity of a __shared__ variable: a module number, 0 for the dynamic array (an undefined weak symbol
// belongs to no module), and the offset among the module's variables.
extern "C" __attribute__((visibility("hidden"), no_sanitize("thread", "address", "undefined"))) void* __tls_get_addr(
    const size_t* index) {
    return index[0] ? twin::here->static_shared + index[1] : twin::here->dynamic_shared;
}

#define TWIN_EXPORT(kernel) \
    extern "C" __attribute__((no_sanitize("thread"))) void twin_entry(void** parameters) { \
        twin::call(kernel, parameters);                                                    \
    }
