// y[p][k] = activated(sum over taps of z[q(p, tap)][tap][k] + bias[k]),  z[q][tap][k] = sum over c of x[q][c] *
// w[k][tap][c]
//
// Many channels, few filters, limited by reading x: an autoencoder's last layer. The columns of one GEMM are all taps
// of all filters, so x is read once, directly from global memory into mma.sync registers, 16 bytes per lane. The
// mapping of channels to k is free, and the weights in smem are permuted to match. The products of a band of rows stay
// in smem; every output gathers its taps from there (col2im).
//   TRANSPOSED  gather as a transposed convolution, q * STRIDE + tap - pad = p: the gradient of an input with few
//               channels; weights are [c][tap][k]
//   PRODUCTS    3: fp32 accuracy by splitting operands into two TF32 parts; tensor cores round toward zero, so recent
//               sums are promoted to fp32 accumulators every other block of channels
// Limiter: memory bandwidth for x.
//
// Rung: `col2im`. conv2d_input_gradient launches it with TRANSPOSED.

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;              // scatter.dtype
constexpr int PRODUCTS = 3;         // scatter.products
constexpr bool TRANSPOSED = false;  // scatter.transposed
constexpr int CHANNELS = 24;        // scatter.channels
constexpr int FILTERS = 40;         // scatter.filters
constexpr int FILTER_HEIGHT = 1;    // scatter.taps[0]
constexpr int FILTER_WIDTH = 1;     // scatter.taps[1]
constexpr int STRIDE_H = 2;         // scatter.stride[0]
constexpr int STRIDE_W = 2;         // scatter.stride[1]
constexpr int DILATION_H = 1;       // scatter.dilation[0]
constexpr int DILATION_W = 1;       // scatter.dilation[1]
constexpr int BAND = 1;             // config.band: rows of y per band, whose products are in shared memory
constexpr int DEPTH = 4;            // depth
constexpr int WARPS = 8;            // warps
constexpr int BLOCKS_PER_SM = 3;    // config.together(scatter, card)
constexpr bool HAS_BIAS = true;     // epilogue.bias
constexpr bool HAS_RELU = true;     // epilogue.relu
#endif

#include "common/epilogue.cuh"
#include "common/mma_tile.cuh"
#include "common/ptx.cuh"

struct Col2imShape {
    int batch;                        // scatter.batch
    int height, width;                // scatter.image: of x
    int output_height, output_width;  // scatter.output: of y
    int pad_h, pad_w;                 // scatter.padding
    int bands;                        // config.bands(scatter): per image, of BAND rows of y each
};

constexpr bool PAIRED = sizeof(Element) == 2;
constexpr int LANE = 16 / sizeof(Element);  // consecutive channels per lane
constexpr int BLOCK = 4 * LANE;             // channels of two k-steps
constexpr int BLOCKS = (CHANNELS + BLOCK * DEPTH - 1) / (BLOCK * DEPTH) * DEPTH;
constexpr int TAPS = FILTER_HEIGHT * FILTER_WIDTH;
constexpr int COLUMNS = TAPS * FILTERS;
constexpr int TILES_N = (COLUMNS + 7) / 8;
constexpr int PITCH = TILES_N * 8 + 2;  // floats per pixel of z
constexpr int THREADS = WARPS * 32;
constexpr int TILE = 16;  // pixels per warp
constexpr int PARTS = PRODUCTS == 3 ? 2 : 1;
constexpr int WEIGHT_WORDS = BLOCKS * TILES_N * 32 * 4;

// The k of a step: step 0 takes the first half of a lane's 16 bytes, step 1 the second. A word is two adjacent 16-bit
// channels, or one 32-bit channel.
__device__ __forceinline__ u32 weight_word(const Element* weight, int column, int channel) {
    constexpr int UNIT = 4 / sizeof(Element);
    Pack<Element, UNIT> word;
    const int tap = column / FILTERS, filter = column % FILTERS;
#pragma unroll
    for (int e = 0; e < UNIT; ++e) {
        const int at = TRANSPOSED ? ((channel + e) * TAPS + tap) * FILTERS + filter
                                  : (filter * TAPS + tap) * CHANNELS + channel + e;
        word.at[e] = column < COLUMNS && channel + e < CHANNELS ? weight[at] : from_float<Element>(0.f);
    }
    return reinterpret_cast<const u32&>(word);
}

__device__ __forceinline__ void stage_weights(u32* weights, const Element* weight) {
#pragma unroll 8
    for (int at = threadIdx.x; at < WEIGHT_WORDS; at += THREADS) {
        const int word = at % 4, lane = at / 4 % 32, j = at / 128 % TILES_N, block = at / 128 / TILES_N;
        const int channel = block * BLOCK + lane % 4 * LANE + word * (PAIRED ? 2 : 1);
        u32 bits = weight_word(weight, j * 8 + lane / 4, channel);
        if constexpr (PRODUCTS == 3) weights[WEIGHT_WORDS + at] = split_off_low(bits);
        else if (!PAIRED) bits = to_tf32(__uint_as_float(bits));
        weights[at] = bits;
    }
}

using Slot = Pack<u32, 4>[2];  // a lane's channels of a block, for two pixels
using Accumulators = float[TILES_N][4];

__device__ __forceinline__ void load(Slot& slot, const Element* const (&pixels)[2], int block) {
    const int channel = block * BLOCK + threadIdx.x % 4 * LANE;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const Pack<Element, LANE> pack = load_pack_if<Element, LANE>(
            pixels[half] != nullptr && (CHANNELS % (BLOCK * DEPTH) == 0 || channel < CHANNELS), pixels[half] + channel);
        slot[half] = reinterpret_cast<const Pack<u32, 4>&>(pack);
    }
}

// Two k-steps: words 0 and 1 of each lane, then 2 and 3.
__device__ __forceinline__ void multiply(Accumulators& acc, Accumulators& recent, const Slot& slot, const u32* weights,
                                         bool promote) {
    u32 a[2][4], low[2][4];
#pragma unroll
    for (int step = 0; step < 2; ++step)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            a[step][e] = slot[e % 2].at[step * 2 + e / 2];
            if constexpr (PRODUCTS == 3) low[step][e] = split_off_low_fast(a[step][e]);
            else if (!PAIRED) a[step][e] = to_tf32(__uint_as_float(a[step][e]));
        }
#pragma unroll
    for (int j = 0; j < TILES_N; ++j) {
        const u32* mine = weights + (j * 32 + threadIdx.x % 32) * 4;
        const Pack<u32, 4> b = load_pack<u32, 4>(mine);
        if constexpr (PRODUCTS == 3) {
            const Pack<u32, 4> b_low = load_pack<u32, 4>(mine + WEIGHT_WORDS);
#pragma unroll
            for (int step = 0; step < 2; ++step) {
                multiply_add<Element>(recent[j], low[step], {b.at[2 * step], b.at[2 * step + 1]});
                multiply_add<Element>(recent[j], a[step], {b_low.at[2 * step], b_low.at[2 * step + 1]});
                multiply_add<Element>(recent[j], a[step], {b.at[2 * step], b.at[2 * step + 1]});
            }
#pragma unroll
            for (int e = 0; promote && e < 4; ++e) acc[j][e] += recent[j][e], recent[j][e] = 0.f;
        } else {
#pragma unroll
            for (int step = 0; step < 2; ++step)
                multiply_add<Element>(acc[j], a[step], {b.at[2 * step], b.at[2 * step + 1]});
        }
    }
}

// Products of 16 pixels with all columns, stored to z.
__device__ __forceinline__ void make_tile(float* z, const u32* weights, const Element* first_pixel, int first, int pixels) {
    const int group = threadIdx.x % 32 / 4, pair = threadIdx.x % 4 * 2;
    const Element* rows[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int pixel = first + group + half * 8;
        rows[half] = pixel < pixels ? first_pixel + 1LL * pixel * CHANNELS : nullptr;
    }
    Accumulators acc = {}, recent = {};
    Slot slots[DEPTH];
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) load(slots[d], rows, d);
#pragma unroll 1
    for (int block = 0; block < BLOCKS; block += DEPTH)
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) {
            multiply(acc, recent, slots[d], weights + (block + d) * TILES_N * 128, d % 2 == 1 || d == DEPTH - 1);
            if (block + DEPTH < BLOCKS) load(slots[d], rows, block + DEPTH + d);
        }
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int j = 0; j < TILES_N; ++j)
            if (first + group + half * 8 < pixels)
                store_pack(z + (first + group + half * 8) * PITCH + j * 8 + pair,
                           Pack<float, 2>{{acc[j][half * 2], acc[j][half * 2 + 1]}});
}

// Pixel of x that a tap of an output reads, along one dimension; -1 if none.
template <int STRIDE, int DILATION>
__device__ __forceinline__ int source_pixel(int at, int tap, int pad, int size) {
    const int moved = TRANSPOSED ? at + pad - tap * DILATION : at * STRIDE - pad + tap * DILATION;
    const int pixel = TRANSPOSED ? moved / STRIDE : moved;
    return moved < 0 || (TRANSPOSED && moved % STRIDE) || pixel >= size ? -1 : pixel;
}

__device__ __forceinline__ void gather(const float* z, const Element* bias, Element* y, const Col2imShape& shape, int n,
                                       int first_row, int rows, int first_source) {
    const int row_elements = shape.output_width * FILTERS;
    Element* target = y + (1LL * n * shape.output_height + first_row) * row_elements;
    for (int at = threadIdx.x; at < rows * row_elements; at += THREADS) {
        const int filter = at % FILTERS, column = at / FILTERS % shape.output_width, row = at / row_elements;
        float sum = HAS_BIAS ? to_float(bias[filter]) : 0.f;
#pragma unroll
        for (int r = 0; r < FILTER_HEIGHT; ++r) {
            const int h = source_pixel<STRIDE_H, DILATION_H>(first_row + row, r, shape.pad_h, shape.height);
#pragma unroll
            for (int s = 0; s < FILTER_WIDTH; ++s) {
                const int w = source_pixel<STRIDE_W, DILATION_W>(column, s, shape.pad_w, shape.width);
                if (h >= 0 && w >= 0)
                    sum += z[((h - first_source) * shape.width + w) * PITCH + (r * FILTER_WIDTH + s) * FILTERS + filter];
            }
        }
        target[at] = from_float<Element>(activated<HAS_RELU>(sum));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    conv2d_col2im(const Element* __restrict__ x, const Element* __restrict__ weight, const Element* __restrict__ bias,
                  Element* __restrict__ y, Col2imShape shape) {
    extern __shared__ __align__(16) unsigned char shared_memory[];
    wait_for_previous_launch();
    u32* const weights = shared_part(reinterpret_cast<u32*>(shared_memory), PARTS * WEIGHT_WORDS);
    float* const z = shared_part(reinterpret_cast<float*>(shared_memory) + PARTS * WEIGHT_WORDS, REST);
    stage_weights(weights, weight);
    __syncthreads();
    for (int band = blockIdx.x; band < shape.batch * shape.bands; band += gridDim.x) {
        const int n = band / shape.bands, first_row = band % shape.bands * BAND;
        const int rows = min(BAND, shape.output_height - first_row), last_row = first_row + rows - 1;
        constexpr int REACH = (FILTER_HEIGHT - 1) * DILATION_H;
        const int from = TRANSPOSED ? (first_row + shape.pad_h - REACH + STRIDE_H - 1) / STRIDE_H
                                    : first_row * STRIDE_H - shape.pad_h;
        const int to = TRANSPOSED ? (last_row + shape.pad_h) / STRIDE_H : last_row * STRIDE_H - shape.pad_h + REACH;
        const int first_source = max(0, from), pixels = (min(shape.height - 1, to) - first_source + 1) * shape.width;
        const Element* first_pixel = x + (1LL * n * shape.height + first_source) * shape.width * CHANNELS;
        for (int first = threadIdx.x / 32 * TILE; first < pixels; first += WARPS * TILE)
            make_tile(z, weights, first_pixel, first, pixels);
        __syncthreads();
        gather(z, bias, y, shape, n, first_row, rows, first_source);
        __syncthreads();
    }
}
