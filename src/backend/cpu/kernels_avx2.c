/* kernels_avx2.c - the kernels in AVX2 and FMA: 16 lanes are two registers. */
#include "backend/cpu/cpu.h"

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
OP void v_load_pair(const uint16_t *p, V *even, V *odd)
{
    __m256i a = _mm256_loadu_si256((const __m256i *)(const void *)p);
    __m256i b = _mm256_loadu_si256((const __m256i *)(const void *)(p + 16));
    __m256i high = _mm256_set1_epi32(-65536);
    even->a = _mm256_castsi256_ps(_mm256_slli_epi32(a, 16));
    even->b = _mm256_castsi256_ps(_mm256_slli_epi32(b, 16));
    odd->a = _mm256_castsi256_ps(_mm256_and_si256(a, high));
    odd->b = _mm256_castsi256_ps(_mm256_and_si256(b, high));
}

#define OPS_NAME  "avx2"
#define OPS_TABLE cpu_ops_avx2
#define GEMM_WIDE 1
#include "backend/cpu/kernels.inc"
#endif
