// parts[block] = the gradients of all parameters over the rows of the block; grad_x[row], if asked for
//
// A block takes TILE_ROWS rows at a time and walks them down the chain and back up. All weights W are in shared memory,
// and so are the rows' inputs N and gradients G of every layer; a layer's groups are rows of their own. Three products:
//
//   forwards   Z = N W^T + bias   4x4 outputs a thread, k cut into splits so that most threads have some; the parts
//   backwards  N' = G W           meet in scratch, where all threads take their share of activations and slopes
//   weights    H += G^T N         after the walk, for all layers at once: a warp has 32x64 of one layer, a thread 8x8
//                                 in its registers for as long as the block lives (RESIDENT; else they wait in parts)
//
// A norm's weight v and bias u are folded into W and the bias, so N is what the norm made of a row, and their gradients
// follow from sums that are there anyway: with H = G^T N and s = the sum of G over rows, the gradient of W is
// H v + s u^T, of v the column sums of W * H, and of u those of W * s. What bounds it: multiply-adds, and the reads of
// shared memory between them.
#include "common/elements.cuh"
#include "common/ptx.cuh"
#include "common/warp.cuh"
#include "mlp_backward/activation.cuh"

struct Layer {
    int features, outputs, groups;
    bool norm, bias;
    int activation;
    float epsilon;
    int parameter;  // the number of the first of its tensors
    int result;     // where their gradients begin
    int input_at, gradient_at, weight_at, bias_at, sums_at, rstd_at;  // in shared memory, in floats
    int forward_splits, backward_splits;
    bool wide;       // a warp's share of the weights is 64 features by 32 outputs, not 32 by 64
    int first_warp;  // of those that have a share
};
constexpr Layer LAYERS[] = {LAYER_LIST};
constexpr int COUNT = sizeof(LAYERS) / sizeof(Layer), LAST = COUNT - 1, WARPS = THREADS / 32;
constexpr int PASSES = (WARP_TILES + WARPS - 1) / WARPS;
constexpr bool RESIDENT = PASSES == 1;
using Four = Pack<float, 4>;

__device__ __forceinline__ constexpr int fours(int count) { return (count + 3) / 4; }
// An odd number of 16-byte packs: the same pack of eight neighbouring rows lies in all banks.
__device__ __forceinline__ constexpr int pitch_of(int columns) { return 4 * (fours(columns) | 1); }
template <int COUNT>
__device__ __forceinline__ Pack<float, COUNT> widened(const Pack<Element, COUNT>& pack) {
    Pack<float, COUNT> wide;
#pragma unroll
    for (int e = 0; e < COUNT; ++e) wide.at[e] = to_float(pack.at[e]);
    return wide;
}
__device__ __forceinline__ Four four(const float* from) { return load_pack<float, 4>(from); }

template <int L>
struct Of {
    static constexpr Layer layer = LAYERS[L];
    static constexpr int rows = TILE_ROWS * layer.groups;
    static constexpr int width_in = layer.groups * layer.features, width_out = layer.groups * layer.outputs;
    static constexpr int input_pitch = pitch_of(layer.features), gradient_pitch = pitch_of(layer.outputs);
    static constexpr int weight = layer.parameter + (layer.norm ? 2 : 0);
    static constexpr int weight_result = layer.result + (layer.norm ? 2 * layer.features : 0);
    static constexpr int bias_result = weight_result + layer.features * layer.outputs;

    // Element i of row t of the tile.
    static __device__ __forceinline__ int input_at(int t, int i) {
        return layer.input_at + (t * layer.groups + i / layer.features) * input_pitch + i % layer.features;
    }
    static __device__ __forceinline__ int gradient_at(int t, int i) {
        return layer.gradient_at + (t * layer.groups + i / layer.outputs) * gradient_pitch + i % layer.outputs;
    }
};

// ------------------------------------------------------------------ weights

template <int L, class Parameters>
__device__ __forceinline__ void load_weights(float* shared, const Parameters& parameters) {
    using Here = Of<L>;
    constexpr Layer layer = LAYERS[L];
    constexpr int features = layer.features, pitch = Here::input_pitch;
    const Element* weight = parameters[Here::weight];
    if constexpr (layer.norm) {
        const Element *scale = parameters[layer.parameter], *shift = parameters[layer.parameter + 1];
        for (int o = threadIdx.x / 32; o < layer.outputs; o += WARPS) {
            float sum = 0.f;
#pragma unroll 4
            for (int f = threadIdx.x % 32; f < features; f += 32) {
                const float w = to_float(weight[o * features + f]);
                shared[layer.weight_at + o * pitch + f] = w * to_float(scale[f]);
                sum += w * to_float(shift[f]);
            }
            sum = warp_sum(sum);
            if constexpr (layer.bias) sum += to_float(parameters[Here::weight + 1][o]);
            if (threadIdx.x % 32 == 0) shared[layer.bias_at + o] = sum;
        }
    } else {
        constexpr int VECTOR = features % 4 == 0 ? 4 : 1;
#pragma unroll 4
        for (int at = threadIdx.x * VECTOR; at < features * layer.outputs; at += THREADS * VECTOR) {
            const Pack<Element, VECTOR> pack = load_pack<Element, VECTOR>(weight + at);
            store_pack(shared + layer.weight_at + at / features * pitch + at % features, widened(pack));
        }
        if constexpr (layer.bias)
            for (int o = threadIdx.x; o < layer.outputs; o += THREADS)
                shared[layer.bias_at + o] = to_float(parameters[Here::weight + 1][o]);
    }
    if constexpr (L < LAST) load_weights<L + 1>(shared, parameters);
}

// ------------------------------------------------------------------ rows

// Rows of `width` elements to where `place` says, VECTOR neighbours at a time; zeros behind the last row.
template <int width, int VECTOR, class Place>
__device__ __forceinline__ void load_rows(float* shared, const Element* from, int present, const Place& place) {
#pragma unroll 4
    for (int at = thread_number() * VECTOR; at < TILE_ROWS * width; at += THREADS * VECTOR) {
        const int t = at / width, i = at % width;
        Pack<Element, VECTOR> pack{};
        if (t < present) pack = load_pack<Element, VECTOR>(from + at);
        store_pack(shared + place(t, i), widened(pack));
    }
}

// N, a warp a row: less its mean, over its deviation.
template <int L>
__device__ __forceinline__ void normalise(float* shared) {
    constexpr Layer layer = LAYERS[L];
    const int lane = thread_number() % 32;
    for (int r = thread_number() / 32; r < Of<L>::rows; r += WARPS) {
        float* row = shared + layer.input_at + r * Of<L>::input_pitch;
        float sum = 0.f, squares = 0.f;
        for (int f = lane; f < layer.features; f += 32) sum += row[f];
        const float mean = warp_sum(sum) / layer.features;
        for (int f = lane; f < layer.features; f += 32) squares += (row[f] - mean) * (row[f] - mean);
        const float rstd = 1.f / sqrtf(warp_sum(squares) / layer.features + layer.epsilon);
        for (int f = lane; f < layer.features; f += 32) row[f] = (row[f] - mean) * rstd;
        if (lane == 0) shared[layer.rstd_at + r] = rstd;
    }
}

// ------------------------------------------------------------------ products over the rows of a tile

template <int L, bool FORWARDS>
struct Product {
    static constexpr Layer layer = LAYERS[L];
    static constexpr int rows = Of<L>::rows;
    static constexpr int columns = FORWARDS ? layer.outputs : layer.features;
    static constexpr int splits = FORWARDS ? layer.forward_splits : layer.backward_splits;
    static constexpr int row_tiles = rows / 4, column_tiles = fours(columns);

    // In scratch, of one split; `split_pitch` further on is the next one's.
    static constexpr int split_pitch = rows * column_tiles * 4;
    static __device__ __forceinline__ int at(int r, int c) { return SCRATCH_AT + r * column_tiles * 4 + c; }

    static __device__ __forceinline__ float sum(const float* shared, int r, int c) {
        float total = shared[at(r, c)];
#pragma unroll 4
        for (int split = 1; split < splits; ++split) total += shared[at(r, c) + split * split_pitch];
        return total;
    }

    static __device__ __forceinline__ void multiply(float* shared) {
        constexpr int depth = fours(FORWARDS ? layer.features : layer.outputs);
        constexpr int each = (depth + splits - 1) / splits;
        constexpr int left_pitch = FORWARDS ? Of<L>::input_pitch : Of<L>::gradient_pitch;
        constexpr int weight_pitch = Of<L>::input_pitch;
        constexpr int left_step = row_tiles * left_pitch;
        for (int task = thread_number(); task < row_tiles * column_tiles * splits; task += THREADS) {
            const int column_tile = task % column_tiles, row_tile = task / column_tiles % row_tiles;
            const int split = task / (column_tiles * row_tiles);
            const float* left = shared + (FORWARDS ? layer.input_at : layer.gradient_at) + row_tile * left_pitch;
            const float* right = shared + layer.weight_at + (FORWARDS ? column_tile * weight_pitch : column_tile * 4);
            const int end = min(depth, (split + 1) * each);
            float sums[4][4] = {};
#pragma unroll 1
            for (int q = split * each; q < end; ++q) {
                Four b[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const int row = FORWARDS ? j * column_tiles : q * 4 + j;
                    b[j] = four(right + row * weight_pitch + (FORWARDS ? q * 4 : 0));
                }
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const Four a = four(left + i * left_step + q * 4);
#pragma unroll
                    for (int j = 0; j < 4; ++j)
#pragma unroll
                        for (int k = 0; k < 4; ++k) sums[i][j] += a.at[k] * (FORWARDS ? b[j].at[k] : b[k].at[j]);
                }
            }
            float* target = shared + split * split_pitch;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int r = i * row_tiles + row_tile;
                if constexpr (FORWARDS) {
#pragma unroll
                    for (int j = 0; j < 4; ++j) target[at(r, j * column_tiles + column_tile)] = sums[i][j];
                } else {
                    store_pack(target + at(r, column_tile * 4), Four{sums[i][0], sums[i][1], sums[i][2], sums[i][3]});
                }
            }
        }
    }
};

// ------------------------------------------------------------------ down the chain

template <int L>
__device__ __forceinline__ void forwards(float* shared, const Element* grad_y, int present) {
    using Here = Of<L>;
    constexpr Layer layer = LAYERS[L];
    if constexpr (layer.norm) {
        normalise<L>(shared);
        __syncthreads();
    }
    if constexpr (L < LAST || layer.activation != 0) {
        using Forwards = Product<L, true>;
        Forwards::multiply(shared);
        __syncthreads();
#pragma unroll 2
        for (int at = thread_number(); at < TILE_ROWS * Here::width_out; at += THREADS) {
            const int t = at / Here::width_out, i = at % Here::width_out;
            const int r = t * layer.groups + i / layer.outputs, o = i % layer.outputs;
            const Activated result =
                activate_with_slope<layer.activation>(Forwards::sum(shared, r, o) + shared[layer.bias_at + o]);
            if constexpr (L < LAST) {
                shared[Of<L + 1>::input_at(t, i)] = result.value;
                if constexpr (layer.activation != 0) shared[Here::gradient_at(t, i)] = result.slope;
            } else {
                const float gradient = t < present ? to_float(grad_y[at]) : 0.f;
                shared[Here::gradient_at(t, i)] = through_slope<layer.activation>(gradient, result.slope);
            }
        }
        __syncthreads();
    }
    if constexpr (L < LAST) forwards<L + 1>(shared, grad_y, present);
}

// ------------------------------------------------------------------ and back up

// The gradient of element i of row t of what goes into layer L, through the activation in front.
template <int L>
__device__ __forceinline__ void pass_on(float* shared, float* grad_x, int t, int i, float gradient, int present) {
    if constexpr (L > 0) {
        float& target = shared[Of<L - 1>::gradient_at(t, i)];  // where the slope is
        constexpr int activation = LAYERS[L - 1].activation;
        if constexpr (activation == 0)
            target = gradient;
        else
            target = through_slope<activation>(gradient, target);
    } else {
        if (t < present) grad_x[t * Of<0>::width_in + i] = gradient;
    }
}

template <int L>
__device__ __forceinline__ void backwards(float* shared, float* grad_x, int present) {
    using Here = Of<L>;
    using Backwards = Product<L, false>;
    constexpr Layer layer = LAYERS[L];
    if constexpr (L > 0 || INPUT_GRADIENT) {
        Backwards::multiply(shared);
        __syncthreads();
        if constexpr (layer.norm) {
            const int lane = thread_number() % 32;
            for (int r = thread_number() / 32; r < Here::rows; r += WARPS) {
                const float* hat = shared + layer.input_at + r * Here::input_pitch;
                float sum = 0.f, along = 0.f;
                for (int f = lane; f < layer.features; f += 32) {
                    const float gradient = Backwards::sum(shared, r, f);
                    shared[Backwards::at(r, f)] = gradient;
                    sum += gradient;
                    along += gradient * hat[f];
                }
                const float mean = warp_sum(sum) / layer.features, mean_along = warp_sum(along) / layer.features;
                const float rstd = shared[layer.rstd_at + r];
                const int t = r / layer.groups, first = r % layer.groups * layer.features;
                for (int f = lane; f < layer.features; f += 32) {
                    const float gradient = rstd * (shared[Backwards::at(r, f)] - mean - hat[f] * mean_along);
                    pass_on<L>(shared, grad_x, t, first + f, gradient, present);
                }
            }
        } else {
#pragma unroll 2
            for (int at = thread_number(); at < TILE_ROWS * Here::width_in; at += THREADS) {
                const int t = at / Here::width_in, i = at % Here::width_in;
                const float gradient =
                    Backwards::sum(shared, t * layer.groups + i / layer.features, i % layer.features);
                pass_on<L>(shared, grad_x, t, i, gradient, present);
            }
        }
        __syncthreads();
    }
    if constexpr (L > 0) backwards<L - 1>(shared, grad_x, present);
}

// ------------------------------------------------------------------ the weights' gradients

// A warp's share of a layer's weights; a lane has four neighbouring features and outputs in each half of it.
template <int L>
struct Share {
    static constexpr Layer layer = LAYERS[L];
    static constexpr int warp_features = layer.wide ? 64 : 32, warp_outputs = layer.wide ? 32 : 64;
    static constexpr int across = (layer.features + warp_features - 1) / warp_features;
    static constexpr int down = (layer.outputs + warp_outputs - 1) / warp_outputs;
    static constexpr int lanes_across = warp_features / 8, lanes_down = warp_outputs / 8;
    int tile;

    __device__ __forceinline__ explicit Share(int warp) : tile(warp - layer.first_warp) {}
    __device__ __forceinline__ bool any() const { return tile >= 0 && tile < across * down; }
    // Known while compiling wherever shares end with the weights.
    static __device__ __forceinline__ bool has_feature(int f) {
        return layer.features % warp_features == 0 || f < layer.features;
    }
    static __device__ __forceinline__ bool has_output(int o) {
        return layer.outputs % warp_outputs == 0 || o < layer.outputs;
    }
    __device__ __forceinline__ int lane_down() const { return thread_number() % 32 / lanes_across; }
    __device__ __forceinline__ int feature(int half) const {
        return tile % across * warp_features + half * warp_features / 2 + thread_number() % lanes_across * 4;
    }
    __device__ __forceinline__ int output(int half) const {
        return tile / across * warp_outputs + half * warp_outputs / 2 + lane_down() * 4;
    }
};

struct Operands {
    int input[2], gradient[2];  // in shared memory, of the first row
    int input_pitch, gradient_pitch, groups;
};

template <int L>
__device__ __forceinline__ void find_operands(Operands& operands, int warp) {
    const Share<L> share(warp);
    if (share.any()) {
        constexpr Layer layer = LAYERS[L];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int f = share.feature(half), o = share.output(half);
            // What lies outside is multiplied like the rest, with some operand that is there, and never looked at.
            operands.input[half] = layer.input_at + (share.has_feature(f) ? f : 0);
            operands.gradient[half] = layer.gradient_at + (share.has_output(o) ? o : 0);
        }
        operands.input_pitch = Of<L>::input_pitch, operands.gradient_pitch = Of<L>::gradient_pitch;
        operands.groups = layer.groups;
    }
    if constexpr (L < LAST) find_operands<L + 1>(operands, warp);
}

__device__ __forceinline__ void add_weight_gradient(float (&sums)[8][8], const float* shared, int warp, int present) {
    Operands operands{};
    find_operands<0>(operands, warp);
    const float *input = shared + operands.input[0], *gradient = shared + operands.gradient[0];
    const int input_half = operands.input[1] - operands.input[0];
    const int gradient_half = operands.gradient[1] - operands.gradient[0];
#pragma unroll 2
    for (int r = present * operands.groups; r > 0; --r) {
        const Four n[2] = {four(input), four(input + input_half)};
        const Four g[2] = {four(gradient), four(gradient + gradient_half)};
#pragma unroll
        for (int i = 0; i < 8; ++i)
#pragma unroll
            for (int j = 0; j < 8; ++j) sums[i][j] += g[i / 4].at[i % 4] * n[j / 4].at[j % 4];
        input += operands.input_pitch, gradient += operands.gradient_pitch;
    }
}

// The sums of G over rows; lightly loaded warps are the last.
template <int L, int BEFORE>
__device__ __forceinline__ void add_bias_gradient(float* shared, int present) {
    constexpr Layer layer = LAYERS[L];
    constexpr bool needed = layer.bias || layer.norm;
    if constexpr (needed) {
        const int thread = (2 * THREADS - 1 - thread_number() - BEFORE % THREADS) % THREADS;
        for (int o = thread; o < layer.outputs; o += THREADS) {
            const float* gradient = shared + layer.gradient_at + o;
            float sum = 0.f;
#pragma unroll 4
            for (int r = 0; r < present * layer.groups; ++r) sum += gradient[r * Of<L>::gradient_pitch];
            shared[layer.sums_at + o] += sum;
        }
    }
    if constexpr (L < LAST) add_bias_gradient<L + 1, BEFORE + (needed ? layer.outputs : 0)>(shared, present);
}

// A lane's sums to the block's part of the gradients, or back from there.
template <int L, bool STORE>
__device__ __forceinline__ void move_sums(float (&sums)[8][8], float* slot, const Share<L>& share) {
    constexpr Layer layer = LAYERS[L];
    constexpr int features = layer.features, from = Of<L>::weight_result;
    constexpr int VECTOR = features % 4 == 0 && from % 4 == 0 ? 4 : 1;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int o = share.output(i / 4) + i % 4;
#pragma unroll
        for (int j = 0; j < 8; j += VECTOR) {
            const int f = share.feature(j / 4) + j % 4;
            if (!share.has_output(o) || !share.has_feature(f)) continue;
            Pack<float, VECTOR> pack;
            if constexpr (!STORE) pack = load_pack<float, VECTOR>(slot + from + o * features + f);
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) {
                if constexpr (STORE)
                    pack.at[e] = sums[i][j + e];
                else
                    sums[i][j + e] = pack.at[e];
            }
            if constexpr (STORE) store_pack(slot + from + o * features + f, pack);
        }
    }
}

template <int L, bool STORE>
__device__ __forceinline__ void move_any_sums(float (&sums)[8][8], float* slot, int warp) {
    const Share<L> share(warp);
    if (share.any()) move_sums<L, STORE>(sums, slot, share);
    if constexpr (L < LAST) move_any_sums<L + 1, STORE>(sums, slot, warp);
}

// What the block has summed for a layer with a norm, made into gradients; a lane a feature, a warp every WARPS-th
// output. The weights in shared memory are no longer needed: the warps' sums over outputs meet there.
template <int L, class Parameters>
__device__ __forceinline__ void finish_norms(float* shared, float* slot, const Parameters& parameters) {
    constexpr Layer layer = LAYERS[L];
    if constexpr (layer.norm) {
        const Element *scale = parameters[layer.parameter], *shift = parameters[layer.parameter + 1];
        const Element* weight = parameters[Of<L>::weight];
        constexpr int features = layer.features, pitch = Of<L>::input_pitch;
        const int warp = threadIdx.x / 32;
        for (int f = threadIdx.x % 32; f < features; f += 32) {
            const float v = to_float(scale[f]), u = to_float(shift[f]);
            float along = 0.f, sum = 0.f;
#pragma unroll 4
            for (int o = warp; o < layer.outputs; o += WARPS) {
                float& gradient = slot[Of<L>::weight_result + o * features + f];
                const float h = gradient, w = to_float(weight[o * features + f]), s = shared[layer.sums_at + o];
                along += w * h;
                sum += w * s;
                gradient = h * v + s * u;
            }
            float* meeting = shared + layer.weight_at + warp * pitch + f;
            meeting[0] = along, meeting[WARPS * pitch] = sum;
        }
    }
    if constexpr (L < LAST) finish_norms<L + 1>(shared, slot, parameters);
}

template <int L>
__device__ __forceinline__ void finish_vectors(const float* shared, float* slot) {
    constexpr Layer layer = LAYERS[L];
    if constexpr (layer.norm) {
        constexpr int pitch = Of<L>::input_pitch;
        for (int at = threadIdx.x; at < 2 * layer.features; at += THREADS) {
            const float* meeting = shared + layer.weight_at + at / layer.features * WARPS * pitch + at % layer.features;
            float sum = 0.f;
            for (int warp = 0; warp < WARPS; ++warp) sum += meeting[warp * pitch];
            slot[layer.result + at] = sum;
        }
    }
    if constexpr (layer.bias)
        for (int o = threadIdx.x; o < layer.outputs; o += THREADS)
            slot[Of<L>::bias_result + o] = shared[layer.sums_at + o];
    if constexpr (L < LAST) finish_vectors<L + 1>(shared, slot);
}

// ------------------------------------------------------------------ all of it

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    mlp_backward_fused(const Element* x, const Element* grad_y, float* parts, float* grad_x, int tiles, int last_rows,
                       PARAMETER_LIST) {
    extern __shared__ __align__(16) float shared[];
    const Element* const parameters[] = {PARAMETER_NAMES};
    float* const slot = parts + 1LL * blockIdx.x * PART_PITCH;
    const int warp = threadIdx.x / 32;

    for (int at = threadIdx.x * 4; at < SHARED_FLOATS; at += THREADS * 4) store_pack(shared + at, Four{});
    wait_for_previous_launch();
    __syncthreads();
    load_weights<0>(shared, parameters);

    float sums[8][8] = {};
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const int present = tile < tiles - 1 ? TILE_ROWS : last_rows;
        const long long first = 1LL * tile * TILE_ROWS;
        constexpr Layer begin = LAYERS[0], end = LAYERS[LAST];
        constexpr int width_in = Of<0>::width_in, width_out = Of<LAST>::width_out;
        load_rows<width_in, begin.features % 4 == 0 ? 4 : 1>(shared, x + first * width_in, present, Of<0>::input_at);
        const Element* gradient = grad_y + first * width_out;
        if constexpr (end.activation == 0)
            load_rows<width_out, end.outputs % 4 == 0 ? 4 : 1>(shared, gradient, present, Of<LAST>::gradient_at);
        __syncthreads();
        forwards<0>(shared, gradient, present);
        backwards<LAST>(shared, grad_x + first * width_in, present);

        if constexpr (RESIDENT) {
            add_weight_gradient(sums, shared, warp, present);
        } else {
            for (int pass = 0; pass < PASSES; ++pass) {
                const int share = pass * WARPS + warp;
                for (auto& row : sums)
                    for (float& sum : row) sum = 0.f;
                if (tile != blockIdx.x) move_any_sums<0, false>(sums, slot, share);
                add_weight_gradient(sums, shared, share, present);
                move_any_sums<0, true>(sums, slot, share);
            }
        }
        add_bias_gradient<0, 0>(shared, present);
        __syncthreads();
    }

    if constexpr (RESIDENT) move_any_sums<0, true>(sums, slot, warp);
    __syncthreads();
    finish_norms<0>(shared, slot, parameters);
    __syncthreads();
    finish_vectors<0>(shared, slot);
}
