/* kernels_neon.c - the kernels in NEON: 16 lanes are four registers. */
#include "backend/cpu/cpu.h"
#include "format/scalar.h"

#if defined(__aarch64__) && !defined(MOULT_REFERENCE_F32)
#include <arm_neon.h>
#include <math.h>

typedef struct {
    float32x4_t a, b, c, d;
} V;

#define OP       static inline __attribute__((always_inline))
#define EACH1(f) ((V){f(x.a), f(x.b), f(x.c), f(x.d)})
#define EACH2(f) ((V){f(x.a, y.a), f(x.b, y.b), f(x.c, y.c), f(x.d, y.d)})

#define F32(u) vreinterpretq_f32_u32(u)
#define U32(f) vreinterpretq_u32_f32(f)

OP V v_load(const float *p)
{
    return (V){vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)};
}
OP void v_store(float *p, V x)
{
    vst1q_f32(p, x.a);
    vst1q_f32(p + 4, x.b);
    vst1q_f32(p + 8, x.c);
    vst1q_f32(p + 12, x.d);
}
OP V v_set1(float x)
{
    float32x4_t q = vdupq_n_f32(x);
    return (V){q, q, q, q};
}
OP V v_add(V x, V y)
{
    return EACH2(vaddq_f32);
}
OP V v_sub(V x, V y)
{
    return EACH2(vsubq_f32);
}
OP V v_mul(V x, V y)
{
    return EACH2(vmulq_f32);
}
OP V v_div(V x, V y)
{
    return EACH2(vdivq_f32);
}
/* Not fmax and fmin: those treat NaN and signed zeros otherwise than x > y ? x : y does. */
OP float32x4_t max4(float32x4_t x, float32x4_t y)
{
    return vbslq_f32(vcgtq_f32(x, y), x, y);
}
OP float32x4_t min4(float32x4_t x, float32x4_t y)
{
    return vbslq_f32(vcltq_f32(x, y), x, y);
}
OP V v_max(V x, V y)
{
    return EACH2(max4);
}
OP V v_min(V x, V y)
{
    return EACH2(min4);
}
OP V v_fma(V x, V y, V z)
{
    return (V){vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b), vfmaq_f32(z.c, x.c, y.c),
               vfmaq_f32(z.d, x.d, y.d)};
}
OP float32x4_t exp2_bits(float32x4_t t)
{
    return F32(vaddq_u32(vshlq_n_u32(U32(t), 23), vdupq_n_u32(0x3f800000u)));
}
OP V v_exp2_bits(V x)
{
    return EACH1(exp2_bits);
}
OP float32x4_t zero_below(float32x4_t x, float32x4_t y, float32x4_t limit)
{
    return F32(vbicq_u32(U32(y), vcltq_f32(x, limit)));
}
OP V v_zero_below(V y, V x, float limit)
{
    float32x4_t l = vdupq_n_f32(limit);
    return (V){zero_below(x.a, y.a, l), zero_below(x.b, y.b, l), zero_below(x.c, y.c, l),
               zero_below(x.d, y.d, l)};
}
OP float32x4_t round16(float32x4_t x)
{
    uint32x4_t u = U32(x), up = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
    uint32x4_t r = vaddq_u32(u, vaddq_u32(up, vdupq_n_u32(0x7fff)));
    uint32x4_t nan = vorrq_u32(u, vdupq_n_u32(0x400000));
    r = vbslq_u32(vceqq_f32(x, x), r, nan);
    return F32(vandq_u32(r, vdupq_n_u32(0xffff0000u)));
}
OP V v_round16(V x)
{
    return EACH1(round16);
}
OP float32x4_t load4(const uint16_t *p)
{
    return F32(vshlq_n_u32(vmovl_u16(vld1_u16(p)), 16));
}
OP V v_load_bf16(const uint16_t *p)
{
    return (V){load4(p), load4(p + 4), load4(p + 8), load4(p + 12)};
}
/* Of a word of two BF16 the even element is the low half. */
OP void load_pair4(const uint16_t *p, float32x4_t *even, float32x4_t *odd)
{
    uint32x4_t w = vreinterpretq_u32_u16(vld1q_u16(p));
    *even = F32(vshlq_n_u32(w, 16));
    *odd = F32(vandq_u32(w, vdupq_n_u32(0xffff0000u)));
}
OP void v_load_pair(const uint16_t *p, V *even, V *odd)
{
    load_pair4(p, &even->a, &odd->a);
    load_pair4(p + 8, &even->b, &odd->b);
    load_pair4(p + 16, &even->c, &odd->c);
    load_pair4(p + 24, &even->d, &odd->d);
}

/* ---- 4-bit weights: twice the element, 4 rows of 4 columns a register ---- */

typedef struct {
    int8x16_t w[4][4]; /* [columns / 4][rows / 4] */
} codes_t;

OP void v_codes(codes_t *c, const uint8_t *p)
{
    static const int8_t twice[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    const int8x16_t value = vld1q_s8(twice);
    UNROLL for (int u = 0; u < 4; u += 2)
        UNROLL for (int q = 0; q < 4; q++)
        {
            uint8x16_t x = vld1q_u8(p + u * 32 + q * 16);
            c->w[u][q] = vqtbl1q_s8(value, vandq_u8(x, vdupq_n_u8(15)));
            c->w[u + 1][q] = vqtbl1q_s8(value, vshrq_n_u8(x, 4));
        }
}
/* Rows 4 q to 4 q + 3; 16-bit lanes hold 4 columns' products by a digit, at most 4 * 12 * 128. */
OP float32x4_t dot4(const codes_t *c, const struct fixed *x, int q)
{
    int32x4_t sum = vdupq_n_s32(0);
    UNROLL for (int d = FIXED_DIGITS - 1; d >= 0; d--)
    {
        int16x8_t low = vdupq_n_s16(0), high = low; /* of rows 0 and 1, 2 and 3 */
        UNROLL for (int u = 0; u < 4; u++)
        {
            int32_t four;
            memcpy(&four, x->digit[d] + 4 * u, sizeof four);
            int8x8_t v = vreinterpret_s8_s32(vdup_n_s32(four));
            low = vmlal_s8(low, vget_low_s8(c->w[u][q]), v);
            high = vmlal_s8(high, vget_high_s8(c->w[u][q]), v);
        }
        sum = vaddq_s32(vshlq_n_s32(sum, 8), vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
    }
    return vcvtq_f32_s32(sum);
}
OP V v_dot(const codes_t *c, const struct fixed *x)
{
    return (V){dot4(c, x, 0), dot4(c, x, 1), dot4(c, x, 2), dot4(c, x, 3)};
}
#define v_codes v_codes

#define OPS_NAME  "neon"
#define OPS_TABLE cpu_ops_neon
#include "backend/cpu/kernels.inc"
#endif
