/*
 * kernels_avx512.c - the kernels in AVX-512: 16 lanes are one register.
 *
 * The chain is written as two FMAs and not as vdpbf16ps, which flushes subnormals: this way its
 * bits are the portable ones always.
 */
#include "backend/cpu/cpu.h"

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
OP void v_load_pair(const uint16_t *p, V *even, V *odd)
{
    __m512i w = _mm512_loadu_si512(p);
    *even = _mm512_castsi512_ps(_mm512_slli_epi32(w, 16));
    *odd = _mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32(-65536)));
}

#define OPS_NAME  "avx512"
#define OPS_TABLE cpu_ops_avx512
#define GEMM_WIDE 4
#include "backend/cpu/kernels.inc"
#endif
