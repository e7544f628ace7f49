#include "cli/quantize_plan.h"

#include "base/file.h"
#include "base/mem.h"
#include "model/model.h"
#include "model/tensors.h"
#include "weight/pattern.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CONFIG_MAX_BYTES ((size_t)16 << 20)
#define COUNT(a)         (sizeof(a) / sizeof(a)[0])

/* ---- names ---- */

static const char *last_part(const char *module)
{
    const char *dot = strrchr(module, '.');
    return dot ? dot + 1 : module;
}

static bool is_linear(const char *module)
{
    static const char *const names[] = {"q_proj",    "k_proj",  "v_proj",    "o_proj",
                                        "gate_proj", "up_proj", "down_proj", "lm_head"};
    for (size_t i = 0; i < COUNT(names); i++)
        if (strcmp(last_part(module), names[i]) == 0) return true;
    return false;
}

static bool is_head(const char *module)
{
    return strcmp(module, "lm_head") == 0;
}

static bool is_router(const char *module)
{
    static const char tail[] = ".mlp.gate";
    size_t n = strlen(module), k = sizeof tail - 1;
    return n > k && strcmp(module + n - k, tail) == 0;
}

static bool is_expert(const char *module)
{
    return strstr(module, ".mlp.experts.") != NULL;
}

/* -1: of no layer. */
static long layer_of(const char *module)
{
    static const char head[] = "model.layers.";
    size_t k = sizeof head - 1;
    return strncmp(module, head, k) == 0 ? strtol(module + k, NULL, 10) : -1;
}

/* Does a runtime build a and b as one matrix?  Both lie in one module. */
static bool fused(const char *a, const char *b)
{
    static const char *const sets[] = {"q_proj k_proj v_proj", "gate_proj up_proj"};
    size_t n = (size_t)(last_part(a) - a);
    if (n != (size_t)(last_part(b) - b) || strncmp(a, b, n) != 0) return false;
    for (size_t i = 0; i < COUNT(sets); i++)
        if (strstr(sets[i], last_part(a)) && strstr(sets[i], last_part(b))) return true;
    return false;
}

/* ---- the request ---- */

static err_t find_format(struct quantize_plan *p, const struct quantize_request *r, struct err *e)
{
    struct buf list = {0};
    err_t rc = OK;
    p->format = r->format ? format_find(r->format) : FORMAT_COUNT;
    if (p->format == FORMAT_COUNT) {
        for (int f = 0; f < FORMAT_COUNT; f++)
            buf_printf(&list, "%s%s", f ? ", " : "", formats[f].name);
        rc = r->format ? err_set(e, ERR_INPUT, "--format: \"%.60s\" is not one of %s", r->format,
                                 list.data)
                       : err_set(e, ERR_INPUT, "--format is needed: one of %s", list.data);
        buf_release(&list);
        return rc;
    }
    p->spell = quantize_spell_find(r->spelling, p->format);
    if (p->spell == NULL) {
        quantize_spell_list(p->format, &list);
        rc = err_set(e, ERR_INPUT, "--spelling: %s has no %s (allowed: %s)", r->spelling,
                     formats[p->format].name, list.data ? list.data : "");
        buf_release(&list);
    }
    return rc;
}

static err_t find_rule(struct quantize_plan *p, const struct quantize_request *r, struct err *e)
{
    struct buf list = {0};
    p->rule = encode_rule_find(p->format, r->rule ? r->rule : p->spell->rule);
    if (p->rule) return OK;
    for (size_t i = 0; i < ENCODE_RULES; i++)
        if (encode_rules[i].formats >> p->format & 1)
            buf_printf(&list, "%s%s", list.len ? ", " : "", encode_rules[i].name);
    err_t rc = err_set(e, ERR_INPUT, "--rule: \"%.60s\" is not one of %s's: %s", r->rule,
                       formats[p->format].name, list.data ? list.data : "");
    buf_release(&list);
    return rc;
}

/* One list a pattern, so that one that means nothing is seen. */
struct excludes {
    struct patterns v[OPT_STRINGS_MAX];
    bool hit[OPT_STRINGS_MAX];
    size_t n;
};

static err_t excludes_make(struct excludes *x, const struct quantize_request *r, struct err *e)
{
    for (x->n = 0; x->n < r->exclude.n; x->n++) {
        const char *text = r->exclude.v[x->n];
        bool regex = strncmp(text, "re:", 3) == 0;
        err_t rc = patterns_add(&x->v[x->n], regex ? SYNTAX_EXACT : SYNTAX_WILDCARD, text, e);
        if (rc != OK) return err_wrap(e, rc, "--exclude");
    }
    return OK;
}

static void excludes_free(struct excludes *x)
{
    for (size_t i = 0; i < x->n; i++)
        patterns_free(&x->v[i]);
}

static bool excluded(struct excludes *x, const char *module)
{
    bool any = false;
    for (size_t i = 0; i < x->n; i++)
        if (patterns_match(&x->v[i], module, NULL)) any = x->hit[i] = true;
    return any;
}

static bool wanted(const struct quantize_plan *p, const struct quantize_request *r,
                   struct excludes *x, const struct quantize_weight *w)
{
    if (!w->linear || (is_head(w->module) && !r->lm_head)) return false;
    if (excluded(x, w->module)) return false; /* first: every pattern is seen */
    if ((r->experts_only || p->spell->experts_only) && !is_expert(w->module)) return false;
    long layer = layer_of(w->module);
    return layer < 0 || (layer >= r->bf16_first_n && layer < p->config.n_layers - r->bf16_last_n);
}

/* ---- the source ---- */

/* Does a quantization config ask for an FP8 KV cache? */
static bool asks_fp8_kv(const json_t *q)
{
    const char *algo = json_string_value(json_object_get(q, "kv_cache_quant_algo"));
    const json_t *scheme = json_object_get(q, "kv_cache_scheme");
    return (algo && strcmp(algo, "FP8") == 0) ||
           json_integer_value(json_object_get(scheme, "num_bits")) == 8;
}

static err_t read_json(json_t **out, const struct quantize_plan *p, const char *name, struct err *e)
{
    struct buf path = {0}, text = {0};
    json_error_t je;
    if (!buf_printf(&path, "%s/%s", p->dir, name))
        return err_set(e, ERR_NOMEM, "no memory for a path");
    err_t rc = file_read(&text, path.data, CONFIG_MAX_BYTES, e);
    json_t *root = rc == OK ? json_loadb(text.data, text.len, JSON_REJECT_DUPLICATES, &je) : NULL;
    if (rc == OK && !json_is_object(root))
        rc = err_set(e, ERR_INPUT, "%s: line %d: %s", path.data, je.line,
                     root ? "must be an object" : je.text);
    if (rc == OK)
        *out = root;
    else
        json_decref(root);
    buf_release(&path);
    buf_release(&text);
    return rc;
}

static err_t read_config(struct quantize_plan *p, struct err *e)
{
    json_t *hf = NULL;
    err_t rc = read_json(&p->json, p, "config.json", e);
    if (rc != OK) return rc;
    p->fp8_kv = asks_fp8_kv(json_object_get(p->json, "quantization_config"));
    if (read_json(&hf, p, "hf_quant_config.json", NULL) == OK) {
        p->fp8_kv = p->fp8_kv || asks_fp8_kv(json_object_get(hf, "quantization"));
        json_decref(hf);
    }
    json_object_del(p->json, "quantization_config");
    char *plain = json_dumps(p->json, JSON_COMPACT);
    rc = plain ? config_parse(&p->config, plain, strlen(plain), e)
               : err_set(e, ERR_NOMEM, "no memory for config.json");
    if (rc != OK) rc = err_wrap(e, rc, "%s/config.json", p->dir);
    free(plain);
    return rc;
}

static err_t open_source(struct quantize_plan *p, const struct quantize_request *r, struct err *e)
{
    err_t rc = checkpoint_find(&p->dir, r->src, e);
    if (rc == OK) rc = read_config(p, e);
    if (rc == OK) rc = checkpoint_open(&p->checkpoint, p->dir, e);
    if (rc == OK) rc = spelling_open(&p->reader, &p->checkpoint, e);
    return rc;
}

static err_t find_weight(struct quantize_plan *p, struct quantize_weight *w,
                         const struct slot_spec *s, struct err *e)
{
    size_t len = strlen(s->name) - (sizeof ".weight" - 1);
    snprintf(w->module, sizeof w->module, "%.*s", (int)len, s->name);
    w->n_dims = s->n_dims;
    w->rows = (size_t)s->shape.rows;
    w->cols = (size_t)s->shape.cols;
    w->linear = is_linear(w->module);
    w->to = FORMAT_BF16;
    return spelling_find(&p->reader, &w->src, s->name, s->n_dims, w->rows, w->cols, e);
}

static err_t find_weights(struct quantize_plan *p, struct err *e)
{
    struct slot_spec *specs = NULL;
    size_t n = 0;
    err_t rc = model_specs(&p->config, &specs, &n, e);
    if (rc != OK) return rc;
    p->weights = mem_try_array(n, sizeof *p->weights);
    if (p->weights == NULL) rc = err_set(e, ERR_NOMEM, "no memory for %zu weights", n);
    for (size_t i = 0; i < n && rc == OK; i++) {
        if (specs[i].optional || (i == SLOT_HEAD && p->config.tie_word_embeddings)) continue;
        rc = find_weight(p, &p->weights[p->n_weights], &specs[i], e);
        if (rc == OK) p->n_weights++;
    }
    mem_free(specs);
    return rc;
}

/* ---- what becomes of it ---- */

static err_t decide(struct quantize_plan *p, const struct quantize_request *r, struct err *e)
{
    struct excludes x = {0};
    if (r->lm_head && p->config.tie_word_embeddings)
        return err_set(e, ERR_INPUT,
                       "--lm-head: the head of this model is its embedding (tie_word_embeddings)");
    err_t rc = excludes_make(&x, r, e);
    for (size_t i = 0; i < p->n_weights && rc == OK; i++) {
        struct quantize_weight *w = &p->weights[i];
        format_t from = w->src.format;
        if (from != FORMAT_BF16 && !r->requantize) {
            rc = err_set(e, ERR_INPUT,
                         "%s: is %s already; --requantize quantizes what was quantized before",
                         w->module, formats[from].name);
            break;
        }
        if (wanted(p, r, &x, w)) w->to = p->format;
        w->copy = from == w->to && (from == FORMAT_BF16 || r->rule == NULL);
        p->n_quantized += w->to == p->format;
        w->share = i;
        for (size_t j = i; w->to != FORMAT_BF16 && j-- > 0 && i - j <= 2;)
            if (p->weights[j].to == w->to && fused(p->weights[j].module, w->module)) {
                w->share = p->weights[j].share;
                break;
            }
    }
    for (size_t i = 0; i < x.n && rc == OK; i++)
        if (!x.hit[i])
            rc = err_set(e, ERR_INPUT, "--exclude: \"%.200s\" means none of the projections",
                         r->exclude.v[i]);
    excludes_free(&x);
    if (rc == OK && p->n_quantized == 0)
        rc = err_set(e, ERR_INPUT, "nothing is left to quantize: all is excluded");
    return rc;
}

static struct st_out *add_out(struct quantize_plan *p, size_t *index, const char *module,
                              const char *suffix, st_dtype_t dtype)
{
    struct st_out *o = &p->outs[p->n_outs];
    snprintf(o->name, sizeof o->name, "%s%s", module, suffix);
    o->dtype = dtype;
    *index = p->n_outs++;
    return o;
}

static void add_scale(struct quantize_plan *p, struct quantize_weight *w)
{
    const struct quantize_spell *s = p->spell;
    const struct format *f = &formats[w->to];
    bool bf16 = p->rule->bf16_scale && f->scale == SCALE_F32 && !w->copy;
    struct st_out *o =
        add_out(p, &w->out[PART_SCALE], w->module, s->scale, bf16 ? ST_BF16 : s->scale_dtype);
    bool grid = f->group_rows && f->group_cols;
    o->n_dims = grid ? 2 : s->scale_dims;
    o->shape[0] = format_scale_rows(w->to, w->rows);
    o->shape[1] = format_scale_cols(w->to, w->cols);
}

static void add_outs(struct quantize_plan *p, struct quantize_weight *w)
{
    const struct quantize_spell *s = p->spell;
    bool plain = w->to == FORMAT_BF16, input = w->src.part[PART_INPUT].tensor != NULL;
    for (int part = 0; part < PART_COUNT; part++)
        w->out[part] = SIZE_MAX;
    struct st_out *o = add_out(p, &w->out[PART_DATA], w->module, plain ? ".weight" : s->data,
                               plain ? ST_BF16 : s->data_dtype);
    o->n_dims = w->n_dims;
    bool packed = formats[w->to].elem_bits < 8;
    uint64_t cols = packed ? format_row_bytes(w->to, w->cols) : w->cols;
    o->shape[0] = w->n_dims == 1 ? cols : w->rows;
    o->shape[1] = cols;
    if (plain) return;
    add_scale(p, w);
    if (s->tensor) {
        o = add_out(p, &w->out[PART_TENSOR], w->module, s->tensor, ST_F32);
        o->n_dims = s->tensor_dims;
        o->shape[0] = 1;
    }
    if (s->input && (input || s->unit_input)) {
        o = add_out(p, &w->out[PART_INPUT], w->module, s->input, ST_F32);
        o->n_dims = s->tensor_dims;
        o->shape[0] = 1;
        p->n_inputs++;
    }
}

/* Scales of an FP8 KV cache are carried over. */
static err_t add_kv(struct quantize_plan *p, struct err *e)
{
    for (int l = 0; l < p->config.n_layers; l++) {
        char module[64];
        struct source kv[2] = {{0}, {0}};
        snprintf(module, sizeof module, "model.layers.%d.self_attn", l);
        err_t rc = spelling_find_kv(&p->reader, kv, module, e);
        if (rc != OK) return rc;
        for (int i = 0; i < 2 && kv[0].tensor; i++) {
            p->kv[p->n_kv].src = kv[i];
            add_out(p, &p->kv[p->n_kv].out, module, p->spell->kv[i], ST_F32);
            p->n_kv++;
        }
    }
    return OK;
}

static err_t make_outs(struct quantize_plan *p, struct err *e)
{
    size_t n = p->n_weights * PART_COUNT + 2 * (size_t)p->config.n_layers;
    p->outs = mem_try_array(n, sizeof *p->outs);
    p->kv = mem_try_array(2 * (size_t)p->config.n_layers, sizeof *p->kv);
    if (p->outs == NULL || p->kv == NULL)
        return err_set(e, ERR_NOMEM, "no memory for %zu tensors", n);
    for (size_t i = 0; i < p->n_weights; i++) {
        add_outs(p, &p->weights[i]);
        for (int part = 0; part < PART_COUNT; part++)
            if (p->weights[i].src.part[part].tensor)
                p->src_bytes += source_bytes(&p->weights[i].src.part[part]);
    }
    return add_kv(p, e);
}

err_t quantize_plan_make(struct quantize_plan *p, const struct quantize_request *r, struct err *e)
{
    *p = (struct quantize_plan){0};
    err_t rc = find_format(p, r, e);
    if (rc == OK) rc = find_rule(p, r, e);
    if (rc == OK) rc = open_source(p, r, e);
    if (rc == OK) rc = find_weights(p, e);
    if (rc == OK) rc = decide(p, r, e);
    if (rc == OK) rc = make_outs(p, e);
    if (rc == OK) rc = spelling_rest(&p->reader, p->config.tie_word_embeddings, e);
    if (rc != OK) quantize_plan_free(p);
    return rc;
}

void quantize_plan_free(struct quantize_plan *p)
{
    json_decref(p->json);
    spelling_close(&p->reader);
    checkpoint_close(&p->checkpoint);
    mem_free(p->weights);
    mem_free(p->outs);
    mem_free(p->kv);
    mem_free(p->dir);
    *p = (struct quantize_plan){0};
}

/* ---- what configs list ---- */

static void add_layer(json_t *list, const char *syntax, long layer)
{
    char text[96];
    /* The syntaxes of the table take the layer's number. */
    const char *at = strstr(syntax, "%d");
    snprintf(text, sizeof text, "%.*s%ld%s", (int)(at - syntax), syntax, layer, at + 2);
    json_array_append_new(list, json_string(text));
}

/* Weights [from, to) are those of one layer. */
static void list_layer(const struct quantize_plan *p, json_t *list, size_t from, size_t to)
{
    size_t quantized = 0, experts = 0, attention_left = 0;
    long layer = layer_of(p->weights[from].module);
    for (size_t i = from; i < to; i++) {
        const struct quantize_weight *w = &p->weights[i];
        bool done = w->to != FORMAT_BF16;
        quantized += done;
        experts += done && is_expert(w->module);
        attention_left += w->linear && !done && fused(w->module, p->weights[from + LAYER_Q].module);
    }
    if (quantized == 0) {
        add_layer(list, p->spell->layer_syntax, layer);
        return;
    }
    bool experts_listed = false;
    for (size_t i = from; i < to; i++) {
        const struct quantize_weight *w = &p->weights[i];
        if (w->to != FORMAT_BF16 || !(w->linear || is_router(w->module))) continue;
        if (!is_expert(w->module) || experts)
            json_array_append_new(list, json_string(w->module));
        else if (!experts_listed)
            add_layer(list, p->spell->experts_syntax, layer);
        experts_listed = experts_listed || is_expert(w->module);
    }
    if (attention_left == 3 && p->spell->qkv_alias)
        add_layer(list, "model.layers.%d.self_attn.qkv_proj", layer);
}

json_t *quantize_plan_excluded(const struct quantize_plan *p)
{
    json_t *list = json_array();
    for (size_t i = 0; i < p->n_weights; i++)
        if (is_head(p->weights[i].module) && p->weights[i].to == FORMAT_BF16)
            json_array_append_new(list, json_string("lm_head"));
    for (size_t i = 0; i < p->n_weights;) {
        long layer = layer_of(p->weights[i].module);
        size_t end = i + 1;
        while (end < p->n_weights && layer_of(p->weights[end].module) == layer)
            end++;
        if (layer >= 0) list_layer(p, list, i, end);
        i = end;
    }
    return list;
}
