// spectra[plane][u][v] = 2 SCALE * sum over h, w of tile(plane)[h][w] * exp(-2 pi i (u h + v w) / TILE)
//
// Forward transform of images and filters; a filter is an image of one tile. Conjugate symmetry leaves v <= TILE/2, so
// a spectrum is as large as its tile.
// Limiter: bytes written or, in L2, smem: six passes over the tile.
//
// Rungs: `fft` (images and filters), `fft_fused` (filters only). Read fft_planes.cuh for the tiles.
#include "conv2d/fft_planes.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr float SCALE = 0.0009765625f;  // scale: factor of all transforms, applied to the filters
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1)
conv2d_fft_forward(const Element* __restrict__ source, float2* __restrict__ spectra, FftPlanes shape) {
    extern __shared__ float4 shared_memory[];
    __shared__ PlanePosition positions[PLANES];
    const Tiles tiles(reinterpret_cast<float2*>(shared_memory));
    find_positions(positions, shape);
    __syncthreads();

    tiles.forward(PixelSource{source, shape, positions, SCALE});

    const int first_plane = blockIdx.x * PLANES;
    tiles.frequencies<true, false>([&](int plane, int k1, int column, const float2(&values)[Tiles::RADIX]) {
        if (first_plane + plane >= shape.planes) return;
        float2* spectrum = spectra + 1LL * (first_plane + plane) * Tiles::FREQUENCIES + column;
#pragma unroll
        for (int k2 = 0; k2 < Tiles::RADIX; ++k2) spectrum[(k1 + 8 * k2) * Tiles::COLUMNS] = values[k2];
    });
}
