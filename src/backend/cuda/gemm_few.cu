/*
 * gemm_few.cu - the GEMM kernels for dense linears of at most GEMM_FEW_ROWS rows of x: a warp
 * streams 16 rows of weights, or a segment of them, by itself.
 *
 * A strip is 16 rows of weights: two units, neighbours of a panel.  Each of its segments has a warp
 * of its own; the warps of a strip are a team, which adds their sums in order.  A block has some
 * teams, with neighbouring strips.
 *
 *   ring     each warp's own, in shared memory: CHUNKS chunks of an even number of blocks of 64 k,
 * by cp.async, one group a chunk; it runs on from strip to strip.  Of a block a quarter of a tile:
 * the two units, then their small scales.  The first chunks are asked for before the kernel before
 * has ended, where that is allowed: then only x is left to wait for x        all of it in shared
 * memory, once a block: for each block of 64 k 128 bytes a row (a power of two of rows), 16-byte
 * pieces swizzled by row, for ldmatrix chain    mma.sync over the same chains of k16 steps as in
 * gemm.cuh, the next block's operands on their way into registers meanwhile bound    few strips:
 * the chain, whatever the format; many: bytes
 */
#include "backend/cuda/gemm_few.h"
#include "backend/cuda/gemm_produce.cuh"
#include "backend/cuda/gemm_store.cuh"

enum { CHUNKS = GEMM_FEW_CHUNKS };

/* Bytes of a block's part of a strip. */
template <format_t F>
struct few_shape {
    typedef weight<F> W;
    static constexpr bool CHAINS = F == FORMAT_FP8_BLOCK;
    static constexpr int ROW_SCALES = W::GROUP ? 64 / (W::GROUP ? W::GROUP : 64) : 0;
    static constexpr int UNITS = 2 * W::UNIT, BLOCK = UNITS + 16 * ROW_SCALES;
    static constexpr int PIECES = ROW_SCALES; /* of 16 bytes: the scales of both units */
};

/* What never changes for a warp. */
struct few_place {
    uint32_t ring;     /* shared-memory address */
    int chunk;         /* blocks */
    int begin, end;    /* its segment, in blocks; `begin` is even */
    int total, stride; /* strips; from one of the warp's to its next */
};

__device__ __forceinline__ int few_strips(const struct gemm_args &a, int part)
{
    return (weight_rows(a, part) + 15) / 16;
}

__device__ __forceinline__ struct work few_at(const struct gemm_args &a, int i)
{
    struct work w = {};
    for (int n; (n = few_strips(a, w.group)) <= i; w.group++)
        i -= n;
    w.m = i;
    w.width = a.n_rows;
    w.n = weight_rows(a, w.group);
    w.col = a.part[w.group];
    return w;
}

/* --- the ring */

/* What a lane copies next: its 16 bytes of a strip's units and scales. */
struct few_feed {
    const char *units, *scales;
    int strip, block, slot;
};

template <format_t F>
__device__ __forceinline__ void few_find(struct few_feed &f, const struct gemm_args &a)
{
    typedef weight<F> W;
    typedef few_shape<F> S;
    constexpr int P = S::PIECES ? S::PIECES : 1;
    struct work w = few_at(a, f.strip);
    int lane = threadIdx.x & 31, unit = w.m * 2;
    const char *tile =
        (const char *)a.w[w.group].tiles + (size_t)(unit / 8) * gemm_few_blocks(a.k) * W::TILE;
    f.units = tile + unit % 8 * W::UNIT + lane * 16;
    f.scales = tile + W::DATA + unit % 8 * 8 * S::ROW_SCALES + lane % P * 16 + lane / P * W::TILE;
}

/* The next chunk, if there is one. */
template <format_t F>
__device__ __forceinline__ void few_feed(struct few_feed &f, const struct gemm_args &a,
                                         const struct few_place &at)
{
    typedef weight<F> W;
    typedef few_shape<F> S;
    constexpr int P = S::PIECES ? S::PIECES : 1;
    int lane = threadIdx.x & 31, n = min(at.chunk, at.end - f.block);
    uint32_t to = at.ring + f.slot * at.chunk * S::BLOCK;
    f.slot = (f.slot + 1) & (CHUNKS - 1);
    if (f.strip < at.total) {
        size_t from = (size_t)f.block * W::TILE;
        if (S::PIECES && lane < n * P)
            cp_async_cg_16(to + lane / P * S::BLOCK + S::UNITS + lane % P * 16, f.scales + from,
                           16);
        const char *units = f.units + from;
        to += lane * 16;
#pragma unroll 1
        for (int j = 0; j < n; j += 2) {
#pragma unroll
            for (int h = 0; h < 2; h++)
                if (j + h < n)
#pragma unroll
                    for (int i = 0; i < S::UNITS; i += 512)
                        cp_async_cg_16(to + h * S::BLOCK + i, units + h * W::TILE + i, 16);
            to += 2 * S::BLOCK;
            units += 2 * W::TILE;
        }
        f.block += n;
        if (f.block == at.end) {
            f.block = at.begin;
            f.strip += at.stride;
            if (f.strip < at.total) few_find<F>(f, a);
        }
    }
    cp_async_commit_group();
}

/* All rows of x, by the whole block. */
__device__ __forceinline__ void few_rows(const struct gemm_args &a, uint32_t to)
{
    enum { AHEAD = 8 };
    int log = gemm_few_log(a.n_rows), pieces = gemm_few_blocks(a.k) * 8 << log;
#pragma unroll 1
    for (int p0 = threadIdx.x; p0 < pieces; p0 += AHEAD * blockDim.x) {
        float4 v[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            int p = p0 + i * blockDim.x, row = p >> 3, column = row & ((1 << log) - 1);
            int k = (row >> log) * 64 + (p & 7) * 8;
            v[i] = {};
            if (p < pieces && k < a.k)
                v[i] = *(const float4 *)((const uint16_t *)a.x +
                                         (size_t)min(column, a.n_rows - 1) * a.ldx + k);
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            int p = p0 + i * blockDim.x, row = p >> 3, column = row & ((1 << log) - 1);
            const float piece[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
            if (p < pieces) st_shared_v4(to + row * 128 + (((p & 7) ^ column) << 4), piece);
        }
    }
}

/* --- a block of 64 k */

/* What is read next, as addresses of this lane: `left` blocks of the open chunk, `todo` of the
 * strip behind it. */
struct few_read {
    uint32_t units, scales, x[2];
    int left, todo, slot;
};

template <format_t F>
__device__ __forceinline__ void few_open(struct few_read &r, const struct few_place &at)
{
    typedef few_shape<F> S;
    int lane = threadIdx.x & 31;
    cp_async_wait_group<CHUNKS - 1>();
    __syncwarp();
    uint32_t chunk = at.ring + r.slot * at.chunk * S::BLOCK;
    r.units = chunk + lane * (weight<F>::BITS == 4 ? 8 : 16);
    r.scales = chunk + S::UNITS + lane / 4 * S::ROW_SCALES;
    r.slot = (r.slot + 1) & (CHUNKS - 1);
    if (r.todo == 0) r.todo = at.end - at.begin;
    r.left = min(at.chunk, r.todo);
    r.todo -= r.left;
}

template <format_t F>
struct few_block {
    struct raw<F> raw[2];
    uint32_t x[8]; /* of step s: registers 2 s and 2 s + 1 of B */
};

/* A third of the next of the open chunk: each unit with its scales, then x. */
template <format_t F>
__device__ __forceinline__ void few_load(struct few_block<F> &v, struct few_read &r, int row_bytes,
                                         int third)
{
    typedef weight<F> W;
    typedef few_shape<F> S;
    if (third < 2) {
        uint32_t p = r.units + third * W::UNIT, s = r.scales + third * 8 * S::ROW_SCALES;
        struct raw<F> &q = v.raw[third];
        if (W::BITS == 16) {
            *(uint4 *)&q.q[0] = ld_shared_v4(p);
            *(uint4 *)&q.q[W::BITS / 4] = ld_shared_v4(p + 512);
        } else if (W::BITS == 8) {
            *(uint4 *)&q.q[0] = ld_shared_v4(p);
        } else {
            *(uint2 *)&q.q[0] = ld_shared_v2(p);
        }
        if (W::GROUP == 16) q.s0 = ld_shared_u32(s);
        if (W::GROUP == 32) q.s0 = ld_shared_u16(s);
        return;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        ldmatrix_x4(&v.x[4 * i], r.x[i]);
        r.x[i] += row_bytes;
    }
    r.units += S::BLOCK;
    r.scales += S::BLOCK;
    r.left--;
}

template <format_t F>
__device__ __forceinline__ void few_load(struct few_block<F> &v, struct few_read &r, int row_bytes)
{
#pragma unroll
    for (int third = 0; third < 3; third++)
        few_load<F>(v, r, row_bytes, third);
}

/* acc += a block.  After each step a third of the next block's operands is asked for: not before,
 * since both blocks' loads share scoreboards, and not at once, since loads take their time to
 * issue.
 */
template <format_t F>
__device__ __forceinline__ void few_multiply(float acc[4], struct few_block<F> &v,
                                             struct few_block<F> &next, bool load,
                                             struct few_read &r, int row_bytes)
{
    weight_prepare<F>(v.raw[0]);
    weight_prepare<F>(v.raw[1]);
#pragma unroll
    for (int step = 0; step < 4; step++) {
        uint32_t f[4];
        weight_operand<F>(f, v.raw, step);
        mma_m16n8k16_bf16(acc, f, &v.x[2 * step]);
        if (load && step < 3) few_load<F>(next, r, row_bytes, step);
    }
}

/* --- kernels */

/* Each segment's sums to the team's first warp. */
__device__ __forceinline__ void few_add(float sum[4], float4 (*sums)[32], int segments)
{
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, team = warp / segments;
    sums[warp][lane] = {sum[0], sum[1], sum[2], sum[3]};
    bar_sync(1 + team, segments * 32);
    for (int s = 1; s < segments && warp % segments == 0; s++) {
        float4 v = sums[warp + s][lane];
        sum[0] = __fadd_rn(sum[0], v.x);
        sum[1] = __fadd_rn(sum[1], v.y);
        sum[2] = __fadd_rn(sum[2], v.z);
        sum[3] = __fadd_rn(sum[3], v.w);
    }
    bar_sync(1 + team, segments * 32);
}

/* The warp's strips from `i` on; `x`: address of the rows. */
template <format_t F>
__device__ __forceinline__ void few_run(const struct gemm_args &a, const struct few_place &at,
                                        struct few_feed &f, int i, uint32_t x, float4 (*sums)[32],
                                        int segments)
{
    typedef few_shape<F> S;
    int lane = threadIdx.x & 31, segment = (threadIdx.x >> 5) % segments,
        row_bytes = 128 << gemm_few_log(a.n_rows);
    int column = lane & 7 & ((1 << gemm_few_log(a.n_rows)) - 1);
    uint32_t x0 = x + at.begin * row_bytes + column * 128, piece = (lane / 8 ^ column) << 4;
    struct few_read r = {0, 0, {x0 + piece, x0 + (piece ^ 64)}, 0, 0, 0};
    struct few_block<F> even, odd;
    few_open<F>(r, at);
    few_load<F>(even, r, row_bytes);
    for (; i < at.total; i += at.stride) {
        struct work w = few_at(a, i);
        const struct gemm_weight *m = a.w + w.group;
        float acc[4] = {}, sum[4] = {};
        int col = w.m * 16, row = col + lane / 4;
        float factor[2] = {row_scale<F>(m, row, w.n, a.scale_rows),
                           row_scale<F>(m, row + 8, w.n, a.scale_rows)};
        const float *scales = m->scale + (S::CHAINS ? (size_t)(w.m / 8) * ((a.k + 127) / 128) : 0);
#pragma unroll 1
        for (int b = at.begin; b < at.end; b += 2) {
            bool two = b + 1 < at.end, last = b + 2 >= at.end,
                 more = !last || i + at.stride < at.total;
            float scale = S::CHAINS ? __ldg(scales + b / 2) : 1.0f;
            few_multiply<F>(acc, even, odd, two, r, row_bytes);
            if (last) {
                r.x[0] = x0 + piece;
                r.x[1] = x0 + (piece ^ 64);
            }
            if (r.left == 0 && more) { /* all of the chunk has been read */
                __syncwarp();
                few_feed<F>(f, a, at);
                few_open<F>(r, at);
            }
            if (two)
                few_multiply<F>(acc, odd, even, more, r, row_bytes);
            else if (more)
                few_load<F>(even, r, row_bytes);
            if (S::CHAINS)
#pragma unroll
                for (int q = 0; q < 4; q++) {
                    sum[q] = __fmaf_rn(acc[q], scale, sum[q]);
                    acc[q] = 0.0f;
                }
        }
#pragma unroll
        for (int q = 0; q < 4 && !S::CHAINS; q++)
            sum[q] = acc[q];
        if (segments > 1) few_add(sum, sums, segments);
        if (segment > 0) continue;
        if (a.out_kind == GEMM_BF16)
            store_bf16<F, 8>(a, sum, factor, w, col, 8, false);
        else
            store_f32<F, 8>(a, sum, factor, w, col, 8);
    }
}

template <format_t F>
__device__ __forceinline__ void few_body(const struct gemm_args &a)
{
    typedef few_shape<F> S;
    extern __shared__ __align__(128) char smem[];
    __shared__ float4 sums[GEMM_FEW_WARPS][32];
    int warps = blockDim.x >> 5, warp = threadIdx.x >> 5, blocks = gemm_few_blocks(a.k);
    int per_segment = a.segment / TILE_K, segments = (blocks + per_segment - 1) / per_segment;
    int teams = warps / segments, segment = warp % segments;
    griddepcontrol_launch_dependents();
    if (!a.prefetch) griddepcontrol_wait();
    struct few_place at;
    at.chunk = gemm_few_chunk(a.k, a.segment, a.n_rows, warps, S::BLOCK);
    at.ring = smem_addr_once(smem) + warp * CHUNKS * at.chunk * S::BLOCK;
    at.begin = segment * per_segment;
    at.end = min(at.begin + per_segment, blocks);
    at.stride = gridDim.x * teams;
    at.total = 0;
    for (int p = 0; p < a.n_groups; p++)
        at.total += few_strips(a, p);
    int i = blockIdx.x * teams + warp / segments;
    struct few_feed f = {NULL, NULL, i, at.begin, 0};
    if (i < at.total) {
        few_find<F>(f, a);
#pragma unroll 1
        for (int c = 0; c < CHUNKS; c++)
            few_feed<F>(f, a, at);
        if (segment == 0 && (threadIdx.x & 31) == 0)
#pragma unroll
            for (int j = 0; j < GEMM_NEXT_MAX; j++)
                if (a.next[j].w)
                    prefetch_share(a.next[j].w->tiles, a.next[j].bytes, i,
                                   min(at.total, at.stride));
    }
    if (a.prefetch) griddepcontrol_wait();
    uint32_t x = smem_addr_once(smem) + warps * CHUNKS * at.chunk * S::BLOCK;
    few_rows(a, x);
    __syncthreads();
    if (i < at.total) few_run<F>(a, at, f, i, x, sums, segments);
}

#define FEW_KERNEL(F, name)                                              \
    extern "C" __global__ void __launch_bounds__(GEMM_FEW_WARPS * 32, 2) \
        gemm_##name##_few(const __grid_constant__ struct gemm_args a)    \
    {                                                                    \
        few_body<F>(a);                                                  \
    }
FEW_KERNEL(FORMAT_BF16, bf16)
FEW_KERNEL(FORMAT_NVFP4, nvfp4)
FEW_KERNEL(FORMAT_FP8_BLOCK, fp8_block)
FEW_KERNEL(FORMAT_FP8_CHANNEL, fp8)
FEW_KERNEL(FORMAT_MXFP8, mxfp8)
FEW_KERNEL(FORMAT_MXFP4, mxfp4)
