// parts[block] = gradients of all parameters over the rows of the CTA; grad_x[row], if requested
//
// `fused` on tensor cores: a CTA takes TILE_ROWS rows at a time through the chain forward and backward. All weights W
// are in smem, and so are the rows' inputs N and gradients G of every layer, in 16 bits; a layer's groups are rows of
// their own. A gradient takes the place of the slope of the activation that it passes. Three GEMMs by mma.sync, with
// fp32 accumulators, on which biases, activations and slopes are computed:
//
//   forward    Z = N W^T + bias   16 rows by 32 or 16 columns per warp
//   backward   N' = G W           the same, with W transposed by ldmatrix
//   weights    H += G^T N         of the last layer beside its backward product, of the others together after the walk:
//                                 a warp has 32x64 of one layer, in registers for the life of the CTA; of layers with
//                                 many groups, which have long sums, two warps have half of the rows each if there are
//                                 enough warps
//
// The sums s of G over rows are products with a matrix whose column i is ones. grad_y arrives in smem during the
// forward half of the walk and, in its place, x of the next tile during the backward half. A norm's weight v and bias u
// are folded into W and the bias, so N is the normalized row, and their gradients follow from existing sums: the
// gradient of W is H v + s u^T, of v the column sums of W * H, and of u those of W * s. Limiter: bandwidth of smem
// (ldmatrix), then the instructions of activations and norms.
//
// Rungs: `tensor_core`, and `folded`, where two layers were merged before (mlp/tensor_core_fold.cu). Read
// tensor_core_layers.cuh (layer constants), tensor_core_loading.cuh, tensor_core_products.cuh (forward and backward),
// tensor_core_sums.cuh, then finish.cuh.
#include "mlp_backward/tensor_core_layers.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr int SHARED_FLOATS = 1324;  // plan.shared_floats
constexpr int STAGED_AT = 1196;      // plan.staged_at: offset of x of the next tile, in floats
constexpr int PART_PITCH = 316;      // part_pitch: floats per partial sum
#endif

#include "mlp_backward/finish.cuh"
#include "mlp_backward/tensor_core_products.cuh"
#include "mlp_backward/tensor_core_sums.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    mlp_backward_tensor_core(const Element* x, const Element* grad_y, float* parts, float* grad_x, int tiles,
                             int last_rows, PARAMETER_LIST) {
    extern __shared__ __align__(16) float shared[];
    const void* const parameters[] = {PARAMETER_NAMES};
    constexpr Layer begin = LAYERS[0], end = LAYERS[LAST];
    constexpr int width_in = Of<0>::width_in, width_out = Of<LAST>::width_out;
    float* const staged = shared + STAGED_AT;
    const auto warp = [] { return thread_number() / 32; };  // not kept in a register
    const auto present_of = [&](int tile) { return tile >= tiles ? 0 : tile < tiles - 1 ? TILE_ROWS : last_rows; };
    const auto prefetch = [&](int tile) {
        const int present = present_of(tile);
        prefetch_rows(staged, x + (present ? 1LL * tile * TILE_ROWS * width_in : 0), present * width_in);
        copy_async_commit();
    };

    for (int at = threadIdx.x * 4; at < SHARED_FLOATS; at += THREADS * 4) store_pack(shared + at, Pack<float, 4>{});
    wait_for_previous_launch();
    __syncthreads();
    prefetch(blockIdx.x);
    load_weights<0>(shared, parameters);

    Sums sums{};
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const int present = present_of(tile);
        const long long first = 1LL * tile * TILE_ROWS;
        const Element* gradient = grad_y + first * width_out;
        float* below = grad_x + first * width_in;
        copy_async_wait<0>();
        __syncthreads();
        load_inputs<0, begin.norm>(shared, reinterpret_cast<const Element*>(staged), begin.features);
        __syncthreads();
        if constexpr (end.activation == 0) prefetch_gradient(shared, gradient, present);
        copy_async_commit();
        forward<0>(shared, gradient, present);
        copy_async_wait<0>();
        __syncthreads();
        // The last layer's gradients are read for the last time, and make room for x of the next tile.
        add_weight_gradient<LAST>(sums, shared, warp());
        backward<LAST>(shared, below, present);
        if constexpr (LAST == 0 && !INPUT_GRADIENT) __syncthreads();  // no backward step, so no barrier yet
        prefetch(tile + gridDim.x);
        if constexpr (LAST > 0) {
            backward_from<LAST - 1>(shared, below, present);
            add_weight_gradients<0, LAST>(sums, shared, warp());
        }
    }
    copy_async_wait<0>();
    __syncthreads();

    move_sums<0>(sums, parts + 1LL * blockIdx.x * PART_PITCH, shared, warp());
    float* const slot = parts + 1LL * blockIdx.x * PART_PITCH;
    finish_norms<0>(shared, slot, parameters);
    __syncthreads();
    finish_vectors<0>(shared, slot);
}
