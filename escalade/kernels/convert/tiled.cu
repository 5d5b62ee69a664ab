// y[n][column][row] = x[n][row][column] * scale[c] + shift[c], 0 for row >= rows
//
// NCHW to NHWC and back, each a matrix transposition per image: rows are channels and columns pixels, or vice versa.
// One CTA per tile of TILE x TILE: read along columns, stored in smem in y's element type and order, written along
// rows, so that both sides move whole lines in accesses of up to 16 bytes. In smem a row of the tile holds one column
// of x, as 16-byte chunks XOR-swizzled by the column: the lanes that write one chunk of eight columns each, and those
// that read all chunks of one row, have no bank conflicts. 16-bit elements are written in pairs of rows. Limiter:
// memory.
//
// Rung: `tiled`. Read convert.cuh (element types, normalization).
#include "convert/convert.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr int SOURCE_VECTOR = 4;  // source_vector: elements per load
constexpr int TARGET_VECTOR = 4;  // target_vector: elements per store
#endif

struct Shape {
    int batch;
    int rows, columns;            // rows, columns
    int padded_rows;              // padded_rows: of y; also the distance between its columns
    int source_pitch;             // source_pitch: the distance between rows of x
    int source_image;             // problem.stored_channels * problem.pixels
    int target_image;             // problem.padded_channels * problem.pixels
    int row_tiles, column_tiles;  // row_tiles, column_tiles
};

constexpr int TILE = 64;
constexpr int THREADS = 256;
constexpr int CHUNK = 16 / sizeof(Target);
constexpr int ROWS = 4 / sizeof(Target);  // per thread and access
constexpr int COLUMN_LANES = SOURCE_VECTOR >= 4 ? 8 : 32;
constexpr int ROW_STEP = THREADS / COLUMN_LANES * ROWS;
constexpr int COLUMN_STEP = COLUMN_LANES * SOURCE_VECTOR;
constexpr int ROW_PASSES = TILE / ROW_STEP;
constexpr int COLUMN_PASSES = TILE / COLUMN_STEP;
static_assert(TILE % ROW_STEP == 0 && TILE % COLUMN_STEP == 0, "passes cover the tile");
constexpr int ROW_LANES = TILE / TARGET_VECTOR < 32 ? TILE / TARGET_VECTOR : 32;

__device__ __forceinline__ int place(int row, int column) {
    const int chunk = row / CHUNK ^ column / SOURCE_VECTOR % 8;
    return column * TILE + chunk * CHUNK + row % CHUNK;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    convert_tiled(const Source* x, const float* scale, const float* shift, Target* y, Shape shape) {
    __shared__ __align__(16) unsigned char shared_memory[TILE * TILE * sizeof(Target)];
    Target* tile = reinterpret_cast<Target*>(shared_memory);
    wait_for_previous_launch();

    // Tiles that share lines of y are adjacent.
    const int first_row = blockIdx.x % shape.row_tiles * TILE;
    const int first_column = blockIdx.x / shape.row_tiles % shape.column_tiles * TILE;
    const long long image = blockIdx.x / shape.row_tiles / shape.column_tiles;
    if (image >= shape.batch) return;
    const Source* matrix = x + image * shape.source_image;

    const int lane_row = threadIdx.x / COLUMN_LANES * ROWS;
    const int lane_column = threadIdx.x % COLUMN_LANES * SOURCE_VECTOR;
    Pack<Source, SOURCE_VECTOR> read[ROW_PASSES][COLUMN_PASSES][ROWS];
#pragma unroll
    for (int i = 0; i < ROW_PASSES; ++i)
#pragma unroll
        for (int j = 0; j < COLUMN_PASSES; ++j)
#pragma unroll
            for (int k = 0; k < ROWS; ++k) {
                const int row = first_row + i * ROW_STEP + lane_row + k;
                const int column = first_column + j * COLUMN_STEP + lane_column;
                read[i][j][k] = {};
                if (row < shape.rows && column < shape.columns)
                    read[i][j][k] = load_pack<Source, SOURCE_VECTOR>(matrix + 1LL * row * shape.source_pitch + column);
            }

#pragma unroll
    for (int i = 0; i < ROW_PASSES; ++i)
#pragma unroll
        for (int j = 0; j < COLUMN_PASSES; ++j)
#pragma unroll
            for (int e = 0; e < SOURCE_VECTOR; ++e) {
                const int row = i * ROW_STEP + lane_row;
                const int column = j * COLUMN_STEP + lane_column + e;
                Pack<Target, ROWS> rows;
#pragma unroll
                for (int k = 0; k < ROWS; ++k) {
                    float value = to_float(read[i][j][k].at[e]);
                    const int channel = SOURCE_NHWC ? first_column + column : first_row + row + k;
                    if (NORMALISE && first_row + row + k < shape.rows && first_column + column < shape.columns)
                        value = normalized(value, scale, shift, channel);
                    rows.at[k] = from_float<Target>(value);
                }
                store_pack(tile + place(row, column), rows);
            }
    __syncthreads();

    const int row = threadIdx.x % ROW_LANES * TARGET_VECTOR;
    const int column = threadIdx.x / ROW_LANES;
    Target* corner = y + image * shape.target_image + 1LL * first_column * shape.padded_rows + first_row;
#pragma unroll
    for (int j = 0; j < TILE; j += THREADS / ROW_LANES)
#pragma unroll
        for (int i = 0; i < TILE; i += ROW_LANES * TARGET_VECTOR)
            if (first_row + row + i < shape.padded_rows && first_column + column + j < shape.columns)
                store_pack(corner + 1LL * (column + j) * shape.padded_rows + row + i,
                           load_pack<Target, TARGET_VECTOR>(tile + place(row + i, column + j)));
}
