/*
 * encode.h - f32 to any weight format, by the rules of the tools that write checkpoints.
 *
 *     struct encode e;
 *     float amax = 0;
 *     if (format_needs_amax(&formats[f])) amax = encode_amax(amax, x, n);  // any pieces, any order
 *     encode_init(&e, f, encode_rule_find(f, NULL), rows, cols, amax);
 *     encode_rows(&e, x, row0, n, data, scale);                 // row groups, any order
 *
 * Matrices that share a tensor scale (gate and up, q, k and v) share the amax.  Rows go in groups:
 * row0 is a multiple of the format's group_rows, n as well unless row0 + n == rows.  Values must be
 * finite (encode_amax gives NaN or infinity otherwise).  BF16 weights are widened by the caller.
 *
 * Arithmetic: f32, every operation rounded to nearest even, in the order written.  "e4m3" and
 * "e2m1" round to nearest even and saturate; a is the largest magnitude of a group, A of the
 * matrix, s a scale after it was rounded.  E2M1 codes get a sign only for x < 0 (so -0 is code 0),
 * except where a rule says otherwise.
 *
 *   bf16   nearest      nearest even
 *   fp8*   amax         s = a / 448, or 1 where that is 0; e4m3(x / s).
 *                       (DeepSeek-V3's and Miles' block rule, which has no answer for zero blocks.)
 *   fp8-block amax-bf16 the same with s rounded to BF16 before the division, as in checkpoints
 *                       whose weight_scale_inv is BF16.
 *   nvfp4  modelopt     tensor = A / 2688; s = e4m3(max(a / (6 * tensor), 2^-9)), 1 for a zero
 *                       group; e2m1(x / (s * tensor)).  (NVIDIA Model-Optimizer,
 *                       qtensor/nvfp4_tensor.py.)
 *   nvfp4  transformer-engine
 *                       g = min(2688 / A, FLT_MAX); s = e4m3(a * (g * (1 / 6))); tensor = 1 / g;
 *                       e2m1(x * min(1 / (s * tensor), FLT_MAX)).  (Transformer Engine,
 *                       custom_recipes/quantization_nvfp4.py; FlashInfer's exact mode.)
 *   nvfp4  compressed-tensors
 *                       g = 2688 / A; s = e4m3(g * (a / 6)), 0.125 where that is 0; tensor = 1 / g;
 *                       e2m1(x / (s / g)).  (vllm-project/compressed-tensors, quantization/utils/
 *                       helpers.py, where observers keep a in f32.)
 *   nvfp4  4over6       g = 1536 / A; b = a / 6 * g; s is e4m3(b), or e4m3(1.5 * b) if that gives
 *                       the smaller sum of squares of (q * s * A / 1536 - x), added in order; the
 *                       rest as transformer-engine.  (Transformer Engine,
 *                       quantize_4over6_nvfp4.cuh: squares, E4M3 up to 256, exact error;
 *                       Cook et al., arXiv 2512.02010.)
 *   mx*    round-up     s = least power of two >= a / m, m the largest element (448 or 6); zero
 *                       group: code 0; elements of x / s.  (FlashInfer, Transformer Engine, Miles,
 *                       Model-Optimizer for MXFP8: never saturates.)
 *   mx*    ocp-floor    s = 2^(floor(log2 a) - 8 or - 2).  (OCP Microscaling v1.0; torchao.)
 *   mx*    even         the same after rounding a to one mantissa bit.  (compressed-tensors,
 *                       quantization/utils/mxfp4_utils.py.)
 *   mxfp4  modelopt     scales as round-up; elements with ties toward zero, and zeros of either
 *                       sign are code 8.  (Model-Optimizer, qtensor/mxfp4_tensor.py.)
 *
 * In every NVFP4 rule A = 0 gives tensor = g = 1.  E8M0 codes end at 0 and 254.
 * Pure: the caller's buffers, any thread.
 */
#ifndef FORMAT_ENCODE_H
#define FORMAT_ENCODE_H

#include "format/format.h"

struct encode;
/* One group of n elements in a row: 4-bit elements go to codes[] unpacked, one a byte. */
typedef void encode_group_fn(const struct encode *e, const float *x, size_t n, uint8_t *codes,
                             uint8_t *scale);
typedef void encode_tensor_fn(struct encode *e); /* fills tensor and inverse from amax */

struct encode_rule {
    const char *name;
    uint32_t formats;  /* bit 1 << format_t: those that it writes */
    uint32_t standard; /* those whose default it is */
    const char *about;
    encode_tensor_fn *tensor; /* NULL where no format has a tensor scale */
    encode_group_fn *group;   /* NULL: BF16, and FP8 with f32 scales */
    bool bf16_scale;          /* f32 scales are BF16 values and may be stored so */
};

#define ENCODE_RULES 11
extern const struct encode_rule encode_rules[ENCODE_RULES];

/* By name, or the format's default for NULL; NULL if the format has no such rule. */
const struct encode_rule *encode_rule_find(format_t f, const char *name);

struct encode {
    format_t format;
    const struct encode_rule *rule;
    size_t rows, cols;
    float amax;
    float tensor;  /* to be stored: format_parts.tensor */
    float inverse; /* g, stored by compressed-tensors instead: tensor = 1 / g */
};

/* max(amax, |x[i]|); NaN if there is one. */
float encode_amax(float amax, const float *x, size_t n);
/* `amax` matters only where format_needs_amax. */
void encode_init(struct encode *e, format_t f, const struct encode_rule *rule, size_t rows,
                 size_t cols, float amax);
/* Rows [row0, row0 + n) of the matrix, x[n][cols]; `data` and `scale` are the places of row row0.
 * The scale of a format that has only one is written with row 0. */
void encode_rows(const struct encode *e, const float *x, size_t row0, size_t n, void *data,
                 void *scale);

#endif
