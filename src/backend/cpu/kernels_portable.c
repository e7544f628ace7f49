/*
 * kernels_portable.c - the kernels in plain C.  It is the definition of the bits.  Without FMA
 * hardware fmaf is slow but right.
 */
#include "backend/cpu/cpu.h"
#include "format/scalar.h"
#include <math.h>

typedef struct {
    float f[16];
} V;

#define LANES(expr)              \
    V r;                         \
    for (int i = 0; i < 16; i++) \
        r.f[i] = (expr);         \
    return r

static inline uint32_t bits_of(float f)
{
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    return u;
}
static inline float of_bits(uint32_t u)
{
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

static inline V v_load(const float *p)
{
    LANES(p[i]);
}
static inline void v_store(float *p, V x)
{
    memcpy(p, x.f, sizeof x.f);
}
static inline V v_set1(float x)
{
    LANES(x);
}
static inline V v_add(V a, V b)
{
    LANES(a.f[i] + b.f[i]);
}
static inline V v_sub(V a, V b)
{
    LANES(a.f[i] - b.f[i]);
}
static inline V v_mul(V a, V b)
{
    LANES(a.f[i] * b.f[i]);
}
static inline V v_div(V a, V b)
{
    LANES(a.f[i] / b.f[i]);
}
static inline V v_fma(V a, V b, V c)
{
#ifdef MOULT_REFERENCE_F32
    LANES(a.f[i] * b.f[i] + c.f[i]); /* bits do not matter in this build, and fmaf may be a call */
#else
    LANES(fmaf(a.f[i], b.f[i], c.f[i]));
#endif
}
static inline V v_max(V a, V b)
{
    LANES(a.f[i] > b.f[i] ? a.f[i] : b.f[i]);
}
static inline V v_min(V a, V b)
{
    LANES(a.f[i] < b.f[i] ? a.f[i] : b.f[i]);
}
/* 2^n, where the low bits of t hold n. */
static inline V v_exp2_bits(V t)
{
    LANES(of_bits((bits_of(t.f[i]) << 23) + 0x3f800000u));
}
static inline V v_zero_below(V v, V x, float limit)
{
    LANES(x.f[i] < limit ? 0.0f : v.f[i]);
}
#ifdef MOULT_REFERENCE_F32
static inline V v_load_kv(const float *p)
{
    return v_load(p);
}
static inline void v_load_kv_pair(const float *p, V *even, V *odd)
{
    for (int i = 0; i < 16; i++) {
        even->f[i] = p[2 * i];
        odd->f[i] = p[2 * i + 1];
    }
}
#else
static inline V v_round16(V x)
{
    LANES(bf16_to_f32(f32_to_bf16(x.f[i])));
}
static inline V v_load_bf16(const uint16_t *p)
{
    LANES(bf16_to_f32(p[i]));
}
#endif
static inline void v_load_pair(const uint16_t *p, V *even, V *odd)
{
    for (int i = 0; i < 16; i++) {
        even->f[i] = bf16_to_f32(p[2 * i]);
        odd->f[i] = bf16_to_f32(p[2 * i + 1]);
    }
}

#define OPS_NAME  "portable"
#define OPS_TABLE cpu_ops_portable
#include "backend/cpu/kernels.inc"
