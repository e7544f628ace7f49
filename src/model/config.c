#include "model/config.h"

#include "base/file.h"
#include <jansson.h>
#include <math.h>
#include <stddef.h>
#include <string.h>

#define CONFIG_MAX_BYTES       ((size_t)16 << 20)
#define COUNT(a)               (sizeof(a) / sizeof(a)[0])
#define AT(c, off, type)       ((type *)(void *)((char *)(c) + (off)))
#define AT_CONST(c, off, type) ((const type *)(const void *)((const char *)(c) + (off)))

/* Integers that must be there. `forward`: a change of it changes the forward. */
static const struct int_field {
    const char *name;
    size_t off;
    int32_t min, max;
    bool even, forward;
} ints[] = {
#define I(name, field, min, max, even, fwd)                       \
    {                                                             \
        name, offsetof(struct config, field), min, max, even, fwd \
    }
    I("vocab_size", vocab_size, 1, 1 << 24, false, true),
    I("hidden_size", hidden_size, 2, 1 << 16, true, true),
    I("moe_intermediate_size", moe_intermediate_size, 2, 1 << 20, true, true),
    I("num_hidden_layers", n_layers, 1, CONFIG_MAX_LAYERS, false, true),
    I("num_attention_heads", n_heads, 1, 1024, false, true),
    I("num_key_value_heads", n_kv_heads, 1, 1024, false, true),
    I("head_dim", head_dim, 2, 256, true, true),
    I("num_experts", n_experts, 1, 1024, false, true),
    I("num_experts_per_tok", top_k, 1, 1024, false, true),
    I("max_position_embeddings", max_positions, 1, 1 << 28, false, false),
#undef I
};

static err_t read_int(int32_t *out, const json_t *root, const char *name, int32_t min, int32_t max,
                      bool even, struct err *e)
{
    const json_t *v = json_object_get(root, name);
    if (v == NULL) return err_set(e, ERR_INPUT, "%s: missing", name);
    if (!json_is_integer(v)) return err_set(e, ERR_INPUT, "%s: must be an integer", name);
    json_int_t i = json_integer_value(v);
    if (i < min || i > max || (even && i % 2))
        return err_set(e, ERR_INPUT, "%s: %lld: must be %s from %d to %d", name, (long long)i,
                       even ? "an even number" : "a number", min, max);
    *out = (int32_t)i;
    return OK;
}

static err_t read_positive(float *out, const json_t *v, const char *name, struct err *e)
{
    if (v == NULL) return err_set(e, ERR_INPUT, "%s: missing", name);
    if (!json_is_number(v)) return err_set(e, ERR_INPUT, "%s: must be a number", name);
    double d = json_number_value(v);
    if (!(d > 1e-30 && d < 1e30))
        return err_set(e, ERR_INPUT, "%s: %g: must be positive and finite", name, d);
    *out = (float)d;
    return OK;
}

/* Absent or null: `absent`. */
static err_t read_bool(bool *out, const json_t *root, const char *name, bool absent, struct err *e)
{
    const json_t *v = json_object_get(root, name);
    if (v != NULL && !json_is_null(v) && !json_is_boolean(v))
        return err_set(e, ERR_INPUT, "%s: must be true or false", name);
    *out = json_is_boolean(v) ? json_is_true(v) : absent;
    return OK;
}

/* A flag that must be off. */
static err_t refuse_true(const json_t *root, const char *name, struct err *e)
{
    bool on = false;
    err_t rc = read_bool(&on, root, name, false, e);
    if (rc == OK && on) return err_set(e, ERR_UNSUPPORTED, "%s: true is not implemented", name);
    return rc;
}

/* A string that, if present, must be one of `allowed` (NULL-terminated). */
static err_t expect_string(const json_t *root, const char *name, const char *const *allowed,
                           struct err *e)
{
    const json_t *v = json_object_get(root, name);
    if (v == NULL || json_is_null(v)) return OK;
    const char *s = json_string_value(v);
    if (s == NULL) return err_set(e, ERR_INPUT, "%s: must be a string", name);
    for (; *allowed; allowed++)
        if (strcmp(s, *allowed) == 0) return OK;
    return err_set(e, ERR_UNSUPPORTED, "%s: \"%.60s\" is not implemented", name, s);
}

static err_t parse_identity(struct config *c, const json_t *root, struct err *e)
{
    const char *type = json_string_value(json_object_get(root, "model_type"));
    if (type == NULL) return err_set(e, ERR_INPUT, "model_type: must be a string");
    if (strcmp(type, "qwen3_moe") != 0)
        return err_set(e, ERR_UNSUPPORTED,
                       "model_type: \"%.60s\" is not implemented (qwen3_moe is)", type);
    memcpy(c->model_type, type, strlen(type) + 1);
    const json_t *list = json_object_get(root, "architectures");
    const char *arch = json_string_value(json_array_get(list, 0));
    if (list == NULL || json_is_null(list)) arch = "Qwen3MoeForCausalLM";
    if (arch == NULL || json_array_size(list) > 1)
        return err_set(e, ERR_INPUT, "architectures: must be a list of one string");
    if (strcmp(arch, "Qwen3MoeForCausalLM") != 0)
        return err_set(e, ERR_UNSUPPORTED, "architectures: \"%.60s\" is not implemented", arch);
    memcpy(c->architecture, arch, strlen(arch) + 1);
    return OK;
}

/* rope_scaling or rope_parameters: only the default type; the rest would change the forward. */
static err_t check_rope(const json_t *rope, const char *name, struct err *e)
{
    if (rope == NULL || json_is_null(rope)) return OK;
    if (!json_is_object(rope)) return err_set(e, ERR_INPUT, "%s: must be an object or null", name);
    const char *key = json_object_get(rope, "rope_type") ? "rope_type" : "type";
    const json_t *v = json_object_get(rope, key);
    const char *type = json_string_value(v);
    if (type == NULL) return err_set(e, ERR_INPUT, "%s.rope_type: must be a string", name);
    if (strcmp(type, "default") != 0)
        return err_set(e, ERR_UNSUPPORTED, "%s.%s: \"%.60s\" is not implemented", name, key, type);
    const json_t *part = json_object_get(rope, "partial_rotary_factor");
    if (part && !(json_is_number(part) && json_number_value(part) == 1.0))
        return err_set(e, ERR_UNSUPPORTED, "%s.partial_rotary_factor: only 1 is implemented", name);
    return OK;
}

static err_t parse_rope(struct config *c, const json_t *root, struct err *e)
{
    const json_t *params = json_object_get(root, "rope_parameters");
    const json_t *top = json_object_get(root, "rope_theta"), *in = NULL;
    err_t rc = check_rope(json_object_get(root, "rope_scaling"), "rope_scaling", e);
    if (rc == OK) rc = check_rope(params, "rope_parameters", e);
    if (rc != OK) return rc;
    in = json_object_get(params, "rope_theta");
    float inner = 0;
    if (in) rc = read_positive(&inner, in, "rope_parameters.rope_theta", e);
    if (rc != OK) return rc;
    if (top == NULL && in) {
        c->rope_theta = inner;
    } else {
        rc = read_positive(&c->rope_theta, top, "rope_theta", e);
        if (rc == OK && in && c->rope_theta != inner)
            return err_set(e, ERR_INPUT, "rope_theta: %g, but rope_parameters.rope_theta: %g",
                           (double)c->rope_theta, (double)inner);
    }
    if (rc != OK) return rc;
    const json_t *part = json_object_get(root, "partial_rotary_factor");
    if (part && !json_is_null(part) && !(json_is_number(part) && json_number_value(part) == 1.0))
        return err_set(e, ERR_UNSUPPORTED, "partial_rotary_factor: only 1 is implemented");
    return OK;
}

/* Which layers are dense: mlp_only_layers, and all but every decoder_sparse_step-th. */
static err_t parse_dense(struct config *c, const json_t *root, struct err *e)
{
    int32_t step = 1;
    err_t rc = OK;
    bool any = false;
    if (json_object_get(root, "decoder_sparse_step"))
        rc = read_int(&step, root, "decoder_sparse_step", 1, 1 << 20, false, e);
    if (rc != OK) return rc;
    for (int i = 0; i < c->n_layers; i++)
        c->dense[i] = (i + 1) % step != 0;
    const json_t *list = json_object_get(root, "mlp_only_layers");
    if (list && !json_is_null(list) && !json_is_array(list))
        return err_set(e, ERR_INPUT, "mlp_only_layers: must be a list");
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *v = json_array_get(list, i);
        json_int_t layer = json_integer_value(v);
        if (!json_is_integer(v) || layer < 0 || layer >= c->n_layers)
            return err_set(e, ERR_INPUT, "mlp_only_layers[%zu]: must be a layer from 0 to %d", i,
                           c->n_layers - 1);
        c->dense[layer] = true;
    }
    for (int i = 0; i < c->n_layers; i++)
        any = any || c->dense[i];
    if (!any && json_object_get(root, "intermediate_size") == NULL) return OK;
    return read_int(&c->intermediate_size, root, "intermediate_size", 2, 1 << 20, true, e);
}

static err_t check_layer_types(const json_t *root, struct err *e)
{
    const json_t *list = json_object_get(root, "layer_types");
    for (size_t i = 0; i < json_array_size(list); i++) {
        const char *s = json_string_value(json_array_get(list, i));
        if (s == NULL || strcmp(s, "full_attention") != 0)
            return err_set(e, ERR_UNSUPPORTED, "layer_types[%zu]: \"%.60s\" is not implemented", i,
                           s ? s : "(not a string)");
    }
    return OK;
}

static err_t add_eos_id(struct config *c, const json_t *v, struct err *e)
{
    json_int_t id = json_integer_value(v);
    if (!json_is_integer(v) || id < 0 || id >= c->vocab_size)
        return err_set(e, ERR_INPUT, "eos_token_id: must be ids from 0 to %d", c->vocab_size - 1);
    for (int i = 0; i < c->n_eos; i++)
        if (c->eos[i] == id) return OK;
    if (c->n_eos == CONFIG_MAX_EOS)
        return err_set(e, ERR_INPUT, "eos_token_id: more than %d ids", CONFIG_MAX_EOS);
    c->eos[c->n_eos++] = (int32_t)id;
    return OK;
}

static err_t add_eos(struct config *c, const json_t *root, struct err *e)
{
    const json_t *v = json_object_get(root, "eos_token_id");
    if (v == NULL || json_is_null(v)) return OK;
    if (!json_is_array(v)) return add_eos_id(c, v, e);
    err_t rc = OK;
    for (size_t i = 0; i < json_array_size(v) && rc == OK; i++)
        rc = add_eos_id(c, json_array_get(v, i), e);
    return rc;
}

static err_t parse_sizes(struct config *c, const json_t *root, struct err *e)
{
    for (size_t i = 0; i < COUNT(ints); i++) {
        const struct int_field *f = &ints[i];
        err_t rc = read_int(AT(c, f->off, int32_t), root, f->name, f->min, f->max, f->even, e);
        if (rc != OK) return rc;
    }
    if (c->n_heads % c->n_kv_heads)
        return err_set(e, ERR_INPUT,
                       "num_key_value_heads: %d does not divide num_attention_heads %d",
                       c->n_kv_heads, c->n_heads);
    if (c->top_k > c->n_experts)
        return err_set(e, ERR_INPUT, "num_experts_per_tok: %d is more than num_experts %d",
                       c->top_k, c->n_experts);
    return OK;
}

static err_t parse_forward(struct config *c, const json_t *root, struct err *e)
{
    static const char *const acts[] = {"silu", NULL};
    static const char *const dtypes[] = {"bfloat16", "float16", "float32", NULL};
    err_t rc = parse_identity(c, root, e);
    if (rc == OK) rc = parse_sizes(c, root, e);
    if (rc == OK)
        rc = read_positive(&c->rms_norm_eps, json_object_get(root, "rms_norm_eps"), "rms_norm_eps",
                           e);
    if (rc == OK) rc = parse_rope(c, root, e);
    if (rc == OK && json_object_get(root, "norm_topk_prob") == NULL)
        rc = err_set(e, ERR_INPUT, "norm_topk_prob: missing");
    if (rc == OK) rc = read_bool(&c->norm_topk_prob, root, "norm_topk_prob", false, e);
    if (rc == OK) rc = read_bool(&c->tie_word_embeddings, root, "tie_word_embeddings", false, e);
    if (rc == OK) rc = refuse_true(root, "use_sliding_window", e);
    if (rc == OK) rc = refuse_true(root, "attention_bias", e);
    if (rc == OK) rc = expect_string(root, "hidden_act", acts, e);
    if (rc == OK) rc = expect_string(root, "torch_dtype", dtypes, e);
    if (rc == OK) rc = expect_string(root, "dtype", dtypes, e);
    if (rc == OK) rc = check_layer_types(root, e);
    if (rc == OK) rc = parse_dense(c, root, e);
    return rc;
}

static err_t parse_text(json_t **root, const char *json, size_t n, struct err *e)
{
    json_error_t je;
    *root = json_loadb(json, n, JSON_REJECT_DUPLICATES, &je);
    if (*root == NULL) return err_set(e, ERR_INPUT, "line %d: %s", je.line, je.text);
    if (json_is_object(*root)) return OK;
    json_decref(*root);
    *root = NULL;
    return err_set(e, ERR_INPUT, "must be a JSON object");
}

err_t config_parse(struct config *c, const char *json, size_t n, struct err *e)
{
    struct config t = {
        .gen_temperature = NAN,
        .gen_top_p = NAN,
        .gen_min_p = NAN,
        .gen_repetition_penalty = NAN,
        .gen_top_k = -1,
        .gen_do_sample = true,
    };
    json_t *root = NULL;
    err_t rc = parse_text(&root, json, n, e);
    if (rc == OK) rc = parse_forward(&t, root, e);
    if (rc == OK) rc = add_eos(&t, root, e);
    json_decref(root);
    if (rc == OK) *c = t;
    return rc;
}

static err_t read_gen(float *out, const json_t *root, const char *name, double min, double max,
                      struct err *e)
{
    const json_t *v = json_object_get(root, name);
    if (v == NULL || json_is_null(v)) return OK;
    double d = json_number_value(v);
    if (!json_is_number(v) || !(d >= min && d <= max))
        return err_set(e, ERR_INPUT, "%s: must be a number from %g to %g", name, min, max);
    *out = (float)d;
    return OK;
}

static err_t parse_generation(struct config *c, const json_t *root, struct err *e)
{
    err_t rc = add_eos(c, root, e);
    if (rc == OK) rc = read_gen(&c->gen_temperature, root, "temperature", 0, 1e6, e);
    if (rc == OK) rc = read_gen(&c->gen_top_p, root, "top_p", 0, 1, e);
    if (rc == OK) rc = read_gen(&c->gen_min_p, root, "min_p", 0, 1, e);
    if (rc == OK)
        rc = read_gen(&c->gen_repetition_penalty, root, "repetition_penalty", 1e-6, 1e6, e);
    const json_t *k = json_object_get(root, "top_k");
    if (rc == OK && k && !json_is_null(k))
        rc = read_int(&c->gen_top_k, root, "top_k", -1, 1 << 30, false, e);
    if (rc == OK) rc = read_bool(&c->gen_do_sample, root, "do_sample", true, e);
    return rc;
}

static err_t load_generation(struct config *c, const char *path, struct err *e)
{
    if (!file_exists(path)) return OK;
    struct buf text = {0};
    json_t *root = NULL;
    err_t rc = file_read(&text, path, CONFIG_MAX_BYTES, e);
    if (rc != OK) return rc;
    rc = parse_text(&root, text.data, text.len, e);
    if (rc == OK) rc = parse_generation(c, root, e);
    json_decref(root);
    buf_release(&text);
    return rc == OK ? OK : err_wrap(e, rc, "%s", path);
}

err_t config_load(struct config *c, const char *dir, struct err *e)
{
    struct buf path = {0}, text = {0};
    struct config t;
    if (!buf_printf(&path, "%s/config.json", dir))
        return err_set(e, ERR_NOMEM, "%s: no memory for the path", dir);
    err_t rc = file_read(&text, path.data, CONFIG_MAX_BYTES, e);
    if (rc == OK) {
        rc = config_parse(&t, text.data, text.len, e);
        if (rc != OK) rc = err_wrap(e, rc, "%s", path.data);
    }
    buf_release(&text);
    buf_clear(&path);
    if (rc == OK && !buf_printf(&path, "%s/generation_config.json", dir))
        rc = err_set(e, ERR_NOMEM, "%s: no memory for the path", dir);
    if (rc == OK) rc = load_generation(&t, path.data, e);
    buf_release(&path);
    if (rc == OK) *c = t;
    return rc;
}

static err_t differs(struct err *e, const char *name, double a, double b)
{
    return err_set(e, ERR_STATE, "%s: %.9g -> %.9g", name, a, b);
}

err_t config_same_forward(const struct config *resident, const struct config *next, struct err *e)
{
    static const struct {
        const char *name;
        size_t off;
    } floats[] = {{"rms_norm_eps", offsetof(struct config, rms_norm_eps)},
                  {"rope_theta", offsetof(struct config, rope_theta)}},
      bools[] = {{"norm_topk_prob", offsetof(struct config, norm_topk_prob)},
                 {"tie_word_embeddings", offsetof(struct config, tie_word_embeddings)}};
    const struct config *a = resident, *b = next;
    if (strcmp(a->model_type, b->model_type) != 0)
        return err_set(e, ERR_STATE, "model_type: %s -> %s", a->model_type, b->model_type);
    for (size_t i = 0; i < COUNT(ints); i++) {
        int32_t x = *AT_CONST(a, ints[i].off, int32_t), y = *AT_CONST(b, ints[i].off, int32_t);
        if (ints[i].forward && x != y) return differs(e, ints[i].name, x, y);
    }
    for (size_t i = 0; i < COUNT(floats); i++) {
        float x = *AT_CONST(a, floats[i].off, float), y = *AT_CONST(b, floats[i].off, float);
        if (x != y) return differs(e, floats[i].name, (double)x, (double)y);
    }
    for (size_t i = 0; i < COUNT(bools); i++) {
        bool x = *AT_CONST(a, bools[i].off, bool), y = *AT_CONST(b, bools[i].off, bool);
        if (x != y) return differs(e, bools[i].name, x, y);
    }
    for (int i = 0; i < a->n_layers; i++) {
        if (a->dense[i] != b->dense[i])
            return err_set(e, ERR_STATE, "layer %d: %s -> %s", i, a->dense[i] ? "dense" : "sparse",
                           b->dense[i] ? "dense" : "sparse");
        if (a->dense[i] && a->intermediate_size != b->intermediate_size)
            return differs(e, "intermediate_size", a->intermediate_size, b->intermediate_size);
    }
    return OK;
}

void config_no_defaults(struct config *c)
{
    c->gen_temperature = c->gen_top_p = c->gen_min_p = c->gen_repetition_penalty = NAN;
    c->gen_top_k = -1;
}
