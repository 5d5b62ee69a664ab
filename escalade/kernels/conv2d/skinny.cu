// y[pixel][filter] = activated(sum over taps and channels of x[window(pixel, tap)][c] * weight[filter][tap][c] +
//                              bias[filter] + residual[pixel][filter])
// or, with HAS_MASK, mask > 0 ? sum : 0, the gradient of a ReLU; the mask is passed in place of the residual. NHWC.
//
// Few channels, many filters, limited by writing y: a network's first layer, and the input gradient of its last one if
// that has few filters. A band of rows of x is in smem, pixel by pixel, channels padded to whole words; the k of an MMA
// are the words of the taps in order, so nothing is gathered. Filters are the rows of mma.sync, permuted so that a
// lane's results of a pixel are adjacent: they are stored directly from registers, 16 bytes per lane and whole lines
// per warp. Each CTA permutes the weights itself when it starts, so no launch packs them.
//   FLIPPED   weights are [c][tap][filter], those of the convolution this is the gradient of, and the taps are reversed
//   STEPS     MMAs of 8 columns across an image; PITCH: words per row of a band
//   PRODUCTS  3: fp32, operands split into two TF32 parts. Tensor cores round toward zero at each of the few steps:
//             results are off by 3e-7 to 5e-7 on an H200; separate accumulators per step would take registers that a
//             second CTA needs
//   POOL_H, POOL_W  y is the max over disjoint windows, with PLACES also the argmax, one byte each, 255 where a ReLU is
//                   inactive. A warp has the rows of a window in adjacent steps and a lane its two columns, so the max
//                   is taken in registers and the full-size result is never written
// Limiter: writing y; if pooled, instruction issue.
//
// Rung: `skinny`. conv2d_input_gradient launches it with FLIPPED and HAS_MASK. common/placed_maximum.cuh has PyTorch's
// argmax rule.

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Element = float;            // bands.dtype
constexpr int PRODUCTS = 1;       // bands.products
constexpr bool FLIPPED = false;   // flipped
constexpr int CHANNELS = 8;       // bands.channels
constexpr int FILTER_HEIGHT = 3;  // bands.taps[0]
constexpr int FILTER_WIDTH = 3;   // bands.taps[1]
constexpr int STRIDE_H = 1;       // bands.stride[0]
constexpr int STRIDE_W = 1;       // bands.stride[1]
constexpr int DILATION_H = 1;     // bands.dilation[0]
constexpr int DILATION_W = 1;     // bands.dilation[1]
constexpr int BAND = 1;           // config.band: output rows per band
constexpr int STEPS = 2;          // bands.steps
constexpr int PITCH = 72;         // bands.pitch
constexpr int WARPS_M = 1;        // config.warps_m: warps along the filters
constexpr int WARPS_N = 8;        // config.warps_n
constexpr int TILES_N = 4;        // bands.tiles_n
constexpr int POOL_H = 1;         // bands.pool[0]
constexpr int POOL_W = 1;         // bands.pool[1]
constexpr bool PLACES = false;    // bands.places
constexpr int BLOCKS_PER_SM = 2;  // blocks_per_sm
constexpr bool HAS_BIAS = true;   // epilogue.bias
constexpr bool HAS_RESIDUAL = false;// epilogue.residual
constexpr bool HAS_RELU = true;   // epilogue.relu
constexpr bool HAS_MASK = false;  // epilogue.mask
#endif

#include "common/epilogue.cuh"
#include "common/mma_tile.cuh"
#include "common/pairs.cuh"
#include "common/placed_maximum.cuh"
#include "common/ptx.cuh"

struct SkinnyShape {
    int batch;                        // bands.batch
    int height, width;                // bands.image
    int filters;                      // bands.filters
    int output_height, output_width;  // bands.output
    int pad_h, pad_w;                 // bands.padding
    int bands;                        // config.bands(bands): per image
};

constexpr bool PAIRED = sizeof(Element) == 2;
constexpr int UNIT = 4 / sizeof(Element);  // elements per word
constexpr int PIXEL_WORDS = (CHANNELS + UNIT - 1) / UNIT;
constexpr int LANE = 16 / sizeof(Element);  // adjacent filters per lane
constexpr int PACKS = PAIRED ? 1 : 2;       // of them
constexpr int FILTERS = 64;                 // per warp: rows of four MMAs
constexpr int TILES_M = FILTERS / 16;
constexpr int TAPS = FILTER_HEIGHT * FILTER_WIDTH;
constexpr int WORDS = TAPS * PIXEL_WORDS;
constexpr int STEPS_K = (WORDS + 7) / 8;
constexpr int BAND_ROWS = (BAND - 1) * STRIDE_H + (FILTER_HEIGHT - 1) * DILATION_H + 1;
constexpr int THREADS = WARPS_M * WARPS_N * 32;
constexpr int BLOCK_FILTERS = WARPS_M * FILTERS;
constexpr int PARTS = PRODUCTS == 3 ? 2 : 1;              // parts per number
constexpr int WEIGHT_WORDS = STEPS_K * TILES_M * 32 * 4;  // of a warp's filters, per part

static_assert(TILES_N % POOL_H == 0 && BAND % POOL_H == 0 && 2 % POOL_W == 0, "a warp holds whole windows");

using Word = Pack<Element, UNIT>;

// Filter, relative to the warp's first, of row `group + 8 * half` of MMA i.
__device__ __forceinline__ int filter_of(int i, int half, int group) {
    return PAIRED ? group * LANE + 2 * i + half : half * FILTERS / 2 + group * LANE + i;
}

// Word `word` of a filter's weights, zero-padded.
__device__ __forceinline__ u32 weight_word(const Element* weight, int filter, int word, int filters) {
    const int tap = word / PIXEL_WORDS, first = word % PIXEL_WORDS * UNIT;
    Word result;
#pragma unroll
    for (int e = 0; e < UNIT; ++e) {
        const int channel = first + e;
        const bool exists = filter < filters && tap < TAPS && channel < CHANNELS;
        const int at = FLIPPED ? (channel * TAPS + TAPS - 1 - tap) * filters + filter
                               : (filter * TAPS + tap) * CHANNELS + channel;
        result.at[e] = exists ? weight[at] : from_float<Element>(0.f);
    }
    return reinterpret_cast<const u32&>(result);
}

// Weights of the CTA's filters in fragment order; the low parts of split weights follow all high parts.
__device__ __forceinline__ void stage_weights(u32* weights, const Element* weight, int first_filter, int filters) {
#pragma unroll 4
    for (int at = threadIdx.x; at < WARPS_M * WEIGHT_WORDS; at += THREADS) {
        const int e = at % 4, lane = at / 4 % 32, i = at / 128 % TILES_M, step = at / 128 / TILES_M % STEPS_K;
        const int filter = first_filter + at / WEIGHT_WORDS * FILTERS + filter_of(i, e % 2, lane / 4);
        u32 word = weight_word(weight, filter, step * 8 + e / 2 * 4 + lane % 4, filters);
        if constexpr (PRODUCTS == 3) weights[WARPS_M * WEIGHT_WORDS + at] = split_off_low(word);
        else if (!PAIRED) word = to_tf32(__uint_as_float(word));
        weights[at] = word;
    }
}

// A band of x, zero outside the image.
__device__ __forceinline__ void stage_band(u32* words, const Element* x, const SkinnyShape& shape, int band) {
    const int n = band / shape.bands, first_row = band % shape.bands * BAND * STRIDE_H - shape.pad_h;
    const int pixels = PITCH / PIXEL_WORDS;
#pragma unroll 2
    for (int at = threadIdx.x; at < BAND_ROWS * pixels; at += THREADS) {
        const int row = first_row + at / pixels, column = at % pixels - shape.pad_w;
        const bool inside = 0 <= row && row < shape.height && 0 <= column && column < shape.width;
        const Element* pixel = x + ((1LL * n * shape.height + row) * shape.width + column) * CHANNELS;
#pragma unroll
        for (int i = 0; i < PIXEL_WORDS; ++i) {
            Word word;
#pragma unroll
            for (int e = 0; e < UNIT; ++e)
                word.at[e] = inside && i * UNIT + e < CHANNELS ? pixel[i * UNIT + e] : from_float<Element>(0.f);
            words[at * PIXEL_WORDS + i] = reinterpret_cast<const u32&>(word);
        }
    }
}

using Accumulators = float[TILES_M][TILES_N][4];

// Initializes the accumulators with the bias. A lane's filters are adjacent: eight, or twice four.
__device__ __forceinline__ void begin(Accumulators& acc, const float* biases) {
    Pack<float, 4> packs[2] = {};
    const int group = threadIdx.x % 32 / 4;
#pragma unroll
    for (int pack = 0; HAS_BIAS && pack < 2; ++pack)
        packs[pack] = load_pack<float, 4>(biases + (PAIRED ? group * LANE + pack * 4 : pack * FILTERS / 2 + group * LANE));
#pragma unroll
    for (int i = 0; i < TILES_M; ++i)
#pragma unroll
        for (int j = 0; j < TILES_N; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int half = e / 2, number = 2 * i + half;
                acc[i][j][e] = PAIRED ? packs[number / 4].at[number % 4] : packs[half].at[i];
            }
}

// Row and first column in the band of a step's 8 pixels; past the last step it repeats that one.
struct Steps {
    int row[TILES_N], column[TILES_N];
    int count;  // number that exist

    __device__ __forceinline__ explicit Steps(int first) {
        const int all = BAND * STEPS;
        count = min(TILES_N, all - first);
#pragma unroll
        for (int j = 0; j < TILES_N; ++j) {
            // vertically adjacent rows of a window are consecutive
            const int step = min(first + j, all - 1), windows = step / POOL_H;
            row[j] = windows / STEPS * POOL_H + step % POOL_H;
            column[j] = windows % STEPS * 8;
        }
    }
};

__device__ __forceinline__ void multiply(Accumulators& acc, const u32* words, const u32* weights, const Steps& steps,
                                         const int (&offsets)[STEPS_K][2]) {
    const int lane = threadIdx.x % 32;
    int pixels[TILES_N];
#pragma unroll
    for (int j = 0; j < TILES_N; ++j)
        pixels[j] = steps.row[j] * STRIDE_H * PITCH + (steps.column[j] + lane / 4) * STRIDE_W * PIXEL_WORDS;
#pragma unroll
    for (int step = 0; step < STEPS_K; ++step) {
        u32 b[TILES_N][2], lower[TILES_N][2];
#pragma unroll
        for (int j = 0; j < TILES_N; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const bool exists = step * 8 + e * 4 + 3 < WORDS || step * 8 + e * 4 + lane % 4 < WORDS;
                b[j][e] = exists ? words[pixels[j] + offsets[step][e]] : 0;
                if constexpr (PRODUCTS == 3) lower[j][e] = split_off_low_fast(b[j][e]);
                else if (!PAIRED) b[j][e] = to_tf32(__uint_as_float(b[j][e]));
            }
#pragma unroll
        for (int i = 0; i < TILES_M; ++i) {
            const u32* mine = weights + ((step * TILES_M + i) * 32 + lane) * 4;
            const Pack<u32, 4> a = load_pack<u32, 4>(mine);
            if constexpr (PRODUCTS == 3) {
                const Pack<u32, 4> low = load_pack<u32, 4>(mine + WARPS_M * WEIGHT_WORDS);
#pragma unroll
                for (int j = 0; j < TILES_N; ++j) multiply_add<Element>(acc[i][j], low.at, b[j]);
#pragma unroll
                for (int j = 0; j < TILES_N; ++j) multiply_add<Element>(acc[i][j], a.at, lower[j]);
            }
#pragma unroll
            for (int j = 0; j < TILES_N; ++j) multiply_add<Element>(acc[i][j], a.at, b[j]);
        }
    }
}

// Two adjacent elements as stored, and back. Templates because 32-bit results have no packed pairs.
template <class Stored = Element>
__device__ __forceinline__ void to_words(u32* words, float2 two) {
    if constexpr (sizeof(Stored) == 2) words[0] = pack_pair<Stored>(two.x, two.y);
    else words[0] = __float_as_uint(two.x), words[1] = __float_as_uint(two.y);
}

template <class Stored = Element>
__device__ __forceinline__ float2 from_words(const u32* words) {
    if constexpr (sizeof(Stored) == 2) return unpack_pair<Stored>(words[0]);
    else return make_float2(__uint_as_float(words[0]), __uint_as_float(words[1]));
}

// Two results of adjacent filters before the ReLU; `other` is their residual or mask.
__device__ __forceinline__ float2 finished(float2 acc, float2 other) {
    if (!HAS_MASK) return activated_pair<HAS_RESIDUAL, false>(acc, other);
    return make_float2(other.x <= 0.f ? 0.f : acc.x, other.y <= 0.f ? 0.f : acc.y);  // NaN passes the gradient
}

// A lane's results of one pixel, LANE adjacent filters. `side` selects one of the two pixels of a step.
__device__ __forceinline__ void finish_pixel(float (&results)[LANE], const Accumulators& acc, int j, int side, int pack,
                                             const Element* residual) {
    Pack<u32, 4> others = {};
    if (HAS_MASK || HAS_RESIDUAL) others = load_pack<u32, 4>(reinterpret_cast<const u32*>(residual));
#pragma unroll
    for (int pair = 0; pair < LANE / 2; ++pair) {
        const int first = PAIRED ? pair : 2 * pair, second = PAIRED ? pair : 2 * pair + 1;  // their MMAs
        const int row = PAIRED ? 0 : pack, other_row = PAIRED ? 1 : pack;                   // their 8 rows
        const float2 sums_of_two = {acc[first][j][row * 2 + side], acc[second][j][other_row * 2 + side]};
        const float2 two = finished(sums_of_two, from_words(&others.at[pair * 2 / UNIT]));
        results[pair * 2] = two.x, results[pair * 2 + 1] = two.y;
    }
}

// Max and argmax of a window that begins at step j and `side`. EXACT also gives a NaN its index, at the price of
// another comparison per result; without it, the return value reports a NaN.
template <bool EXACT>
__device__ __forceinline__ bool find_largest(Largest (&largest)[LANE], const Accumulators& acc, int j, int side,
                                             int pack, const Element* residual, long long row_step, int column_step) {
    bool found_nan = false;
#pragma unroll
    for (int index = 0; index < POOL_H * POOL_W; ++index) {
        const int r = index / POOL_W, s = index % POOL_W;
        float results[LANE];
        finish_pixel(results, acc, j + r, side + s, pack, residual + r * row_step + s * column_step);
#pragma unroll
        for (int e = 0; e < LANE; ++e) {
            if (index == 0) largest[e] = {results[e], 0};
            else if (EXACT) largest[e].update(results[e], index);
            else largest[e].update_number(results[e], index);
        }
    }
#pragma unroll
    for (int e = 0; e < LANE; ++e) found_nan |= largest[e].value != largest[e].value;
    return found_nan;
}

// The ReLU is applied last, to the max.
__device__ __forceinline__ void store(Element* y, const Largest (&largest)[LANE]) {
    const auto result = [&](int e) { return HAS_RELU ? max_nan(largest[e].value, 0.f) : largest[e].value; };
    Pack<u32, 4> words;
#pragma unroll
    for (int pair = 0; pair < LANE / 2; ++pair)
        to_words(&words.at[pair * 2 / UNIT], make_float2(result(pair * 2), result(pair * 2 + 1)));
    store_16(y, make_uint4(words.at[0], words.at[1], words.at[2], words.at[3]));
}

__device__ __forceinline__ void store_indices(unsigned char* indices, const Largest (&largest)[LANE]) {
    Pack<u32, LANE / 4> words = {};
#pragma unroll
    for (int e = 0; e < LANE; ++e) words.at[e / 4] |= stored_index<HAS_RELU>(largest[e]) << e % 4 * 8;
    store_pack(reinterpret_cast<u32*>(indices), words);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    conv2d_skinny(const Element* __restrict__ x, const Element* __restrict__ weight, const Element* __restrict__ bias,
                  const Element* __restrict__ residual, Element* __restrict__ y, unsigned char* __restrict__ indices,
                  SkinnyShape shape) {
    extern __shared__ __align__(16) unsigned char shared_memory[];
    wait_for_previous_launch();
    u32* const weights = shared_part(reinterpret_cast<u32*>(shared_memory), PARTS * WARPS_M * WEIGHT_WORDS);
    float* const numbers = reinterpret_cast<float*>(shared_memory) + PARTS * WARPS_M * WEIGHT_WORDS;
    float* const biases = shared_part(numbers, BLOCK_FILTERS);
    u32* const words = shared_part(reinterpret_cast<u32*>(numbers + BLOCK_FILTERS), REST);
    const int lane = threadIdx.x % 32, warp_m = threadIdx.x / 32 % WARPS_M, warp_n = threadIdx.x / 32 / WARPS_M;
    const int first_filter = (blockIdx.y * WARPS_M + warp_m) * FILTERS;
    stage_weights(weights, weight, blockIdx.y * BLOCK_FILTERS, shape.filters);

    for (int i = threadIdx.x; HAS_BIAS && i < BLOCK_FILTERS; i += THREADS) {
        const int filter = blockIdx.y * BLOCK_FILTERS + i;
        biases[i] = filter < shape.filters ? to_float(bias[filter]) : 0.f;
    }
    int offsets[STEPS_K][2];
#pragma unroll
    for (int step = 0; step < STEPS_K; ++step)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int word = min(step * 8 + e * 4 + lane % 4, WORDS - 1), tap = word / PIXEL_WORDS;
            offsets[step][e] = tap / FILTER_WIDTH * DILATION_H * PITCH +
                               tap % FILTER_WIDTH * DILATION_W * PIXEL_WORDS + word % PIXEL_WORDS;
        }

    for (int band = blockIdx.x; band < shape.batch * shape.bands; band += gridDim.x) {
        __syncthreads();
        stage_band(words, x, shape, band);
        __syncthreads();
        const int n = band / shape.bands, first_row = band % shape.bands * BAND;
        for (int first = warp_n * TILES_N; first < BAND * STEPS; first += WARPS_N * TILES_N) {
            const Steps steps(first);
            Accumulators acc;
            begin(acc, biases + warp_m * FILTERS);
            multiply(acc, words, weights + warp_m * WEIGHT_WORDS, steps, offsets);
#pragma unroll
            for (int j = 0; j < TILES_N; j += POOL_H)
#pragma unroll
                for (int side = 0; side < 2; side += POOL_W) {
                    const int row = first_row + steps.row[j], column = steps.column[j] + lane % 4 * 2 + side;
                    if (j >= steps.count || row + POOL_H > shape.output_height || column + POOL_W > shape.output_width)
                        continue;
                    const long long pixel = (1LL * n * shape.output_height + row) * shape.output_width + column;
                    const long long window = (1LL * n * (shape.output_height / POOL_H) + row / POOL_H) *
                                                 (shape.output_width / POOL_W) + column / POOL_W;
#pragma unroll
                    for (int pack = 0; pack < PACKS; ++pack) {
                        const int filter = first_filter + pack * FILTERS / 2 + lane / 4 * LANE;
                        if (filter >= shape.filters) continue;
                        const Element* others = residual + pixel * shape.filters + filter;
                        const long long row_step = 1LL * shape.output_width * shape.filters;
                        Largest largest[LANE];
                        if (find_largest<false>(largest, acc, j, side, pack, others, row_step, shape.filters) && PLACES)
                            find_largest<true>(largest, acc, j, side, pack, others, row_step, shape.filters);
                        store(y + window * shape.filters + filter, largest);
                        if (PLACES) store_indices(indices + window * shape.filters + filter, largest);
                    }
                }
        }
    }
}
