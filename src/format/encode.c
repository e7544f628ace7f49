#include "format/encode.h"

#include "format/encode_rules.h"
#include "format/name.h"
#include "format/scalar.h"

#define BIT(f) (1u << FORMAT_##f)
#define FP8    (BIT(FP8_BLOCK) | BIT(FP8_TENSOR) | BIT(FP8_CHANNEL))
#define MX     (BIT(MXFP8) | BIT(MXFP4))

const struct encode_rule encode_rules[ENCODE_RULES] = {
    {.name = "nearest", BIT(BF16), BIT(BF16), "nearest even"},
    {.name = "amax", FP8, FP8, "scale = amax / 448"},
    {.name = "amax-bf16",
     BIT(FP8_BLOCK),
     0,
     "the same, scale rounded to BF16 first",
     .bf16_scale = true},
    {.name = "modelopt",
     BIT(NVFP4),
     BIT(NVFP4),
     "NVIDIA Model-Optimizer's NVFP4",
     .tensor = tensor_modelopt,
     .group = group_modelopt},
    {.name = "transformer-engine",
     BIT(NVFP4),
     0,
     "Transformer Engine's; also FlashInfer's exact mode",
     .tensor = tensor_te,
     .group = group_te},
    {.name = "compressed-tensors",
     BIT(NVFP4),
     0,
     "llm-compressor's",
     .tensor = tensor_ct,
     .group = group_ct},
    {.name = "4over6",
     BIT(NVFP4),
     0,
     "group maximum at 4 or at 6, by the smaller square error",
     .tensor = tensor_4over6,
     .group = group_4over6},
    {.name = "round-up", MX, MX, "scale rounded up: never saturates", .group = group_round_up},
    {.name = "ocp-floor", MX, 0, "OCP Microscaling v1.0: scale rounded down", .group = group_floor},
    {.name = "even", MX, 0, "amax rounded to one mantissa bit, then down", .group = group_even},
    {.name = "modelopt",
     BIT(MXFP4),
     0,
     "Model-Optimizer's MXFP4: ties toward zero, zeros are -0",
     .group = group_mxfp4_modelopt},
};

const struct encode_rule *encode_rule_find(format_t f, const char *name)
{
    for (size_t i = 0; i < ENCODE_RULES; i++) {
        const struct encode_rule *r = &encode_rules[i];
        if (name ? r->formats >> f & 1 && format_same_name(r->name, name) : r->standard >> f & 1)
            return r;
    }
    return NULL;
}

float encode_amax(float amax, const float *x, size_t n)
{
    return scalar_amax(amax, x, n);
}

void encode_init(struct encode *e, format_t f, const struct encode_rule *rule, size_t rows,
                 size_t cols, float amax)
{
    *e = (struct encode){.format = f,
                         .rule = rule,
                         .rows = rows,
                         .cols = cols,
                         .amax = amax,
                         .tensor = 1.0f,
                         .inverse = 1.0f};
    if (formats[f].tensor) rule->tensor(e);
}

/* A scale of FP8: finite and not zero. */
static float fp8_scale(const struct encode *e, float amax)
{
    float s = amax / E4M3_MAX;
    if (e->rule->bf16_scale) s = scalar_bf16(scalar_to_bf16(s));
    return s == 0.0f ? 1.0f : s;
}

/* FP8 with f32 scales: groups may span rows. */
static void fp8_rows(const struct encode *e, const float *x, size_t row0, size_t n, uint8_t *data,
                     float *scale)
{
    const struct format *f = &formats[e->format];
    size_t gr = f->group_rows ? f->group_rows : n, gc = f->group_cols ? f->group_cols : e->cols;
    bool whole = format_needs_amax(f);
    for (size_t r = 0; r < n; r += gr) {
        size_t r_end = n - r < gr ? n : r + gr;
        for (size_t c = 0; c < e->cols; c += gc) {
            size_t c_end = e->cols - c < gc ? e->cols : c + gc;
            float amax = whole ? e->amax : 0.0f;
            for (size_t i = r; !whole && i < r_end; i++)
                amax = scalar_amax(amax, x + i * e->cols + c, c_end - c);
            float s = fp8_scale(e, amax);
            for (size_t i = r; i < r_end; i++)
                for (size_t j = c; j < c_end; j++)
                    data[i * e->cols + j] = scalar_to_e4m3(x[i * e->cols + j] / s);
            if (!whole || row0 == 0) *scale++ = s;
        }
    }
}

static void bf16_rows(const struct encode *e, const float *x, size_t n, uint16_t *data)
{
    for (size_t i = 0; i < n * e->cols; i++)
        data[i] = scalar_to_bf16(x[i]);
}

static void pack_nibbles(uint8_t *to, const uint8_t *codes, size_t n)
{
    for (size_t i = 0; i + 1 < n; i += 2)
        to[i / 2] = (uint8_t)(codes[i] | codes[i + 1] << 4);
    if (n % 2) to[n / 2] = codes[n - 1];
}

/* Groups within a row, by the rule's function. */
static void grouped_rows(const struct encode *e, const float *x, size_t n, uint8_t *data,
                         uint8_t *scale)
{
    const struct format *f = &formats[e->format];
    size_t row_bytes = format_row_bytes(e->format, e->cols);
    for (size_t r = 0; r < n; r++, x += e->cols, data += row_bytes) {
        for (size_t c = 0; c < e->cols; c += f->group_cols) {
            size_t m = e->cols - c < f->group_cols ? e->cols - c : f->group_cols;
            uint8_t codes[ENCODE_GROUP_MAX];
            e->rule->group(e, x + c, m, codes, scale++);
            if (f->elem == ELEM_E2M1)
                pack_nibbles(data + c / 2, codes, m);
            else
                memcpy(data + c, codes, m);
        }
    }
}

void encode_rows(const struct encode *e, const float *x, size_t row0, size_t n, void *data,
                 void *scale)
{
    if (e->rule->group)
        grouped_rows(e, x, n, data, scale);
    else if (formats[e->format].scale == SCALE_F32)
        fp8_rows(e, x, row0, n, data, scale);
    else
        bf16_rows(e, x, n, data);
}
