// 64-bit smem descriptors of wgmma operands. Plain arithmetic, shared with the twin.
#pragma once

#include "common/ptx.cuh"

// K-major operand in 128-byte-swizzled rows, tile aligned to 1024 bytes.
//   bits 0-13 start >> 4 | 16-29 leading offset >> 4 (unused here) | 32-45 stride between groups of
//   8 rows >> 4 | 49-51 base offset 0 | 62-63 swizzle mode, 1 = 128 bytes
// Advancing 32 bytes (one k-step) along K inside the row adds 2 to the start field.
__device__ __forceinline__ u64 operand_descriptor(u32 address) {
    return static_cast<u64>((address & 0x3FFFF) >> 4) | (u64(1) << 16) | (u64(1024 >> 4) << 32)
           | (u64(1) << 62);
}

// The same in 64-byte-swizzled rows, tile aligned to 512 bytes: groups of 8 rows are 512 bytes apart, swizzle mode 2.
__device__ __forceinline__ u64 narrow_operand_descriptor(u32 address) {
    return static_cast<u64>((address & 0x3FFFF) >> 4) | (u64(1) << 16) | (u64(512 >> 4) << 32) | (u64(2) << 62);
}

// MN-major operand, where the elements of one k are contiguous: 128-byte-swizzled rows of 64, one row per k,
// consecutive groups of 8 rows, aligned to 1024 bytes. The next 64 along M or N start `block_stride` bytes further.
//   bits 0-13 start >> 4 | 16-29 block_stride >> 4 | 32-45 stride between groups of 8 rows >> 4 | 62-63 swizzle mode 1
// Advancing 16 along K adds 2048 bytes: 128 in the start field.
__device__ __forceinline__ u64 transposed_descriptor(u32 address, u32 block_stride) {
    return static_cast<u64>((address & 0x3FFFF) >> 4) | (u64(block_stride >> 4) << 16) | (u64(1024 >> 4) << 32)
           | (u64(1) << 62);
}

// K-major operand without swizzle. Rows are 16 bytes apart in groups of 8, groups `row_stride` bytes apart; the second
// half of k is `k_stride` bytes after the first. Rows and halves may overlap.
//   bits 0-13 start >> 4 | 16-29 k_stride >> 4 | 32-45 row_stride >> 4 | 62-63 swizzle mode 0
// Advancing the start by n bytes adds n / 16.
__device__ __forceinline__ u64 overlapping_descriptor(u32 address, u32 k_stride, u32 row_stride) {
    return static_cast<u64>((address & 0x3FFFF) >> 4) | (u64(k_stride >> 4) << 16) | (u64(row_stride >> 4) << 32);
}
