/* layout.cu - canonical matrices to tiles and back: layout_cuda.c on the device, a thread for each
 * lane of a unit; one by one, or a batch of pieces (feed.h). */
#include "backend/cuda/feed.h"

template <int BITS>
__device__ uint32_t code_read(const struct layout_args &a, uint32_t row, uint32_t col)
{
    if (row >= a.rows || col >= a.cols) return 0;
    if (BITS == 16) return ((const uint16_t *)a.data)[(size_t)row * a.cols + col];
    if (BITS == 8) return ((const uint8_t *)a.data)[(size_t)row * a.cols + col];
    return ((const uint8_t *)a.data)[(size_t)row * ((a.cols + 1) / 2) + col / 2] >> (col % 2 * 4) &
           15;
}

/* Columns col (even) and col + 1; a byte of two nibbles is written whole. */
template <int BITS>
__device__ void codes_write(const struct layout_args &a, uint32_t row, uint32_t col, uint32_t lo,
                            uint32_t hi)
{
    if (row >= a.rows || col >= a.cols) return;
    bool both = col + 1 < a.cols;
    size_t at = (size_t)row * a.cols + col;
    if (BITS == 16) {
        ((uint16_t *)a.data)[at] = lo;
        if (both) ((uint16_t *)a.data)[at + 1] = hi;
    } else if (BITS == 8) {
        ((uint8_t *)a.data)[at] = lo;
        if (both) ((uint8_t *)a.data)[at + 1] = hi;
    } else {
        ((uint8_t *)a.data)[(size_t)row * ((a.cols + 1) / 2) + col / 2] = lo | (both ? hi << 4 : 0);
    }
}

__device__ __forceinline__ uint32_t rotl(uint32_t x, int n)
{
    return x << n | x >> (32 - n);
}

__device__ uint32_t nibbles_spread(uint32_t lo, uint32_t hi)
{
    return (lo >> 3) << 15 | (lo & 7) << 6 | (hi >> 3) << 31 | (hi & 7) << 22;
}

/* The lane's bytes of its unit from 16 codes, and back; layout_cuda.h has the places. */
template <int BITS>
__device__ void lane_write(char *unit, int lane, const uint32_t code[16])
{
    if (BITS == 16) {
        for (int j = 0; j < 16; j++)
            *(uint16_t *)(unit + j / 8 * 512 + lane * 16 + j % 8 * 2) = code[j];
    } else if (BITS == 8) {
        for (int j = 0; j < 16; j++)
            unit[lane * 16 + j / 4 * 4 + j % 2 * 2 + j % 4 / 2] = code[j];
    } else {
        uint32_t t[8];
        for (int i = 0; i < 8; i++)
            t[i] = nibbles_spread(code[2 * i], code[2 * i + 1]);
        uint32_t x = rotl(t[6], 24) | rotl(t[7], 18);
        uint32_t q0 = t[0] | t[1] >> 4 | rotl(t[2], 22) | (x & 0x06030603u);
        uint32_t q1 = t[3] >> 2 | t[4] >> 6 | rotl(t[5], 20) | (x & ~0x06030603u);
        *(uint2 *)(unit + lane * 8) = make_uint2(q0, q1);
    }
}

template <int BITS>
__device__ void lane_read(uint32_t code[16], const char *unit, int lane)
{
    if (BITS == 16) {
        for (int j = 0; j < 16; j++)
            code[j] = *(const uint16_t *)(unit + j / 8 * 512 + lane * 16 + j % 8 * 2);
    } else if (BITS == 8) {
        for (int j = 0; j < 16; j++)
            code[j] = (uint8_t)unit[lane * 16 + j / 4 * 4 + j % 2 * 2 + j % 4 / 2];
    } else {
        uint2 q = *(const uint2 *)(unit + lane * 8);
        uint32_t x = (q.x & 0x06030603u) | (q.y & ~0x06030603u);
        const uint32_t t[8] = {q.x,      q.x << 4,      rotl(q.x, 10), q.y << 2,
                               q.y << 6, rotl(q.y, 12), rotl(x, 8),    rotl(x, 14)};
        for (int i = 0; i < 8; i++) {
            code[2 * i] = (t[i] >> 15 & 1) << 3 | (t[i] >> 6 & 7);
            code[2 * i + 1] = t[i] >> 31 << 3 | (t[i] >> 22 & 7);
        }
    }
}

/* Elements of tile b of panel p. */
template <int BITS, bool TO_TILES>
__device__ void layout_elements(const struct layout_args &a, char *tile, uint32_t b, uint32_t p)
{
    uint32_t unit = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint32_t row = p * TILE_ROWS + unit * 8 + lane / 4, code[16];
    char *at = tile + unit * (TILE_ROWS * TILE_K * BITS / 8 / 8);
    if (!TO_TILES) lane_read<BITS>(code, at, lane);
    for (int j = 0; j < 16; j += 2) {
        uint32_t col = b * TILE_K + j / 4 * 16 + lane % 4 * 2 + j % 4 / 2 * 8;
        if (TO_TILES) {
            code[j] = code_read<BITS>(a, row, col);
            code[j + 1] = code_read<BITS>(a, row, col + 1);
        } else {
            codes_write<BITS>(a, row, col, code[j], code[j + 1]);
        }
    }
    if (TO_TILES) lane_write<BITS>(at, lane, code);
}

template <int BITS, int GROUP, bool TO_TILES>
__device__ void layout_body(const struct layout_args &a, uint32_t b, uint32_t p, uint32_t n_blocks)
{
    constexpr int DATA = TILE_ROWS * TILE_K * BITS / 8, PER_ROW = GROUP ? TILE_K / (GROUP ? GROUP : 1) : 0;
    constexpr int TILE = DATA + TILE_ROWS * PER_ROW;
    char *tile = (char *)a.tiles + ((size_t)p * n_blocks + b) * TILE;
    if (a.data) layout_elements<BITS, TO_TILES>(a, tile, b, p);
    if (!a.scale) return;
    for (uint32_t i = threadIdx.x; PER_ROW && i < TILE_ROWS * PER_ROW; i += LAYOUT_THREADS) {
        constexpr uint32_t N = PER_ROW ? PER_ROW : 1, G = GROUP ? GROUP : 1;
        uint32_t r = p * TILE_ROWS + i / N, c = b * N + i % N, cols = (a.cols + G - 1) / G;
        bool in = r < a.rows && c < cols;
        char *scale = (char *)a.scale + (size_t)r * cols + c;
        if (TO_TILES)
            tile[DATA + i] = in ? *scale : 0;
        else if (in)
            *scale = tile[DATA + i];
    }
}

#define LAYOUT_KERNELS(name, bits, group)                           \
    extern "C" __global__ void __launch_bounds__(LAYOUT_THREADS)    \
        pack_##name(const __grid_constant__ struct layout_args a)   \
    {                                                               \
        layout_body<bits, group, true>(a, blockIdx.x, blockIdx.y, gridDim.x); \
    }                                                               \
    extern "C" __global__ void __launch_bounds__(LAYOUT_THREADS)    \
        unpack_##name(const __grid_constant__ struct layout_args a) \
    {                                                               \
        layout_body<bits, group, false>(a, blockIdx.x, blockIdx.y, gridDim.x); \
    }

LAYOUT_KERNELS(16, 16, 0)
LAYOUT_KERNELS(8, 8, 0)
LAYOUT_KERNELS(8_g32, 8, 32)
LAYOUT_KERNELS(4_g16, 4, 16)
LAYOUT_KERNELS(4_g32, 4, 32)

template <int BITS, int GROUP>
__device__ void feed_tile(const struct feed_piece &p, const char *from, uint32_t at)
{
    uint32_t blocks = (p.cols + TILE_K - 1) / TILE_K;
    struct layout_args a = {p.to, p.scales ? nullptr : (void *)from, p.scales ? (void *)from : nullptr, p.rows, p.cols};
    layout_body<BITS, GROUP, true>(a, at % blocks, at / blocks, blocks);
}

__device__ void feed_plain(const struct feed_piece &p, const char *from, uint32_t at)
{
    size_t begin = (size_t)at * FEED_CHUNK, end = p.bytes - begin < FEED_CHUNK ? p.bytes : begin + FEED_CHUNK;
    char *to = (char *)p.to;
    if ((((size_t)to | (size_t)p.bytes) & 15) == 0)
        for (size_t i = begin + threadIdx.x * 16; i < end; i += LAYOUT_THREADS * 16)
            *(uint4 *)(to + i) = *(const uint4 *)(from + i);
    else
        for (size_t i = begin + threadIdx.x; i < end; i += LAYOUT_THREADS)
            to[i] = from[i];
}

extern "C" __global__ void __launch_bounds__(LAYOUT_THREADS) feed_batch(const __grid_constant__ struct feed_args a)
{
    const struct feed_piece *pieces = (const struct feed_piece *)a.batch;
    uint32_t lo = 0, hi = a.n - 1; /* the last piece that begins here or before */
    while (lo < hi) {
        uint32_t mid = (lo + hi + 1) / 2;
        if (pieces[mid].first <= blockIdx.x) lo = mid;
        else hi = mid - 1;
    }
    const struct feed_piece p = pieces[lo];
    const char *from = a.batch + p.from;
    uint32_t at = blockIdx.x - p.first;
    switch (p.kind) {
    case FEED_PLAIN: feed_plain(p, from, at); break;
    case FEED_16: feed_tile<16, 0>(p, from, at); break;
    case FEED_8: feed_tile<8, 0>(p, from, at); break;
    case FEED_8_G32: feed_tile<8, 32>(p, from, at); break;
    case FEED_4_G16: feed_tile<4, 16>(p, from, at); break;
    case FEED_4_G32: feed_tile<4, 32>(p, from, at); break;
    }
}
