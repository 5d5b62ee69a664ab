// y[pixel][filter] = relu(sum over k of input[pixel][k] * weight[filter][k] + bias[filter] + residual[pixel][filter])
// or, with HAS_MASK, mask > 0 ? sum : 0, the gradient of a ReLU; the mask is passed in place of the residual.
//
// fp32 accuracy from fp16 MMAs: x * 2^e = upper + lower, the weights likewise with a power of two per filter
// (common/halves.cuh), and three MMAs replace one: upper * upper + upper * lower + lower * upper.
//
// TMA loads x unchanged, in k-tiles of 32 channels of one filter tap, into a ring of STAGES stages, beside the halves
// of the weights. Each lane loads its fragment of x, splits it in registers, and the warpgroup multiplies from
// registers: only x, weights and y pass through memory. The MMA truncates its accumulation, so it sums 32 channels
// only, small terms first; fp32 additions then accumulate the totals part by part, one part being added while the
// others multiply.
//
// 2^e depends on max |x|, which is unknown before x has been read. Attempt 0 uses 2^FIRST_EXPONENT, or with SAMPLED an
// estimate from a sample of x, and records max |x|. A second launch checks it and recomputes if that power was not good
// enough.
//
// Persistent CTAs: one producer thread, WARPGROUPS consumer warpgroups. Limiter: tensor cores at a third of the fp16
// rate with tiles of 128 filters; loads from L2 with 64.
//
// Rung: `wgmma_split`. conv2d_input_gradient launches it with HAS_MASK, PLACED and SAMPLED. Read placement.cuh (output
// offsets).
#include "common/conv_shape.cuh"
#include "common/epilogue.cuh"
#include "common/magnitudes.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr int TILE_N = 64;               // config.filters
constexpr int WARPGROUPS = 1;            // config.warpgroups: consumer warpgroups, with 64 pixels of a tile each
constexpr int STAGES = 6;                // config.stages
constexpr int BLOCKS_PER_SM = 2;         // config.blocks_per_sm
constexpr int COPY_REGISTERS = 32;       // config.registers[0]: per producer thread
constexpr int PRODUCT_REGISTERS = 224;   // config.registers[1]: per consumer thread
constexpr bool FILTERS_ALIGNED = false;  // conv.filters % config.filters == 0
constexpr bool FILTERS_EVEN = true;      // conv.filters % 2 == 0
constexpr bool HAS_SHORTCUT = false;     // conv.shortcut is not None
constexpr bool PLACED = false;           // placed: y is spread over a larger image
constexpr bool PITCHED = false;          // conv.y_pitch > 0
constexpr bool SAMPLED = false;          // conv.any_magnitude: look for huge and tiny values first
constexpr bool HAS_BIAS = false;         // conv.epilogue.bias
constexpr bool HAS_RESIDUAL = false;     // conv.epilogue.residual
constexpr bool HAS_RELU = false;         // conv.epilogue.relu
constexpr bool HAS_MASK = false;         // conv.epilogue.mask
#endif

#include "common/ring.cuh"
#include "common/warp.cuh"
#include "conv2d/placement.cuh"

constexpr int K_TILE = 32;  // channels per stage
constexpr int STEPS = K_TILE / 16;
constexpr int ROW_BYTES = 128;  // 32 elements of x, or both halves of 32 weights
constexpr int TILE_M = 64 * WARPGROUPS;
constexpr int PIXEL_BYTES = TILE_M * ROW_BYTES;
constexpr int STAGE_BYTES = PIXEL_BYTES + TILE_N * ROW_BYTES;
constexpr int PARTS = TILE_N / 64;  // per warpgroup, 64 pixels by 64 filters each: 32 accumulators per lane
constexpr int THREADS = (WARPGROUPS + 1) * 128;
constexpr bool HAS_AUX = HAS_RESIDUAL || HAS_MASK;  // auxiliary tensor of y's shape
static_assert(!HAS_MASK || !(HAS_BIAS || HAS_RESIDUAL || HAS_RELU), "a mask excludes bias, residual and ReLU");
static_assert(BLOCKS_PER_SM * 128 * (COPY_REGISTERS + WARPGROUPS * PRODUCT_REGISTERS) <= 65536,
              "an SM has 64 K registers");

using Stages = Ring<STAGES, STAGE_BYTES>;  // pixels, then weights
using Part = float[32];
using Accumulators = Part[PARTS];

struct Fragments {  // a lane's share of a k-tile of its warpgroup's pixels
    u32 upper[STEPS][4], lower[STEPS][4];
};

// Pixel (of 8) held by the lanes of row lane / 4: 0 4 1 5 2 6 3 7. Eight adjacent lanes then read chunks in different
// banks whatever the swizzle.
__device__ __forceinline__ int lane_pixel() {
    const int row = threadIdx.x % 32 / 4;
    return row / 2 + row % 2 * 4;
}

struct Work {  // filled by escalade/ops/conv2d/rungs/sm90_split.py, in this order
    int pixels, tiles, tiles_n, slabs;
};

struct Tile {
    int first_pixel, first_filter;

    // Tiles over the same pixels are consecutive, so x is read from DRAM once.
    __device__ __forceinline__ Tile(int index, const Work& work)
        : first_pixel(index / work.tiles_n * TILE_M), first_filter(index % work.tiles_n * TILE_N) {}
};

// Issues the copies of a tile: all channels of a tap, then the next tap, then the shortcut. Called by one thread.
__device__ __forceinline__ void load_tile(const Tile& tile, const TensorMap& pixel_map, const TensorMap& shortcut_map,
                                          const TensorMap& weight_map, const ConvShape& shape,
                                          const ShortcutShape& shortcut, Stages& ring) {
    const int row = tile.first_pixel / shape.output_width, column = tile.first_pixel % shape.output_width;
    const int n = row / shape.output_height, output_row = row % shape.output_height;
    const int h = output_row * shape.stride_h - shape.pad_h, w = column * shape.stride_w - shape.pad_w;
    int k = 0;                // column of the packed weights
    const auto begin = [&] {  // loads the weights of the next stage; the caller loads the pixels
        ring.wait_empty();
        barrier_expect(ring.full(ring.stage), STAGE_BYTES);
        tma_load_2d(ring.address() + PIXEL_BYTES, weight_map, ring.full(ring.stage), k, tile.first_filter);
        k += 2 * K_TILE;
    };
    for (int r = 0; r < shape.filter_height; ++r)
        for (int s = 0; s < shape.filter_width; ++s)
            for (int c = 0; c < shape.channels; c += K_TILE) {
                begin();
                tma_load_im2col(ring.address(), pixel_map, ring.full(ring.stage), c, w, h, n, s * shape.dilation_w,
                                r * shape.dilation_h);
                ring.next();
            }
    if (HAS_SHORTCUT)
        for (int c = 0; c < shortcut.channels; c += K_TILE) {
            begin();
            tma_load_im2col(ring.address(), shortcut_map, ring.full(ring.stage), c, column * shortcut.stride,
                            output_row * shortcut.stride, n, 0, 0);
            ring.next();
        }
}

extern __shared__ __align__(1024) unsigned char shared_memory[];

struct Multiplier {
    int row;  // this lane's first row of a stage's pixels
    float scale;
    u32 largest = 0;  // max over the keys of all magnitudes read

    // Four channels of two rows per k-step. The swizzle XORs the next step's 64 bytes.
    __device__ __forceinline__ void split_k_tile(Fragments& fragments, const Stages& ring) {
        const unsigned char* first = shared_memory + ring.stage * STAGE_BYTES + row * ROW_BYTES;
        const int chunk = (threadIdx.x % 4 ^ lane_pixel()) * 16;
#pragma unroll
        for (int step = 0; step < STEPS; ++step)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const unsigned char* at = first + half * 8 * ROW_BYTES + (chunk ^ step * 64);
                const Pack<float, 4> four = load_pack<float, 4>(reinterpret_cast<const float*>(at));
#pragma unroll
                for (int pair = 0; pair < 2; ++pair) {
                    const float first = four.at[2 * pair], second = four.at[2 * pair + 1];
                    largest = max(largest, max(magnitude_key(first), magnitude_key(second)));
                    const Halves halves = split(first * scale, second * scale);
                    fragments.upper[step][2 * pair + half] = halves.upper;
                    fragments.lower[step][2 * pair + half] = halves.lower;
                }
            }
    }
};

__device__ __forceinline__ void multiply(Part& acc, const Fragments& fragments, int part, const Stages& ring) {
    const u64 upper = operand_descriptor(ring.address() + PIXEL_BYTES + part * 64 * ROW_BYTES);
    const u64 lower = upper + (ROW_BYTES / 2 >> 4);  // stored behind the upper halves in every row
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
        wgmma_from_registers(acc, fragments.lower[step], upper + step * 2, step > 0);
#pragma unroll
    for (int step = 0; step < STEPS; ++step) wgmma_from_registers(acc, fragments.upper[step], lower + step * 2, true);
#pragma unroll
    for (int step = 0; step < STEPS; ++step) wgmma_from_registers(acc, fragments.upper[step], upper + step * 2, true);
    wgmma_commit();
}

__device__ __forceinline__ void add(Part& totals, const Part& acc) {
#pragma unroll
    for (int e = 0; e < 32; ++e) totals[e] += acc[e];
}

// One k-tile, part by part: the previous k-tile's part is added to the totals while the other parts multiply.
template <bool FIRST>
__device__ __forceinline__ void advance(Accumulators& totals, Accumulators& acc, Fragments& fragments,
                                        Multiplier& multiplier, const Stages& ring) {
    ring.wait_full();
    multiplier.split_k_tile(fragments, ring);
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        if (!FIRST) {
            wgmma_wait<PARTS - 1>();
            add(totals[part], acc[part]);
        }
        multiply(acc[part], fragments, part, ring);
    }
}

// Totals of a tile. Fragments are double-buffered: the next k-tile is split while this one multiplies.
__device__ __forceinline__ void multiply_tile(Accumulators& totals, Multiplier& multiplier, Stages& ring, int k_tiles) {
    Accumulators acc;
    Fragments even, odd;
#pragma unroll
    for (int part = 0; part < PARTS; ++part)
#pragma unroll
        for (int e = 0; e < 32; ++e) totals[part][e] = 0.f;
    int previous = ring.stage;
    advance<true>(totals, acc, even, multiplier, ring);
    ring.next();
    const auto go_on = [&](Fragments& fragments) {
        advance<false>(totals, acc, fragments, multiplier, ring);
        ring.release(previous);
        previous = ring.stage;
        ring.next();
    };
    // Duplicated on both paths: where they merged, ptxas would lose track of which wgmmas have completed.
    const auto end = [&] {
        wgmma_wait<0>();
        ring.release(previous);
#pragma unroll
        for (int part = 0; part < PARTS; ++part) add(totals[part], acc[part]);
    };
    int k_tile = 1;
    for (; k_tile + 1 < k_tiles; k_tile += 2) {
        go_on(odd);
        go_on(even);
    }
    if (k_tile < k_tiles) {
        go_on(odd);
        end();
    } else {
        end();
    }
}

// In every 8 filters a lane holds two adjacent ones of two pixels; the four lanes of a pixel store 32 bytes.
struct Output {
    const float *bias, *residual, *scales;
    float* y;
    const ConvShape& shape;
    const Placement& placement;
    int pixels;
    float2 image_scale;
    int y_pitch;  // elements between pixels where PITCHED: y is part of a larger buffer

    // Undoes the powers of two of x and of a filter. Their product may exceed fp32's range; two factors do not.
    __device__ __forceinline__ float scaled(float total, float first, float second) const {
        return total * (first * image_scale.x) * (second * image_scale.y);
    }

    __device__ __forceinline__ static float finished(float sum, float added, float aux) {
        if (HAS_MASK) return aux <= 0.f ? 0.f : sum;  // as PyTorch does: NaN in the mask passes the gradient
        return finish<HAS_BIAS, HAS_RESIDUAL, HAS_RELU>(sum, &added, 0, &aux, 0);
    }

    __device__ __forceinline__ void store_pair(float low, float high, int filter, long long at) const {
        using Pair = Pack<float, 2>;
        const Pack<float, 4> of_pair = load_pack<float, 4>(scales + 2 * filter);
        const float values[2] = {scaled(low, of_pair.at[0], of_pair.at[1]),
                                 scaled(high, of_pair.at[2], of_pair.at[3])};
        if (FILTERS_EVEN) {
            Pair biases = {}, residuals = {}, results;
            if (HAS_BIAS) biases = load_pack<float, 2>(bias + filter);
            if (HAS_AUX) residuals = load_pack<float, 2>(residual + at);
#pragma unroll
            for (int e = 0; e < 2; ++e) results.at[e] = finished(values[e], biases.at[e], residuals.at[e]);
            store_pack(y + at, results);
        } else {
#pragma unroll
            for (int e = 0; e < 2; ++e)
                if (filter + e < shape.filters)
                    y[at + e] =
                        finished(values[e], HAS_BIAS ? bias[filter + e] : 0.f, HAS_AUX ? residual[at + e] : 0.f);
        }
    }

    __device__ __forceinline__ void store(const Accumulators& totals, int first_pixel, int first_filter) const {
        const int filter = first_filter + threadIdx.x % 4 * 2;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int pixel = first_pixel + lane_pixel() + half * 8;
            if (pixel >= pixels) return;
            const long long at = (PITCHED ? 1LL * pixel * y_pitch : offset(pixel, shape, placement)) + filter;
#pragma unroll
            for (int i = 0; i < PARTS * 8; ++i) {
                const float* two = &totals[i / 8][i % 8 * 4 + half * 2];
                if (FILTERS_ALIGNED || filter + i * 8 < shape.filters) store_pair(two[0], two[1], filter + i * 8, at + i * 8);
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    conv2d_sm90_split(const __grid_constant__ TensorMap pixel_map, const __grid_constant__ TensorMap shortcut_map,
                      const __grid_constant__ TensorMap weight_map, const float* __restrict__ scales,
                      const float* __restrict__ bias, const float* __restrict__ residual, float* __restrict__ y,
                      Seen* seen, int attempt, const float* __restrict__ x, long long x_packs, Work work,
                      ConvShape shape, ShortcutShape shortcut, Placement placement, int y_pitch) {
    Stages ring(shared_address(shared_memory));
    if (threadIdx.x == 0) {
        ring.init(WARPGROUPS * 4);
        fence_barrier_init();
        prefetch_map(pixel_map);
        prefetch_map(weight_map);
    }
    wait_for_previous_launch();
    int exponent = SAMPLED ? sampled_exponent(x, x_packs) : FIRST_EXPONENT;
    bool needed = true;
    if (attempt > 0) {
        const u32 largest_bits = seen->largest_bits;
        needed = !good_exponent(exponent, largest_bits);
        exponent = scaling_exponent(largest_bits);
    }
    __syncthreads();
    if (attempt > 0 && threadIdx.x == 0 && take_ticket(&seen->tickets, gridDim.x) == gridDim.x - 1)
        seen->largest_bits = 0;
    if (!needed) return;

    if (threadIdx.x / 128 == WARPGROUPS) {
        release_registers<COPY_REGISTERS>();
        if (threadIdx.x % 128 == 0)
            for (int index = blockIdx.x; index < work.tiles; index += gridDim.x)
                load_tile(Tile(index, work), pixel_map, shortcut_map, weight_map, shape, shortcut, ring);
        return;
    }
    claim_registers<PRODUCT_REGISTERS>();
    const int first_row = threadIdx.x / 32 * 16;
    const Output output{bias, residual, scales, y, shape, placement, work.pixels, undoing_factors(exponent), y_pitch};
    Multiplier multiplier{first_row + lane_pixel(), power_of_two(exponent)};
    for (int index = blockIdx.x; index < work.tiles; index += gridDim.x) {
        const Tile tile(index, work);
        Accumulators totals;
        multiply_tile(totals, multiplier, ring, work.slabs);
        output.store(totals, tile.first_pixel + first_row, tile.first_filter);
        __syncwarp();  // lanes past the last pixel return early; wgmma needs converged warps
    }
    if (attempt == 0) {
        const u32 largest = warp_max(multiplier.largest);
        if (threadIdx.x % 32 == 0) atomicMax(&seen->largest_bits, magnitude_bits(largest));
    }
}
