// y[n][c] = relu(inverse(transform(x[n][c]) * conj(weights[c])) + bias[c] + residual), per tile
//
// A depthwise convolution does not sum over channels, so tiles are independent: this kernel transforms, multiplies and
// transforms back. The thread that ends the forward transform of some frequencies starts their inverse, so the product
// is formed in its registers.
// Limiter: smem, twelve passes over the tile; x is read once, y written once.
//
// Rung: `fft_fused`. Read fft_planes.cuh (tiles), then fft_output.cuh (epilogue).
#include "conv2d/fft_output.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1)
conv2d_fft_depthwise(const Element* __restrict__ x, const float2* __restrict__ weights, const Element* bias,
                     const Element* residual, Element* y, FftPlanes input, FftPlanes output) {
    extern __shared__ float4 shared_memory[];
    __shared__ PlanePosition input_positions[PLANES], output_positions[PLANES];
    const Tiles tiles(reinterpret_cast<float2*>(shared_memory));
    find_positions(input_positions, input);
    find_positions(output_positions, output);
    __syncthreads();

    tiles.forward(PixelSource{x, input, input_positions, 1.f});
    tiles.frequencies<true, true>([&](int plane, int k1, int column, float2(&values)[Tiles::RADIX]) {
        const float2* weight = weights + input_positions[plane].channel * Tiles::FREQUENCIES + column;
#pragma unroll
        for (int k2 = 0; k2 < Tiles::RADIX; ++k2)
            values[k2] = product_with_conjugate(values[k2], weight[(k1 + 8 * k2) * Tiles::COLUMNS]);
    });
    tiles.inverse(PixelSink{bias, residual, y, output, output_positions});
}
