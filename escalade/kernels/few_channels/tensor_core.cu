// y = pool(relu(sum over r, s, c of x[n][row + r - pad][column + s - pad][c] * weight[k][c][r][s] + bias[k]))
//
// A product on tensor cores that does not mind how few channels there are: its rows are pairs of neighbouring output
// pixels, its columns the filters for both, and k the pixels of a filter row that a pair sees (see tensor_core.cuh):
// with 7 taps, 7 of 8 products count. Blocks stay; a block takes IMAGES images at a time, staged in shared memory once
// while those before are computed. A warp keeps its weights in registers for good and takes 16 pairs of columns by
// ROWS output rows, from wherever in the tile they are: a fragment of an image row is loaded once and serves all the
// output rows that see it. With four channels a pair begins every 16 bytes, so that ldmatrix reads windows that
// overlap; with one every 4 bytes, a word a lane.
//
// Pooling is in registers too: a lane has all pixels of a window, for the pairs of a window 4 wide are rows `group`
// and `group` + 8 of the product. Where the last windows of a row hang over and have only one pair (NARROW), those of
// two blocks of rows share the two rows, so that no pair is computed that is not there.
//
// SPLIT: fp32 by fp16 halves, three products of them for one (see halves.cuh), x with one power of two for a tile.
// Tensor cores round sums towards zero, so those of each image row (with one channel, of four) join the others in fp32.
//
// Weights of zero stand where a pair's pixel is outside one of its two windows, and zero times infinity is NaN: a tile
// with a pixel that is not finite (SPLIT: or weights) is computed plainly.
//
// What bounds it: one channel, memory; four, the rate of mma.sync.
//
// The prelude has besides: Source, Element, Operand (16 bits), HEIGHT, WIDTH, PAD_H, PAD_W, OUTPUT_HEIGHT, OUTPUT_WIDTH,
// NHWC, HAS_BIAS, HAS_RELU, POOL (1, 2 or 4), IMAGES, ROWS, WARPS, BLOCKS_PER_SM, ROW_BLOCKS (of ROWS, in an image),
// CELLS_IN_ROW (pairs, or windows of two), NARROW, STAGED_WIDTH (pixels as they are copied), OPERAND_WIDTH (pixels as
// they are multiplied, a few more where that puts pairs into different banks), SOURCE_BUFFER (elements of a tile as it
// is stored, 0 where that is how it is multiplied), BUFFER (of its operands, and what is read past their end),
// COPY_BYTES (at once; 0: element by element, for images that are not staged as they lie in memory).
#include "common/epilogue.cuh"
#include "common/mma_tile.cuh"
#include "common/pairs.cuh"
#include "common/warp.cuh"
#include "common/halves.cuh"
#include "few_channels/tensor_core.cuh"

constexpr int THREADS = WARPS * 32;
constexpr int WORKERS = WARPS / UNITS;  // warps that share the rows of the product
static_assert(WARPS % UNITS == 0, "every unit has as many warps");
static_assert(POOL == 1 || ROWS % POOL == 0, "windows end with the rows of a warp");
constexpr int CONV_HEIGHT = HEIGHT + 2 * PAD_H - FILTER_HEIGHT + 1;
constexpr int CONV_WIDTH = WIDTH + 2 * PAD_W - FILTER_WIDTH + 1;
constexpr int IMAGE = HEIGHT * WIDTH * CHANNELS;
constexpr int OUTPUT_IMAGE = OUTPUT_HEIGHT * OUTPUT_WIDTH * FILTERS;

constexpr int PAIRS_IN_CELL = POOL == 4 ? 2 : 1;
constexpr int CELLS_IN_TILE = 16 / PAIRS_IN_CELL;  // of the product's rows
constexpr int WIDE_CELLS = ROW_BLOCKS * CELLS_IN_ROW;
constexpr int NARROW_CELLS = NARROW ? (ROW_BLOCKS + 1) / 2 : 0;
constexpr int CELLS_IN_IMAGE = WIDE_CELLS + NARROW_CELLS;
static_assert(!NARROW || (POOL == 4 && CELLS_IN_ROW == OUTPUT_WIDTH - 1), "the last windows of a row are apart");

constexpr bool DIRECT = sizeof(Source) == 2;  // staged as it is, so that a tile and the next have a buffer each
constexpr int STAGED_HEIGHT = HEIGHT + 2 * PAD_H;
constexpr int STAGED_ROW = STAGED_WIDTH * PIXEL;
constexpr int STAGED_IMAGE = STAGED_HEIGHT * STAGED_ROW;
constexpr int STAGED = IMAGES * STAGED_IMAGE;
constexpr int OPERAND_ROW = OPERAND_WIDTH * PIXEL;
constexpr int OPERAND_IMAGE = STAGED_HEIGHT * OPERAND_ROW;
constexpr int OPERANDS = IMAGES * OPERAND_IMAGE;
constexpr int ROW_BYTES = OPERAND_ROW * 2;
static_assert(ROW_BYTES % (SINGLE ? 4 : 16) == 0 && BUFFER % 16 == 0 && SOURCE_BUFFER % 16 == 0, "pairs are aligned");
static_assert(OPERAND_WIDTH == STAGED_WIDTH || STAGED_ROW * 2 % 16 == 0, "copies end with a row");

// Where element `at` of a tile as it is copied lies among the operands.
__device__ __forceinline__ int operand_at(int at) { return at + at / STAGED_ROW * (OPERAND_ROW - STAGED_ROW); }

__device__ __forceinline__ float to_float(unsigned char value) { return value; }

// ------------------------------------------------------------------ staging

template <int BYTES>
__device__ __forceinline__ void copy_async(u32 shared, const void* global, bool inside) {
    if constexpr (BYTES == 16) copy_async_16(shared, global, inside);
    if constexpr (BYTES == 8) copy_async_8(shared, global, inside);
    if constexpr (BYTES == 4) copy_async_4(shared, global, inside);
}

// `images` images from `first` on, as they are stored; zeros in their padding and in place of images that are missing.
__device__ __forceinline__ void fetch(Source* staged, const Source* __restrict__ x, long long first, int images) {
    x += first * IMAGE;
    if constexpr (COPY_BYTES > 0) {
        const char* source = reinterpret_cast<const char*>(x);
        const int bytes = images * IMAGE * static_cast<int>(sizeof(Source));
        const u32 target = shared_address(staged);
#pragma unroll 1
        for (int at = threadIdx.x * COPY_BYTES; at < STAGED * static_cast<int>(sizeof(Source));
             at += THREADS * COPY_BYTES) {
            if (at >= bytes || at + COPY_BYTES <= bytes) {
                const int to = DIRECT ? operand_at(at / 2) * 2 : at;
                copy_async<COPY_BYTES>(target + to, source + at, at < bytes);
            } else {  // an odd number of images may end inside a copy
                const int end = (at + COPY_BYTES) / sizeof(Source);
#pragma unroll 1
                for (int i = at / sizeof(Source); i < end; ++i)
                    staged[DIRECT ? operand_at(i) : i] = i < images * IMAGE ? x[i] : Source(0.f);
            }
        }
        copy_async_commit();
    } else {
#pragma unroll 1
        for (int at = threadIdx.x; at < STAGED; at += THREADS) {
            const int c = at % PIXEL, column = at / PIXEL % STAGED_WIDTH - PAD_W;
            const int row = at / PIXEL / STAGED_WIDTH % STAGED_HEIGHT - PAD_H, image = at / STAGED_IMAGE;
            const bool exists = image < images && row >= 0 && row < HEIGHT && column >= 0 && column < WIDTH;
            const int pixel = row * WIDTH + column;
            staged[DIRECT ? operand_at(at) : at] =
                exists && c < CHANNELS
                    ? x[image * IMAGE + (NHWC ? pixel * CHANNELS + c : c * HEIGHT * WIDTH + pixel)]
                    : Source(0.f);
        }
    }
}

// The last bit of the exponent of two operands.
template <class T>
constexpr u32 LAST_EXPONENT_BITS = 0;
#ifdef __CUDA_FP16_H__
template <>
constexpr u32 LAST_EXPONENT_BITS<__half> = 0x04000400;
#endif
#ifdef __CUDA_BF16_H__
template <>
constexpr u32 LAST_EXPONENT_BITS<__nv_bfloat16> = 0x00800080;
#endif

// Operands that are infinite or NaN: their exponent is all ones, and one more carries into the sign.
struct Finite {
    u32 carries = 0;
    __device__ __forceinline__ void look_at(u32 pair) {
        carries |= (pair & 0x7FFF7FFF) + LAST_EXPONENT_BITS<Operand>;
    }
    __device__ __forceinline__ bool violated() const { return carries & 0x80008000; }
};

// Whether this thread's part of a staged tile is not finite.
__device__ __forceinline__ bool inspect(const Operand* operands) {
    Finite finite;
#pragma unroll 2
    for (int at = threadIdx.x * 8; at < OPERANDS; at += THREADS * 8) {
        const Pack<u32, 4> four = load_pack<u32, 4>(reinterpret_cast<const u32*>(operands + at));
#pragma unroll
        for (int i = 0; i < 4; ++i) finite.look_at(four.at[i]);
    }
    return finite.violated();
}

// The same while it is converted.
__device__ __forceinline__ bool convert(Operand* operands, const Source* staged) {
    Finite finite;
#pragma unroll 2
    for (int at = threadIdx.x * 4; at < STAGED; at += THREADS * 4) {
        const Pack<Source, 4> four = load_pack<Source, 4>(staged + at);
        Pack<u32, 2> pairs;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            pairs.at[i] = pack_pair<Operand>(to_float(four.at[2 * i]), to_float(four.at[2 * i + 1]));
            finite.look_at(pairs.at[i]);
        }
        store_pack(reinterpret_cast<u32*>(operands + operand_at(at)), pairs);
    }
    return finite.violated();
}

// The upper and then the lower halves, by a power of two whose exponent is returned (or that the tile is not finite).
__device__ __forceinline__ int convert_split(Operand* operands, const Source* staged) {
    __shared__ u32 warp_largest[WARPS];
    const int thread = thread_number();
    u32 largest = 0;
#pragma unroll 2
    for (int at = thread * 4; at < STAGED; at += THREADS * 4) {
        const Pack<Source, 4> four = load_pack<Source, 4>(staged + at);
#pragma unroll
        for (int i = 0; i < 4; ++i) largest = max(largest, __float_as_uint(to_float(four.at[i])) & 0x7FFFFFFF);
    }
    largest = warp_max(largest);
    if (thread % 32 == 0) warp_largest[thread / 32] = largest;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < WARPS; ++i) largest = max(largest, warp_largest[i]);
    const int exponent = scaling_exponent(largest);
    const float scale = power_of_two(exponent);
#pragma unroll 2
    for (int at = thread * 4; at < STAGED; at += THREADS * 4) {
        const Pack<Source, 4> four = load_pack<Source, 4>(staged + at);
        Pack<u32, 2> upper, lower;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const Halves halves = split(to_float(four.at[2 * i]) * scale, to_float(four.at[2 * i + 1]) * scale);
            upper.at[i] = halves.upper, lower.at[i] = halves.lower;
        }
        store_pack(reinterpret_cast<u32*>(operands + operand_at(at)), upper);
        store_pack(reinterpret_cast<u32*>(operands + BUFFER + operand_at(at)), lower);
    }
    return largest < INFINITY_BITS ? exponent : NOT_FINITE;
}

// Whether the power of two that takes a sum to what it stands for is a normal number; a filter with a weight that is
// not finite is out of range too.
__device__ __forceinline__ bool in_range(int tile_exponent, const int* exponents) {
    bool in_range = true;
#pragma unroll 1
    for (int f = thread_number(); f < FILTERS; f += THREADS) in_range &= abs(tile_exponent + exponents[f]) <= 126;
    return in_range;
}

// ------------------------------------------------------------------ where the rows of the product are

struct Place {
    bool exists;  // in a tile that is full
    bool narrow;  // a window of one pair
    int cell;
    int image;    // of the tile
    int row;      // of the convolution, the first of ROWS
    int pair;     // of columns

    // Row i of 16 in block m. The pairs of a window lie in rows `group` and `group` + 8, in an order in which eight
    // neighbouring rows begin in different banks.
    __device__ __forceinline__ Place(int m, int i) {
        cell = m * CELLS_IN_TILE + i % CELLS_IN_TILE;
        const int inside = min(cell, IMAGES * CELLS_IN_IMAGE - 1), in_image = inside % CELLS_IN_IMAGE;
        image = inside / CELLS_IN_IMAGE;
        exists = true;
        narrow = NARROW && in_image >= WIDE_CELLS;
        if (narrow) {
            const int block = in_image - WIDE_CELLS + i / 8 * NARROW_CELLS;
            exists = block < ROW_BLOCKS;
            row = min(block, ROW_BLOCKS - 1) * ROWS;
            pair = 2 * CELLS_IN_ROW;
        } else {
            row = in_image / CELLS_IN_ROW * ROWS;
            pair = (NARROW ? in_image : inside) % CELLS_IN_ROW;
            if (PAIRS_IN_CELL == 2) pair = 2 * pair + ((i % 8 >= 4) != (i >= 8));
        }
    }

    // Of the first element among the operands.
    __device__ __forceinline__ int operand() const {
        return image * OPERAND_IMAGE + row * OPERAND_ROW + 2 * pair * PIXEL;
    }
};

// ------------------------------------------------------------------ the product

using Sums = float[TILES_N][4];
using Weights = u32[PACKED * 2][2];

// Neighbouring steps for one output row: `a` are pixels, `at` is the first fragment of the weights.
template <int STEPS>
__device__ __forceinline__ void multiply(float (&sum)[4], const u32 (&a)[STEPS][SETS][4], const Weights& weights,
                                         int at, int t) {
    if constexpr (SPLIT) {  // the smaller products first
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            multiply_add<Operand>(sum, a[step][1], weights[(at + step) * TILES_N + t]);
            multiply_add<Operand>(sum, a[step][0], weights[(FRAGMENTS + at + step) * TILES_N + t]);
        }
    }
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
        multiply_add<Operand>(sum, a[step][0], weights[(at + step) * TILES_N + t]);
}

// What an output row adds up. Where SPLIT, JOINT calls in a row have a sum of their own.
struct Row {
    static constexpr int JOINT = SINGLE ? 2 : 1;
    Sums sums;
    Sums part;

    // `call` of `calls`.
    template <int STEPS>
    __device__ __forceinline__ void add(const u32 (&a)[STEPS][SETS][4], const Weights& weights, int at, int call,
                                        int calls) {
        const bool begins = SPLIT ? call % JOINT == 0 : call == 0;
        const bool ends = call % JOINT == JOINT - 1 || call == calls - 1;
#pragma unroll
        for (int t = 0; t < TILES_N; ++t) {
            if (begins)
#pragma unroll
                for (int e = 0; e < 4; ++e) part[t][e] = 0.f;
            multiply(part[t], a, weights, at, t);
            if (!SPLIT || ends)
#pragma unroll
                for (int e = 0; e < 4; ++e) sums[t][e] = SPLIT && call >= JOINT ? sums[t][e] + part[t][e] : part[t][e];
        }
    }
};

// Zero, for which the assembler has to wait for `sum`, because it does not know that `none` is zero. Addresses are
// moved by it where the assembler would otherwise start so many image rows at once that it runs out of registers.
__device__ __forceinline__ int zero_after(float sum, int none) { return SPLIT ? __float_as_int(sum) & none : 0; }

// ROWS output rows of block m; `finish(r, sums)` takes each when it is complete.
template <class Finish>
__device__ __forceinline__ void convolve(const Operand* operands, const Weights& weights, int m, int none,
                                         Finish finish) {
    const int lane = threadIdx.x % 32, group = lane / 4, member = lane % 4;
    Row rows[ROWS];
    if constexpr (SINGLE) {
        const u32* upper = reinterpret_cast<const u32*>(operands + Place(m, group).operand()) + member;
        const u32* lower = reinterpret_cast<const u32*>(operands + Place(m, group + 8).operand()) + member;
#pragma unroll
        for (int j = 0; j < (ROWS + FILTER_HEIGHT) / 2; ++j) {
            if (j >= 2) {
                const int zero = zero_after(rows[min(2 * j - 3, ROWS - 1)].part[0][0], none);
                upper += zero, lower += zero;
            }
            u32 a[1][SETS][4];
#pragma unroll
            for (int set = 0; set < SETS; ++set)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int word = set * (BUFFER / 2) + (2 * j + i) * (ROW_BYTES / 4);
                    a[0][set][2 * i] = upper[word], a[0][set][2 * i + 1] = lower[word];
                }
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                const int step = j - r / 2, steps = (FILTER_HEIGHT + r % 2 + 1) / 2;
                if (step < 0 || step >= steps) continue;
                rows[r].add(a, weights, r % 2 * ROW_PAIR_STEPS + step, step, steps);
                if (step == steps - 1) finish(r, rows[r].sums);
            }
        }
    } else {
        u32 pixels = shared_address(operands + Place(m, lane % 16).operand()) + lane / 16 * 16;
#pragma unroll
        for (int i = 0; i < ROWS + FILTER_HEIGHT - 1; ++i) {
            if (i >= 2) pixels += zero_after(rows[min(i - 2, ROWS - 1)].sums[0][0], none);
            u32 a[ROW_STEPS][SETS][4];
#pragma unroll
            for (int step = 0; step < ROW_STEPS; ++step)
#pragma unroll
                for (int set = 0; set < SETS; ++set)
                    load_matrices(a[step][set], pixels + set * (BUFFER * 2) + i * ROW_BYTES + step * 32);
#pragma unroll
            for (int r = 0; r < ROWS; ++r)
                if (r <= i && i - r < FILTER_HEIGHT)
                    rows[r].add(a, weights, (i - r) * ROW_STEPS, i - r, FILTER_HEIGHT);
            if (i >= FILTER_HEIGHT - 1) finish(i - FILTER_HEIGHT + 1, rows[i - FILTER_HEIGHT + 1].sums);
        }
    }
}

// ------------------------------------------------------------------ y

// What follows a sum of one filter: its unit, bias and ReLU.
struct Epilogue {
    float bias[LANE_FILTERS];
    float scale[LANE_FILTERS];

    __device__ __forceinline__ Epilogue(const Element* biases, int first) {
#pragma unroll
        for (int f = 0; f < LANE_FILTERS; ++f)
            bias[f] = HAS_BIAS && first + f < FILTERS ? to_float(biases[first + f]) : 0.f;
    }

    __device__ __forceinline__ void move_to(int tile_exponent, const int* exponents, int first) {
#pragma unroll
        for (int f = 0; f < LANE_FILTERS; ++f)
            scale[f] = power_of_two(-(tile_exponent + (first + f < FILTERS ? exponents[first + f] : 0)));
    }

    __device__ __forceinline__ float operator()(float sum, int f) const {
        if (SPLIT) sum *= scale[f];
        if (HAS_BIAS) sum += bias[f];
        return HAS_RELU ? relu(sum) : sum;
    }
};

// Neighbouring elements; whether the address is aligned to as many is known when this is compiled.
template <bool ALIGNED, int COUNT>
__device__ __forceinline__ void store(Element* y, const float (&values)[COUNT], int exist) {
    if constexpr (ALIGNED) {
        if constexpr (sizeof(Element) == 2 && COUNT % 2 == 0) {
            Pack<u32, COUNT / 2> pairs;
#pragma unroll
            for (int i = 0; i < COUNT / 2; ++i) pairs.at[i] = pack_pair<Element>(values[2 * i], values[2 * i + 1]);
            store_pack(reinterpret_cast<u32*>(y), pairs);
        } else {
            Pack<Element, COUNT> pack;
            from_floats(pack, values);
            store_pack(y, pack);
        }
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
            if (i < exist) y[i] = from_float<Element>(values[i]);
    }
}

// A lane's share of the output rows of one block: two pairs of columns, or one window of two pairs.
struct Writer {
    // Of a pooling window, what is not there: rows (of a block, from this one on), pairs, the second pixel of a pair.
    static constexpr int SURE_ROWS = OUTPUT_HEIGHT * POOL > CONV_HEIGHT ? CONV_HEIGHT - (ROW_BLOCKS - 1) * ROWS : ROWS;
    static constexpr bool MASK_PAIRS = !NARROW && OUTPUT_WIDTH * POOL >= CONV_WIDTH + 2;
    static constexpr bool MASK_COLUMNS = OUTPUT_WIDTH * POOL > CONV_WIDTH && CONV_WIDTH % 2;
    static constexpr int CELLS = NARROW ? 2 : 2 / PAIRS_IN_CELL;
    const Epilogue& epilogue;
    int filters;      // that exist, of this lane's
    Element* y[2];    // the first element, for both pairs or cells
    int rows[2];      // how many of y's exist
    int conv_rows[2];
    int columns[2];   // of a pair, how many exist
    bool narrow;      // windows of one pair each
    float best[TILES_N][2];

    __device__ __forceinline__ Writer(const Epilogue& epilogue, Element* y, int images, int m, int unit)
        : epilogue(epilogue) {
        const int lane = threadIdx.x % 32, group = lane / 4, member = lane % 4;
        const int filter = first_filter(unit, member);
        filters = FILTERS - filter;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const Place place(m, group + 8 * h);
            const int column = 2 * place.pair + lane_offset(unit, member);
            const int output_row = place.row / POOL, output_column = column / POOL;
            conv_rows[h] = CONV_HEIGHT - place.row;
            columns[h] = CONV_WIDTH - column;
            narrow = place.narrow;
            const bool exists = place.exists && place.cell < images * CELLS_IN_IMAGE && filters > 0 &&
                                (POOL > 1 || columns[h] > 0) && (!NARROW || narrow || h == 0);
            rows[h] = exists ? OUTPUT_HEIGHT - output_row : 0;
            const int pixel = output_row * OUTPUT_WIDTH + output_column;
            this->y[h] = y + place.image * OUTPUT_IMAGE +
                         (NHWC ? pixel * FILTERS + filter : filter * OUTPUT_HEIGHT * OUTPUT_WIDTH + pixel);
        }
    }

    __device__ __forceinline__ void add(int r, const Sums& sums) {
        if constexpr (POOL > 1) {
            pool(r, sums);
        } else {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                if constexpr (PAIRED) {
                    if (r < rows[h]) store_columns(y[h] + r * OUTPUT_WIDTH, sums, h);
                } else {
                    float values[LANE_FILTERS];
#pragma unroll
                    for (int f = 0; f < LANE_FILTERS; ++f) values[f] = epilogue(sums[f / 2][2 * h + f % 2], f);
                    if (r < rows[h])
                        store<FILTERS % LANE_FILTERS == 0>(y[h] + r * OUTPUT_WIDTH * FILTERS, values,
                                                           filters);
                }
            }
        }
    }

private:
    // NCHW: two columns of each filter.
    __device__ __forceinline__ void store_columns(Element* pixel, const Sums& sums, int h) {
#pragma unroll
        for (int t = 0; t < TILES_N; ++t)
            if (t < filters) {
                const float values[2] = {epilogue(sums[t][2 * h], t), epilogue(sums[t][2 * h + 1], t)};
                store<OUTPUT_WIDTH % 2 == 0>(pixel + t * OUTPUT_HEIGHT * OUTPUT_WIDTH, values, columns[h]);
            }
    }

    __device__ __forceinline__ void pool(int r, const Sums& sums) {
        const float lowest = -__uint_as_float(INFINITY_BITS);
#pragma unroll
        for (int t = 0; t < TILES_N; ++t)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float right = MASK_COLUMNS && columns[h] < 2 ? lowest : sums[t][2 * h + 1];
                float larger = max_nan(sums[t][2 * h], right);
                if ((r >= SURE_ROWS && r >= conv_rows[h]) || (MASK_PAIRS && columns[h] < 1)) larger = lowest;
                float& most = best[t][h % CELLS];
                most = r % POOL == 0 && h < CELLS ? larger : max_nan(most, larger);
            }
        if (r % POOL < POOL - 1) return;
        if (NARROW && !narrow)
#pragma unroll
            for (int t = 0; t < TILES_N; ++t) best[t][0] = max_nan(best[t][0], best[t][1]);
#pragma unroll
        for (int h = 0; h < CELLS; ++h) {
            float values[TILES_N];
#pragma unroll
            for (int t = 0; t < TILES_N; ++t) values[t] = epilogue(best[t][h], t);
            if (r / POOL < rows[h]) {
                Element* pixel = y[h] + r / POOL * OUTPUT_WIDTH * (NHWC ? FILTERS : 1);
                if constexpr (NHWC) {
                    store<FILTERS % TILES_N == 0>(pixel, values, filters);
                } else {
#pragma unroll
                    for (int t = 0; t < TILES_N; ++t)
                        if (t < filters) pixel[t * OUTPUT_HEIGHT * OUTPUT_WIDTH] = from_float<Element>(values[t]);
                }
            }
        }
    }
};

// ------------------------------------------------------------------ tiles that are not finite

// One output of the convolution, as PyTorch has it.
__device__ __forceinline__ float plain_sum(const Source* __restrict__ image, const Element* __restrict__ weights,
                                           int row, int column) {
    float sum = 0.f;
#pragma unroll 1
    for (int r = 0; r < FILTER_HEIGHT; ++r)
#pragma unroll 1
        for (int s = 0; s < FILTER_WIDTH; ++s) {
            const int source_row = row + r - PAD_H, source_column = column + s - PAD_W;
            if (source_row < 0 || source_row >= HEIGHT || source_column < 0 || source_column >= WIDTH) continue;
            const int pixel = source_row * WIDTH + source_column;
#pragma unroll 1
            for (int c = 0; c < CHANNELS; ++c) {
                const Source value = image[NHWC ? pixel * CHANNELS + c : c * HEIGHT * WIDTH + pixel];
                sum += to_float(from_float<Element>(to_float(value))) *
                       to_float(weights[(c * FILTER_HEIGHT + r) * FILTER_WIDTH + s]);
            }
        }
    return sum;
}

__device__ __forceinline__ void convolve_plainly(const Source* __restrict__ x, const Element* __restrict__ weight,
                                                 const Element* __restrict__ bias, Element* __restrict__ y,
                                                 int images) {
#pragma unroll 1
    for (int at = threadIdx.x; at < images * OUTPUT_IMAGE; at += THREADS) {
        const int image = at / OUTPUT_IMAGE, inside = at % OUTPUT_IMAGE;
        const int filter = NHWC ? inside % FILTERS : inside / (OUTPUT_HEIGHT * OUTPUT_WIDTH);
        const int pixel = NHWC ? inside / FILTERS : inside % (OUTPUT_HEIGHT * OUTPUT_WIDTH);
        const int row = pixel / OUTPUT_WIDTH * POOL, column = pixel % OUTPUT_WIDTH * POOL;
        float best = -__uint_as_float(INFINITY_BITS);
#pragma unroll 1
        for (int i = row; i < min(row + POOL, CONV_HEIGHT); ++i)
#pragma unroll 1
            for (int j = column; j < min(column + POOL, CONV_WIDTH); ++j)
                best = max_nan(best, plain_sum(x + image * IMAGE, weight + filter * (CHANNELS * FILTER_HEIGHT *
                                                                                      FILTER_WIDTH), i, j));
        y[at] = finish<HAS_BIAS, false, HAS_RELU, Element>(best, bias, filter, nullptr, 0);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    few_channels_tensor_core(const Source* __restrict__ x, const Element* __restrict__ weight,
                             const Element* __restrict__ bias, Element* __restrict__ y,
                             const u32* __restrict__ packed, const int* __restrict__ exponents, int batch) {
    // Two tiles of operands; or one as it is stored, and its operands (the upper and the lower halves).
    extern __shared__ __align__(128) unsigned char shared_memory[];
    Operand* operands = reinterpret_cast<Operand*>(shared_memory + SOURCE_BUFFER * sizeof(Source));
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, unit = warp % UNITS;
    wait_for_previous_launch();

    Weights weights;
#pragma unroll
    for (int i = 0; i < PACKED; ++i) {
        const Pack<u32, 4> four = load_pack<u32, 4>(packed + ((unit * PACKED + i) * 32 + lane) * 4);
#pragma unroll
        for (int e = 0; e < 4; ++e) weights[2 * i + e / 2][e % 2] = four.at[e];
    }
    Epilogue epilogue(bias, first_filter(unit, lane % 4));

    // What is read past the end of a row or a tile is multiplied by zeros or dropped: it must only be finite.
#pragma unroll 1
    for (int at = threadIdx.x; at < (DIRECT || SPLIT ? 2 : 1) * BUFFER; at += THREADS) operands[at] = Operand(0.f);
#pragma unroll 1
    for (int at = STAGED + threadIdx.x; at < SOURCE_BUFFER; at += THREADS)
        reinterpret_cast<Source*>(shared_memory)[at] = Source(0.f);
    if (DIRECT) __syncthreads();  // the first tile comes on top

    const u32 tiles = (batch + IMAGES - 1u) / IMAGES;
    const auto fetch_tile = [&](u32 tile, int buffer) {
        if (tile < tiles)
            fetch(reinterpret_cast<Source*>(shared_memory) + (DIRECT ? buffer * BUFFER : 0), x, 1LL * tile * IMAGES,
                  min(IMAGES, static_cast<int>(batch - tile * IMAGES)));
    };
    fetch_tile(blockIdx.x, 0);
    int turn = 0;
#pragma unroll 1
    for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x, turn ^= 1) {
        copy_async_wait<0>();
        __syncthreads();  // this tile is there, and nobody reads the one before
        bool strange;
        int exponent = 0;
        const Operand* staged = operands;
        if constexpr (DIRECT) {
            fetch_tile(tile + gridDim.x, 1 - turn);
            staged += turn * BUFFER;
            strange = inspect(staged);
        } else if constexpr (SPLIT) {
            exponent = convert_split(operands, reinterpret_cast<const Source*>(shared_memory));
            strange = exponent == NOT_FINITE || !in_range(exponent, exponents);
        } else {
            strange = convert(operands, reinterpret_cast<const Source*>(shared_memory));
        }
        const bool plainly = __syncthreads_or(strange);
        if (!DIRECT) fetch_tile(tile + gridDim.x, 0);

        const long long first = 1LL * tile * IMAGES;
        const int images = IMAGES == 1 ? 1 : min(IMAGES, static_cast<int>(batch - tile * IMAGES));
        Element* target = y + first * OUTPUT_IMAGE;
        if (plainly) {
            convolve_plainly(x + first * IMAGE, weight, bias, target, images);
            continue;
        }
        if (SPLIT) epilogue.move_to(exponent, exponents, first_filter(unit, lane % 4));
        const int blocks = (images * CELLS_IN_IMAGE + CELLS_IN_TILE - 1) / CELLS_IN_TILE;
#pragma unroll 1
        for (int m = warp / UNITS; m < blocks; m += WORKERS) {
            Writer writer(epilogue, target, images, m, unit);
            convolve(staged, weights, m, batch >> 31, [&](int r, const Sums& sums) { writer.add(r, sums); });
        }
    }
}
