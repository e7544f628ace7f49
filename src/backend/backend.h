/*
 * backend.h - the arithmetic of the forward, one table per instruction set.
 *
 * Every table gives the same bits: the order of operations below is part of the contract, and
 * "FMA" is one rounding.  Activations are f32 arrays whose values are BF16-representable where the
 * numerics contract asks for BF16 (act_round does the rounding); weights are BF16.  With
 * MOULT_REFERENCE_F32 nothing is rounded, KV is f32, and only the portable table exists.
 *
 *   lanes   element i of a row belongs to lane i % 16; a sum keeps 16 lane sums in index order, then
 *           adds lane j + 8 to j, j + 4 to j, j + 2 to j, j + 1 to j
 *   chain   for pairs i in order, acc = fma(a[2i + 1], w[2i + 1], acc) and then acc = fma(a[2i],
 *           w[2i], acc), from 0; w is element * small scale (E8M0 or E4M3), exact in BF16
 *   dot     instead of a chain, for 4-bit elements: for each 16 of K in order y = fma(S, t, y), from
 *           0; S = sum of v * 2w, an integer, rounded once to f32, where v are the activations in
 *           fixed point (fixed.h) and w the elements; t = the block's unit * small scale, rounded
 *   gemm    without K blocks: one chain (or dot) over all of K.  With K blocks (the weights' format
 *           has a scale a 128 x 128 block, or the activations one a 128 of K): a chain (or dot) c_j
 *           for each 128 of K, then y = c_0 * s_0 and y = fma(c_j, s_j, y) in order, s_j =
 *           activation scale * weight scale, rounded once, or the one there is.  Then y = y * weight
 *           scale of the row, the matrix or the tensor (those there are, in this order), and y = y *
 *           the activation scale of the row
 *   attention, per chunk of KV_CHUNK keys: the chain over the stored K, times scale * k_scale
 *           (rounded once); m; P = round(exp(s - m)); l = sum of P by lanes; O = FMA chain of P and
 *           the stored V in key order; chunks fold left to right; out = round(O / l * v_scale).
 *           The scales are 1 for KV_BF16
 *   exp     backend/cpu/kernels.inc, v_exp
 *
 * Functions are pure, thread-safe, and never depend on how many rows they are given.
 */
#ifndef BACKEND_BACKEND_H
#define BACKEND_BACKEND_H

#include "backend/fixed.h"
#include "backend/kv.h"
#include "backend/matrix.h"
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define PANEL_ROWS   16
#define SEGMENT      128 /* K of a chain where scales lie a K block */
#define KV_CHUNK     256 /* keys that share one softmax maximum; at absolute positions */
#define HEAD_DIM_MAX 256
#define KV_PAGE_ROWS 16 /* keys a page: one panel */

#ifdef MOULT_REFERENCE_F32
typedef float kv_t;
#else
typedef uint16_t kv_t; /* BF16 */
#endif

static inline float bf16_to_f32(uint16_t h)
{
    uint32_t u = (uint32_t)h << 16;
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

/* Nearest even; a NaN stays one. */
static inline uint16_t f32_to_bf16(float f)
{
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(u >> 16 | 0x40u);
    return (uint16_t)((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}

static inline float act_round(float f)
{
#ifdef MOULT_REFERENCE_F32
    return f;
#else
    return bf16_to_f32(f32_to_bf16(f));
#endif
}

static inline kv_t kv_from_f32(float f)
{
#ifdef MOULT_REFERENCE_F32
    return f;
#else
    return f32_to_bf16(f);
#endif
}

typedef enum { ACT_SCALE_NONE, ACT_SCALE_ROW, ACT_SCALE_128 } act_scale_t;

/* out[i][r] for rows i in [0, m) and r in the 16-row panels [panel0, panel0 + n_panels) of w.
 * Row i reads a + (idx ? idx[i] : i) * lda; lda is at least w->cols up to even, an odd K padded
 * with a zero. */
struct gemm {
    const float *a;
    size_t lda;
    const int32_t *idx;
    const struct fixed *fixed; /* [row of a][fixed_blocks(cols)], read where elements have 4 bits */
    act_scale_t act_scale;
    const float *a_scale; /* ROW: [row of a]; 128: [row of a][ceil(cols / 128)] */
    const struct matrix *w;
    float *out; /* [m][ldo], element (i, r) at out[i * ldo + r - col0] */
    size_t ldo;
    size_t col0;
};

/* Floats of a_scale a row of a. */
static inline size_t gemm_scales(const struct gemm *g)
{
    return g->act_scale == ACT_SCALE_128   ? ((size_t)g->w->cols + SEGMENT - 1) / SEGMENT
           : g->act_scale == ACT_SCALE_ROW ? 1
                                           : 0;
}

/* The gemm without its first m0 rows. */
static inline struct gemm gemm_from_row(struct gemm g, size_t m0)
{
    if (g.idx) {
        g.idx += m0;
    } else {
        g.a += m0 * g.lda;
        if (g.fixed) g.fixed += m0 * fixed_blocks(g.w->cols);
        if (g.act_scale != ACT_SCALE_NONE) g.a_scale += m0 * gemm_scales(&g);
    }
    g.out += m0 * g.ldo;
    return g;
}

/* One token and one KV head: `n_heads` query heads [n_heads][head_dim], already rounded. */
struct attn {
    const float *q;
    float *out; /* [n_heads][head_dim], rounded */
    int n_heads, head_dim;
    kv_type_t kv;
    float k_scale, v_scale; /* of KV_E4M3; else 1 */
    const uint8_t *k, *v;   /* base; page p of this head at k + p * page_stride; see kv.h */
    size_t page_stride;     /* bytes */
    const int32_t *pages;
    int n_keys;      /* position + 1 */
    int first_chunk; /* keys of the first chunk: KV_CHUNK, but for tests (model_break_invariance) */
    float scale;
};

struct backend_ops {
    const char *name;
    void (*gemm)(const struct gemm *g, size_t m, size_t panel0, size_t n_panels);
    /* out = round(x / rms(x) * w); w is BF16 */
    void (*rmsnorm)(float *out, const float *x, const uint16_t *w, size_t n, float eps);
    void (*rmsnorm_f32)(float *out, const float *x, const uint16_t *w, size_t n,
                        float eps); /* not rounded */
    /* out = round(gate / (1 + exp(-gate)) * up); out may be gate or up */
    void (*swiglu)(float *out, const float *gate, const float *up, size_t n);
    /* out = round(x) */
    void (*round)(float *out, const float *x, size_t n);
    /* x += sum over k in order of w[k] * rows[k][i]: a product, then FMAs, then one addition */
    void (*combine)(float *x, const float *const *rows, const float *w, size_t k, size_t n);
    /* out[i] = exp(x[i] - max); returns their sum: lanes within blocks of 4096, blocks in double */
    double (*exp_sum)(float *out, const float *x, float max, size_t n);
    void (*attention)(const struct attn *a);
};

#endif
