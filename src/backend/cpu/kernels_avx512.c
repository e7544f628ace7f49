/*
 * kernels_avx512.c - the kernels in AVX-512: 16 lanes are one register.
 *
 * The chain is written as two FMAs and not as vdpbf16ps, which flushes subnormals: this way its
 * bits are the portable ones always.
 */
#include "backend/cpu/cpu.h"
#include "format/scalar.h"

#if defined(__x86_64__) && !defined(MOULT_REFERENCE_F32)
#include <immintrin.h>
#include <math.h>

typedef __m512 V;

#define v_load(p)      _mm512_loadu_ps(p)
#define v_store(p, x)  _mm512_storeu_ps(p, x)
#define v_set1(x)      _mm512_set1_ps(x)
#define v_add(x, y)    _mm512_add_ps(x, y)
#define v_sub(x, y)    _mm512_sub_ps(x, y)
#define v_mul(x, y)    _mm512_mul_ps(x, y)
#define v_div(x, y)    _mm512_div_ps(x, y)
#define v_max(x, y)    _mm512_max_ps(x, y)
#define v_min(x, y)    _mm512_min_ps(x, y)
#define v_fma(x, y, z) _mm512_fmadd_ps(x, y, z)

#define OP static inline __attribute__((always_inline))

OP V v_exp2_bits(V t)
{
    __m512i i = _mm512_slli_epi32(_mm512_castps_si512(t), 23);
    return _mm512_castsi512_ps(_mm512_add_epi32(i, _mm512_set1_epi32(0x3f800000)));
}
OP V v_zero_below(V v, V x, float limit)
{
    __mmask16 low = _mm512_cmp_ps_mask(x, _mm512_set1_ps(limit), _CMP_LT_OQ);
    return _mm512_mask_mov_ps(v, low, _mm512_setzero_ps());
}
OP V v_round16(V x)
{
    __m512i u = _mm512_castps_si512(x);
    __m512i up = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    __m512i r = _mm512_add_epi32(u, _mm512_add_epi32(up, _mm512_set1_epi32(0x7fff)));
    __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    r = _mm512_mask_or_epi32(r, nan, u, _mm512_set1_epi32(0x400000));
    return _mm512_castsi512_ps(_mm512_and_si512(r, _mm512_set1_epi32(-65536)));
}
OP V v_load_bf16(const uint16_t *p)
{
    __m512i u = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(u, 16));
}
OP void widen_pairs(__m512i w, V *even, V *odd)
{
    *even = _mm512_castsi512_ps(_mm512_slli_epi32(w, 16));
    *odd = _mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32(-65536)));
}
OP void v_load_pair(const uint16_t *p, V *even, V *odd)
{
    widen_pairs(_mm512_loadu_si512(p), even, odd);
}

/* ---- decoding ---- */

/* A unit's bytes with its rows in order. */
OP __m256i unit_bytes(const uint8_t *p)
{
    return _mm256_permute4x64_epi64(_mm256_loadu_si256((const __m256i *)(const void *)p), 0xd8);
}
/* BF16 of a normal E4M3 is its bits moved, and 120 added to the exponent; of a subnormal, a table's. */
OP void e4m3_pair(const uint8_t *p, bool nan, V *even, V *odd)
{
    const __m512i subnormal = _mm512_broadcast_i32x4(
        _mm_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
    __m512i x = _mm512_cvtepu8_epi16(unit_bytes(p)), m = _mm512_and_si512(x, _mm512_set1_epi16(0x7f));
    __m512i y = _mm512_add_epi16(_mm512_slli_epi16(m, 4), _mm512_set1_epi16(120 << 7));
    __mmask32 small = _mm512_cmplt_epu16_mask(m, _mm512_set1_epi16(8));
    y = _mm512_mask_permutexvar_epi16(y, small, m, subnormal);
    if (nan)
        y = _mm512_mask_mov_epi16(y, _mm512_cmpeq_epi16_mask(m, _mm512_set1_epi16(0x7f)),
                                  _mm512_set1_epi16(0x7fc0));
    __m512i sign = _mm512_slli_epi16(_mm512_and_si512(x, _mm512_set1_epi16(0x80)), 8);
    widen_pairs(_mm512_or_si512(y, sign), even, odd);
}
OP void v_e4m3_pair(const uint8_t *p, V *even, V *odd)
{
    e4m3_pair(p, false, even, odd);
}
OP void v_e4m3_nan_pair(const uint8_t *p, V *even, V *odd)
{
    e4m3_pair(p, true, even, odd);
}
/* As in kernels_avx2.c. */
OP V v_scale_e4m3(const uint8_t *p)
{
    __m512i m = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)p));
    __m512i x = _mm512_add_epi32(_mm512_slli_epi32(m, 20), _mm512_set1_epi32(120 << 23));
    __m512i y = _mm512_add_epi32(x, _mm512_set1_epi32(1 << 23));
    return _mm512_min_ps(_mm512_castsi512_ps(x),
                         _mm512_sub_ps(_mm512_castsi512_ps(y), _mm512_set1_ps(0x1p-6f)));
}
OP V v_scale_e8m0(const uint8_t *p)
{
    __m512i m = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(m, 23));
}

/* ---- 4-bit weights: bytes of twice the element plus 12, 16 rows of 4 columns ---- */

typedef struct {
    __m512i w[4];
} codes_t;

OP void v_codes(codes_t *c, const uint8_t *p)
{
    const __m512i value = _mm512_broadcast_i32x4(
        _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    const __m512i nibble = _mm512_set1_epi8(15);
    UNROLL for (int u = 0; u < 4; u += 2)
    {
        __m512i x = _mm512_loadu_si512(p + u * 32);
        c->w[u] = _mm512_shuffle_epi8(value, _mm512_and_si512(x, nibble));
        c->w[u + 1] =
            _mm512_shuffle_epi8(value, _mm512_and_si512(_mm512_srli_epi16(x, 4), nibble));
    }
}
OP V v_dot(const codes_t *c, const struct fixed *x)
{
    __m512i s[FIXED_DIGITS] = {_mm512_set1_epi32(x->bias), _mm512_setzero_si512(),
                               _mm512_setzero_si512()};
    UNROLL for (int u = 0; u < 4; u++)
        UNROLL for (int d = 0; d < FIXED_DIGITS; d++)
        {
            int32_t four;
            memcpy(&four, x->digit[d] + 4 * u, sizeof four);
            s[d] = _mm512_dpbusd_epi32(s[d], c->w[u], _mm512_set1_epi32(four));
        }
    __m512i t = _mm512_add_epi32(_mm512_slli_epi32(s[2], 8), s[1]);
    return _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(t, 8), s[0]));
}
#define v_codes      v_codes
#define v_e4m3_pair  v_e4m3_pair
#define v_scale_e4m3 v_scale_e4m3
#define v_scale_e8m0 v_scale_e8m0

#define OPS_NAME  "avx512"
#define OPS_TABLE cpu_ops_avx512
#define GEMM_MR   6
#define GEMM_NP   4
#define ATTN_SUMS 8
#include "backend/cpu/kernels.inc"
#endif
