#include "format/encode_rules.h"
#include "format/scalar.h"

/* Largest element, and the exponent of its leading bit. */
static const struct {
    float max;
    int exponent;
} elems[] = {[ELEM_E4M3] = {E4M3_MAX, 8}, [ELEM_E2M1] = {E2M1_MAX, 2}};

uint8_t encode_e8m0_up(float x)
{
    uint32_t u = scalar_bits(x), exponent = u >> 23 & 0xff, mantissa = u & 0x7fffff;
    if (exponent == 0) return mantissa > 0x400000; /* 2^-127 is code 0, 2^-126 code 1 */
    return (uint8_t)(exponent + (mantissa > 0 && exponent < 254));
}

/* The E8M0 code of 2^(floor(log2 amax) - exponent of the largest element). */
static uint8_t floor_code(float amax, int exponent)
{
    uint32_t u = scalar_bits(amax);
    /* Subnormals lie below any scale that could be reached. */
    int code = (int)(u >> 23) - exponent;
    return (uint8_t)(code < 0 ? 0 : code > 254 ? 254 : code);
}

static uint8_t to_code(elem_t elem, float v)
{
    if (elem == ELEM_E4M3) return scalar_to_e4m3(v);
    return (uint8_t)(scalar_to_e2m1_abs(scalar_float(scalar_bits(v) & 0x7fffffffu)) |
                     (v < 0.0f ? 8 : 0));
}

/* 2^(127 - code), exact: 1 / scale. */
static float e8m0_inverse(uint8_t code)
{
    return scalar_e8m0((uint8_t)(254 - code));
}

static void elements(elem_t elem, uint8_t scale, const float *x, size_t n, uint8_t *codes)
{
    float inverse = e8m0_inverse(scale);
    for (size_t i = 0; i < n; i++)
        codes[i] = to_code(elem, x[i] * inverse);
}

void group_round_up(const struct encode *e, const float *x, size_t n, uint8_t *codes,
                    uint8_t *scale)
{
    elem_t elem = formats[e->format].elem;
    *scale = encode_e8m0_up(scalar_amax(0.0f, x, n) / elems[elem].max);
    elements(elem, *scale, x, n, codes);
}

void group_floor(const struct encode *e, const float *x, size_t n, uint8_t *codes, uint8_t *scale)
{
    elem_t elem = formats[e->format].elem;
    *scale = floor_code(scalar_amax(0.0f, x, n), elems[elem].exponent);
    elements(elem, *scale, x, n, codes);
}

void group_even(const struct encode *e, const float *x, size_t n, uint8_t *codes, uint8_t *scale)
{
    elem_t elem = formats[e->format].elem;
    float amax = scalar_float(scalar_bits(scalar_amax(0.0f, x, n)) + (1u << 21));
    *scale = floor_code(amax, elems[elem].exponent);
    elements(elem, *scale, x, n, codes);
}

/* The magnitude's code with ties toward zero. */
static uint8_t toward_zero(float a)
{
    return (uint8_t)((a > 0.25f) + (a > 0.75f) + (a > 1.25f) + (a > 1.75f) + (a > 2.5f) +
                     (a > 3.5f) + (a > 5.0f));
}

void group_mxfp4_modelopt(const struct encode *e, const float *x, size_t n, uint8_t *codes,
                          uint8_t *scale)
{
    (void)e;
    *scale = encode_e8m0_up(scalar_amax(0.0f, x, n) / E2M1_MAX);
    float inverse = e8m0_inverse(*scale);
    for (size_t i = 0; i < n; i++) {
        float v = x[i] * inverse;
        codes[i] = (uint8_t)(toward_zero(v < 0.0f ? -v : v) | (v > 0.0f ? 0 : 8));
    }
}
