// y[.., column * y_stride + row] = x[.., row * x_stride + column]                    (for each index of each part)
//
// Each part is a batch of matrix transpositions: x is contiguous along columns, y along rows, and all other dimensions
// select the matrix. One CTA per tile of TILE x TILE: read along columns, stored in smem in y's order, written along
// rows, so that both sides move whole sectors in accesses of up to 16 bytes. In smem a row of the tile holds one column
// of x, as 16-byte chunks XOR-swizzled by the column: the lanes that write one chunk of eight columns each, and those
// that read all chunks of one row, have no bank conflicts. 16-bit elements are written in pairs of rows. Limiter:
// memory.
//
// Rung: `tiled`. Read parts.cuh (table of parts); its sizes count tiles: of columns last, of rows before that, and
// strides are between tiles.
#include "copy/parts.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
constexpr int X_VECTOR = 4;  // x_vector: elements per load
constexpr int Y_VECTOR = 4;  // y_vector: elements per store
#endif

struct Edge {  // filled by escalade/ops/copy.py, in this order
    int rows, columns;       // of a whole matrix
    int x_stride, y_stride;  // elements from row to row of x, and from column to column of y
};

struct Edges {
    Edge at[PARTS];
};

constexpr int TILE = 64;
constexpr int THREADS = 256;
constexpr int CHUNK = 16 / sizeof(Element);
constexpr int CHUNKS = TILE / CHUNK;
constexpr int ROWS = sizeof(Element) < 4 ? 2 : 1;  // per thread and access
constexpr int COLUMN_LANES = X_VECTOR >= 4 ? 8 : 32;
constexpr int ROW_STEP = THREADS / COLUMN_LANES * ROWS;
constexpr int COLUMN_STEP = COLUMN_LANES * X_VECTOR;
constexpr int ROW_PASSES = TILE / ROW_STEP;
constexpr int COLUMN_PASSES = TILE / COLUMN_STEP;
static_assert(TILE % ROW_STEP == 0 && TILE % COLUMN_STEP == 0, "passes cover the tile");
constexpr int ROW_LANES = TILE / Y_VECTOR < 32 ? TILE / Y_VECTOR : 32;

__device__ __forceinline__ int place(int row, int column) {
    const int chunk = row / CHUNK ^ column / X_VECTOR % (CHUNKS < 8 ? CHUNKS : 8);
    return column * TILE + chunk * CHUNK + row % CHUNK;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    copy_tiled(const __grid_constant__ Addresses addresses, const __grid_constant__ Parts parts,
               const __grid_constant__ Edges edges) {
    __shared__ __align__(16) unsigned char shared_memory[TILE * TILE * sizeof(Element)];
    Element* tile = reinterpret_cast<Element*>(shared_memory);
    wait_for_previous_launch();

    const int number = part_of_block(parts, blockIdx.x);
    const Part& part = parts.at[number];
    const Edge& edge = edges.at[number];
    const unsigned at = blockIdx.x - part.first_block;
    const Offsets corner = offsets_of(part, at);
    // Tiles that share lines of y are adjacent: those of rows are the innermost.
    const int rows = edge.rows - static_cast<int>(at % part.size[RANK - 1]) * TILE;  // from the tile's first on
    const int columns = edge.columns - static_cast<int>(at / part.size[RANK - 1] % part.size[RANK - 2]) * TILE;
    const Element* x = addresses.x[number] + corner.x;
    Element* y = addresses.y[number] + corner.y;

    const int lane_row = threadIdx.x / COLUMN_LANES * ROWS;
    const int lane_column = threadIdx.x % COLUMN_LANES * X_VECTOR;
    Pack<Element, X_VECTOR> read[ROW_PASSES][COLUMN_PASSES][ROWS];
#pragma unroll
    for (int i = 0; i < ROW_PASSES; ++i)
#pragma unroll
        for (int j = 0; j < COLUMN_PASSES; ++j)
#pragma unroll
            for (int k = 0; k < ROWS; ++k) {
                const int row = i * ROW_STEP + lane_row + k;
                const int column = j * COLUMN_STEP + lane_column;
                read[i][j][k] = {};
                if (row < rows && column < columns)
                    read[i][j][k] = load_pack<Element, X_VECTOR>(x + 1LL * row * edge.x_stride + column);
            }

#pragma unroll
    for (int i = 0; i < ROW_PASSES; ++i)
#pragma unroll
        for (int j = 0; j < COLUMN_PASSES; ++j)
#pragma unroll
            for (int e = 0; e < X_VECTOR; ++e) {
                Pack<Element, ROWS> pair;
#pragma unroll
                for (int k = 0; k < ROWS; ++k) pair.at[k] = read[i][j][k].at[e];
                store_pack(tile + place(i * ROW_STEP + lane_row, j * COLUMN_STEP + lane_column + e), pair);
            }
    __syncthreads();

    const int row = threadIdx.x % ROW_LANES * Y_VECTOR;
    const int column = threadIdx.x / ROW_LANES;
#pragma unroll
    for (int j = 0; j < TILE; j += THREADS / ROW_LANES)
#pragma unroll
        for (int i = 0; i < TILE; i += ROW_LANES * Y_VECTOR)
            if (row + i < rows && column + j < columns)
                store_pack(y + 1LL * (column + j) * edge.y_stride + row + i,
                           load_pack<Element, Y_VECTOR>(tile + place(row + i, column + j)));
}
