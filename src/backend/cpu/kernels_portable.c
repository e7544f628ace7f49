/*
 * kernels_portable.c - the kernels without intrinsics.  It is the definition of the bits.
 *
 * A vector is four of the compiler's own (GCC's and clang's extension): loops over 16 floats GCC 12
 * at -O3 miscompiles (its loop vectorizer, on the chains of TILE), and with sanitizers it takes
 * minutes over them.
 */
#include "backend/cpu/cpu.h"
#include "format/scalar.h"
#include <math.h>

typedef float F4 __attribute__((vector_size(16)));
typedef uint32_t U4 __attribute__((vector_size(16)));
typedef uint16_t H4 __attribute__((vector_size(8)));

typedef struct {
    F4 a, b, c, d;
} V;

#define OP       static inline __attribute__((always_inline))
#define EACH2(f) ((V){f(x.a, y.a), f(x.b, y.b), f(x.c, y.c), f(x.d, y.d)})
#define EACH3(f) ((V){f(x.a, y.a, z.a), f(x.b, y.b, z.b), f(x.c, y.c, z.c), f(x.d, y.d, z.d)})

OP V v_load(const float *p)
{
    V r;
    memcpy(&r, p, sizeof r);
    return r;
}
OP void v_store(float *p, V x)
{
    memcpy(p, &x, sizeof x);
}
OP V v_set1(float x)
{
    F4 q = {x, x, x, x};
    return (V){q, q, q, q};
}
/* mask ? x : y, for the masks that comparisons give. */
OP F4 pick(U4 mask, F4 x, F4 y)
{
    return (F4)((mask & (U4)x) | (~mask & (U4)y));
}
#define ADD(x, y)   ((x) + (y))
#define SUB(x, y)   ((x) - (y))
#define MUL(x, y)   ((x) * (y))
#define DIV(x, y)   ((x) / (y))
#define MAX(x, y)   pick((U4)((x) > (y)), x, y)
#define MIN(x, y)   pick((U4)((x) < (y)), x, y)
#define ABOVE(x, y) ((F4)(~(U4)((x) < limit) & (U4)(y))) /* y, 0 where x < limit */

OP V v_add(V x, V y)
{
    return EACH2(ADD);
}
OP V v_sub(V x, V y)
{
    return EACH2(SUB);
}
OP V v_mul(V x, V y)
{
    return EACH2(MUL);
}
OP V v_div(V x, V y)
{
    return EACH2(DIV);
}
OP V v_max(V x, V y)
{
    return EACH2(MAX);
}
OP V v_min(V x, V y)
{
    return EACH2(MIN);
}
/* Without FMA hardware fmaf is slow but right, and a call: then 16 of them are one function. */
#ifndef FP_FAST_FMAF
static __attribute__((noinline)) void fma_lanes(V *z, const V *x, const V *y)
#else
OP void fma_lanes(V *z, const V *x, const V *y)
#endif
{
#ifdef MOULT_REFERENCE_F32
    *z = v_add(v_mul(*x, *y), *z); /* bits do not matter in this build */
#else
    float a[16], b[16], c[16];
    v_store(a, *x);
    v_store(b, *y);
    v_store(c, *z);
    for (int i = 0; i < 16; i++)
        c[i] = fmaf(a[i], b[i], c[i]);
    *z = v_load(c);
#endif
}
OP V v_fma(V x, V y, V z)
{
    fma_lanes(&z, &x, &y);
    return z;
}
/* 2^n, where the low bits of t hold n. */
OP F4 exp2_bits(F4 t)
{
    return (F4)(((U4)t << 23) + 0x3f800000u);
}
OP V v_exp2_bits(V t)
{
    return (V){exp2_bits(t.a), exp2_bits(t.b), exp2_bits(t.c), exp2_bits(t.d)};
}
OP V v_zero_below(V y, V x, float limit)
{
    return EACH2(ABOVE);
}
#ifdef MOULT_REFERENCE_F32
OP V v_load_kv(const float *p)
{
    return v_load(p);
}
OP void v_load_kv_pair(const float *p, V *even, V *odd)
{
    float e[16], o[16];
    for (int i = 0; i < 16; i++) {
        e[i] = p[2 * i];
        o[i] = p[2 * i + 1];
    }
    *even = v_load(e);
    *odd = v_load(o);
}
#else
/* f32_to_bf16 and back: to nearest even, a NaN stays one. */
OP F4 round16(F4 x)
{
    U4 u = (U4)x, r = u + 0x7fffu + (u >> 16 & 1u);
    return (F4)((U4)pick((U4)(x == x), (F4)r, (F4)(u | 0x400000u)) & 0xffff0000u);
}
OP V v_round16(V x)
{
    return (V){round16(x.a), round16(x.b), round16(x.c), round16(x.d)};
}
OP F4 load4(const uint16_t *p)
{
    H4 h;
    memcpy(&h, p, sizeof h);
    return (F4)(__builtin_convertvector(h, U4) << 16);
}
OP V v_load_bf16(const uint16_t *p)
{
    return (V){load4(p), load4(p + 4), load4(p + 8), load4(p + 12)};
}
#endif
/* Of a word of two BF16 the even element is the low half. */
OP F4 low_half(U4 w)
{
    return (F4)(w << 16);
}
OP F4 high_half(U4 w)
{
    return (F4)(w & 0xffff0000u);
}
OP void v_load_pair(const uint16_t *p, V *even, V *odd)
{
    U4 w[4];
    memcpy(w, p, sizeof w);
    *even = (V){low_half(w[0]), low_half(w[1]), low_half(w[2]), low_half(w[3])};
    *odd = (V){high_half(w[0]), high_half(w[1]), high_half(w[2]), high_half(w[3])};
}

#define OPS_NAME  "portable"
#define OPS_TABLE cpu_ops_portable
#include "backend/cpu/kernels.inc"
