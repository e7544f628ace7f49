#include "cli/quantize_spell.h"

#include "cli/commands.h"
#include "cli/quantize_plan.h"
#include <string.h>

/* ---- fp8 and mxfp8 of transformers and Miles ---- */

static json_t *config_hf(const struct quantize_spell *s, const struct quantize_plan *p)
{
    const struct format *f = &formats[s->format];
    json_t *q = json_pack("{s:s, s:s, s:s}", "quant_method", s->algo, "fmt", "e4m3",
                          "activation_scheme", "dynamic");
    if (f->group_cols)
        json_object_set_new(q, "weight_block_size",
                            json_pack("[i, i]", (int)f->group_rows, (int)f->group_cols));
    if (f->scale == SCALE_E8M0) json_object_set_new(q, "scale_fmt", json_string("ue8m0"));
    json_object_set_new(q, "modules_to_not_convert", quantize_plan_excluded(p));
    return q;
}

/* ---- ModelOpt ---- */

static json_t *kv_scheme(void)
{
    return json_pack("{s:b, s:i, s:s}", "dynamic", 0, "num_bits", 8, "type", "float");
}

static json_t *producer(void)
{
    return json_pack("{s:s, s:s}", "name", "modelopt", "version", "moult-" MOULT_VERSION);
}

/* NVFP4 whose activations have no scales is ModelOpt's weight-only algorithm. */
static const char *modelopt_algo(const struct quantize_spell *s, const struct quantize_plan *p)
{
    if (s->format == FORMAT_NVFP4 && !s->unit_input && p->n_inputs < p->n_quantized)
        return "W4A16_NVFP4";
    return s->algo;
}

static json_t *modelopt_numbers(const struct format *f)
{
    return json_pack("{s:i, s:s, s:i, s:b}", "num_bits", f->elem_bits, "type", "float",
                     "group_size", (int)f->group_cols, "dynamic", 0);
}

static json_t *config_modelopt(const struct quantize_spell *s, const struct quantize_plan *p)
{
    const struct format *f = &formats[s->format];
    const char *algo = modelopt_algo(s, p);
    json_t *q = json_pack("{s:s, s:s, s:o, s:o}", "quant_method", "modelopt", "quant_algo", algo,
                          "ignore", quantize_plan_excluded(p), "producer", producer());
    if (f->group_cols && f->group_rows == 1) {
        json_t *group =
            json_pack("{s:[s], s:o}", "targets", "Linear", "weights", modelopt_numbers(f));
        if (strcmp(algo, s->algo) == 0)
            json_object_set_new(group, "input_activations", modelopt_numbers(f));
        json_object_set_new(q, "group_size", json_integer(f->group_cols));
        json_object_set_new(q, "config_groups", json_pack("{s:o}", "group_0", group));
    }
    if (p->fp8_kv) json_object_set_new(q, "kv_cache_scheme", kv_scheme());
    return q;
}

json_t *quantize_spell_hf_quant_config(const struct quantize_spell *s,
                                       const struct quantize_plan *p)
{
    if (s == NULL || !s->hf_quant_config) return NULL;
    const struct format *f = &formats[s->format];
    json_t *q = json_pack("{s:s}", "quant_algo", modelopt_algo(s, p));
    json_object_set_new(q, "kv_cache_quant_algo", p->fp8_kv ? json_string("FP8") : json_null());
    if (f->group_cols && f->group_rows == 1)
        json_object_set_new(q, "group_size", json_integer(f->group_cols));
    json_object_set_new(q, "exclude_modules", quantize_plan_excluded(p));
    return json_pack("{s:o, s:o}", "producer", producer(), "quantization", q);
}

/* ---- compressed-tensors ---- */

/* What its weights and activations are called; activations NULL: left alone. */
static const struct {
    const char *weights, *activations;
} strategies[FORMAT_COUNT] = {
    [FORMAT_FP8_BLOCK] = {"block", "group"},     [FORMAT_FP8_TENSOR] = {"tensor", "token"},
    [FORMAT_FP8_CHANNEL] = {"channel", "token"}, [FORMAT_MXFP8] = {"group", "group"},
    [FORMAT_NVFP4] = {"tensor_group", NULL},     [FORMAT_MXFP4] = {"group", NULL},
};

static json_t *compressed_args(const struct format *f, const char *strategy, bool dynamic)
{
    json_t *a = json_pack("{s:i, s:s, s:b, s:b, s:s}", "num_bits", f->elem_bits, "type", "float",
                          "symmetric", 1, "dynamic", dynamic, "strategy", strategy);
    if (strstr(strategy, "group"))
        json_object_set_new(a, "group_size", json_integer(f->group_cols));
    if (strcmp(strategy, "block") == 0)
        json_object_set_new(a, "block_structure",
                            json_pack("[i, i]", (int)f->group_rows, (int)f->group_cols));
    return a;
}

static json_t *config_compressed(const struct quantize_spell *s, const struct quantize_plan *p)
{
    const struct format *f = &formats[s->format];
    const char *activations = strategies[s->format].activations;
    json_t *in = activations ? compressed_args(f, activations, true) : json_null();
    if (f->tensor && p->n_inputs == p->n_quantized) { /* static global, dynamic local scales */
        json_decref(in);
        in = compressed_args(f, strategies[s->format].weights, true);
        json_object_set_new(in, "dynamic", json_string("local"));
    }
    json_t *group = json_pack("{s:[s], s:o, s:o, s:n, s:s}", "targets", "Linear", "weights",
                              compressed_args(f, strategies[s->format].weights, false),
                              "input_activations", in, "output_activations", "format", s->algo);
    json_t *q = json_pack("{s:s, s:s, s:s, s:{s:o}, s:o}", "quant_method", "compressed-tensors",
                          "format", s->algo, "quantization_status", "compressed", "config_groups",
                          "group_0", group, "ignore", quantize_plan_excluded(p));
    json_object_set_new(q, "kv_cache_scheme", p->fp8_kv ? kv_scheme() : json_null());
    return q;
}

/* ---- the table ---- */

#define HF                                                                                \
    .data = ".weight", .kv = {".k_proj.k_scale", ".v_proj.v_scale"}, .config = config_hf, \
    .layer_syntax = "model.layers.%d.", .experts_syntax = "model.layers.%d.mlp.experts"
#define MODELOPT                                                                           \
    .spelling = "modelopt", .data = ".weight", .scale = ".weight_scale",                   \
    .kv = {".k_proj.k_scale", ".v_proj.v_scale"}, .config = config_modelopt,               \
    .layer_syntax = "model.layers.%d.*", .experts_syntax = "model.layers.%d.mlp.experts*", \
    .hf_quant_config = true
#define COMPRESSED                                                                              \
    .spelling = "compressed-tensors", .scale = ".weight_scale", .kv = {".k_scale", ".v_scale"}, \
    .config = config_compressed, .layer_syntax = "re:^model\\.layers\\.%d\\.",                  \
    .experts_syntax = "re:^model\\.layers\\.%d\\.mlp\\.experts\\."
#define E4M3_F32 .data_dtype = ST_F8_E4M3, .scale_dtype = ST_F32
#define E4M3_U8  .data_dtype = ST_F8_E4M3, .scale_dtype = ST_U8
#define FP4_E4M3 .data_dtype = ST_U8, .scale_dtype = ST_F8_E4M3

static const struct quantize_spell spells[] = {
    {HF, .spelling = "hf", .format = FORMAT_FP8_BLOCK, .preferred = true,
     .scale = ".weight_scale_inv", .algo = "fp8", E4M3_F32},
    {HF, .spelling = "hf", .format = FORMAT_FP8_TENSOR, .preferred = true, .scale = ".weight_scale",
     .algo = "fp8", E4M3_F32},
    {HF, .spelling = "miles", .format = FORMAT_FP8_BLOCK, .scale = ".weight_scale_inv",
     .algo = "fp8", E4M3_F32},
    {HF, .spelling = "miles", .format = FORMAT_MXFP8, .preferred = true,
     .scale = ".weight_scale_inv", .algo = "mxfp8", E4M3_U8},
    {MODELOPT, .format = FORMAT_FP8_BLOCK, .algo = "FP8_PB_WO", E4M3_F32},
    {MODELOPT, .format = FORMAT_FP8_TENSOR, .algo = "FP8", .input = ".input_scale", E4M3_F32},
    {MODELOPT, .format = FORMAT_FP8_CHANNEL, .algo = "FP8_PER_CHANNEL_PER_TOKEN", .scale_dims = 1,
     E4M3_F32},
    {MODELOPT, .format = FORMAT_MXFP8, .algo = "MXFP8", E4M3_U8},
    {MODELOPT, .format = FORMAT_NVFP4, .preferred = true, .algo = "NVFP4",
     .tensor = ".weight_scale_2", .input = ".input_scale", FP4_E4M3},
    {.spelling = "miles",
     .format = FORMAT_NVFP4,
     .rule = "transformer-engine",
     .data = ".weight",
     .scale = ".weight_scale",
     .tensor = ".weight_scale_2",
     .input = ".input_scale",
     FP4_E4M3,
     .unit_input = true,
     .experts_only = true,
     .kv = {".k_proj.k_scale", ".v_proj.v_scale"},
     .config = config_modelopt,
     .algo = "NVFP4",
     .layer_syntax = "model.layers.%d.",
     .experts_syntax = "model.layers.%d.mlp.experts",
     .hf_quant_config = true,
     .qkv_alias = true},
    {COMPRESSED, .format = FORMAT_FP8_BLOCK, .data = ".weight", .algo = "float-quantized",
     E4M3_F32},
    {COMPRESSED, .format = FORMAT_FP8_TENSOR, .data = ".weight", .algo = "float-quantized",
     .scale_dims = 1, E4M3_F32},
    {COMPRESSED, .format = FORMAT_FP8_CHANNEL, .preferred = true, .data = ".weight",
     .algo = "float-quantized", .scale_dims = 2, E4M3_F32},
    {COMPRESSED, .format = FORMAT_MXFP8, .data = ".weight", .algo = "mxfp8-quantized", E4M3_U8},
    {COMPRESSED, .format = FORMAT_MXFP4, .preferred = true, .data = ".weight_packed",
     .algo = "mxfp4-pack-quantized", .data_dtype = ST_U8, .scale_dtype = ST_U8},
    {COMPRESSED, .format = FORMAT_NVFP4, .rule = "compressed-tensors", .data = ".weight_packed",
     .algo = "nvfp4-pack-quantized", .tensor = ".weight_global_scale",
     .input = ".input_global_scale", .tensor_dims = 1, .inverse = true, FP4_E4M3},
    {.spelling = "hf",
     .format = FORMAT_BF16,
     .preferred = true,
     .data = ".weight",
     .kv = {".k_proj.k_scale", ".v_proj.v_scale"},
     .data_dtype = ST_BF16},
};
#define N_SPELLS (sizeof spells / sizeof spells[0])

const struct quantize_spell *quantize_spell_find(const char *spelling, format_t f)
{
    for (size_t i = 0; i < N_SPELLS; i++)
        if (spells[i].format == f &&
            (spelling ? strcmp(spells[i].spelling, spelling) == 0 : spells[i].preferred))
            return &spells[i];
    return NULL;
}

void quantize_spell_list(format_t f, struct buf *out)
{
    for (size_t i = 0; i < N_SPELLS; i++)
        if (spells[i].format == f)
            buf_printf(out, "%s%s", out->len ? ", " : "", spells[i].spelling);
}
