#include "cli/inspect_model.h"

#include "base/buf.h"
#include "base/file.h"
#include "base/mem.h"
#include "model/model.h"
#include "model/tensors.h"
#include "weight/quant_config.h"
#include "weight/spelling.h"
#include <jansson.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CONFIG_MAX_BYTES ((size_t)16 << 20)
#define COUNT(a)         (sizeof(a) / sizeof(a)[0])
#define NAME_BYTES       160

const char *const module_class_names[MODULE_CLASSES] = {
    [MODULE_EMBEDDING] = "embedding", [MODULE_ATTENTION] = "attention", [MODULE_MLP] = "mlp",
    [MODULE_EXPERTS] = "experts",     [MODULE_ROUTER] = "router",       [MODULE_NORM] = "norms",
    [MODULE_HEAD] = "head",
};

/* What a name contains; the first row that fits. */
static const struct {
    const char *part;
    module_class_t class;
} classes[] = {
    {"norm.", MODULE_NORM},        {".mlp.experts.", MODULE_EXPERTS},
    {".mlp.gate.", MODULE_ROUTER}, {".self_attn.", MODULE_ATTENTION},
    {".mlp.", MODULE_MLP},         {"embed_tokens.", MODULE_EMBEDDING},
    {"lm_head.", MODULE_HEAD},
};

module_class_t module_class(const char *name)
{
    for (size_t i = 0; i < COUNT(classes); i++)
        if (strstr(name, classes[i].part)) return classes[i].class;
    return MODULE_MLP;
}

static void odd(struct inspected *m, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
static void odd(struct inspected *m, const char *fmt, ...)
{
    char text[512];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    if (m->n_odd < INSPECT_ODD) m->odd[m->n_odd] = mem_dup(text);
    m->n_odd++;
}

/* ---- one weight ---- */

/* A weight as found: formats of neighbours are compared afterwards. */
struct seen {
    char module[NAME_BYTES];
    bool found;
    format_t format;
};

struct look {
    struct inspected *m;
    struct checkpoint checkpoint;
    struct spelling spelling;
    struct quant_config *quant;
    struct slot_spec *specs;
    size_t n;
    struct seen *seen; /* [n] */
};

static struct inspected_row *row_of(struct inspected *m, module_class_t class,
                                    const struct spelled *w)
{
    for (size_t i = 0; i < m->n_rows; i++) {
        struct inspected_row *r = &m->rows[i];
        if (r->class == class && r->format == w->format &&
            strcmp(r->arrangement, w->arrangement) == 0)
            return r;
    }
    if (m->n_rows == INSPECT_ROWS) return NULL;
    struct inspected_row *r = &m->rows[m->n_rows++];
    *r = (struct inspected_row){.class = class, .format = w->format, .arrangement = w->arrangement};
    return r;
}

static void count_weight(struct inspected *m, const char *name, const struct spelled *w)
{
    static const char head[] = "model.layers.";
    struct inspected_row *r = row_of(m, module_class(name), w);
    if (r == NULL) return;
    r->weights++;
    r->inputs += w->part[PART_INPUT].tensor != NULL;
    for (int p = 0; p < PART_COUNT; p++)
        if (w->part[p].tensor) r->bytes += source_bytes(&w->part[p]);
    if (strncmp(name, head, sizeof head - 1) == 0) {
        long layer = strtol(name + sizeof head - 1, NULL, 10);
        if (layer < CONFIG_MAX_LAYERS) r->layers[layer] = true;
    }
}

static void look_at(struct look *l, size_t i)
{
    const struct slot_spec *s = &l->specs[i];
    struct seen *seen = &l->seen[i];
    struct spelled w;
    struct err e = {0};
    size_t len = strlen(s->name) - (sizeof ".weight" - 1);
    snprintf(seen->module, sizeof seen->module, "%.*s", (int)len, s->name);
    if (spelling_find(&l->spelling, &w, s->name, s->n_dims, s->shape.rows, s->shape.cols, &e) !=
        OK) {
        odd(l->m, "%s", e.msg);
        return;
    }
    seen->found = true;
    seen->format = w.format;
    count_weight(l->m, s->name, &w);
    if (l->quant && quant_config_check(l->quant, seen->module, NULL, w.format, &e) != OK)
        odd(l->m, "%s", e.msg);
}

/* Would a reader that believes the config take this BF16 weight for a quantized one? */
static bool expected_quantized(const struct look *l, const struct seen *s)
{
    for (int f = 0; f < FORMAT_COUNT; f++)
        if (f != FORMAT_BF16 &&
            quant_config_check(l->quant, s->module, NULL, (format_t)f, NULL) == OK)
            return true;
    return false;
}

/* ---- all of them ---- */

static void look_at_fused(struct look *l, size_t a, size_t b)
{
    const struct seen *x = &l->seen[a], *y = &l->seen[b];
    if (x->found && y->found && x->format != y->format)
        odd(l->m, "%s is %s and %s is %s: a runtime that fuses them cannot", x->module,
            formats[x->format].name, y->module, formats[y->format].name);
}

static void look_at_layers(struct look *l)
{
    const struct config *c = &l->m->config;
    for (int i = 0; i < c->n_layers; i++) {
        struct layer_slots s;
        tensors_layer(&s, c, i);
        look_at_fused(l, s.q, s.k);
        look_at_fused(l, s.k, s.v);
        if (c->dense[i]) look_at_fused(l, s.gate, s.up);
        for (int x = 0; x < c->n_experts && !c->dense[i]; x++)
            look_at_fused(l, slot_expert(&s, x, MLP_GATE), slot_expert(&s, x, MLP_UP));
        char module[64];
        struct source kv[2] = {{0}, {0}};
        struct err e = {0};
        snprintf(module, sizeof module, "model.layers.%d.self_attn", i);
        if (spelling_find_kv(&l->spelling, kv, module, &e) != OK)
            odd(l->m, "%s", e.msg);
        else
            l->m->n_kv += kv[0].tensor != NULL;
    }
    if (l->m->n_kv > 0 && l->m->n_kv < (size_t)c->n_layers)
        odd(l->m, "scales of K and V are there for %zu of %d layers", l->m->n_kv, c->n_layers);
}

static void look_at_inputs(struct look *l)
{
    size_t weights = 0, inputs = 0;
    for (size_t i = 0; i < l->m->n_rows; i++) {
        const struct inspected_row *r = &l->m->rows[i];
        if (r->format == FORMAT_BF16) continue;
        weights += r->weights;
        inputs += r->inputs;
    }
    if (inputs > 0 && inputs < weights)
        odd(l->m, "scales of activations are there for %zu of %zu quantized weights", inputs,
            weights);
    if (weights == 0 && l->quant)
        odd(l->m, "the config says %s, but no weight is quantized", l->m->quantization);
    if (weights > 0 && l->quant == NULL)
        odd(l->m, "%zu weights are quantized, but no config says so", weights);
}

static void look_at_plain(struct look *l)
{
    size_t n = 0, quantized = 0;
    const char *first = NULL;
    for (size_t i = 0; l->quant && i < l->n; i++) {
        const struct seen *s = &l->seen[i];
        module_class_t class = module_class(l->specs[i].name);
        quantized += s->found && s->format != FORMAT_BF16;
        if (!s->found || s->format != FORMAT_BF16 || l->specs[i].n_dims != 2) continue;
        if (class != MODULE_ATTENTION && class != MODULE_MLP && class != MODULE_EXPERTS) continue;
        if (!expected_quantized(l, s)) continue;
        if (first == NULL) first = s->module;
        n++;
    }
    if (n > 0 && quantized > 0)
        odd(l->m, "%zu weights are BF16 though the config does not exclude them, %s among them", n,
            first);
}

static void look_at_exclusions(struct look *l)
{
    const struct patterns *p = quant_config_excluded(l->quant);
    for (size_t i = 0; p && i < p->n; i++) {
        bool any = l->m->config.tie_word_embeddings && strcmp(patterns_text(p, i), "lm_head") == 0;
        for (size_t j = 0; j < l->n && !any; j++)
            any = patterns_match_one(p, i, l->seen[j].module, NULL);
        if (!any) odd(l->m, "exclusion \"%s\" means no module", patterns_text(p, i));
    }
}

/* Does a tensor belong to a weight that was refused, and so was named already? */
static bool of_refused(const struct look *l, const char *tensor)
{
    for (size_t i = 0; i < l->n; i++) {
        const struct seen *s = &l->seen[i];
        size_t n = strlen(s->module);
        if (n && !s->found && strncmp(tensor, s->module, n) == 0 && tensor[n] == '.') return true;
    }
    return false;
}

/* Tensors that nobody asked for. */
static void look_at_rest(struct look *l)
{
    size_t n = 0;
    const char *first = NULL;
    for (size_t i = 0; i < l->checkpoint.n_tensors; i++) {
        const char *name = l->checkpoint.entries[i].tensor->name;
        if (!spelling_is_rest(&l->spelling, i, l->m->config.tie_word_embeddings)) continue;
        if (l->spelling.used[i]) {
            odd(l->m, "tensor %s: holds more than the model's experts", name);
        } else if (!of_refused(l, name)) {
            if (first == NULL) first = name;
            n++;
        }
    }
    if (n == 1)
        odd(l->m, "tensor %s: unknown to the model", first);
    else if (n > 1)
        odd(l->m, "%zu tensors are unknown to the model, %s among them", n, first);
}

/* ---- the folder ---- */

static err_t read_config(struct inspected *m, struct err *e)
{
    struct buf path = {0}, text = {0};
    json_error_t je;
    if (!buf_printf(&path, "%s/config.json", m->dir))
        return err_set(e, ERR_NOMEM, "no memory for a path");
    err_t rc = file_read(&text, path.data, CONFIG_MAX_BYTES, e);
    json_t *root = rc == OK ? json_loadb(text.data, text.len, JSON_REJECT_DUPLICATES, &je) : NULL;
    if (rc == OK && !json_is_object(root))
        rc = err_set(e, ERR_INPUT, "%s: line %d: %s", path.data, je.line,
                     root ? "must be an object" : je.text);
    if (rc == OK) {
        json_object_del(root, "quantization_config"); /* quant_config.h reads it */
        char *plain = json_dumps(root, JSON_COMPACT);
        rc = plain ? config_parse(&m->config, plain, strlen(plain), e)
                   : err_set(e, ERR_NOMEM, "no memory for %s", path.data);
        free(plain);
    }
    json_decref(root);
    buf_release(&path);
    buf_release(&text);
    return rc;
}

static err_t look(struct look *l, struct err *e)
{
    struct inspected *m = l->m;
    struct err quant = {0};
    err_t rc = read_config(m, e);
    if (rc == OK) rc = checkpoint_open(&l->checkpoint, m->dir, e);
    if (rc == OK) rc = spelling_open(&l->spelling, &l->checkpoint, e);
    if (rc == OK) rc = model_specs(&m->config, &l->specs, &l->n, e);
    if (rc != OK) return rc;
    l->seen = mem_try_array(l->n, sizeof *l->seen);
    if (l->seen == NULL) return err_set(e, ERR_NOMEM, "no memory for %zu weights", l->n);
    bool readable = quant_config_load(&l->quant, m->dir, &quant) == OK;
    if (!readable) odd(m, "%s", quant.msg);
    snprintf(m->quantization, sizeof m->quantization, "%s",
             readable ? quant_config_about(l->quant) : "not readable");
    m->n_files = l->checkpoint.n_files;
    m->n_tensors = l->checkpoint.n_tensors;
    for (size_t i = 0; i < m->n_files; i++)
        m->bytes += l->checkpoint.files[i].file_bytes;
    for (size_t i = 0; i < l->n; i++)
        if (!l->specs[i].optional && !(i == SLOT_HEAD && m->config.tie_word_embeddings))
            look_at(l, i);
    look_at_layers(l);
    if (readable) look_at_inputs(l);
    look_at_plain(l);
    look_at_exclusions(l);
    look_at_rest(l);
    return OK;
}

err_t inspect_model(struct inspected *m, const char *model, struct err *e)
{
    *m = (struct inspected){0};
    struct look l = {.m = m};
    err_t rc = checkpoint_find(&m->dir, model, e);
    if (rc == OK) rc = look(&l, e);
    quant_config_free(l.quant);
    spelling_close(&l.spelling);
    checkpoint_close(&l.checkpoint);
    mem_free(l.specs);
    mem_free(l.seen);
    if (rc != OK) inspect_free(m);
    return rc;
}

void inspect_free(struct inspected *m)
{
    for (size_t i = 0; i < m->n_odd && i < INSPECT_ODD; i++)
        mem_free(m->odd[i]);
    mem_free(m->dir);
    *m = (struct inspected){0};
}
