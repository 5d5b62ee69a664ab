// y[n][c] = gate(sum over s of gate_weight[c][s] * activation(sum over k of weight[s][k] * mean[n][k] + bias[s])
//                + gate_bias[c]), where mean[n][k] is the mean of x[n][pixel][k] over the pixels
//
// One CTA per image. A thread sums the pixels of a channel, then the products of a squeezed feature, then those of a
// gate; the threads of a warp read rows of weights, so their loads are scattered. Limiter: latency of dependent loads.
//
// Rung: `naive`. Read layers.cuh (activations).
#include "squeeze_excite/layers.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr int CHANNELS = 32;  // problem.channels
constexpr int SQUEEZED = 8;   // problem.squeezed
constexpr int PIXELS = 35;    // problem.pixels
constexpr int THREADS = 256;  // config.threads
#endif

extern "C" __global__ void __launch_bounds__(THREADS)
    squeeze_excite_naive(const Element* x, const Element* weight, const Element* bias, const Element* gate_weight,
                         const Element* gate_bias, Element* y, int x_pitch) {
    extern __shared__ float shared[];
    float *means = shared_part(shared, CHANNELS), *hidden = shared_part(shared + CHANNELS, REST);
    wait_for_previous_launch();
    const Element* image = x + 1LL * blockIdx.x * PIXELS * x_pitch;
    for (int c = threadIdx.x; c < CHANNELS; c += THREADS) {
        float sum = 0.f;
        for (int pixel = 0; pixel < PIXELS; ++pixel) sum += to_float(image[1LL * pixel * x_pitch + c]);
        means[c] = sum / PIXELS;
    }
    __syncthreads();
    for (int s = threadIdx.x; s < SQUEEZED; s += THREADS) {
        float sum = 0.f;
        for (int c = 0; c < CHANNELS; ++c) sum += to_float(weight[s * CHANNELS + c]) * means[c];
        hidden[s] = squeezed(sum, bias, s);
    }
    __syncthreads();
    for (int c = threadIdx.x; c < CHANNELS; c += THREADS) {
        float sum = 0.f;
        for (int s = 0; s < SQUEEZED; ++s) sum += to_float(gate_weight[c * SQUEEZED + s]) * hidden[s];
        y[1LL * blockIdx.x * CHANNELS + c] = gated(sum, gate_bias, c);
    }
}
