/*
 * act.h - activations rounded as low-precision GEMMs of other devices round them.
 *
 * A kernel there multiplies codes and applies scales afterwards.  act_row gives the same split:
 *
 *     x[i]  becomes  out[i] * scale[i / scale_group]    (one scale: scale[0]; none: out[i])
 *
 * where every out[i] is exactly representable in BF16 (a code, or a code times a power of two or an
 * E4M3 scale), so that a BF16 GEMM over `out` sums exactly what the device sums.  The f32 scales
 * are for the accumulator: one each 128 of K (fp8-block: multiply the partial sum of that segment),
 * or one for the row (nvfp4: multiply the whole sum).
 *
 * a is the largest magnitude of a group of K; arithmetic is f32, each operation rounded to nearest
 * even in the order written; e4m3 and e2m1 round to nearest even and saturate.  Inputs are finite.
 *
 *   bf16             out = bf16(x)
 *   fp8-block        a of 128, at least 1e-10; scale = a * (1 / 448); out = e4m3(x * (448 / a)).
 *                    (SGLang, per_token_group_quant_8bit.cu, which feeds DeepGEMM.)
 *   mxfp8            a of 32; s = least power of two >= a / 448; out = e4m3(x / s) * s.
 *                    Exact unless a < 448 * 2^-124: then nearest BF16.  (FlashInfer,
 *                    Transformer Engine.)
 *   nvfp4            g = 1 / input_scale of the checkpoint, encode.h's transformer-engine rule with
 *                    that g on groups of 16; out = e2m1 * e4m3; scale = input_scale.  (FlashInfer's
 *                    fp4_quantize with FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH.)
 *   nvfp4-per-token  the same with input_scale = a of the row * (1 / 2688).  (FlashInfer's
 *                    per_token_activation; SGLANG_FLASHINFER_NVFP4_PER_TOKEN_ACTIVATION.)
 *
 * A row depends on nothing but itself.  Pure; any thread.
 */
#ifndef FORMAT_ACT_H
#define FORMAT_ACT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum {
    ACT_BF16,
    ACT_FP8_BLOCK,
    ACT_MXFP8,
    ACT_NVFP4,
    ACT_NVFP4_PER_TOKEN,
    ACT_COUNT
} act_t;

#define ACT_ROW UINT32_MAX /* scale_group: one scale for the row */

typedef void act_row_fn(float *out, float *scale, const float *x, size_t cols, float input_scale);

struct act {
    const char *name;
    const char *about;
    uint32_t scale_group; /* K of one f32 scale; 0: none; ACT_ROW */
    bool static_scale;    /* uses the checkpoint's input_scale */
    act_row_fn *row;
};

extern const struct act acts[ACT_COUNT];

/* By name, any case, '_' as '-'; ACT_COUNT if unknown. */
act_t act_find(const char *name);
/* f32 scales of a row. */
size_t act_scales(act_t a, size_t cols);
/* out[cols] may be x; scale[act_scales].  input_scale: positive; read where static_scale. */
static inline void act_row(act_t a, float *out, float *scale, const float *x, size_t cols,
                           float input_scale)
{
    acts[a].row(out, scale, x, cols, input_scale);
}

#endif
