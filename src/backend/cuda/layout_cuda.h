/*
 * layout_cuda.h - the resident layout of a matrix on the GPU: a permutation of its canonical bits.
 *
 *     canonical  data and scales as in format/format.h
 *     resident   [panel p = row / 64][block b = k / 64] tiles of 64 rows x 64 k, each
 *                    [unit u = row % 64 / 8] of 8 rows x 64 k, then the tile's small scales
 *                rows and k are padded with zero bits to whole tiles; f32 scales stay canonical and
 *                apart (FP8), so do tensor scales
 *
 * A unit is what the 32 lanes of a warp need of 8 rows for four k16 steps of a tensor-core A
 * fragment: lane = row % 8 * 4 + c holds, for step s = k % 64 / 16, the k's 16 s + {2c, 2c + 1} and
 * {2c + 8, 2c + 9}, two "pairs" 2s and 2s + 1.  Bytes of a lane within its unit:
 *
 *     BF16  32: [half = s / 2][lane][16 bytes: four pairs from 4 half, 4 bytes each, even k first]
 *     E4M3  16: [lane][4 words s: bytes k = 2c, 2c + 8, 2c + 1, 2c + 9 of the step]
 *     E2M1   8: [lane][2 words q0, q1]: pair i is t(i), sign bits 15 and 31, E2M1's other three at
 *               bits 8-6 and 24-22, the even k in the low half; with m = 0x81C081C0,
 *               n = 0x06030603 and x = q0 & n | q1 & ~n
 *                   t0 = q0 & m             t1 = q0 << 4 & m
 *                   t2 = rotl(q0, 10) & m   t3 = q1 << 2 & m
 *                   t4 = q1 << 6 & m        t5 = rotl(q1, 12) & m
 *                   t6 = rotl(x, 8) & m     t7 = rotl(x, 14) & m
 *
 * Small scales of a tile: [row % 64][64 / group] bytes (NVFP4 4, MXFP4 and MXFP8 2), k ascending.
 *
 * Tiles lie front to back in the order a GEMM reads 64 rows, so one bulk copy fetches one.
 * layout_cuda_pack and _unpack are the definition, on the CPU; the kernels of layout.cu do the same
 * on the device while staging and when weights are read back (test/cuda/test_layout.c: random
 * bytes, odd shapes, both ways).
 */
#ifndef BACKEND_CUDA_LAYOUT_CUDA_H
#define BACKEND_CUDA_LAYOUT_CUDA_H

#include "format/format.h"

#define TILE_ROWS 64
#define TILE_K    64

/* What a tile holds of a format, by the width of its elements and the k that share a small scale.
 */
struct tile_shape {
    uint32_t elem_bits;
    uint32_t group;      /* k of a small scale; 0: none in the tile */
    uint32_t data_bytes; /* of the elements; the small scales follow */
    uint32_t bytes;      /* of the whole tile, a multiple of 16 */
};
struct tile_shape tile_shape(format_t f);

static inline uint32_t tile_panels(uint32_t rows)
{
    return rows / TILE_ROWS + (rows % TILE_ROWS != 0);
}
static inline uint32_t tile_blocks(uint32_t cols)
{
    return cols / TILE_K + (cols % TILE_K != 0);
}

/* Bytes of all tiles of a matrix (f32 scales apart); false when they overflow size_t. */
bool layout_cuda_bytes(size_t *out, format_t f, uint64_t rows, uint64_t cols);

/* Canonical data and small scales (NULL where the format has none in the tiles) to tiles, and back.
 * Panels [panel0, panel0 + n) alone; pointers are those of the whole matrix. */
void layout_cuda_pack(void *tiles, format_t f, const void *data, const void *scale, uint32_t rows,
                      uint32_t cols, uint32_t panel0, uint32_t n);
void layout_cuda_unpack(void *data, void *scale, format_t f, const void *tiles, uint32_t rows,
                        uint32_t cols, uint32_t panel0, uint32_t n);

/* --- what the kernels of layout.cu take; repack.h launches them. */
#define LAYOUT_THREADS 256
struct layout_args {
    void *tiles;
    void *data;  /* canonical; written by unpack_*, else read; NULL: the elements are left alone */
    void *scale; /* likewise */
    uint32_t rows, cols;
};

#endif
