// Replacements of C library functions, which kernels call under these names (assembly.py): those that end the process
// report instead, and those that store through pointers notify the checks.
#include "checks.h"

#include <cmath>

namespace {

using namespace twin;

// A struct copy has its own hook: do not count a second memory request.
void tell(const void* pointer, size_t bytes, bool write, void* caller) {
    if (bytes) checks::hook(pointer, uint32_t(bytes), write, false, checks::UNCOUNTED, caller);
}

}  // namespace

extern "C" {

#define CALLER __builtin_return_address(0)

void twin_abort() { fail({}, "abort()"); }
void twin___assert_fail(const char* expression, const char* file, unsigned line, const char*) {
    fail({file, int(line)}, "assertion failed: %s", expression);
}

void* twin_memcpy(void* to, const void* from, size_t bytes) {
    tell(from, bytes, false, CALLER);
    tell(to, bytes, true, CALLER);
    return std::memcpy(to, from, bytes);
}
void* twin_memmove(void* to, const void* from, size_t bytes) {
    tell(from, bytes, false, CALLER);
    tell(to, bytes, true, CALLER);
    return std::memmove(to, from, bytes);
}
void* twin_memset(void* to, int value, size_t bytes) {
    tell(to, bytes, true, CALLER);
    return std::memset(to, value, bytes);
}

#define TWIN_STORING(T, suffix)                                              \
    T twin_modf##suffix(T v, T* whole) {                                     \
        tell(whole, sizeof *whole, true, CALLER);                            \
        return modf##suffix(v, whole);                                       \
    }                                                                        \
    T twin_frexp##suffix(T v, int* exponent) {                               \
        tell(exponent, sizeof *exponent, true, CALLER);                      \
        return frexp##suffix(v, exponent);                                   \
    }                                                                        \
    T twin_remquo##suffix(T a, T b, int* quotient) {                         \
        tell(quotient, sizeof *quotient, true, CALLER);                      \
        return remquo##suffix(a, b, quotient);                               \
    }                                                                        \
    void twin_sincos##suffix(T v, T* sine, T* cosine) {                      \
        tell(sine, sizeof *sine, true, CALLER);                              \
        tell(cosine, sizeof *cosine, true, CALLER);                          \
        sincos##suffix(v, sine, cosine);                                     \
    }
TWIN_STORING(double, )
TWIN_STORING(float, f)
#undef TWIN_STORING
#undef CALLER

}
