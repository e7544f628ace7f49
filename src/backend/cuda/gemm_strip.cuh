/*
 * gemm_strip.cuh - the GEMM kernel for few rows of x: every warp streams 16 rows of weights by
 * itself.
 *
 * A work item is 16 rows of weights (two units: neighbours of a panel, or with SWIGLU the same unit
 * of gate and up) times at most 8 * NB rows of x.  A warp keeps DEPTH blocks of 64 k in registers,
 * loaded straight from global memory: tiles are in fragment order, so a load instruction reads
 * neighbouring bytes.  No shared memory but the tables, no barriers; mma.sync over the same chain
 * of k16 steps as in gemm.cuh.
 */
#ifndef BACKEND_CUDA_GEMM_STRIP_CUH
#define BACKEND_CUDA_GEMM_STRIP_CUH

/* A block of 64 k as loaded. */
template <format_t F, int NB>
struct strip_block {
    struct raw<F> raw[2];
    uint32_t x[NB][8]; /* of step s: registers 2 s and 2 s + 1 of B */
    float scale[2];    /* FP8 with block scales: of its chain */
};

/* Where an item's data lie for this lane. */
template <int NB>
struct strip {
    const char *unit[2];  /* this lane's bytes of the first block */
    const char *small[2]; /* and small scales */
    const float *scale[2];
    const char *x[NB];
};

template <format_t F, int NB>
__device__ __forceinline__ void strip_weights(struct strip_block<F, NB> &v,
                                              const struct strip<NB> &p, int b)
{
    typedef weight<F> W;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const char *from = p.unit[i] + (size_t)b * W::TILE, *s = p.small[i] + (size_t)b * W::TILE;
        struct raw<F> &r = v.raw[i];
        if (W::BITS == 16) {
            *(uint4 *)&r.q[0] = __ldcs((const uint4 *)from);
            *(uint4 *)&r.q[W::BITS / 4] = __ldcs((const uint4 *)(from + 512));
        } else if (W::BITS == 8) {
            *(uint4 *)&r.q[0] = __ldcs((const uint4 *)from);
        } else {
            *(uint2 *)&r.q[0] = __ldcs((const uint2 *)from);
        }
        if (W::GROUP == 16) r.s0 = __ldcs((const uint32_t *)s);
        if (W::GROUP == 32) r.s0 = __ldcs((const uint16_t *)s);
        if (F == FORMAT_FP8_BLOCK && b % 2 == 0) v.scale[i] = __ldg(p.scale[i] + b / 2);
    }
}

template <format_t F, int NB>
__device__ __forceinline__ void strip_rows(struct strip_block<F, NB> &v, const struct strip<NB> &p,
                                           int b, int k)
{
#pragma unroll
    for (int j = 0; j < NB; j++)
#pragma unroll
        for (int i = 0; i < 8; i++) /* k = 64 b + 8 i + 2 (lane % 4); k is a multiple of 8 */
            v.x[j][i] = b * 64 + i * 8 < k ? *(const uint32_t *)(p.x[j] + b * 128 + i * 16) : 0;
}

template <format_t F, int NB>
__device__ __forceinline__ void strip_multiply(float acc[NB][4], struct strip_block<F, NB> &v)
{
    weight_prepare<F>(v.raw[0]);
    weight_prepare<F>(v.raw[1]);
#pragma unroll
    for (int step = 0; step < 4; step++) {
        uint32_t w[2], f[4];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            weight_step<F>(w, v.raw[i], step);
            f[i] = w[0];
            f[i + 2] = w[1];
        }
#pragma unroll
        for (int j = 0; j < NB; j++)
            mma_m16n8k16_bf16(acc[j], f, &v.x[j][2 * step]);
    }
}

template <format_t F, int NB>
__device__ __forceinline__ struct strip<NB> strip_find(const struct gemm_args &a,
                                                       const struct work &w, int unit, bool pair) {
    typedef weight<F> W;
    struct strip<NB> p;
    int lane = threadIdx.x & 31, blocks = (a.k + TILE_K - 1) / TILE_K;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int u = pair ? unit : unit + i, panel = u / 8, panels = (a.n + TILE_ROWS - 1) / TILE_ROWS;
        const struct gemm_weight *m = (pair && i ? a.up : a.w) + w.group;
        const char *tile =
            (const char *)m->tiles + (size_t)min(panel, panels - 1) * blocks * W::TILE;
        p.unit[i] = tile + u % 8 * W::UNIT + lane * (W::BITS == 4 ? 8 : 16);
        p.small[i] = tile + W::DATA + (u % 8 * 8 + lane / 4) * (64 / (W::GROUP ? W::GROUP : 64));
        p.scale[i] =
            m->scale + (F == FORMAT_FP8_BLOCK ? (size_t)(u / 16) * ((a.k + 127) / 128) : 0);
    }
#pragma unroll
    for (int j = 0; j < NB; j++) {
        int row = w.row + min(j * 8 + lane / 4, w.width - 1);
        if (a.src) row = a.src[row];
        p.x[j] = (const char *)a.x + ((size_t)row * a.ldx + lane % 4 * 2) * 2;
    }
    return p;
}

template <format_t F, int NB, int DEPTH>
__device__ __forceinline__ void strip_item(const struct gemm_args &a, const struct work &w,
                                           bool wait)
{
    bool pair = a.out_kind == GEMM_SWIGLU;
    int lane = threadIdx.x & 31, unit = pair ? w.m : w.m * 2, blocks = (a.k + TILE_K - 1) / TILE_K;
    struct strip<NB> p = strip_find<F, NB>(a, w, unit, pair);
    struct strip_block<F, NB> v[DEPTH];
    float acc[NB][4] = {}, total[NB][4] = {};
#pragma unroll
    for (int d = 0; d < DEPTH; d++)
        if (d < blocks) strip_weights(v[d], p, d);
    if (wait) griddepcontrol_wait();
#pragma unroll
    for (int d = 0; d < DEPTH; d++)
        if (d < blocks) strip_rows(v[d], p, d, a.k);
    for (int b0 = 0; b0 < blocks; b0 += DEPTH)
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            int b = b0 + d;
            if (b >= blocks) break;
            strip_multiply<F, NB>(acc, v[d]);
            if (F == FORMAT_FP8_BLOCK &&
                (d % 2 || b + 1 == blocks)) /* DEPTH is even: a chain's scale is in the even one */
#pragma unroll
                for (int i = 0; i < NB * 4; i++) {
                    total[i / 4][i % 4] = __fmaf_rn(
                        acc[i / 4][i % 4], v[d / 2 * 2].scale[i / 2 % 2], total[i / 4][i % 4]);
                    acc[i / 4][i % 4] = 0.0f;
                }
                /* Refill; with chains both blocks of one at its end. */
#pragma unroll
            for (int e = F != FORMAT_FP8_BLOCK ? d : d % 2 ? d - 1 : d + 1; e <= d; e++)
                if (b0 + e + DEPTH < blocks) {
                    strip_weights(v[e], p, b0 + e + DEPTH);
                    strip_rows(v[e], p, b0 + e + DEPTH, a.k);
                }
        }
    int row = unit * 8 + lane / 4;
    float scale[2] = {
        row_scale<F>(a.w + w.group, row, a.n, a.scale_rows),
        row_scale<F>((pair ? a.up : a.w) + w.group, pair ? row : row + 8, a.n, a.scale_rows)};
    const float *result = F == FORMAT_FP8_BLOCK ? &total[0][0] : &acc[0][0];
    if (pair || a.out_kind == GEMM_BF16)
        store_bf16<F, NB * 8>(a, result, scale, w, unit * 8, 8, pair);
    else
        store_f32<F, NB * 8>(a, result, scale, w, unit * 8, 8);
}

template <format_t F, int NB>
__device__ __forceinline__ void strip_body(const struct gemm_args &a)
{
    constexpr int DEPTH = 8, WARPS = GEMM_STRIP_THREADS / 32;
    __shared__ struct tables t;
    int strips = a.out_kind == GEMM_SWIGLU ? (a.n + 7) / 8 : (a.n + 15) / 16;
    griddepcontrol_launch_dependents();
    bool early =
        !a.first && a.prefetch && !a.src; /* the first weights may be read before the wait */
    if (!early) griddepcontrol_wait();
    tables_fill<NB * 8, GEMM_STRIP_THREADS>(&t, a, strips);
    __syncthreads();
    int n_work = t.tiles[a.n_groups];
    /* Neighbouring items go to different SMs. */
    for (int i = threadIdx.x / 32 * gridDim.x + blockIdx.x; i < n_work; i += gridDim.x * WARPS) {
        strip_item<F, NB, DEPTH>(a, find_work<NB * 8>(&t, a.n_groups, strips, i), early);
        early = false;
    }
    if (early) griddepcontrol_wait();
}

#endif
