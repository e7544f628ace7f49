/* kernels_avx2.c - the kernels in AVX2 and FMA: 16 lanes are two registers. */
#include "backend/cpu/cpu.h"
#include "format/scalar.h"

#if defined(__x86_64__) && !defined(MOULT_REFERENCE_F32)
#include <immintrin.h>
#include <math.h>

typedef struct {
    __m256 a, b;
} V;

#define OP      static inline __attribute__((always_inline))
#define BOTH(f) ((V){f(x.a, y.a), f(x.b, y.b)})

OP V v_load(const float *p)
{
    return (V){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
}
OP void v_store(float *p, V x)
{
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
OP V v_set1(float x)
{
    __m256 v = _mm256_set1_ps(x);
    return (V){v, v};
}
OP V v_add(V x, V y)
{
    return BOTH(_mm256_add_ps);
}
OP V v_sub(V x, V y)
{
    return BOTH(_mm256_sub_ps);
}
OP V v_mul(V x, V y)
{
    return BOTH(_mm256_mul_ps);
}
OP V v_div(V x, V y)
{
    return BOTH(_mm256_div_ps);
}
OP V v_max(V x, V y)
{
    return BOTH(_mm256_max_ps);
}
OP V v_min(V x, V y)
{
    return BOTH(_mm256_min_ps);
}
OP V v_fma(V x, V y, V z)
{
    return (V){_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
OP __m256 exp2_bits(__m256 t)
{
    __m256i i = _mm256_slli_epi32(_mm256_castps_si256(t), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(i, _mm256_set1_epi32(0x3f800000)));
}
OP V v_exp2_bits(V t)
{
    return (V){exp2_bits(t.a), exp2_bits(t.b)};
}
OP V v_zero_below(V v, V x, float limit)
{
    __m256 l = _mm256_set1_ps(limit);
    return (V){_mm256_andnot_ps(_mm256_cmp_ps(x.a, l, _CMP_LT_OQ), v.a),
               _mm256_andnot_ps(_mm256_cmp_ps(x.b, l, _CMP_LT_OQ), v.b)};
}
OP __m256 round16(__m256 x)
{
    __m256i u = _mm256_castps_si256(x), high = _mm256_set1_epi32(-65536);
    __m256i up = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    __m256i r = _mm256_add_epi32(u, _mm256_add_epi32(up, _mm256_set1_epi32(0x7fff)));
    __m256i nan = _mm256_or_si256(u, _mm256_set1_epi32(0x400000));
    __m256 is_nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
    __m256 y = _mm256_blendv_ps(_mm256_castsi256_ps(r), _mm256_castsi256_ps(nan), is_nan);
    return _mm256_and_ps(y, _mm256_castsi256_ps(high));
}
OP V v_round16(V x)
{
    return (V){round16(x.a), round16(x.b)};
}
OP __m256 load8(const uint16_t *p)
{
    __m256i u = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(u, 16));
}
OP V v_load_bf16(const uint16_t *p)
{
    return (V){load8(p), load8(p + 8)};
}
/* From BF16 pairs of rows 0-7 and 8-15. */
OP void widen_pairs(__m256i a, __m256i b, V *even, V *odd)
{
    __m256i high = _mm256_set1_epi32(-65536);
    even->a = _mm256_castsi256_ps(_mm256_slli_epi32(a, 16));
    even->b = _mm256_castsi256_ps(_mm256_slli_epi32(b, 16));
    odd->a = _mm256_castsi256_ps(_mm256_and_si256(a, high));
    odd->b = _mm256_castsi256_ps(_mm256_and_si256(b, high));
}
OP void v_load_pair(const uint16_t *p, V *even, V *odd)
{
    widen_pairs(_mm256_loadu_si256((const __m256i *)(const void *)p),
                _mm256_loadu_si256((const __m256i *)(const void *)(p + 16)), even, odd);
}

/* ---- decoding: codes to BF16 by bytes, BF16 pairs to f32 ---- */

/* Two 16-byte tables of the low and the high byte of BF16 values, in both halves. */
#define TABLE(...) _mm256_broadcastsi128_si256(_mm_setr_epi8(__VA_ARGS__))

/* BF16 of a normal E4M3 is its bits moved, and 120 added to the exponent.  For the subnormals 0 to 7
 * the tables hold what is to be added instead; all from 8 take the last entry. */
OP void e4m3_pair(const uint8_t *p, bool nan, V *even, V *odd)
{
    const __m256i low = TABLE(0, -16, 96, -112, -64, -48, -32, -16, 0, 0, 0, 0, 0, 0, 0, 0);
    const __m256i high = TABLE(0, 58, 59, 59, 59, 59, 59, 59, 60, 60, 60, 60, 60, 60, 60, 60);
    const __m256i keep = _mm256_set1_epi16((short)0x87f0);
    __m256i x = _mm256_loadu_si256((const __m256i *)(const void *)p), zero = _mm256_setzero_si256();
    __m256i m = _mm256_and_si256(x, _mm256_set1_epi8(0x7f));
    __m256i i = _mm256_min_epu8(m, _mm256_set1_epi8(15));
    __m256i l = _mm256_shuffle_epi8(low, i), h = _mm256_shuffle_epi8(high, i);
    if (nan) { /* code 0x7f: another 0x3c00 makes all ones of the exponent */
        __m256i is_nan = _mm256_cmpeq_epi8(m, _mm256_set1_epi8(0x7f));
        h = _mm256_add_epi8(h, _mm256_and_si256(is_nan, _mm256_set1_epi8(0x3c)));
    }
    __m256i a = _mm256_srai_epi16(_mm256_unpacklo_epi8(zero, x), 4);
    __m256i b = _mm256_srai_epi16(_mm256_unpackhi_epi8(zero, x), 4);
    a = _mm256_add_epi16(_mm256_and_si256(a, keep), _mm256_unpacklo_epi8(l, h));
    b = _mm256_add_epi16(_mm256_and_si256(b, keep), _mm256_unpackhi_epi8(l, h));
    widen_pairs(a, b, even, odd);
}
OP void v_e4m3_pair(const uint8_t *p, V *even, V *odd)
{
    e4m3_pair(p, false, even, odd);
}
OP void v_e4m3_nan_pair(const uint8_t *p, V *even, V *odd)
{
    e4m3_pair(p, true, even, odd);
}

/* 16 bytes as the high bytes of words, rows 0-7 and 8-15. */
OP void spread_bytes(const uint8_t *p, __m256i *a, __m256i *b)
{
    const __m256i low = _mm256_setr_epi8(-1, -1, -1, 0, -1, -1, -1, 1, -1, -1, -1, 2, -1, -1, -1, 3,
                                         -1, -1, -1, 4, -1, -1, -1, 5, -1, -1, -1, 6, -1, -1, -1, 7);
    __m256i x = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)p));
    *a = _mm256_shuffle_epi8(x, low);
    *b = _mm256_shuffle_epi8(x, _mm256_or_si256(low, _mm256_set1_epi8(8)));
}
/* The code's bits are those of its value times 2^-120.  Subnormal scales, which are rare, make
 * subnormal operands here. */
OP V v_scale_e4m3(const uint8_t *p)
{
    const __m256 unit = _mm256_set1_ps(0x1p120f);
    __m256i a, b;
    spread_bytes(p, &a, &b);
    return (V){_mm256_mul_ps(_mm256_castsi256_ps(_mm256_srli_epi32(a, 4)), unit),
               _mm256_mul_ps(_mm256_castsi256_ps(_mm256_srli_epi32(b, 4)), unit)};
}
OP V v_scale_e8m0(const uint8_t *p)
{
    __m256i a, b;
    spread_bytes(p, &a, &b);
    return (V){_mm256_castsi256_ps(_mm256_srli_epi32(a, 1)),
               _mm256_castsi256_ps(_mm256_srli_epi32(b, 1))};
}

/* ---- 4-bit weights: bytes of twice the element plus 12, 8 rows of 4 columns ---- */

typedef struct {
    __m256i a[4], b[4]; /* rows 0-7 and 8-15 */
} codes_t;

/* Half a unit: 8 rows of columns 0-3 (bits 0) or 4-7 (bits 4). */
OP __m256i codes8(const uint8_t *p, int bits)
{
    const __m256i value = TABLE(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
    __m256i x = _mm256_loadu_si256((const __m256i *)(const void *)p);
    x = _mm256_and_si256(bits ? _mm256_srli_epi16(x, 4) : x, _mm256_set1_epi8(15));
    return _mm256_shuffle_epi8(value, x);
}
OP void v_codes(codes_t *c, const uint8_t *p)
{
    UNROLL for (int u = 0; u < 4; u++)
    {
        c->a[u] = codes8(p + u / 2 * 64, u % 2 * 4);
        c->b[u] = codes8(p + u / 2 * 64 + 32, u % 2 * 4);
    }
}

/* Sums by digit; 16-bit lanes hold 8 columns, at most 8 * 24 * 128. */
typedef struct {
    __m256i a[FIXED_DIGITS], b[FIXED_DIGITS];
} sums_t;

/* Columns 4 u to 4 u + 3.  Left to itself the compiler regroups these additions, and then the
 * registers do not suffice. */
#define ADD16(sum, x)                                                                              \
    do {                                                                                           \
        sum = _mm256_add_epi16(sum, x);                                                            \
        __asm__("" : "+x"(sum));                                                                   \
    } while (0)
OP void add_unit(sums_t *s, __m256i a, __m256i b, const struct fixed *x, int u)
{
    UNROLL for (int d = 0; d < FIXED_DIGITS; d++)
    {
        int32_t four;
        memcpy(&four, x->digit[d] + 4 * u, sizeof four);
        __m256i v = _mm256_set1_epi32(four);
        if (u == 0) {
            s->a[d] = _mm256_maddubs_epi16(a, v);
            s->b[d] = _mm256_maddubs_epi16(b, v);
        } else {
            ADD16(s->a[d], _mm256_maddubs_epi16(a, v));
            ADD16(s->b[d], _mm256_maddubs_epi16(b, v));
        }
    }
}
OP __m256 join_digits(const __m256i s[FIXED_DIGITS], int32_t bias)
{
    __m256i one = _mm256_set1_epi16(1), next = _mm256_set1_epi16(256);
    __m256i t = _mm256_add_epi32(_mm256_madd_epi16(s[2], next), _mm256_madd_epi16(s[1], one));
    t = _mm256_add_epi32(_mm256_slli_epi32(t, 8), _mm256_madd_epi16(s[0], one));
    return _mm256_cvtepi32_ps(_mm256_add_epi32(t, _mm256_set1_epi32(bias)));
}
OP V v_dot(const codes_t *c, const struct fixed *x)
{
    sums_t s;
    UNROLL for (int u = 0; u < 4; u++) add_unit(&s, c->a[u], c->b[u], x, u);
    return (V){join_digits(s.a, x->bias), join_digits(s.b, x->bias)};
}
OP V v_dot_codes(const uint8_t *p, const struct fixed *x)
{
    sums_t s;
    UNROLL for (int u = 0; u < 4; u++)
    {
        const uint8_t *q = p + u / 2 * 64;
        add_unit(&s, codes8(q, u % 2 * 4), codes8(q + 32, u % 2 * 4), x, u);
    }
    return (V){join_digits(s.a, x->bias), join_digits(s.b, x->bias)};
}
#define v_codes      v_codes
#define v_dot_codes  v_dot_codes
#define v_e4m3_pair  v_e4m3_pair
#define v_scale_e4m3 v_scale_e4m3
#define v_scale_e8m0 v_scale_e8m0

#define OPS_NAME  "avx2"
#define OPS_TABLE cpu_ops_avx2
#define GEMM_MR   6
#include "backend/cpu/kernels.inc"
#endif
