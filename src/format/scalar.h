/*
 * scalar.h - the scalar codecs of format.h, inline for loops over elements.
 *
 * Rounding is to nearest even, by integer arithmetic or by the addition of 2^23, and so needs the
 * default rounding mode.  Written without branches, so that compilers vectorize loops over them.
 */
#ifndef FORMAT_SCALAR_H
#define FORMAT_SCALAR_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define E4M3_MAX 448.0f
#define E2M1_MAX 6.0f

static inline uint32_t scalar_bits(float x)
{
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

static inline float scalar_float(uint32_t u)
{
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

static inline float scalar_bf16(uint16_t code)
{
    return scalar_float((uint32_t)code << 16);
}

static inline uint16_t scalar_to_bf16(float x)
{
    uint32_t u = scalar_bits(x);
    uint32_t rounded = (u + 0x7fffu + (u >> 16 & 1u)) >> 16;
    uint32_t nan = u >> 16 | 0x40u;
    return (uint16_t)((u & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}

static inline float scalar_e4m3(uint8_t code)
{
    uint32_t sign = (uint32_t)(code & 0x80) << 24, m = code & 0x7f;
    float subnormal = (float)m * 0x1p-9f; /* exponent field 0: m < 8 */
    uint32_t u = m < 8 ? scalar_bits(subnormal) : (m << 20) + (120u << 23);
    u = m == 0x7f ? 0x7fc00000u : u;
    return scalar_float(u | sign);
}

static inline float scalar_e8m0(uint8_t code)
{
    uint32_t u = (uint32_t)code << 23;
    u = code == 0 ? 0x00400000u : u; /* 2^-127, subnormal */
    u = code == 0xff ? 0x7fc00000u : u;
    return scalar_float(u);
}

static inline float scalar_e2m1(uint8_t nibble)
{
    static const float value[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                    -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
    return value[nibble & 15];
}

static inline uint8_t scalar_to_e4m3(float x)
{
    uint32_t u = scalar_bits(x), sign = u >> 24 & 0x80u, a = u & 0x7fffffffu;
    /* Below 2^-6 the codes count steps of 2^-9: adding 2^23 rounds to a whole number of them. */
    uint32_t small = scalar_bits(scalar_float(a) * 512.0f + 0x1p23f) - 0x4b000000u;
    uint32_t code = ((a + 0x7ffffu + (a >> 20 & 1u)) >> 20) - (120u << 3);
    code = a < 0x3c800000u ? small : code;  /* 2^-6 */
    code = a >= 0x43e00000u ? 0x7eu : code; /* 448 */
    code = a > 0x7f800000u ? 0x7fu : code;
    return (uint8_t)(code | sign);
}

/* The magnitude's code alone; a NaN gives 7. */
static inline uint8_t scalar_to_e2m1_abs(float a)
{
    return (uint8_t)(!(a <= 0.25f) + !(a < 0.75f) + !(a <= 1.25f) + !(a < 1.75f) + !(a <= 2.5f) +
                     !(a < 3.5f) + !(a <= 5.0f));
}

static inline uint8_t scalar_to_e2m1(float x)
{
    uint32_t u = scalar_bits(x);
    return (uint8_t)(scalar_to_e2m1_abs(scalar_float(u & 0x7fffffffu)) | (u >> 28 & 8u));
}

/* Largest magnitude of n values; NaN if there is one. */
static inline float scalar_amax(float amax, const float *x, size_t n)
{
    uint32_t m = scalar_bits(amax) & 0x7fffffffu; /* magnitudes order like their bits */
    for (size_t i = 0; i < n; i++) {
        uint32_t a = scalar_bits(x[i]) & 0x7fffffffu;
        m = a > m ? a : m;
    }
    return scalar_float(m);
}

#endif
