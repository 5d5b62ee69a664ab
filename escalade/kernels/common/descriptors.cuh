// How wgmma is told where an operand lies in shared memory: descriptors of 64 bits. Plain arithmetic, which the twin takes
// from here too.
#pragma once

#include "common/ptx.cuh"

// A K-major operand in 128-byte-swizzled rows, its tile aligned to 1024 bytes.
//   bits 0-13 start >> 4 | 16-29 leading offset >> 4 (unused here) | 32-45 stride between groups of
//   8 rows >> 4 | 49-51 base offset 0 | 62-63 swizzle mode, 1 = 128 bytes
// Going 32 bytes along K inside the row, as far as a product goes, adds 2 to the start's field.
__device__ __forceinline__ u64 operand_descriptor(u32 address) {
    return static_cast<u64>((address & 0x3FFFF) >> 4) | (u64(1) << 16) | (u64(1024 >> 4) << 32)
           | (u64(1) << 62);
}

// An MN-major operand, where the elements of one k lie together: 128-byte-swizzled rows of 64, a row for each k, groups
// of 8 rows one behind another, from 1024-byte boundaries on; the next 64 along M or N begin `block_stride` bytes
// further.
//   bits 0-13 start >> 4 | 16-29 block_stride >> 4 | 32-45 stride between groups of 8 rows >> 4 | 62-63 swizzle mode 1
// Going 16 along K adds 2048 bytes: 128 in the start's field.
__device__ __forceinline__ u64 transposed_descriptor(u32 address, u32 block_stride) {
    return static_cast<u64>((address & 0x3FFFF) >> 4) | (u64(block_stride >> 4) << 16) | (u64(1024 >> 4) << 32)
           | (u64(1) << 62);
}

// A K-major operand without swizzle. Its rows are 16 bytes apart in groups of 8, `row_stride` bytes from group to
// group; the second half of k lies `k_stride` bytes after the first. Rows and halves may overlap.
//   bits 0-13 start >> 4 | 16-29 k_stride >> 4 | 32-45 row_stride >> 4 | 62-63 swizzle mode 0
// Moving the start by n bytes adds n / 16.
__device__ __forceinline__ u64 overlapping_descriptor(u32 address, u32 k_stride, u32 row_stride) {
    return static_cast<u64>((address & 0x3FFFF) >> 4) | (u64(k_stride >> 4) << 16) | (u64(row_stride >> 4) << 32);
}
