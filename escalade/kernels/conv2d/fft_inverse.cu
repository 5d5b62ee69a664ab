// y = relu(inverse transform of spectra + bias + residual), over the outputs of each tile
//
// Inverse transform. DEPTHWISE: every channel has its own filter and nothing is summed, so the product spectra[plane] *
// conj(weights[channel]) is formed here on the fly.
// Limiter: bytes read or, in L2, smem: six passes over the tile.
//
// Rung: `fft`. Read fft_planes.cuh (tiles), then fft_output.cuh (epilogue).
#include "conv2d/fft_output.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr bool DEPTHWISE = false;  // depthwise: multiply with the filters' spectra first
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1)
conv2d_fft_inverse(const float2* __restrict__ spectra, const float2* __restrict__ weights, const Element* bias,
                   const Element* residual, Element* y, FftPlanes shape) {
    extern __shared__ float4 shared_memory[];
    __shared__ PlanePosition positions[PLANES];
    const Tiles tiles(reinterpret_cast<float2*>(shared_memory));
    find_positions(positions, shape);
    __syncthreads();

    const int first_plane = blockIdx.x * PLANES;
    tiles.frequencies<false, true>([&](int plane, int k1, int column, float2(&values)[Tiles::RADIX]) {
        // Planes past the last one repeat it; none of their pixels is stored.
        const int source = min(first_plane + plane, shape.planes - 1);
        const float2* spectrum = spectra + 1LL * source * Tiles::FREQUENCIES + column;
#pragma unroll
        for (int k2 = 0; k2 < Tiles::RADIX; ++k2) values[k2] = spectrum[(k1 + 8 * k2) * Tiles::COLUMNS];
        if constexpr (DEPTHWISE) {
            const float2* weight = weights + positions[plane].channel * Tiles::FREQUENCIES + column;
#pragma unroll
            for (int k2 = 0; k2 < Tiles::RADIX; ++k2)
                values[k2] = product_with_conjugate(values[k2], weight[(k1 + 8 * k2) * Tiles::COLUMNS]);
        }
    });
    tiles.inverse(PixelSink{bias, residual, y, shape, positions});
}
