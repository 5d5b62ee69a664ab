// Tiles of tensor_core.cu: smem layout, and the pixels of the product's rows; the opening of that file explains the
// prelude's constants.
#pragma once

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Source = float;              // problem.x_type
using Element = float;             // problem.storage
constexpr int HEIGHT = 9;          // problem.height
constexpr int WIDTH = 9;           // problem.width
constexpr int PAD_H = 2;           // problem.padding[0]
constexpr int PAD_W = 2;           // problem.padding[1]
constexpr int OUTPUT_HEIGHT = 10;  // problem.output_height
constexpr int OUTPUT_WIDTH = 10;   // problem.output_width
constexpr int POOL = 0;            // problem.pool
constexpr int IMAGES = 1;          // config.images: per stage
constexpr int ROWS = 1;            // config.rows: convolution rows per warp at once
constexpr int WARPS = 4;           // config.warps
constexpr int ROW_BLOCKS = 3;      // product.row_blocks
constexpr int CELLS_IN_ROW = 6;    // product.cells_in_row
constexpr bool NARROW = false;         // product.narrow: the last window of a row has one pair
constexpr int STAGED_WIDTH = 18;   // product.staged_width
constexpr int OPERAND_WIDTH = 18;  // product.operand_width
constexpr int SOURCE_BUFFER = 0;   // product.source_buffer
constexpr int BUFFER = 1008;       // product.buffer
#endif

#include "common/elements.cuh"
#include "few_channels/tensor_core.cuh"

constexpr int THREADS = WARPS * 32;
constexpr int WORKERS = WARPS / UNITS;  // warps that share the rows of the product
static_assert(WARPS % UNITS == 0, "units divide the warps");
static_assert(POOL == 1 || ROWS % POOL == 0, "windows end with the rows of a warp");
constexpr int CONV_HEIGHT = HEIGHT + 2 * PAD_H - FILTER_HEIGHT + 1;
constexpr int CONV_WIDTH = WIDTH + 2 * PAD_W - FILTER_WIDTH + 1;
constexpr int IMAGE = HEIGHT * WIDTH * CHANNELS;
constexpr int OUTPUT_IMAGE = OUTPUT_HEIGHT * OUTPUT_WIDTH * FILTERS;

constexpr int PAIRS_IN_CELL = POOL == 4 ? 2 : 1;
constexpr int CELLS_IN_TILE = 16 / PAIRS_IN_CELL;  // per 16 rows of the product
constexpr int WIDE_CELLS = ROW_BLOCKS * CELLS_IN_ROW;
constexpr int NARROW_CELLS = NARROW ? (ROW_BLOCKS + 1) / 2 : 0;
constexpr int CELLS_IN_IMAGE = WIDE_CELLS + NARROW_CELLS;
static_assert(!NARROW || (POOL == 4 && CELLS_IN_ROW == OUTPUT_WIDTH - 1), "the last windows of a row are separate");

constexpr bool DIRECT = sizeof(Source) == 2;  // staged as stored; the tile and the next have a buffer each
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

// Offset among the operands of element `at` of a tile as copied.
__device__ __forceinline__ int operand_at(int at) { return at + at / STAGED_ROW * (OPERAND_ROW - STAGED_ROW); }

__device__ __forceinline__ float to_float(unsigned char value) { return value; }

// A row of the product: a pair of columns, in ROWS rows of an image.
struct RowPosition {
    bool exists;  // in a full tile
    bool narrow;  // a window of one pair
    int cell;
    int image;  // of the tile
    int row;    // of the convolution, first of ROWS
    int pair;   // of columns

    // Row i of 16 in block m. The pairs of a window are rows `group` and `group` + 8, ordered so that eight adjacent
    // rows start in different banks.
    __device__ __forceinline__ RowPosition(int m, int i) {
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

    // Offset of the first element among the operands.
    __device__ __forceinline__ int operand() const {
        return image * OPERAND_IMAGE + row * OPERAND_ROW + 2 * pair * PIXEL;
    }
};
