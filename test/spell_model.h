/*
 * spell_model.h - a tiny model with random weights in any format, written in any spelling.
 *
 *     struct tiny t;
 *     tiny_new(&t, FORMAT_NVFP4, 64, 128);          // hidden, moe_intermediate
 *     tiny_write(&t, dir, &spells[i], NULL);        // m.safetensors and config.json
 *     tiny_free(&t);
 *
 * Every linear has the format; gate and up have scales of their own.
 */
#ifndef TEST_SPELL_MODEL_H
#define TEST_SPELL_MODEL_H

#include "format/encode.h"
#include "model/model.h"
#include "model/tensors.h"
#include "random_model.h"
#include "st_writer.h"
#include <stdlib.h>

enum { TINY_LAYERS = 2, TINY_EXPERTS = 4 };
typedef enum { EACH, MIXTRAL, FUSED, TRANSPOSED, INTERLEAVED } arrange_t;

struct spell {
    const char *name;
    format_t format;
    arrange_t arrange;
    const char *float_dtype; /* of BF16 weights, and of f32 scales */
    const char *data, *scale, *tensor, *input;     /* behind a module with one weight */
    const char *fdata, *fscale, *ftensor, *finput; /* behind a fused one */
    bool inverse, row_scales_flat; /* tensor and input as 1 / x; [N] instead of [N, 1] */
    const char *byte_dtype;        /* of E8M0 scales: U8 or F8_E8M0 */
    const char *code_dtype;        /* of E2M1 codes: U8 or F4 */
};

struct tiny_weight {
    uint16_t *bf16;
    uint8_t *data, *scale;
    size_t data_bytes, scale_bytes;
    float tensor, inverse, input;
};

struct tiny {
    char json[1024];
    format_t format;
    struct config c;
    struct slot_spec *specs;
    size_t n;
    struct tiny_weight *w;
};

static inline void tiny_encode(struct tiny *t, size_t i, const char *rule)
{
    struct tiny_weight *w = &t->w[i];
    const struct slot_spec *p = &t->specs[i];
    size_t rows = (size_t)p->shape.rows, cols = (size_t)p->shape.cols, len = rows * cols;
    struct encode e;
    float *x = mem_alloc(len * sizeof *x);
    for (size_t k = 0; k < len; k++)
        x[k] = format_bf16(w->bf16[k]);
    CHECK(format_bytes(t->format, rows, cols, &w->data_bytes, &w->scale_bytes));
    w->data = mem_alloc(w->data_bytes + 1);
    w->scale = mem_alloc(w->scale_bytes + 1);
    encode_init(&e, t->format, encode_rule_find(t->format, rule), rows, cols,
                encode_amax(0.0f, x, len));
    encode_rows(&e, x, 0, rows, w->data, w->scale);
    w->tensor = e.tensor;
    w->inverse = e.inverse;
    w->input = 0.25f * (float)(1u << i % 8);
    mem_free(x);
}

static inline void tiny_new(struct tiny *t, format_t format, int hidden, int inner)
{
    struct err e;
    *t = (struct tiny){.format = format};
    snprintf(t->json, sizeof t->json,
             "\"model_type\":\"qwen3_moe\",\"architectures\":[\"Qwen3MoeForCausalLM\"],"
             "\"vocab_size\":48,\"hidden_size\":%d,\"moe_intermediate_size\":%d,"
             "\"num_hidden_layers\":%d,\"num_attention_heads\":2,\"num_key_value_heads\":1,"
             "\"head_dim\":32,\"num_experts\":%d,\"num_experts_per_tok\":2,"
             "\"norm_topk_prob\":true,\"rms_norm_eps\":1e-6,\"rope_theta\":10000.0,"
             "\"max_position_embeddings\":256,\"eos_token_id\":1",
             hidden, inner, TINY_LAYERS, TINY_EXPERTS);
    char all[1100];
    snprintf(all, sizeof all, "{%s}", t->json);
    CHECK(config_parse(&t->c, all, strlen(all), &e) == OK);
    CHECK(model_specs(&t->c, &t->specs, &t->n, &e) == OK);
    t->w = mem_alloc(t->n * sizeof *t->w);
    for (size_t i = 0; i < t->n; i++) {
        size_t len = (size_t)(t->specs[i].shape.rows * t->specs[i].shape.cols);
        t->w[i].bf16 = mem_alloc(len * 2 + 2);
        random_bf16(t->w[i].bf16, len, t->specs[i].shape.cols, i + 1);
        /* FP8 blocks: scales that BF16 and F16 hold exactly; NVFP4: 1 / x both ways */
        if (t->specs[i].linear && format != FORMAT_BF16)
            tiny_encode(t, i, format == FORMAT_FP8_BLOCK ? "amax-bf16"
                              : format == FORMAT_NVFP4   ? "compressed-tensors"
                                                         : NULL);
    }
}

static inline void tiny_free(struct tiny *t)
{
    for (size_t i = 0; i < t->n; i++) {
        mem_free(t->w[i].bf16);
        mem_free(t->w[i].data);
        mem_free(t->w[i].scale);
    }
    mem_free(t->w);
    mem_free(t->specs);
}

/* ---- writing ---- */

/* Of values that F16 holds exactly, and normally. */
static inline uint16_t tiny_f16(float x)
{
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    uint32_t exp = u >> 23 & 255;
    CHECK((u & 0x1fff) == 0 && exp > 112 && exp < 143);
    return (uint16_t)(u >> 16 & 0x8000) | (uint16_t)((exp - 112) << 10 | (u >> 13 & 1023));
}

/* n floats as a dtype; returns bytes an element. */
static inline size_t tiny_floats(void *to, const float *x, size_t n, const char *dtype)
{
    uint16_t *h = to;
    if (strcmp(dtype, "F32") == 0) {
        memcpy(to, x, n * sizeof *x);
        return 4;
    }
    for (size_t i = 0; i < n; i++)
        h[i] = strcmp(dtype, "F16") == 0 ? tiny_f16(x[i]) : format_to_bf16(x[i]);
    return 2;
}

/* A part of several matrices (experts x halves) as one tensor: element (x, h, r, c) to its place. */
struct tiny_block {
    uint8_t *bytes;
    size_t experts, halves, rows, cols, elem;
    arrange_t arrange;
};

static inline void tiny_place(const struct tiny_block *b, size_t x, size_t h, const uint8_t *part)
{
    size_t all = b->halves * b->rows, slab = x * all * b->cols;
    for (size_t r = 0; r < b->rows; r++)
        for (size_t c = 0; c < b->cols; c++) {
            size_t at = b->arrange == TRANSPOSED    ? c * all + h * b->rows + r
                        : b->arrange == INTERLEAVED ? (r * b->halves + h) * b->cols + c
                                                    : (h * b->rows + r) * b->cols + c;
            memcpy(b->bytes + (slab + at) * b->elem, part + (r * b->cols + c) * b->elem, b->elem);
        }
}

static inline void tiny_dims(char out[96], const struct tiny_block *b, const struct spell *s,
                             bool scale, format_t f)
{
    size_t all = b->halves * b->rows;
    bool blocks = s->arrange == INTERLEAVED && !scale && b->experts;
    if (b->experts == 0 && scale && f == FORMAT_FP8_CHANNEL && s->row_scales_flat)
        snprintf(out, 96, "[%zu]", all);
    else if (b->experts == 0)
        snprintf(out, 96, "[%zu, %zu]", all, b->cols);
    else if (blocks)
        snprintf(out, 96, "[%zu, %zu, %zu, 16]", b->experts, all, b->cols / 16);
    else if (b->arrange == TRANSPOSED)
        snprintf(out, 96, "[%zu, %zu, %zu]", b->experts, b->cols, all);
    else
        snprintf(out, 96, "[%zu, %zu, %zu]", b->experts, all, b->cols);
}

/* One part of slots[x * halves + h] under `name`. */
static inline void tiny_put(struct st_draft *o, const struct tiny *t, const struct spell *s,
                            const char *name, const size_t *slots, size_t experts, size_t halves,
                            part_t part)
{
    const struct slot_spec *p = &t->specs[slots[0]];
    format_t f = p->linear ? t->format : FORMAT_BF16;
    size_t rows = (size_t)p->shape.rows, cols = (size_t)p->shape.cols, n = experts ? experts : 1;
    bool scale = part == PART_SCALE, f32 = f == FORMAT_BF16 || (scale && formats[f].scale == SCALE_F32);
    struct tiny_block b = {.experts = experts, .halves = halves, .elem = 1};
    b.arrange = experts ? s->arrange : EACH;
    b.rows = scale ? format_scale_rows(f, rows) : rows;
    b.cols = scale ? format_scale_cols(f, cols)
                   : formats[f].elem == ELEM_E2M1 ? (cols + 1) / 2 : cols;
    size_t len = b.rows * b.cols;
    b.bytes = mem_alloc(n * halves * len * 4 + 4);
    float *x = mem_alloc(len * sizeof *x + 4);
    uint8_t *one = mem_alloc(len * 4 + 4);
    /* weights of BF16 are no numbers of F16 */
    const char *dtype = f == FORMAT_BF16 && strcmp(s->float_dtype, "F16") == 0 ? "BF16"
                        : f32 ? s->float_dtype
                        : scale ? (formats[f].scale == SCALE_E8M0 ? s->byte_dtype : "F8_E4M3")
                        : formats[f].elem == ELEM_E4M3 ? "F8_E4M3" : s->code_dtype;
    for (size_t k = 0; k < n * halves; k++) {
        const struct tiny_weight *w = &t->w[slots[k]];
        if (f == FORMAT_BF16) {
            for (size_t i = 0; i < len; i++)
                x[i] = format_bf16(w->bf16[i]);
        } else {
            memcpy(f32 ? (void *)x : one, scale ? w->scale : w->data, f32 ? len * 4 : len);
        }
        if (f32) b.elem = tiny_floats(one, x, len, dtype);
        tiny_place(&b, k / halves, k % halves, one);
    }
    char dims[96];
    tiny_dims(dims, &b, s, scale, f);
    if (!scale && !f32 && strcmp(dtype, "F4") == 0) snprintf(dims, sizeof dims, "[%zu, %zu]", rows, cols);
    if (p->n_dims == 1) snprintf(dims, sizeof dims, "[%zu]", cols);
    /* fused, with one scale a matrix: [E, 2] */
    if (experts && scale && f == FORMAT_FP8_TENSOR)
        snprintf(dims, sizeof dims, halves > 1 ? "[%zu, 2]" : "[%zu]", experts);
    if (!experts && scale && f == FORMAT_FP8_TENSOR) snprintf(dims, sizeof dims, "[]");
    st_put(o, name, dtype, dims, b.bytes, n * halves * len * b.elem);
    mem_free(b.bytes);
    mem_free(x);
    mem_free(one);
}

static inline void tiny_put_scalars(struct st_draft *o, const struct tiny *t, const struct spell *s,
                                    const char *name, const size_t *slots, size_t experts,
                                    size_t halves, bool input)
{
    float x[TINY_EXPERTS * 2];
    size_t n = (experts ? experts : 1) * halves;
    char dims[32];
    for (size_t k = 0; k < n; k++) {
        const struct tiny_weight *w = &t->w[slots[k]];
        x[k] = input ? (s->inverse ? 1.0f / w->input : w->input)
                     : s->inverse ? w->inverse : w->tensor;
    }
    snprintf(dims, sizeof dims, !experts ? "[]" : halves > 1 ? "[%zu, 2]" : "[%zu]", experts);
    if (!experts && s->inverse) snprintf(dims, sizeof dims, "[1]");
    st_put(o, name, "F32", dims, x, n * sizeof *x);
}

static inline void tiny_module(struct st_draft *o, const struct tiny *t, const struct spell *s,
                               const char *module, const size_t *slots, size_t experts, size_t halves)
{
    char name[256];
    bool quantized = t->specs[slots[0]].linear && t->format != FORMAT_BF16;
    const char *data = experts ? s->fdata : s->data, *scale = experts ? s->fscale : s->scale;
    const char *tensor = experts ? s->ftensor : s->tensor, *input = experts ? s->finput : s->input;
    if (!quantized && !experts) data = ".weight";
    snprintf(name, sizeof name, "%s%s", module, data);
    tiny_put(o, t, s, name, slots, experts, halves, PART_DATA);
    if (!quantized) return;
    snprintf(name, sizeof name, "%s%s", module, scale);
    tiny_put(o, t, s, name, slots, experts, halves, PART_SCALE);
    if (formats[t->format].tensor) {
        snprintf(name, sizeof name, "%s%s", module, tensor);
        tiny_put_scalars(o, t, s, name, slots, experts, halves, false);
    }
    if (input == NULL) return;
    snprintf(name, sizeof name, "%s%s", module, input);
    tiny_put_scalars(o, t, s, name, slots, experts, halves, true);
}

static inline void tiny_experts(struct st_draft *o, const struct tiny *t, const struct spell *s,
                                int layer)
{
    static const char *const proj[] = {"gate_proj", "up_proj", "down_proj"}, *const mix[] = {"w1", "w3", "w2"};
    struct layer_slots l;
    char module[192];
    tensors_layer(&l, &t->c, layer);
    size_t pairs[TINY_EXPERTS * 2], downs[TINY_EXPERTS];
    for (int x = 0; x < TINY_EXPERTS; x++) {
        for (int p = 0; p < MLP_SLOTS && s->arrange <= MIXTRAL; p++) {
            size_t slot = slot_expert(&l, x, p);
            snprintf(module, sizeof module, "model.layers.%d.%s.experts.%d.%s", layer,
                     s->arrange == EACH ? "mlp" : "block_sparse_moe", x,
                     s->arrange == EACH ? proj[p] : mix[p]);
            tiny_module(o, t, s, module, &slot, 0, 1);
        }
        pairs[2 * x] = slot_expert(&l, x, MLP_GATE);
        pairs[2 * x + 1] = slot_expert(&l, x, MLP_UP);
        downs[x] = slot_expert(&l, x, MLP_DOWN);
    }
    if (s->arrange <= MIXTRAL) return;
    snprintf(module, sizeof module, "model.layers.%d.mlp.experts.gate_up_proj", layer);
    tiny_module(o, t, s, module, pairs, TINY_EXPERTS, 2);
    snprintf(module, sizeof module, "model.layers.%d.mlp.experts.down_proj", layer);
    tiny_module(o, t, s, module, downs, TINY_EXPERTS, 1);
}

static inline void tiny_tensors(struct st_draft *o, const struct tiny *t, const struct spell *s)
{
    for (size_t i = 0; i < t->n; i++) {
        char module[192];
        const char *name = t->specs[i].name;
        if (strstr(name, ".experts.") || t->specs[i].shape.kind == RESIDENT_F32) continue;
        snprintf(module, sizeof module, "%.*s", (int)(strlen(name) - strlen(".weight")), name);
        char *gate = strstr(module, "mlp.gate");
        if (gate && s->arrange == MIXTRAL) strcpy(gate, "block_sparse_moe.gate");
        tiny_module(o, t, s, module, &i, 0, 1);
    }
    for (int l = 0; l < TINY_LAYERS; l++)
        tiny_experts(o, t, s, l);
}

/* config.json, with `quantization` as its quantization_config (JSON, or NULL). */
static inline void tiny_config(const struct tiny *t, const char *dir, const char *quantization)
{
    struct buf b = {0};
    CHECK(buf_printf(&b, "{%s", t->json));
    if (quantization) CHECK(buf_printf(&b, ",\"quantization_config\":%s", quantization));
    CHECK(buf_puts(&b, "}"));
    file_put(dir, "config.json", b.data, b.len);
    buf_release(&b);
}

/* `o` has what is to be changed, or is NULL. */
static inline void tiny_write(const struct tiny *t, const char *dir, const struct spell *s,
                              struct st_draft *o)
{
    struct st_draft own = {0};
    if (o == NULL) o = &own;
    tiny_tensors(o, t, s);
    st_write(o, dir);
    tiny_config(t, dir, NULL);
}

/* clang-format off */
#define MODELOPT ".weight", ".weight_scale", ".weight_scale_2", ".input_scale"
#define UNDER    "", "_weight_scale", "_weight_scale_2", "_input_scale"
#define HF       ".weight", ".weight_scale_inv", NULL, NULL
#define HF_UNDER "", "_weight_scale_inv", NULL, NULL
#define CT       ".weight_packed", ".weight_scale", ".weight_global_scale", ".input_global_scale"
#define CT_UNDER "_weight_packed", "_weight_scale", "_weight_global_scale", "_input_global_scale"
#define OSS      "_blocks", "_scales", NULL, NULL
#define NONE     NULL, NULL, NULL, NULL
/* The first of each format is what the others are compared with. */
static const struct spell spells[] = {
    {"bf16", FORMAT_BF16, EACH, "BF16", HF, NONE, false, false, "U8", "U8"},
    {"bf16 as F32", FORMAT_BF16, EACH, "F32", HF, NONE, false, false, "U8", "U8"},
    {"bf16 mixtral", FORMAT_BF16, MIXTRAL, "BF16", HF, NONE, false, false, "U8", "U8"},
    {"bf16 fused", FORMAT_BF16, FUSED, "BF16", HF, HF_UNDER, false, false, "U8", "U8"},
    {"bf16 transposed", FORMAT_BF16, TRANSPOSED, "BF16", HF, HF_UNDER, false, false, "U8", "U8"},
    {"bf16 transposed as F32", FORMAT_BF16, TRANSPOSED, "F32", HF, HF_UNDER, false, false, "U8", "U8"},
    {"fp8 block", FORMAT_FP8_BLOCK, EACH, "F32", HF, NONE, false, false, "U8", "U8"},
    {"fp8 block, BF16 scales", FORMAT_FP8_BLOCK, EACH, "BF16", HF, NONE, false, false, "U8", "U8"},
    {"fp8 block, F16 scales", FORMAT_FP8_BLOCK, EACH, "F16", HF, NONE, false, false, "U8", "U8"},
    {"fp8 block by compressed-tensors", FORMAT_FP8_BLOCK, EACH, "F32", ".weight", ".weight_scale", NULL, NULL, NONE, false, false, "U8", "U8"},
    {"fp8 block mixtral", FORMAT_FP8_BLOCK, MIXTRAL, "F32", HF, NONE, false, false, "U8", "U8"},
    {"fp8 block fused", FORMAT_FP8_BLOCK, FUSED, "BF16", HF, HF_UNDER, false, false, "U8", "U8"},
    {"fp8 block transposed", FORMAT_FP8_BLOCK, TRANSPOSED, "F32", HF, HF_UNDER, false, false, "U8", "U8"},
    {"fp8 tensor", FORMAT_FP8_TENSOR, EACH, "F32", MODELOPT, NONE, false, false, "U8", "U8"},
    {"fp8 tensor fused", FORMAT_FP8_TENSOR, FUSED, "F32", MODELOPT, UNDER, false, false, "U8", "U8"},
    {"fp8 channel", FORMAT_FP8_CHANNEL, EACH, "F32", MODELOPT, NONE, false, false, "U8", "U8"},
    {"fp8 channel [N]", FORMAT_FP8_CHANNEL, EACH, "F32", MODELOPT, NONE, false, true, "U8", "U8"},
    {"fp8 channel fused", FORMAT_FP8_CHANNEL, FUSED, "F32", MODELOPT, UNDER, false, false, "U8", "U8"},
    {"fp8 channel transposed", FORMAT_FP8_CHANNEL, TRANSPOSED, "F32", MODELOPT, UNDER, false, false, "U8", "U8"},
    {"mxfp8 by Miles", FORMAT_MXFP8, EACH, "BF16", HF, NONE, false, false, "U8", "U8"},
    {"mxfp8 by ModelOpt", FORMAT_MXFP8, EACH, "BF16", ".weight", ".weight_scale", NULL, NULL, NONE, false, false, "U8", "U8"},
    {"mxfp8 with F8_E8M0", FORMAT_MXFP8, EACH, "BF16", HF, NONE, false, false, "F8_E8M0", "U8"},
    {"mxfp8 fused", FORMAT_MXFP8, FUSED, "BF16", HF, HF_UNDER, false, false, "U8", "U8"},
    {"mxfp8 transposed", FORMAT_MXFP8, TRANSPOSED, "BF16", HF, HF_UNDER, false, false, "U8", "U8"},
    {"nvfp4 by ModelOpt", FORMAT_NVFP4, EACH, "BF16", MODELOPT, NONE, false, false, "U8", "U8"},
    {"nvfp4 by compressed-tensors", FORMAT_NVFP4, EACH, "BF16", CT, NONE, true, false, "U8", "U8"},
    {"nvfp4 with F4", FORMAT_NVFP4, EACH, "BF16", MODELOPT, NONE, false, false, "U8", "F4"},
    {"nvfp4 mixtral", FORMAT_NVFP4, MIXTRAL, "BF16", MODELOPT, NONE, false, false, "U8", "U8"},
    {"nvfp4 fused", FORMAT_NVFP4, FUSED, "BF16", MODELOPT, UNDER, false, false, "U8", "U8"},
    {"nvfp4 fused by compressed-tensors", FORMAT_NVFP4, FUSED, "BF16", CT, CT_UNDER, true, false, "U8", "U8"},
    {"nvfp4 transposed", FORMAT_NVFP4, TRANSPOSED, "BF16", MODELOPT, UNDER, false, false, "U8", "U8"},
    {"mxfp4 by compressed-tensors", FORMAT_MXFP4, EACH, "BF16", ".weight_packed", ".weight_scale", NULL, NULL, NONE, false, false, "U8", "U8"},
    {"mxfp4 by ModelOpt", FORMAT_MXFP4, EACH, "BF16", ".weight", ".weight_scale", NULL, NULL, NONE, false, false, "U8", "U8"},
    {"mxfp4 by gpt-oss", FORMAT_MXFP4, INTERLEAVED, "BF16", ".weight_packed", ".weight_scale", NULL, NULL, OSS, false, false, "U8", "U8"},
};
/* clang-format on */
#define N_SPELLS (sizeof spells / sizeof spells[0])

static inline const struct spell *spell_of(format_t f)
{
    for (size_t i = 0; i < N_SPELLS; i++)
        if (spells[i].format == f) return &spells[i];
    return NULL;
}

#endif
