/* spelling.c - by which names: modules, companions, prefixes.  Shapes are in spelling_shape.c. */
#include "weight/spelling.h"

#include "base/buf.h"
#include "base/mem.h"
#include "weight/spelling_shape.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NAME_BYTES 640
#define COUNT(a)   (sizeof(a) / sizeof(a)[0])

/* Instead of "model." in front, and in front of "lm_head.". */
static const struct {
    const char *model, *head;
} prefixes[] = {
    {"model.", ""},
    {"language_model.model.", "language_model."},
    {"model.language_model.", ""},
    {"", ""},
};

/* Modules with another name elsewhere. */
static const struct {
    const char *tail, *alias;
} aliases[] = {
    {".mlp.gate", ".block_sparse_moe.gate"}, /* Mixtral */
    {".mlp.gate", ".mlp.router"},            /* gpt-oss */
};

/* Where experts may lie, behind the layer's module. */
static const struct arrangement {
    const char *name, *at;
    bool fused;          /* all experts in one tensor; else "at" X "." proj */
    const char *proj[3]; /* of gate, up and down */
} arrangements[] = {
    {"", ".mlp.experts.", false, {"gate_proj", "up_proj", "down_proj"}},
    {"mixtral", ".block_sparse_moe.experts.", false, {"w1", "w3", "w2"}},
    {"fused", ".mlp.experts.", true, {"gate_up_proj", "gate_up_proj", "down_proj"}},
};

enum { GATE, UP, DOWN };

/* What stands behind a module's name. */
static const struct companion {
    const char *suffix;
    bool own, fused; /* where it is possible */
    part_t part;
    bool inverse;
} companions[] = {
    {".weight", true, true, PART_DATA, false},
    {".weight_packed", true, true, PART_DATA, false},
    {"", false, true, PART_DATA, false},
    {"_weight_packed", false, true, PART_DATA, false},
    {"_blocks", false, true, PART_DATA, false},
    {".weight_scale_inv", true, true, PART_SCALE, false},
    {".weight_scale", true, true, PART_SCALE, false},
    {"_weight_scale_inv", false, true, PART_SCALE, false},
    {"_weight_scale", false, true, PART_SCALE, false},
    {"_scale_inv", false, true, PART_SCALE, false},
    {"_scales", false, true, PART_SCALE, false},
    {".weight_scale_2", true, true, PART_TENSOR, false},
    {".weight_global_scale", true, true, PART_TENSOR, true},
    {"_weight_scale_2", false, true, PART_TENSOR, false},
    {"_weight_global_scale", false, true, PART_TENSOR, true},
    {".input_scale", true, true, PART_INPUT, false},
    {".activation_scale", true, true, PART_INPUT, false},
    {".input_global_scale", true, true, PART_INPUT, true},
    {"_input_scale", false, true, PART_INPUT, false},
    {"_input_global_scale", false, true, PART_INPUT, true},
};

/* Of K and V, behind the attention module. */
static const char *const kv_names[][2] = {
    {"k_proj.k_scale", "v_proj.v_scale"},           /* ModelOpt */
    {"qkv_proj.k_scale", "qkv_proj.v_scale"},       /* llm-compressor */
    {"attn.k_scale", "attn.v_scale"},               /* as vLLM and SGLang name them inside */
    {"k_scale", "v_scale"},                         /* compressed-tensors */
    {"k_proj.output_scale", "v_proj.output_scale"}, /* compressed-tensors, early */
    {"kv_scale", "kv_scale"},                       /* one for both */
};

static bool begins(const char *name, const char *prefix, const char *rest)
{
    size_t n = strlen(prefix);
    return strncmp(name, prefix, n) == 0 && strncmp(name + n, rest, strlen(rest)) == 0;
}

/* What a tensor says of the prefixes, if it does: "model.layers.", "language_model.lm_head.". */
static void prefix_of(struct spelling *s, const char *name)
{
    for (size_t i = 0; i < COUNT(prefixes); i++) {
        const char *model = prefixes[i].model, *head = prefixes[i].head;
        if (!begins(name, model, "layers.") && !begins(name, model, "norm.weight") &&
            (*head == 0 || !begins(name, head, "lm_head.")))
            continue;
        s->prefix = model;
        s->head_prefix = head;
        return;
    }
}

err_t spelling_open(struct spelling *s, const struct checkpoint *c, struct err *e)
{
    struct spelling t = {.checkpoint = c, .used = mem_try_array(c->n_tensors + 1, sizeof *t.used)};
    if (t.used == NULL) return err_set(e, ERR_NOMEM, "no memory for %zu tensors", c->n_tensors);
    for (size_t i = 0; i < COUNT(prefixes) && t.prefix == NULL; i++) {
        char name[64];
        snprintf(name, sizeof name, "%sembed_tokens.weight", prefixes[i].model);
        if (checkpoint_get(c, name) == NULL) continue;
        t.prefix = prefixes[i].model;
        t.head_prefix = prefixes[i].head;
    }
    for (size_t i = 0; i < c->n_tensors && t.prefix == NULL; i++)
        prefix_of(&t, c->entries[i].tensor->name);
    if (t.prefix == NULL) t.prefix = prefixes[0].model, t.head_prefix = prefixes[0].head;
    *s = t;
    return OK;
}

void spelling_close(struct spelling *s)
{
    mem_free(s->used);
    *s = (struct spelling){0};
}

/* ---- modules ---- */

/* A name of the checkpoint, from one of Hugging Face's; false: too long for any tensor. */
static bool prefixed(char out[NAME_BYTES], const struct spelling *s, const char *name, size_t len)
{
    const char *prefix = s->head_prefix;
    if (len >= 6 && strncmp(name, "model.", 6) == 0) {
        prefix = s->prefix;
        name += 6;
        len -= 6;
    }
    int n = snprintf(out, NAME_BYTES, "%s%.*s", prefix, (int)len, name);
    return n >= 0 && n < NAME_BYTES;
}

/* "L.mlp.experts.X.P_proj" */
struct expert {
    char layer[NAME_BYTES];
    unsigned index;
    int proj;
};

static bool parse_expert(struct expert *x, const char *module)
{
    const char *mid = arrangements[0].at, *at = strstr(module, mid);
    if (at == NULL) return false;
    const char *digits = at + strlen(mid);
    char *end;
    unsigned long index = strtoul(digits, &end, 10);
    if (*digits < '0' || *digits > '9' || index > 1u << 20 || *end != '.') return false;
    for (x->proj = GATE; x->proj <= DOWN; x->proj++) {
        if (strcmp(end + 1, arrangements[0].proj[x->proj]) != 0) continue;
        snprintf(x->layer, sizeof x->layer, "%.*s", (int)(at - module), module);
        x->index = (unsigned)index;
        return true;
    }
    return false;
}

static bool expert_module(char out[NAME_BYTES], const struct arrangement *a, const struct expert *x,
                          int proj)
{
    int n = a->fused
                ? snprintf(out, NAME_BYTES, "%s%s%s", x->layer, a->at, a->proj[proj])
                : snprintf(out, NAME_BYTES, "%s%s%u.%s", x->layer, a->at, x->index, a->proj[proj]);
    return n >= 0 && n < NAME_BYTES;
}

static const struct checkpoint_entry *get(const struct spelling *s, const char *module,
                                          const char *suffix)
{
    char name[NAME_BYTES];
    int n = snprintf(name, sizeof name, "%s%s", module, suffix);
    return n >= 0 && n < NAME_BYTES ? checkpoint_get(s->checkpoint, name) : NULL;
}

static bool possible(const struct companion *c, bool fused)
{
    return fused ? c->fused : c->own;
}

/* The data of a module, and which row of the table named it. */
static bool find_data(const struct spelling *s, struct found *f, const char *module, bool fused)
{
    for (size_t i = 0; i < COUNT(companions); i++) {
        const struct companion *c = &companions[i];
        if (c->part != PART_DATA || !possible(c, fused)) continue;
        f->part[PART_DATA] = get(s, module, c->suffix);
        if (f->part[PART_DATA] == NULL) continue;
        f->interleaved = strcmp(c->suffix, "_blocks") == 0;
        return true;
    }
    return false;
}

static err_t find_companions(const struct spelling *s, struct found *f, const char *module,
                             bool fused, struct err *e)
{
    for (size_t i = 0; i < COUNT(companions); i++) {
        const struct companion *c = &companions[i];
        if (c->part == PART_DATA || !possible(c, fused)) continue;
        const struct checkpoint_entry *t = get(s, module, c->suffix);
        if (t == NULL) continue;
        if (f->part[c->part])
            return err_set(e, ERR_INPUT, "tensor %s: is what %s is too", t->tensor->name,
                           f->part[c->part]->tensor->name);
        f->part[c->part] = t;
        f->inverse[c->part] = c->inverse;
    }
    return OK;
}

/* The first spelling under which there is data; `module` becomes its name in the checkpoint. */
static bool find_expert(const struct spelling *s, struct found *f, char module[NAME_BYTES],
                        const struct expert *x)
{
    for (size_t i = 0; i < COUNT(arrangements); i++) {
        const struct arrangement *a = &arrangements[i];
        if (!expert_module(module, a, x, x->proj) || !find_data(s, f, module, a->fused)) continue;
        f->arrangement = a->name;
        f->fused = a->fused;
        f->partial = s->partial;
        if (!a->fused) return true;
        char other[NAME_BYTES];
        struct found sibling = {0};
        f->expert = x->index;
        f->halves = x->proj == DOWN ? 1 : 2;
        f->half = x->proj == UP;
        if (expert_module(other, a, x, x->proj == DOWN ? GATE : DOWN) &&
            find_data(s, &sibling, other, true))
            f->sibling = sibling.part[PART_DATA];
        return true;
    }
    return false;
}

static bool find_plain(const struct spelling *s, struct found *f, char module[NAME_BYTES])
{
    if (find_data(s, f, module, false)) return true;
    size_t len = strlen(module);
    for (size_t i = 0; i < COUNT(aliases); i++) {
        size_t k = strlen(aliases[i].tail);
        char other[NAME_BYTES];
        if (len < k || strcmp(module + len - k, aliases[i].tail) != 0) continue;
        int n = snprintf(other, sizeof other, "%.*s%s", (int)(len - k), module, aliases[i].alias);
        if (n < 0 || n >= NAME_BYTES || !find_data(s, f, other, false)) continue;
        memcpy(module, other, (size_t)n + 1);
        return true;
    }
    return false;
}

/* The first candidate name of a part that is missing. */
static err_t missing(struct err *e, const struct found *f, const char *module, part_t part)
{
    struct buf b = {0};
    for (size_t i = 0; i < COUNT(companions); i++) {
        const struct companion *c = &companions[i];
        if (c->part != part || !possible(c, f->fused)) continue;
        if (f->fused && *c->suffix == '.') continue;
        buf_printf(&b, "%s%s%s", b.len ? " or " : "", module, c->suffix);
    }
    const struct st_tensor *t = f->part[PART_DATA]->tensor;
    err_t rc = err_set(e, ERR_INPUT, "tensor %s: %s without its %s; missing: %s", t->name,
                       st_dtype_name(t->dtype), part == PART_SCALE ? "scale" : "tensor scale",
                       b.data ? b.data : "");
    buf_release(&b);
    return rc;
}

static void mark(struct spelling *s, const struct found *f, const struct spelled *w)
{
    for (int p = 0; p < PART_COUNT; p++)
        if (w->part[p].tensor)
            s->used[f->part[p] - s->checkpoint->entries] += source_bytes(&w->part[p]);
}

err_t spelling_find(struct spelling *s, struct spelled *out, const char *name, int n_dims,
                    uint64_t rows, uint64_t cols, struct err *e)
{
    static const char tail[] = ".weight";
    size_t len = strlen(name), k = sizeof tail - 1;
    char module[NAME_BYTES];
    struct found f = {.halves = 1, .arrangement = ""};
    struct expert x;
    bool bare = len <= k || strcmp(name + len - k, tail) != 0;
    bool found = prefixed(module, s, name, bare ? len : len - k);
    if (found && bare)
        found = (f.part[PART_DATA] = get(s, module, "")) != NULL;
    else if (found)
        found =
            parse_expert(&x, module) ? find_expert(s, &f, module, &x) : find_plain(s, &f, module);
    if (!found) return err_set(e, ERR_NOTFOUND, "missing tensor: %s", name);
    err_t rc = bare ? OK : find_companions(s, &f, module, f.fused, e);
    struct spelled w = {.arrangement = f.arrangement};
    part_t absent = PART_COUNT;
    if (rc == OK) rc = shape_match(&w, &f, n_dims, rows, cols, &absent, e);
    if (rc == OK && absent != PART_COUNT) rc = missing(e, &f, module, absent);
    if (rc != OK) return rc;
    mark(s, &f, &w);
    *out = w;
    return OK;
}

err_t spelling_find_kv(struct spelling *s, struct source kv[2], const char *module, struct err *e)
{
    char at[NAME_BYTES], suffix[64];
    struct source found[2] = {{0}, {0}};
    if (!prefixed(at, s, module, strlen(module))) return OK;
    for (size_t i = 0; i < COUNT(kv_names) && !found[0].tensor; i++) {
        const struct checkpoint_entry *t[2];
        for (int j = 0; j < 2; j++) {
            snprintf(suffix, sizeof suffix, ".%s", kv_names[i][j]);
            t[j] = get(s, at, suffix);
        }
        if (!t[0] && !t[1]) continue;
        if (!t[0] || !t[1])
            return err_set(e, ERR_INPUT, "tensor %s: without its pair; missing: %s.%s",
                           t[t[0] == NULL]->tensor->name, at, kv_names[i][t[0] != NULL]);
        for (int j = 0; j < 2; j++) {
            err_t rc = shape_scalar(&found[j], t[j], e);
            if (rc != OK) return rc;
            s->used[t[j] - s->checkpoint->entries] = t[j]->tensor->bytes;
        }
    }
    kv[0] = found[0];
    kv[1] = found[1];
    return OK;
}

/* ---- the rest ---- */

/* Tensors that say nothing the model needs: rotary tables (recomputed), and the head of a tied
 * model, which is the embedding whatever the file holds (as transformers reads it). */
static bool ignored(const struct spelling *s, const char *name, bool tied)
{
    static const char rotary[] = "rotary_emb.inv_freq", head[] = "lm_head.";
    size_t n = strlen(name), k = sizeof rotary - 1, p = strlen(s->head_prefix);
    if (n >= k && strcmp(name + n - k, rotary) == 0) return true;
    return tied && strncmp(name, s->head_prefix, p) == 0 &&
           strncmp(name + p, head, sizeof head - 1) == 0;
}

bool spelling_is_rest(const struct spelling *s, size_t i, bool tied)
{
    const struct st_tensor *t = s->checkpoint->entries[i].tensor;
    if (s->used[i] >= t->bytes && (s->used[i] || t->bytes == 0)) return false;
    return s->used[i] || !ignored(s, t->name, tied);
}

/* Of a scale whose weight is not there: the weight's name. */
static bool orphan(char weight[NAME_BYTES], const struct spelling *s, const char *name)
{
    char module[NAME_BYTES];
    struct found f = {0};
    size_t len = strlen(name);
    for (size_t i = 0; i < COUNT(companions); i++) {
        const struct companion *c = &companions[i];
        size_t k = strlen(c->suffix);
        if (c->part == PART_DATA || len <= k || strcmp(name + len - k, c->suffix) != 0) continue;
        snprintf(module, sizeof module, "%.*s", (int)(len - k), name);
        if ((c->own && find_data(s, &f, module, false)) ||
            (c->fused && find_data(s, &f, module, true)))
            return false;
        int n = snprintf(weight, NAME_BYTES, "%s%s", module, c->own ? ".weight" : "");
        return n >= 0 && n < NAME_BYTES;
    }
    return false;
}

err_t spelling_rest(const struct spelling *s, bool tied, struct err *e)
{
    char weight[NAME_BYTES];
    for (size_t i = 0; i < s->checkpoint->n_tensors; i++) {
        const struct checkpoint_entry *t = &s->checkpoint->entries[i];
        if (!spelling_is_rest(s, i, tied)) continue;
        if (!s->used[i] && orphan(weight, s, t->tensor->name))
            return err_set(e, ERR_INPUT, "tensor %s: without its weight; missing: %s (in %s)",
                           t->tensor->name, weight, t->file->path);
        return err_set(e, ERR_INPUT, "tensor %s: %s (in %s)", t->tensor->name,
                       s->used[i] ? "holds more than the model's experts" : "unknown to the model",
                       t->file->path);
    }
    return OK;
}
