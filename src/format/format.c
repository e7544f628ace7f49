#include "format/format.h"

#include "format/name.h"

const struct format formats[FORMAT_COUNT] = {
    [FORMAT_BF16] = {.name = "bf16",
                     .about = "BF16, unquantized",
                     .elem = ELEM_BF16,
                     .elem_bits = 16},
    [FORMAT_FP8_BLOCK] = {.name = "fp8-block",
                          .about = "E4M3 with an f32 scale a block of 128 x 128",
                          .elem = ELEM_E4M3,
                          .elem_bits = 8,
                          .scale = SCALE_F32,
                          .scale_bytes = 4,
                          .group_rows = 128,
                          .group_cols = 128,
                          .segment = 128},
    [FORMAT_FP8_TENSOR] = {.name = "fp8-tensor",
                           .about = "E4M3 with one f32 scale",
                           .elem = ELEM_E4M3,
                           .elem_bits = 8,
                           .scale = SCALE_F32,
                           .scale_bytes = 4},
    [FORMAT_FP8_CHANNEL] = {.name = "fp8-channel",
                            .about = "E4M3 with an f32 scale a row",
                            .elem = ELEM_E4M3,
                            .elem_bits = 8,
                            .scale = SCALE_F32,
                            .scale_bytes = 4,
                            .group_rows = 1},
    [FORMAT_MXFP8] = {.name = "mxfp8",
                      .about = "E4M3 with an E8M0 scale each 32 of a row",
                      .elem = ELEM_E4M3,
                      .elem_bits = 8,
                      .scale = SCALE_E8M0,
                      .scale_bytes = 1,
                      .group_rows = 1,
                      .group_cols = 32},
    [FORMAT_NVFP4] = {.name = "nvfp4",
                      .about = "E2M1 with an E4M3 scale each 16 of a row and an f32 tensor scale",
                      .elem = ELEM_E2M1,
                      .elem_bits = 4,
                      .scale = SCALE_E4M3,
                      .scale_bytes = 1,
                      .group_rows = 1,
                      .group_cols = 16,
                      .tensor = true},
    [FORMAT_MXFP4] = {.name = "mxfp4",
                      .about = "E2M1 with an E8M0 scale each 32 of a row",
                      .elem = ELEM_E2M1,
                      .elem_bits = 4,
                      .scale = SCALE_E8M0,
                      .scale_bytes = 1,
                      .group_rows = 1,
                      .group_cols = 32},
};

format_t format_find(const char *name)
{
    for (int f = 0; f < FORMAT_COUNT; f++)
        if (format_same_name(formats[f].name, name)) return (format_t)f;
    return FORMAT_COUNT;
}

/* Groups that cover n elements. */
static size_t groups(uint32_t group, size_t n)
{
    if (group == 0) return n > 0;
    return n / group + (n % group != 0);
}

size_t format_row_bytes(format_t f, size_t cols)
{
    size_t bits = (size_t)formats[f].elem_bits;
    return bits >= 8 ? cols * (bits / 8) : cols / 2 + cols % 2;
}

size_t format_scale_rows(format_t f, size_t rows)
{
    return formats[f].scale == SCALE_NONE ? 0 : groups(formats[f].group_rows, rows);
}

size_t format_scale_cols(format_t f, size_t cols)
{
    return formats[f].scale == SCALE_NONE ? 0 : groups(formats[f].group_cols, cols);
}

bool format_bytes(format_t f, uint64_t rows, uint64_t cols, size_t *data, size_t *scale)
{
    size_t d, s;
    if (cols > SIZE_MAX / 2 || rows > SIZE_MAX) return false; /* row_bytes: at most 2 an element */
    if (__builtin_mul_overflow(format_row_bytes(f, cols), rows, &d)) return false;
    if (__builtin_mul_overflow(format_scale_rows(f, rows), format_scale_cols(f, cols), &s))
        return false;
    if (__builtin_mul_overflow(s, (size_t)formats[f].scale_bytes, &s)) return false;
    *data = d;
    *scale = s;
    return true;
}
