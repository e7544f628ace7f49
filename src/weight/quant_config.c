#include "weight/quant_config.h"

#include "base/file.h"
#include "base/mem.h"
#include <jansson.h>
#include <stdio.h>
#include <string.h>

#define CONFIG_MAX_BYTES ((size_t)16 << 20)
#define MAX_GROUPS       64
#define COUNT(a)         (sizeof(a) / sizeof(a)[0])
#define BIT(f)           (1u << (f))
#define ANY_FP8          (BIT(FORMAT_FP8_BLOCK) | BIT(FORMAT_FP8_TENSOR) | BIT(FORMAT_FP8_CHANNEL))

/* Modules that have one of some formats. */
struct group {
    unsigned formats; /* bits of format_t */
    bool all;         /* every linear; else those that match */
    struct patterns targets;
};

struct quant_config {
    char about[96];
    struct patterns excluded;
    size_t n;
    struct group groups[MAX_GROUPS];
};

struct word {
    const char *name;
    unsigned formats; /* 0: known and not implemented */
};

/* quant_algo of ModelOpt. */
static const struct word algos[] = {
    {"FP8", BIT(FORMAT_FP8_TENSOR)},       {"FP8_PER_CHANNEL_PER_TOKEN", BIT(FORMAT_FP8_CHANNEL)},
    {"FP8_PB_WO", BIT(FORMAT_FP8_BLOCK)},  {"MXFP8", BIT(FORMAT_MXFP8)},
    {"NVFP4", BIT(FORMAT_NVFP4)},          {"W4A16_NVFP4", BIT(FORMAT_NVFP4)},
    {"W4A8_NVFP4_FP8", BIT(FORMAT_NVFP4)}, {"MXFP4", BIT(FORMAT_MXFP4)},
    {"W4A8_MXFP4_FP8", BIT(FORMAT_MXFP4)},
};

/* format of compressed-tensors. */
static const struct word pack_formats[] = {
    {"float-quantized", ANY_FP8},
    {"naive-quantized", ANY_FP8},
    {"nvfp4-pack-quantized", BIT(FORMAT_NVFP4)},
    {"mxfp4-pack-quantized", BIT(FORMAT_MXFP4)},
    {"mxfp8-quantized", BIT(FORMAT_MXFP8)},
    {"dense", 0},
};

/* weights.strategy of compressed-tensors narrows the FP8 formats. */
static const struct word strategies[] = {
    {"tensor", BIT(FORMAT_FP8_TENSOR)},
    {"channel", BIT(FORMAT_FP8_CHANNEL)},
    {"block", BIT(FORMAT_FP8_BLOCK)},
};

static const char *text_of(const json_t *o, const char *key)
{
    return json_string_value(json_object_get(o, key));
}

static const struct word *find(const struct word *w, size_t n, const char *name)
{
    for (size_t i = 0; name && i < n; i++)
        if (strcmp(w[i].name, name) == 0) return &w[i];
    return NULL;
}

static err_t unknown(struct err *e, const char *key, const char *value, const struct word *w,
                     size_t n)
{
    struct buf b = {0};
    for (size_t i = 0; i < n; i++)
        if (w[i].formats) buf_printf(&b, "%s%s", b.len ? ", " : "", w[i].name);
    err_t rc = err_set(e, ERR_UNSUPPORTED, "%s: \"%.60s\" is not implemented (%s are)", key,
                       value ? value : "", b.data ? b.data : "");
    buf_release(&b);
    return rc;
}

/* A list of names, if it is there. */
static err_t add_names(struct patterns *p, const json_t *q, const char *key, syntax_t syntax,
                       struct err *e)
{
    const json_t *list = json_object_get(q, key);
    if (list == NULL || json_is_null(list)) return OK;
    if (!json_is_array(list)) return err_set(e, ERR_INPUT, "%s: must be a list", key);
    for (size_t i = 0; i < json_array_size(list); i++) {
        const char *s = json_string_value(json_array_get(list, i));
        if (s == NULL) return err_set(e, ERR_INPUT, "%s[%zu]: must be a string", key, i);
        err_t rc = patterns_add(p, syntax, s, e);
        if (rc != OK) return err_wrap(e, rc, "%s[%zu]", key, i);
    }
    return OK;
}

static err_t add_group(struct quant_config *c, struct group **out, unsigned bits, struct err *e)
{
    if (c->n == MAX_GROUPS) return err_set(e, ERR_TOOBIG, "more than %d groups", MAX_GROUPS);
    *out = &c->groups[c->n++];
    (*out)->formats = bits;
    return OK;
}

static err_t add_all(struct quant_config *c, unsigned bits, struct err *e)
{
    struct group *g = NULL;
    err_t rc = add_group(c, &g, bits, e);
    if (rc == OK) g->all = true;
    return rc;
}

/* ---- one method each ---- */

/* weight_block_size of fp8: [128, 128], or [1, 32] for MXFP8 under that name. */
static err_t block_formats(unsigned *out, const json_t *q, struct err *e)
{
    const json_t *b = json_object_get(q, "weight_block_size");
    if (b == NULL || json_is_null(b)) {
        *out = BIT(FORMAT_FP8_TENSOR) | BIT(FORMAT_FP8_CHANNEL);
        return OK;
    }
    json_int_t r = json_integer_value(json_array_get(b, 0));
    json_int_t k = json_integer_value(json_array_get(b, 1));
    for (int f = 0; f < FORMAT_COUNT && json_array_size(b) == 2; f++) {
        if (formats[f].elem != ELEM_E4M3 || formats[f].group_rows == 0) continue;
        if (r != formats[f].group_rows || k != formats[f].group_cols || k == 0) continue;
        /* a grid of one block may be written as one scale */
        *out = BIT(f) | (r > 1 ? BIT(FORMAT_FP8_TENSOR) : 0u);
        return OK;
    }
    return err_set(
        e, ERR_UNSUPPORTED,
        "weight_block_size: [%lld, %lld] is not implemented ([128, 128] and [1, 32] are)",
        (long long)r, (long long)k);
}

static err_t parse_excluding(struct quant_config *c, const json_t *q, unsigned bits, struct err *e)
{
    err_t rc = add_all(c, bits, e);
    if (rc == OK) rc = add_names(&c->excluded, q, "modules_to_not_convert", SYNTAX_PREFIX, e);
    if (rc == OK) rc = add_names(&c->excluded, q, "ignored_layers", SYNTAX_PREFIX, e);
    return rc;
}

static err_t parse_fp8(struct quant_config *c, const json_t *q, struct err *e)
{
    unsigned bits = 0;
    err_t rc = block_formats(&bits, q, e);
    return rc == OK ? parse_excluding(c, q, bits, e) : rc;
}

static err_t parse_mxfp8(struct quant_config *c, const json_t *q, struct err *e)
{
    return parse_excluding(c, q, BIT(FORMAT_MXFP8), e);
}

static err_t parse_mxfp4(struct quant_config *c, const json_t *q, struct err *e)
{
    return parse_excluding(c, q, BIT(FORMAT_MXFP4), e);
}

static err_t parse_fbgemm(struct quant_config *c, const json_t *q, struct err *e)
{
    return parse_excluding(c, q, BIT(FORMAT_FP8_CHANNEL), e);
}

static err_t parse_layers(struct quant_config *c, const json_t *layers, struct err *e)
{
    const char *module;
    json_t *v;
    struct group *of[COUNT(algos)] = {NULL};
    if (!json_is_object(layers))
        return err_set(e, ERR_INPUT, "quantized_layers: must be an object");
    json_object_foreach((json_t *)layers, module, v)
    {
        const struct word *w = find(algos, COUNT(algos), text_of(v, "quant_algo"));
        if (w == NULL)
            return unknown(e, "quant_algo", text_of(v, "quant_algo"), algos, COUNT(algos));
        struct group **g = &of[w - algos];
        err_t rc = *g ? OK : add_group(c, g, w->formats, e);
        if (rc == OK) rc = patterns_add(&(*g)->targets, SYNTAX_WILDCARD, module, e);
        if (rc != OK) return err_wrap(e, rc, "quantized_layers");
    }
    return OK;
}

static err_t parse_modelopt(struct quant_config *c, const json_t *root, struct err *e)
{
    const json_t *inner = json_object_get(root, "quantization");
    const json_t *q = text_of(root, "quant_algo") || !json_is_object(inner) ? root : inner;
    const char *algo = text_of(q, "quant_algo");
    const struct word *w = find(algos, COUNT(algos), algo);
    err_t rc;
    if (algo && strcmp(algo, "MIXED_PRECISION") == 0)
        rc = parse_layers(c, json_object_get(q, "quantized_layers"), e);
    else
        rc = w ? add_all(c, w->formats, e) : unknown(e, "quant_algo", algo, algos, COUNT(algos));
    if (rc == OK) rc = add_names(&c->excluded, q, "ignore", SYNTAX_WILDCARD, e);
    if (rc == OK) rc = add_names(&c->excluded, q, "exclude_modules", SYNTAX_WILDCARD, e);
    if (rc == OK) snprintf(c->about, sizeof c->about, "modelopt %.40s", algo ? algo : "");
    return rc;
}

/* Formats of a group: its format, or the file's, narrowed by its strategy. */
static err_t group_formats(unsigned *out, const json_t *group, const char *file, struct err *e)
{
    const json_t *weights = json_object_get(group, "weights");
    const char *format = text_of(group, "format");
    const struct word *w = find(pack_formats, COUNT(pack_formats), format ? format : file);
    if (w == NULL || w->formats == 0)
        return unknown(e, "format", format ? format : file, pack_formats, COUNT(pack_formats));
    const struct word *s = find(strategies, COUNT(strategies), text_of(weights, "strategy"));
    *out = s && (w->formats & s->formats) ? s->formats : w->formats;
    const json_t *block = json_object_get(weights, "block_structure");
    json_int_t r = json_integer_value(json_array_get(block, 0));
    json_int_t k = json_integer_value(json_array_get(block, 1));
    if (*out == BIT(FORMAT_FP8_BLOCK) && json_is_array(block) && (r != 128 || k != 128))
        return err_set(e, ERR_UNSUPPORTED,
                       "block_structure: [%lld, %lld] is not implemented ([128, 128] is)",
                       (long long)r, (long long)k);
    return OK;
}

/* A class of modules, not one of them: "Linear". */
static bool is_class(const char *target)
{
    return target[0] >= 'A' && target[0] <= 'Z';
}

static err_t parse_group(struct quant_config *c, const json_t *group, const char *file,
                         struct err *e)
{
    unsigned bits = 0;
    struct group *g = NULL;
    err_t rc = group_formats(&bits, group, file, e);
    if (rc == OK) rc = add_group(c, &g, bits, e);
    if (rc == OK) rc = add_names(&g->targets, group, "targets", SYNTAX_EXACT, e);
    if (rc != OK) return rc;
    const json_t *list = json_object_get(group, "targets");
    for (size_t i = 0; i < json_array_size(list); i++)
        g->all = g->all || is_class(json_string_value(json_array_get(list, i)));
    return OK;
}

static err_t parse_compressed(struct quant_config *c, const json_t *q, struct err *e)
{
    const json_t *groups = json_object_get(q, "config_groups");
    const char *name, *file = text_of(q, "format");
    json_t *group;
    if (!json_is_object(groups)) return err_set(e, ERR_INPUT, "config_groups: must be an object");
    json_object_foreach((json_t *)groups, name, group)
    {
        err_t rc = parse_group(c, group, file, e);
        if (rc != OK) return err_wrap(e, rc, "config_groups.%.60s", name);
    }
    snprintf(c->about, sizeof c->about, "compressed-tensors %.40s", file ? file : "");
    return add_names(&c->excluded, q, "ignore", SYNTAX_EXACT, e);
}

typedef err_t parse_fn(struct quant_config *c, const json_t *q, struct err *e);
static const struct {
    const char *method;
    parse_fn *parse;
} methods[] = {
    {"fp8", parse_fp8},
    {"mxfp8", parse_mxfp8},
    {"mxfp4", parse_mxfp4},
    {"fbgemm_fp8", parse_fbgemm},
    {"modelopt", parse_modelopt},
    {"modelopt_fp8", parse_modelopt},
    {"modelopt_fp4", parse_modelopt},
    {"modelopt_mxfp8", parse_modelopt},
    {"modelopt_mixed", parse_modelopt},
    {"compressed-tensors", parse_compressed},
};

static err_t parse_method(struct quant_config *c, const json_t *q, struct err *e)
{
    const char *method = text_of(q, "quant_method");
    /* hf_quant_config.json names its producer instead. */
    if (method == NULL && (json_object_get(q, "quantization") || text_of(q, "quant_algo")))
        method = "modelopt";
    for (size_t i = 0; method && i < COUNT(methods); i++) {
        if (strcmp(method, methods[i].method) != 0) continue;
        snprintf(c->about, sizeof c->about, "%s", method);
        return methods[i].parse(c, q, e);
    }
    struct buf b = {0};
    for (size_t i = 0; i < COUNT(methods); i++)
        buf_printf(&b, "%s%s", i ? ", " : "", methods[i].method);
    err_t rc = err_set(e, ERR_UNSUPPORTED, "quant_method: \"%.60s\" is not implemented (%s are)",
                       method ? method : "", b.data ? b.data : "");
    buf_release(&b);
    return rc;
}

err_t quant_config_parse(struct quant_config **out, const char *json, size_t n, const char *name,
                         struct err *e)
{
    json_error_t je;
    json_t *root = json_loadb(json, n, JSON_REJECT_DUPLICATES, &je);
    if (root == NULL) return err_set(e, ERR_INPUT, "%s: line %d: %s", name, je.line, je.text);
    const json_t *q = json_object_get(root, "quantization_config");
    const char *in = "quantization_config";
    if (q == NULL && json_object_get(root, "quantization")) { /* hf_quant_config.json */
        q = root;
        in = "quantization";
    }
    err_t rc = OK;
    if (q && !json_is_null(q)) {
        struct quant_config *c = mem_try(sizeof *c);
        if (c == NULL)
            rc = err_set(e, ERR_NOMEM, "%s: no memory", name);
        else if (!json_is_object(q))
            rc = err_set(e, ERR_INPUT, "%s: %s: must be an object", name, in);
        else if ((rc = parse_method(c, q, e)) != OK)
            rc = err_wrap(e, rc, "%s: %s", name, in);
        if (rc == OK)
            *out = c;
        else
            quant_config_free(c);
    }
    json_decref(root);
    return rc;
}

err_t quant_config_load(struct quant_config **out, const char *dir, struct err *e)
{
    static const char *const files[] = {"config.json", "hf_quant_config.json"};
    struct quant_config *q = NULL;
    err_t rc = OK;
    for (size_t i = 0; rc == OK && q == NULL && i < COUNT(files); i++) {
        struct buf path = {0}, text = {0};
        if (!buf_printf(&path, "%s/%s", dir, files[i]))
            return err_set(e, ERR_NOMEM, "%s: no memory for the path", dir);
        if (file_exists(path.data)) {
            rc = file_read(&text, path.data, CONFIG_MAX_BYTES, e);
            if (rc == OK) rc = quant_config_parse(&q, text.data, text.len, path.data, e);
        }
        buf_release(&text);
        buf_release(&path);
    }
    if (rc == OK) *out = q;
    return rc;
}

void quant_config_free(struct quant_config *q)
{
    if (q == NULL) return;
    patterns_free(&q->excluded);
    for (size_t i = 0; i < q->n; i++)
        patterns_free(&q->groups[i].targets);
    mem_free(q);
}

static unsigned allowed(const struct quant_config *q, const char *module, const char *stored)
{
    unsigned bits = 0;
    for (size_t i = 0; i < q->n; i++) {
        const struct group *g = &q->groups[i];
        if (g->all || patterns_match(&g->targets, module, stored)) bits |= g->formats;
    }
    return bits;
}

err_t quant_config_check(const struct quant_config *q, const char *module, const char *stored,
                         format_t format, struct err *e)
{
    if (q == NULL || format == FORMAT_BF16) return OK;
    unsigned bits = allowed(q, module, stored);
    bool excluded = patterns_match(&q->excluded, module, stored);
    if (!excluded && (bits & BIT(format))) return OK;
    struct buf b = {0};
    for (int f = 0; f < FORMAT_COUNT && !excluded; f++)
        if (bits & BIT(f)) buf_printf(&b, "%s%s", b.len ? " or " : "", formats[f].name);
    err_t rc =
        err_set(e, ERR_INPUT, "module %s: stored as %s, but the quantization config (%s) %s%s",
                module, formats[format].name, q->about, excluded ? "excludes it" : "has ",
                excluded ? ""
                : b.len  ? b.data
                         : "bf16");
    buf_release(&b);
    return rc;
}

const struct patterns *quant_config_excluded(const struct quant_config *q)
{
    return q ? &q->excluded : NULL;
}

const char *quant_config_about(const struct quant_config *q)
{
    return q ? q->about : "none";
}
