#include "format/act.h"

#include "format/encode_rules.h"
#include "format/name.h"
#include "format/scalar.h"

#include <float.h>

static size_t span(size_t cols, size_t c, size_t group)
{
    return cols - c < group ? cols - c : group;
}

static void bf16_row(float *out, float *scale, const float *x, size_t cols, float input_scale)
{
    (void)scale;
    (void)input_scale;
    for (size_t i = 0; i < cols; i++)
        out[i] = scalar_bf16(scalar_to_bf16(x[i]));
}

static void fp8_block_row(float *out, float *scale, const float *x, size_t cols, float input_scale)
{
    (void)input_scale;
    for (size_t c = 0; c < cols; c += 128) {
        size_t n = span(cols, c, 128);
        float a = scalar_amax(1e-10f, x + c, n), m = E4M3_MAX / a;
        *scale++ = a * (1.0f / E4M3_MAX);
        for (size_t i = c; i < c + n; i++)
            out[i] = scalar_e4m3(scalar_to_e4m3(x[i] * m));
    }
}

static void mxfp8_row(float *out, float *scale, const float *x, size_t cols, float input_scale)
{
    (void)scale;
    (void)input_scale;
    for (size_t c = 0; c < cols; c += 32) {
        size_t n = span(cols, c, 32);
        uint8_t code = encode_e8m0_up(scalar_amax(0.0f, x + c, n) / E4M3_MAX);
        float s = scalar_e8m0(code), inverse = scalar_e8m0((uint8_t)(254 - code));
        for (size_t i = c; i < c + n; i++)
            out[i] = scalar_bf16(scalar_to_bf16(scalar_e4m3(scalar_to_e4m3(x[i] * inverse)) * s));
    }
}

static void nvfp4_row(float *out, float *scale, const float *x, size_t cols, float input_scale)
{
    float g = 1.0f / input_scale;
    if (g > FLT_MAX) g = FLT_MAX;
    *scale = input_scale;
    for (size_t c = 0; c < cols; c += 16) {
        size_t n = span(cols, c, 16);
        uint8_t codes[16];
        float s = scalar_e4m3(encode_te_group(x + c, n, g, codes));
        for (size_t i = 0; i < n; i++)
            out[c + i] = scalar_e2m1(codes[i]) * s;
    }
}

static void nvfp4_token_row(float *out, float *scale, const float *x, size_t cols,
                            float input_scale)
{
    (void)input_scale;
    float s = scalar_amax(0.0f, x, cols) * (1.0f / (E2M1_MAX * E4M3_MAX));
    if (s > 0.0f) {
        nvfp4_row(out, scale, x, cols, s);
        return;
    }
    *scale = 0.0f;
    for (size_t i = 0; i < cols; i++)
        out[i] = 0.0f;
}

const struct act acts[ACT_COUNT] = {
    [ACT_BF16] = {"bf16", "BF16", 0, false, bf16_row},
    [ACT_FP8_BLOCK] = {"fp8-block", "E4M3, f32 scale each 128", 128, false, fp8_block_row},
    [ACT_MXFP8] = {"mxfp8", "E4M3, E8M0 scale each 32", 0, false, mxfp8_row},
    [ACT_NVFP4] = {"nvfp4", "E2M1, E4M3 scale each 16, the checkpoint's input_scale", ACT_ROW, true,
                   nvfp4_row},
    [ACT_NVFP4_PER_TOKEN] = {"nvfp4-per-token", "E2M1, E4M3 scale each 16, f32 scale a row",
                             ACT_ROW, false, nvfp4_token_row},
};

act_t act_find(const char *name)
{
    for (int a = 0; a < ACT_COUNT; a++)
        if (format_same_name(acts[a].name, name)) return (act_t)a;
    return ACT_COUNT;
}

size_t act_scales(act_t a, size_t cols)
{
    uint32_t group = acts[a].scale_group;
    if (group == 0) return 0;
    return group == ACT_ROW ? 1 : cols / group + (cols % group != 0);
}
