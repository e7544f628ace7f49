#include "format/encode_rules.h"
#include "format/scalar.h"

#include <float.h>

#define TENSOR_MAX (E2M1_MAX * E4M3_MAX) /* 2688 */
#define FOUR_MAX   (E2M1_MAX * 256.0f)   /* 1536: E4M3 room for 1.5 times as much */

static float least(float a, float b)
{
    return a < b ? a : b;
}

static uint8_t code_of(float x)
{
    return (uint8_t)(scalar_to_e2m1_abs(scalar_float(scalar_bits(x) & 0x7fffffffu)) |
                     (x < 0.0f ? 8 : 0));
}

/* ---- Model-Optimizer ---- */

void tensor_modelopt(struct encode *e)
{
    float t = e->amax / TENSOR_MAX;
    e->tensor = t == 0.0f ? 1.0f : t;
    e->inverse = least(1.0f / e->tensor, FLT_MAX);
}

void group_modelopt(const struct encode *e, const float *x, size_t n, uint8_t *codes,
                    uint8_t *scale)
{
    float s = scalar_amax(0.0f, x, n) / (E2M1_MAX * e->tensor);
    if (s == 0.0f) s = 1.0f;
    if (s < 0x1p-9f) s = 0x1p-9f;
    *scale = scalar_to_e4m3(s);
    float d = scalar_e4m3(*scale) * e->tensor;
    for (size_t i = 0; i < n; i++)
        codes[i] = code_of(x[i] / d);
}

/* ---- Transformer Engine ---- */

static void tensor_by_inverse(struct encode *e, float top)
{
    e->inverse = e->amax == 0.0f ? 1.0f : least(top / e->amax, FLT_MAX);
    e->tensor = 1.0f / e->inverse;
}

void tensor_te(struct encode *e)
{
    tensor_by_inverse(e, TENSOR_MAX);
}

/* Codes of a group under a rounded scale s. */
static void te_codes(const float *x, size_t n, float s, float tensor, uint8_t *codes)
{
    float m = least(1.0f / (s * tensor), FLT_MAX);
    for (size_t i = 0; i < n; i++)
        codes[i] = code_of(x[i] * m);
}

uint8_t encode_te_group(const float *x, size_t n, float g, uint8_t *codes)
{
    uint8_t s = scalar_to_e4m3(scalar_amax(0.0f, x, n) * (g * (1.0f / E2M1_MAX)));
    te_codes(x, n, scalar_e4m3(s), 1.0f / g, codes);
    return s;
}

void group_te(const struct encode *e, const float *x, size_t n, uint8_t *codes, uint8_t *scale)
{
    *scale = encode_te_group(x, n, e->inverse, codes);
}

/* ---- compressed-tensors ---- */

void tensor_ct(struct encode *e)
{
    tensor_by_inverse(e, TENSOR_MAX);
}

void group_ct(const struct encode *e, const float *x, size_t n, uint8_t *codes, uint8_t *scale)
{
    uint8_t s = scalar_to_e4m3(e->inverse * (scalar_amax(0.0f, x, n) / E2M1_MAX));
    *scale = s ? s : scalar_to_e4m3(0.125f);
    float d = scalar_e4m3(*scale) / e->inverse;
    for (size_t i = 0; i < n; i++)
        codes[i] = code_of(x[i] / d);
}

/* ---- four over six ---- */

void tensor_4over6(struct encode *e)
{
    tensor_by_inverse(e, FOUR_MAX);
}

static float square_error(const struct encode *e, const float *x, size_t n, float s,
                          const uint8_t *codes)
{
    float sum = 0.0f;
    for (size_t i = 0; i < n; i++) {
        float d = scalar_e2m1(codes[i]) * s * e->amax / FOUR_MAX - x[i];
        sum += d * d;
    }
    return sum;
}

void group_4over6(const struct encode *e, const float *x, size_t n, uint8_t *codes, uint8_t *scale)
{
    float base = scalar_amax(0.0f, x, n) / E2M1_MAX * e->inverse;
    uint8_t s6 = scalar_to_e4m3(base), s4 = scalar_to_e4m3(base * 1.5f), four[ENCODE_GROUP_MAX];
    te_codes(x, n, scalar_e4m3(s6), e->tensor, codes);
    te_codes(x, n, scalar_e4m3(s4), e->tensor, four);
    *scale = s6;
    if (!(square_error(e, x, n, scalar_e4m3(s4), four) <
          square_error(e, x, n, scalar_e4m3(s6), codes)))
        return;
    *scale = s4;
    memcpy(codes, four, n);
}
