// Fourier transforms of real square tiles in smem: TILE x TILE pixels to and from TILE x (TILE/2 + 1) complex
// frequencies, for TILE = 8 * RADIX.
//
// One dimension takes two steps, 8 x RADIX, each a transform that one thread does in registers:
//     X(k1 + 8 k2) = sum over n2 of root(n2 k1) * [sum over n1 of x(n2 + RADIX n1) root8(n1 k1)] * rootR(n2 k2)
// Two tricks halve the storage and work of real tiles. Rows r and r + TILE/2 are the real and imaginary part of one
// complex row. The thread that starts a column separates them: by conjugate symmetry column v needs Z(v) and Z(-v), and
// owns both slots. So every step is in place, and a tile takes the smem of its own pixels.
//
// The forward transform is twice too large (separating would halve), the inverse unnormalized: scale one of the
// multiplied spectra by 1/(4 TILE^2).
#pragma once

#include "common/ptx.cuh"

__device__ __forceinline__ float2 operator+(float2 a, float2 b) { return make_float2(a.x + b.x, a.y + b.y); }
__device__ __forceinline__ float2 operator-(float2 a, float2 b) { return make_float2(a.x - b.x, a.y - b.y); }
__device__ __forceinline__ float2 operator*(float s, float2 a) { return make_float2(s * a.x, s * a.y); }
__device__ __forceinline__ float2 conjugate(float2 a) { return make_float2(a.x, -a.y); }
__device__ __forceinline__ float2 times_i(float2 a) { return make_float2(-a.y, a.x); }
__device__ __forceinline__ float2 complex_product(float2 a, float2 b) {
    return make_float2(a.x * b.x - a.y * b.y, a.x * b.y + a.y * b.x);
}
__device__ __forceinline__ float2 product_with_conjugate(float2 a, float2 b) {  // a * conj(b)
    return make_float2(a.x * b.x + a.y * b.y, a.y * b.x - a.x * b.y);
}

__device__ constexpr double cosine(double angle) {  // |angle| <= 2 pi; the series is exact to a double's last digits
    double term = 1, sum = 1;
    for (int n = 1; n < 30; ++n) {
        term *= -angle * angle / ((2 * n - 1) * (2 * n));
        sum += term;
    }
    return sum;
}

template <int N>
struct Roots {  // exp(2 pi i k / N), as compile-time constants
    float re[N] = {}, im[N] = {};

    __device__ constexpr Roots() {
        constexpr double turn = 6.283185307179586476925286766559;
        for (int k = 0; k < N; ++k) {
            re[k] = static_cast<float>(cosine(turn * k / N));
            im[k] = static_cast<float>(cosine(turn * k / N - turn / 4));
        }
    }
};

template <int N>
__device__ constexpr Roots<N> roots_of_unity{};  // for indices known only at run time

// value * exp(SIGN * 2 pi i k / N), 0 <= k < N. In an unrolled loop k is a constant: only one branch remains, and
// trivial roots cost (almost) nothing.
template <int N, int SIGN>
__device__ __forceinline__ float2 rotated(float2 value, int k) {
    constexpr Roots<N> roots;
    const float2 quarter_turn = SIGN > 0 ? times_i(value) : make_float2(value.y, -value.x);
    if (k == 0) return value;
    if (4 * k == N) return quarter_turn;
    if (2 * k == N) return make_float2(-value.x, -value.y);
    if (8 * k == N) return Roots<8>().re[1] * (value + quarter_turn);
    return complex_product(value, make_float2(roots.re[k], SIGN * roots.im[k]));
}

// values(k) = sum over n of values(n) * exp(SIGN * 2 pi i n k / N), in registers, in natural order.
template <int N, int SIGN>
__device__ __forceinline__ void transform(float2 (&values)[N]) {
    if constexpr (N == 2) {
        const float2 difference = values[0] - values[1];
        values[0] = values[0] + values[1];
        values[1] = difference;
    } else if constexpr (N == 3) {
        constexpr float im = SIGN * Roots<3>().im[1];
        const float2 sum = values[1] + values[2];
        const float2 difference = im * times_i(values[1] - values[2]);
        const float2 middle = values[0] + (-0.5f) * sum;
        values[0] = values[0] + sum;
        values[1] = middle + difference;
        values[2] = middle - difference;
    } else if constexpr (N == 4) {
        const float2 even = values[0] + values[2], even_difference = values[0] - values[2];
        const float2 odd = values[1] + values[3];
        const float2 odd_difference = rotated<4, SIGN>(values[1] - values[3], 1);
        values[0] = even + odd;
        values[1] = even_difference + odd_difference;
        values[2] = even - odd;
        values[3] = even_difference - odd_difference;
    } else if constexpr (N == 5) {
        constexpr Roots<5> roots;
        constexpr float re1 = roots.re[1], im1 = SIGN * roots.im[1], re2 = roots.re[2], im2 = SIGN * roots.im[2];
        const float2 outer = values[1] + values[4], outer_difference = values[1] - values[4];
        const float2 inner = values[2] + values[3], inner_difference = values[2] - values[3];
        const float2 middle1 = values[0] + re1 * outer + re2 * inner;
        const float2 middle2 = values[0] + re2 * outer + re1 * inner;
        const float2 side1 = times_i(im1 * outer_difference + im2 * inner_difference);
        const float2 side2 = times_i(im2 * outer_difference + (-im1) * inner_difference);
        values[0] = values[0] + outer + inner;
        values[1] = middle1 + side1;
        values[2] = middle2 + side2;
        values[3] = middle2 - side2;
        values[4] = middle1 - side1;
    } else if constexpr (N > 5) {
        constexpr int FIRST = N % 4 == 0 ? 4 : N % 2 == 0 ? 2 : 3;
        constexpr int SECOND = N / FIRST;
        static_assert(FIRST * SECOND == N, "sizes have the factors 2, 3 and 5 only");
        float2 rows[FIRST][SECOND];
#pragma unroll
        for (int n2 = 0; n2 < SECOND; ++n2) {
            float2 column[FIRST];
#pragma unroll
            for (int n1 = 0; n1 < FIRST; ++n1) column[n1] = values[n2 + SECOND * n1];
            transform<FIRST, SIGN>(column);
#pragma unroll
            for (int k1 = 0; k1 < FIRST; ++k1) rows[k1][n2] = rotated<N, SIGN>(column[k1], n2 * k1);
        }
#pragma unroll
        for (int k1 = 0; k1 < FIRST; ++k1) {
            transform<SECOND, SIGN>(rows[k1]);
#pragma unroll
            for (int k2 = 0; k2 < SECOND; ++k2) values[k1 + FIRST * k2] = rows[k1][k2];
        }
    }
}

// PLANES tiles in smem, transformed by THREADS threads. A __syncthreads separates two passes.
template <int TILE, int PLANES, int THREADS>
struct FftTiles {
    static constexpr int RADIX = TILE / 8;
    static constexpr int HALF = TILE / 2;
    static constexpr int COLUMNS = HALF + 1;
    static constexpr int FREQUENCIES = TILE * COLUMNS;
    // Columns TILE and TILE + 1 hold the second values of columns 0 and TILE/2, which mirror themselves. A pitch of 8
    // modulo 16 complex numbers puts adjacent rows into different halves of the banks.
    static constexpr int PITCH = TILE % 16 == 0 ? TILE + 8 : TILE + 16;
    // The two steps of a row exchange at n2 + SKEW * k1: an odd stride avoids bank conflicts in both.
    static constexpr int SKEW = RADIX | 1;
    static constexpr int ROOT_PITCH = 9;  // odd as well
    static_assert(TILE % 8 == 0 && RADIX > 1, "a tile is 8 * RADIX pixels wide");
    static_assert(8 * SKEW <= PITCH && TILE + 2 <= PITCH, "a row holds its columns");

    float2* tiles;
    float2* roots;  // exp(-2 pi i n2 k1 / TILE) at [n2][k1]

    __device__ __forceinline__ explicit FftTiles(float2* shared)
        : tiles(shared_part(shared, PLANES * HALF * PITCH)),
          roots(shared_part(shared + PLANES * HALF * PITCH, RADIX * ROOT_PITCH)) {
#pragma unroll 1
        for (int root = threadIdx.x; root < TILE; root += THREADS) {
            const int n2 = root / 8, k1 = root % 8;
            roots[n2 * ROOT_PITCH + k1] =
                make_float2(roots_of_unity<TILE>.re[n2 * k1], -roots_of_unity<TILE>.im[n2 * k1]);
        }
    }

    static __device__ __forceinline__ int mirror(int column) { return column == 0 ? 0 : TILE - column; }
    static __device__ __forceinline__ int partner(int column) {
        return column == 0 ? TILE : column == HALF ? TILE + 1 : TILE - column;
    }

    // Work items, one butterfly each; the innermost index runs along the threads.
    struct Item {
        int plane, outer, inner;
    };
    template <int OUTER, int INNER>
    static __device__ __forceinline__ Item item_of(int number) {
        if constexpr (PLANES == 1) return {0, number / INNER, number % INNER};
        return {number / (OUTER * INNER), number / INNER % OUTER, number % INNER};
    }
    // Column TILE/2 follows all others, so that those map evenly to threads.
    template <int OUTER>
    static __device__ __forceinline__ Item column_item_of(int number) {
        if (number < PLANES * OUTER * HALF) return item_of<OUTER, HALF>(number);
        const int rest = number - PLANES * OUTER * HALF;
        return {rest / OUTER, rest % OUTER, HALF};
    }

    // source.line(plane, row, column)(offset) is the pixel at column + offset of a row of the tile.
    template <class Source>
    __device__ __forceinline__ void forward_rows_first(const Source& source) const {
#pragma unroll 1
        for (int number = threadIdx.x; number < PLANES * HALF * RADIX; number += THREADS) {
            const auto [plane, row, n2] = item_of<HALF, RADIX>(number);
            const auto upper = source.line(plane, row, n2), lower = source.line(plane, row + HALF, n2);
            float2 values[8];
#pragma unroll
            for (int n1 = 0; n1 < 8; ++n1) values[n1] = make_float2(upper(RADIX * n1), lower(RADIX * n1));
            transform<8, -1>(values);
            float2* skewed = tiles + (plane * HALF + row) * PITCH + n2;
            const float2* root = roots + n2 * ROOT_PITCH;
            skewed[0] = values[0];
#pragma unroll
            for (int k1 = 1; k1 < 8; ++k1) skewed[SKEW * k1] = complex_product(values[k1], root[k1]);
        }
    }

    // Step between the skewed and the natural order of a row. Eight adjacent lanes share a row, and no warp is partial:
    // HALF * 8 is a multiple of 32.
    template <int SIGN>
    __device__ __forceinline__ void rows_inner() const {
#pragma unroll 1
        for (int number = threadIdx.x; number < PLANES * HALF * 8; number += THREADS) {
            const int k1 = number % 8;
            float2* row = tiles + number / 8 * PITCH;
            float2 *skewed = row + SKEW * k1, *natural = row + k1;
            float2 values[RADIX];
#pragma unroll
            for (int i = 0; i < RADIX; ++i) values[i] = SIGN < 0 ? skewed[i] : natural[8 * i];
            transform<RADIX, SIGN>(values);
            __syncwarp();
#pragma unroll
            for (int i = 0; i < RADIX; ++i) (SIGN < 0 ? natural[8 * i] : skewed[i]) = values[i];
        }
    }

    __device__ __forceinline__ void forward_columns_first() const {
#pragma unroll 1
        for (int number = threadIdx.x; number < PLANES * RADIX * COLUMNS; number += THREADS) {
            const auto [plane, n2, column] = column_item_of<RADIX>(number);
            float2* rows = tiles + (plane * HALF + n2) * PITCH;
            float2 *own = rows + column, *mirrored = rows + mirror(column);
            float2* partnered = rows + partner(column);
            float2 values[8];
#pragma unroll
            for (int n1 = 0; n1 < 4; ++n1) {  // Z = A + iB: 2A = Z(v) + conj Z(-v), 2iB = Z(v) - conj Z(-v)
                const float2 z = own[RADIX * n1 * PITCH], reflected = conjugate(mirrored[RADIX * n1 * PITCH]);
                const float2 difference = z - reflected;
                values[n1] = z + reflected;
                values[n1 + 4] = make_float2(difference.y, -difference.x);
            }
            transform<8, -1>(values);
            const float2* root = roots + n2 * ROOT_PITCH;
            own[0] = values[0];
#pragma unroll
            for (int k1 = 1; k1 < 8; ++k1)
                (k1 < 4 ? own : partnered)[RADIX * (k1 & 3) * PITCH] = complex_product(values[k1], root[k1]);
        }
    }

    // Calls body(plane, k1, column, values), values[k2] being the frequency in row k1 + 8 k2 of `column`: an output of
    // the forward transform if FORWARD, an input of the inverse if INVERSE, in place if both.
    template <bool FORWARD, bool INVERSE, class Body>
    __device__ __forceinline__ void frequencies(Body body) const {
#pragma unroll 1
        for (int number = threadIdx.x; number < PLANES * 8 * COLUMNS; number += THREADS) {
            const auto [plane, k1, column] = column_item_of<8>(number);
            float2* between = tiles + (plane * HALF + RADIX * (k1 & 3)) * PITCH + (k1 < 4 ? column : partner(column));
            float2 values[RADIX];
            if constexpr (FORWARD) {
#pragma unroll
                for (int n2 = 0; n2 < RADIX; ++n2) values[n2] = between[n2 * PITCH];
                transform<RADIX, -1>(values);
            }
            body(plane, k1, column, values);
            if constexpr (INVERSE) {
                transform<RADIX, 1>(values);
#pragma unroll
                for (int n2 = 0; n2 < RADIX; ++n2) between[n2 * PITCH] = values[n2];
            }
        }
    }

    __device__ __forceinline__ void inverse_columns_last() const {
#pragma unroll 1
        for (int number = threadIdx.x; number < PLANES * RADIX * COLUMNS; number += THREADS) {
            const auto [plane, n2, column] = column_item_of<RADIX>(number);
            float2* rows = tiles + (plane * HALF + n2) * PITCH;
            float2 *own = rows + column, *mirrored = rows + mirror(column);
            const float2* partnered = rows + partner(column);
            const float2* root = roots + n2 * ROOT_PITCH;
            float2 values[8] = {own[0]};
#pragma unroll
            for (int k1 = 1; k1 < 8; ++k1)
                values[k1] = product_with_conjugate((k1 < 4 ? own : partnered)[RADIX * (k1 & 3) * PITCH], root[k1]);
            transform<8, 1>(values);
#pragma unroll
            for (int n1 = 0; n1 < 4; ++n1) {
                const float2 turned = times_i(values[n1 + 4]);  // Z(v) = A + iB, Z(-v) = conj(A - iB)
                mirrored[RADIX * n1 * PITCH] = conjugate(values[n1] - turned);
                own[RADIX * n1 * PITCH] = values[n1] + turned;
            }
        }
    }

    // sink.line(plane, row, column)(offset, value) receives the pixel at column + offset of a row of the tile.
    template <class Sink>
    __device__ __forceinline__ void inverse_rows_last(const Sink& sink) const {
#pragma unroll 1
        for (int number = threadIdx.x; number < PLANES * HALF * RADIX; number += THREADS) {
            const auto [plane, row, n2] = item_of<HALF, RADIX>(number);
            const float2* skewed = tiles + (plane * HALF + row) * PITCH + n2;
            const float2* root = roots + n2 * ROOT_PITCH;
            float2 values[8] = {skewed[0]};
#pragma unroll
            for (int k1 = 1; k1 < 8; ++k1) values[k1] = product_with_conjugate(skewed[SKEW * k1], root[k1]);
            transform<8, 1>(values);
            const auto upper = sink.line(plane, row, n2), lower = sink.line(plane, row + HALF, n2);
#pragma unroll
            for (int n1 = 0; n1 < 8; ++n1) {
                upper(RADIX * n1, values[n1].x);
                lower(RADIX * n1, values[n1].y);
            }
        }
    }

    // From pixels to the step before `frequencies<true, …>`.
    template <class Source>
    __device__ __forceinline__ void forward(const Source& source) const {
        forward_rows_first(source);
        __syncthreads();
        rows_inner<-1>();
        __syncthreads();
        forward_columns_first();
        __syncthreads();
    }

    // From the step after `frequencies<…, true>` to pixels.
    template <class Sink>
    __device__ __forceinline__ void inverse(const Sink& sink) const {
        __syncthreads();
        inverse_columns_last();
        __syncthreads();
        rows_inner<1>();
        __syncthreads();
        inverse_rows_last(sink);
    }
};
