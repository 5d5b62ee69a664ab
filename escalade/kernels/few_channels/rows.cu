// y[n][k][oh][ow] = max over the pooling window of relu(sum over c, r, s of x[...] * w[k][c][r][s] + bias[k])
//
// One CTA per TILE_ROWS rows of y of IMAGES images (several if they are whole). Their rows of x are staged in smem
// once, channel by channel in fp32, so that a run's window is read 16 bytes at a time; if runs start at odd columns,
// each has its own copy of its part of the row. Weights are in smem as [c][r][s][k]. A thread has RUN pixels of a row
// times FILTERS_EACH filters. Adjacent threads have the other filters of the same pixels: they share the reads of the
// window, and their stores fill whole sectors. With pooling, a thread walks down the rows of its windows and keeps the
// max in registers.
//
// Per S * RUN * FILTERS_EACH multiply-adds there are (RUN + S - 1) / 4 reads of x and S of weights: with 7 taps, 17
// pixels and 4 filters, 13 reads per 476. Limiter: FFMA throughput.
//
// Rung: `rows`. Read shape.cuh (sizes, image access).
#include "common/epilogue.cuh"
#include "common/ptx.cuh"
#include "few_channels/shape.cuh"
#include "max_pool2d/largest.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr bool HAS_BIAS = false;   // problem.bias
constexpr bool HAS_RELU = false;   // problem.relu
constexpr int POOL = 1;            // problem.pool
constexpr int FILTER_HEIGHT = 7;   // problem.filter_height
constexpr int FILTER_WIDTH = 7;    // problem.filter_width
constexpr int IMAGES = 1;          // config.images: per CTA
constexpr int TILE_ROWS = 12;      // config.rows: rows of y per CTA
constexpr int SEGMENTS = 3;        // config.segments: runs per row of the CTA
constexpr int RUN = 1;             // config.run: adjacent pixels per thread
constexpr int FILTERS_EACH = 1;    // config.filters: filters per thread
constexpr int FILTER_GROUPS = 4;   // tiling.filter_groups
constexpr int THREADS = 256;       // config.threads
constexpr int ROW_PITCH = 32;      // tiling.row_pitch
constexpr int SEGMENT_PITCH = 12;  // tiling.segment_pitch
constexpr int STAGE_SEGMENTS = 3;  // config.segments if tiling.copied else 1
constexpr int STAGE_COLUMNS = 8;   // tiling.stage_columns
constexpr int X_VECTOR = 1;        // tiling.x_vector
constexpr int Y_VECTOR = 1;        // tiling.y_vector
constexpr int UNROLL_ROWS = 1;     // 1
#endif

constexpr int CONV_ROWS = TILE_ROWS * POOL;
constexpr int INPUT_ROWS = CONV_ROWS + FILTER_HEIGHT - 1;
constexpr int PLANE = IMAGES * INPUT_ROWS * ROW_PITCH;        // one channel in smem
constexpr int WINDOW = (RUN + FILTER_WIDTH - 1 + 3) / 4 * 4;  // inputs per thread and row
constexpr int POOLED = RUN / POOL;
constexpr int ALL_FILTERS = FILTER_GROUPS * FILTERS_EACH;  // padded to whole groups
constexpr int TAPS = FILTER_HEIGHT * FILTER_WIDTH;
constexpr int WEIGHTS = (CHANNELS * TAPS * ALL_FILTERS + 3) / 4 * 4;
constexpr int TASKS = IMAGES * TILE_ROWS * SEGMENTS * FILTER_GROUPS;
constexpr int WIDE = FILTERS_EACH < 4 ? FILTERS_EACH : 4;
constexpr int AT_ONCE = 4;  // loads in flight while x is staged

__device__ __forceinline__ void stage_weights(float* weights, const Element* weight, int filters) {
    for (int i = threadIdx.x; i < CHANNELS * TAPS * ALL_FILTERS; i += THREADS) {
        const int filter = i / (CHANNELS * TAPS), at = i % (CHANNELS * TAPS);
        weights[at * ALL_FILTERS + filter] = filter < filters ? to_float(weight[filter * CHANNELS * TAPS + at]) : 0.f;
    }
}

// Passes load(i) to store(i, ...) for i < COUNT, AT_ONCE loads per thread in flight.
template <int COUNT, class Vector, class Load, class Store>
__device__ __forceinline__ void stage(Load load, Store store) {
#pragma unroll 1
    for (int first = threadIdx.x; first < COUNT; first += AT_ONCE * THREADS) {
        Vector packs[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j)
            if (first + j * THREADS < COUNT) packs[j] = load(first + j * THREADS);
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j)
            if (first + j * THREADS < COUNT) store(first + j * THREADS, packs[j]);
    }
}

// planes[channel][image][row][segment][column] = x, zero outside the images.
__device__ __forceinline__ void stage_input(float* planes, const Source* x, const FewChannelsShape& shape,
                                            long long first_image, int first_row, int first_column) {
    constexpr int LINES = IMAGES * INPUT_ROWS * STAGE_SEGMENTS;
    const Source* images = x + first_image * CHANNELS * shape.height * shape.width;
    // Offset of a line and column in its image; -1 outside.
    const auto pixel_of = [&](int line, int column) {
        const int image = line / (INPUT_ROWS * STAGE_SEGMENTS);
        const int row = first_row + line / STAGE_SEGMENTS % INPUT_ROWS;
        const int source_column = first_column + line % STAGE_SEGMENTS * RUN + column;
        const bool inside = first_image + image < shape.batch && row >= 0 && row < shape.height &&
                            source_column >= 0 && source_column < shape.width;
        return inside ? row * shape.width + source_column : -1;
    };
    const auto target_of = [&](int line, int column) {
        return planes + line / STAGE_SEGMENTS * ROW_PITCH + line % STAGE_SEGMENTS * SEGMENT_PITCH + column;
    };
    if (NHWC && CHANNELS > 1) {  // pixel by pixel
        using Pixel = Pack<Source, X_VECTOR>;
        constexpr int PARTS = (CHANNELS + X_VECTOR - 1) / X_VECTOR;
        struct Whole {
            Pixel part[PARTS];
        };
        stage<LINES * STAGE_COLUMNS, Whole>(
            [&](int i) {
                Whole whole = {};
                const int line = i / STAGE_COLUMNS, pixel = pixel_of(line, i % STAGE_COLUMNS);
                const long long image = line / (INPUT_ROWS * STAGE_SEGMENTS) * 1LL * shape.height * shape.width;
                if (pixel >= 0)
#pragma unroll
                    for (int p = 0; p < PARTS; ++p)
                        whole.part[p] =
                            load_pack<Source, X_VECTOR>(images + (image + pixel) * CHANNELS + p * X_VECTOR);
                return whole;
            },
            [&](int i, const Whole& whole) {
                float* target = target_of(i / STAGE_COLUMNS, i % STAGE_COLUMNS);
#pragma unroll
                for (int c = 0; c < CHANNELS; ++c)
                    target[c * PLANE] = to_float(whole.part[c / X_VECTOR].at[c % X_VECTOR]);
            });
    } else {  // X_VECTOR columns at a time: all inside or all outside
        constexpr int VECTORS = STAGE_COLUMNS / X_VECTOR;
        stage<CHANNELS * LINES * VECTORS, Pack<Source, X_VECTOR>>(
            [&](int i) {
                Pack<Source, X_VECTOR> pack = {};
                const int channel = i / (LINES * VECTORS), line = i / VECTORS % LINES;
                const int pixel = pixel_of(line, i % VECTORS * X_VECTOR);
                const long long plane = line / (INPUT_ROWS * STAGE_SEGMENTS) * CHANNELS + channel;
                if (pixel >= 0)
                    pack = load_pack<Source, X_VECTOR>(images + plane * shape.height * shape.width + pixel);
                return pack;
            },
            [&](int i, const Pack<Source, X_VECTOR>& pack) {
                const int channel = i / (LINES * VECTORS), line = i / VECTORS % LINES;
                Pack<float, X_VECTOR> wide;
#pragma unroll
                for (int e = 0; e < X_VECTOR; ++e) wide.at[e] = to_float(pack.at[e]);
                store_pack(target_of(line, i % VECTORS * X_VECTOR) + channel * PLANE, wide);
            });
    }
}

// RUN pixels of one row of the convolution for FILTERS_EACH filters.
__device__ __forceinline__ void convolve(float (&sums)[RUN][FILTERS_EACH], const float* input, const float* weights) {
#pragma unroll 1
    for (int c = 0; c < CHANNELS; ++c) {
#pragma unroll UNROLL_ROWS
        for (int r = 0; r < FILTER_HEIGHT; ++r) {
            float window[WINDOW];
#pragma unroll
            for (int i = 0; i < WINDOW; i += 4) {
                const Pack<float, 4> pack = load_pack<float, 4>(input + r * ROW_PITCH + i);
#pragma unroll
                for (int e = 0; e < 4; ++e) window[i + e] = pack.at[e];
            }
#pragma unroll
            for (int s = 0; s < FILTER_WIDTH; ++s) {
                float w[FILTERS_EACH];
#pragma unroll
                for (int k = 0; k < FILTERS_EACH; k += WIDE) {
                    const Pack<float, WIDE> pack =
                        load_pack<float, WIDE>(weights + (r * FILTER_WIDTH + s) * ALL_FILTERS + k);
#pragma unroll
                    for (int e = 0; e < WIDE; ++e) w[k + e] = pack.at[e];
                }
#pragma unroll
                for (int i = 0; i < RUN; ++i)
#pragma unroll
                    for (int k = 0; k < FILTERS_EACH; ++k) sums[i][k] += window[i + s] * w[k];
            }
        }
        input += PLANE;
        weights += TAPS * ALL_FILTERS;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    few_channels_rows(const Source* __restrict__ x, const Element* __restrict__ weight,
                      const Element* __restrict__ bias, Element* __restrict__ y, FewChannelsShape shape,
                      int row_tiles, int column_tiles, int weights_ready) {
    extern __shared__ float4 shared_memory[];
    float* const weights = shared_part(reinterpret_cast<float*>(shared_memory), WEIGHTS);
    float* const planes = shared_part(reinterpret_cast<float*>(shared_memory) + WEIGHTS, REST);

    const long long first_image = 1LL * (blockIdx.x / column_tiles / row_tiles) * IMAGES;
    const int first_row = blockIdx.x / column_tiles % row_tiles * TILE_ROWS;  // of y
    const int first_column = blockIdx.x % column_tiles * SEGMENTS * POOLED;   // of y
    if (!weights_ready) wait_for_previous_launch();
    stage_weights(weights, weight, shape.filters);
    wait_for_previous_launch();  // returns at once if already waited for
    stage_input(planes, x, shape, first_image, first_row * POOL - shape.pad_h, first_column * POOL - shape.pad_w);
    __syncthreads();

#pragma unroll 1
    for (int task = threadIdx.x; task < TASKS; task += THREADS) {
        const int group = task % FILTER_GROUPS, segment = task / FILTER_GROUPS % SEGMENTS;
        // Rows outermost: the last may have fewer rows of the convolution, and whole warps finish them early.
        const int image = task / (FILTER_GROUPS * SEGMENTS) % IMAGES;
        const int tile_row = task / (FILTER_GROUPS * SEGMENTS * IMAGES);
        const int row = first_row + tile_row, column = first_column + segment * POOLED;
        if (first_image + image >= shape.batch || row >= shape.output_height || column >= shape.output_width) continue;

        float maxima[POOLED][FILTERS_EACH];
#pragma unroll 1
        for (int i = 0; i < POOL; ++i) {
            if (POOL > 1 && row * POOL + i >= shape.conv_height) break;
            float sums[RUN][FILTERS_EACH] = {};
            convolve(sums,
                     planes + (image * INPUT_ROWS + tile_row * POOL + i) * ROW_PITCH + segment * SEGMENT_PITCH,
                     weights + group * FILTERS_EACH);
#pragma unroll
            for (int j = 0; j < RUN; ++j)
#pragma unroll
                for (int k = 0; k < FILTERS_EACH; ++k) {
                    float& kept = maxima[j / POOL][k];
                    if (j % POOL == 0) {
                        kept = i == 0 ? sums[j][k] : larger(kept, sums[j][k]);
                    } else if (column * POOL + j < shape.conv_width) {
                        kept = larger(kept, sums[j][k]);
                    }
                }
        }

        // Y_VECTOR consecutive elements: filters in NHWC, pixels in NCHW.
        constexpr int PIXEL_STEP = NHWC ? 1 : Y_VECTOR, FILTER_STEP = NHWC ? Y_VECTOR : 1;
        const int pixels = shape.output_height * shape.output_width;
        Element* target = y + (first_image + image) * shape.filters * pixels;
#pragma unroll
        for (int j = 0; j < POOLED; j += PIXEL_STEP)
#pragma unroll
            for (int k = 0; k < FILTERS_EACH; k += FILTER_STEP) {
                const int filter = group * FILTERS_EACH + k;
                if (column + j >= shape.output_width || filter >= shape.filters) continue;
                Pack<Element, Y_VECTOR> pack;
#pragma unroll
                for (int e = 0; e < Y_VECTOR; ++e)
                    pack.at[e] = finish<HAS_BIAS, false, HAS_RELU, Element>(
                        NHWC ? maxima[j][k + e] : maxima[j + e][k], bias, NHWC ? filter + e : filter, nullptr, 0);
                store_pack(target + output_offset(filter, row * shape.output_width + column + j, shape.filters, pixels),
                           pack);
            }
    }
}
