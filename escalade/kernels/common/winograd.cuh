// Winograd's minimal filtering for 3x3 filters: Y = A'[(G g G') * (B' d B)]A with * pointwise, for TILE x TILE outputs
// (TILE 2 or 4) from a patch of (TILE + 2) x (TILE + 2) inputs.
//
// The polynomial is evaluated at 0, 1, -1 and infinity for TILE 2, and at 0, +-1/sqrt(2), +-sqrt(2) and infinity for
// TILE 4: half the rounding error of the textbook's +-1, +-2, at the same number of operations. Factors of a single
// interpolation point are moved into G, which is applied once, to the weights.
//
// One NaN or Inf in a patch reaches all outputs of its tile; a direct convolution would confine it to the outputs whose
// filter covers it.
#pragma once

constexpr float NEAR_POINT = 0.70710678118654752f;  // 1/sqrt(2)
constexpr float FAR_POINT = 1.41421356237309505f;   // sqrt(2)

template <int TILE>
struct Winograd {
    static_assert(TILE == 2 || TILE == 4, "transforms exist for 2x2 and 4x4 outputs");
    static constexpr int PATCH = TILE + 2;
    static constexpr int POINTS = PATCH * PATCH;
};

// One row or column of B' d.
__device__ __forceinline__ void transform_input_line(float& d0, float& d1, float& d2, float& d3) {
    const float first = d0 - d2, second = d1 + d2, third = d2 - d1, last = d1 - d3;
    d0 = first, d1 = second, d2 = third, d3 = last;
}

__device__ __forceinline__ void transform_input_line(float& d0, float& d1, float& d2, float& d3, float& d4, float& d5) {
    const float near_even = d4 - 2.f * d2, near_odd = d3 - 2.f * d1;
    const float far_even = d4 - 0.5f * d2, far_odd = d3 - 0.5f * d1;
    d0 = (d0 - 2.5f * d2) + d4;
    d5 = (d1 - 2.5f * d3) + d5;
    d1 = near_even + NEAR_POINT * near_odd;
    d2 = near_even - NEAR_POINT * near_odd;
    d3 = far_even + FAR_POINT * far_odd;
    d4 = far_even - FAR_POINT * far_odd;
}

// B' d B, in place.
__device__ __forceinline__ void transform_input(float (&d)[4][4]) {
#pragma unroll
    for (int j = 0; j < 4; ++j) transform_input_line(d[0][j], d[1][j], d[2][j], d[3][j]);
#pragma unroll
    for (int i = 0; i < 4; ++i) transform_input_line(d[i][0], d[i][1], d[i][2], d[i][3]);
}

__device__ __forceinline__ void transform_input(float (&d)[6][6]) {
#pragma unroll
    for (int j = 0; j < 6; ++j) transform_input_line(d[0][j], d[1][j], d[2][j], d[3][j], d[4][j], d[5][j]);
#pragma unroll
    for (int i = 0; i < 6; ++i) transform_input_line(d[i][0], d[i][1], d[i][2], d[i][3], d[i][4], d[i][5]);
}

// One row or column of G g.
__device__ __forceinline__ void transform_filter_line(float g0, float g1, float g2, float (&u)[4]) {
    u[0] = g0;
    u[1] = 0.5f * (g0 + g2) + 0.5f * g1;
    u[2] = 0.5f * (g0 + g2) - 0.5f * g1;
    u[3] = g2;
}

__device__ __forceinline__ void transform_filter_line(float g0, float g1, float g2, float (&u)[6]) {
    const float near_even = (g0 + 0.5f * g2) * (-2.f / 3.f), near_odd = g1 * (NEAR_POINT * -2.f / 3.f);
    const float far_even = (g0 + 2.f * g2) * (1.f / 6.f), far_odd = g1 * (FAR_POINT / 6.f);
    u[0] = g0;
    u[1] = near_even + near_odd;
    u[2] = near_even - near_odd;
    u[3] = far_even + far_odd;
    u[4] = far_even - far_odd;
    u[5] = g2;
}

// G g G'.
template <int PATCH>
__device__ __forceinline__ void transform_filter(const float (&g)[3][3], float (&u)[PATCH][PATCH]) {
    float columns[3][PATCH];
#pragma unroll
    for (int s = 0; s < 3; ++s) transform_filter_line(g[0][s], g[1][s], g[2][s], columns[s]);
#pragma unroll
    for (int i = 0; i < PATCH; ++i) transform_filter_line(columns[0][i], columns[1][i], columns[2][i], u[i]);
}

// One row or column of A' m.
__device__ __forceinline__ void transform_output_line(float m0, float m1, float m2, float m3, float& y0, float& y1) {
    y0 = m0 + (m1 + m2);
    y1 = (m1 - m2) - m3;
}

__device__ __forceinline__ void transform_output_line(float m0, float m1, float m2, float m3, float m4, float m5,
                                                      float& y0, float& y1, float& y2, float& y3) {
    const float near_even = m1 + m2, near_odd = NEAR_POINT * (m1 - m2);
    const float far_even = m3 + m4, far_odd = FAR_POINT * (m3 - m4);
    y0 = m0 + (near_even + far_even);
    y1 = near_odd + far_odd;
    y2 = 0.5f * near_even + 2.f * far_even;
    y3 = (0.5f * near_odd + 2.f * far_odd) + m5;
}

// A' m A: leaves the outputs of the tile in the first TILE rows and columns of m.
__device__ __forceinline__ void transform_output(float (&m)[4][4]) {
#pragma unroll
    for (int j = 0; j < 4; ++j) transform_output_line(m[0][j], m[1][j], m[2][j], m[3][j], m[0][j], m[1][j]);
#pragma unroll
    for (int i = 0; i < 2; ++i) transform_output_line(m[i][0], m[i][1], m[i][2], m[i][3], m[i][0], m[i][1]);
}

__device__ __forceinline__ void transform_output(float (&m)[6][6]) {
#pragma unroll
    for (int j = 0; j < 6; ++j)
        transform_output_line(m[0][j], m[1][j], m[2][j], m[3][j], m[4][j], m[5][j], m[0][j], m[1][j], m[2][j], m[3][j]);
#pragma unroll
    for (int i = 0; i < 4; ++i)
        transform_output_line(m[i][0], m[i][1], m[i][2], m[i][3], m[i][4], m[i][5], m[i][0], m[i][1], m[i][2], m[i][3]);
}

// Images divided into output tiles, numbered along rows, then columns, then images.
struct TileGrid {  // filled by escalade/ops/conv2d/rungs/winograd.py, in this order
    int rows, columns;  // tiles down and across one image
    int first, count;   // the tiles that this launch works on
    int room;           // tiles that V and M have room for: `count` in whole blocks of the product
};

struct TilePosition {
    int image, output_row, output_column;  // of the tile's first output
};

template <int TILE>
__device__ __forceinline__ TilePosition position_of(const TileGrid& tiles, int tile) {
    const unsigned all = tiles.first + tile, per_image = tiles.rows * tiles.columns;
    const unsigned image = all / per_image, inside = all - image * per_image;
    const unsigned row = inside / tiles.columns, column = inside - row * tiles.columns;
    return {int(image), int(row * TILE), int(column * TILE)};
}
