#include "weight/plan.h"

#include "base/buf.h"
#include "base/mem.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_NAMED 8

/* Length of a name without its last component. */
static int module_len(const char *name)
{
    const char *dot = strrchr(name, '.');
    return dot ? (int)(dot - name) : (int)strlen(name);
}

/* The stored tensor's module: what a quantization config may call it. */
static void stored_module(char out[512], const char *tensor)
{
    static const char *const tails[] = {".weight", ".weight_packed", "_weight_packed", "_blocks"};
    size_t n = strlen(tensor);
    for (size_t i = 0; i < sizeof tails / sizeof tails[0]; i++) {
        size_t k = strlen(tails[i]);
        if (n > k && strcmp(tensor + n - k, tails[i]) == 0) {
            n -= k;
            break;
        }
    }
    if (n > 511) n = 511;
    memcpy(out, tensor, n);
    out[n] = 0;
}

static err_t find_weight(struct plan *p, struct spelling *s, struct planned *to,
                         const struct slot_spec *spec, struct err *e)
{
    err_t rc = spelling_find(s, &to->weight, spec->name, spec->n_dims, spec->shape.rows,
                             spec->shape.cols, e);
    if (rc != OK) return rc;
    char module[sizeof spec->name], stored[512];
    snprintf(module, sizeof module, "%.*s", module_len(spec->name), spec->name);
    stored_module(stored, to->weight.part[PART_DATA].tensor->name);
    rc = quant_config_check(p->config, module, stored, to->weight.format, e);
    if (rc != OK) return rc;
    to->found = true;
    for (int part = 0; part < PART_COUNT; part++)
        if (to->weight.part[part].tensor) p->bytes += source_bytes(&to->weight.part[part]);
    return OK;
}

static err_t find_kv(struct plan *p, struct spelling *s, struct planned *to,
                     const struct slot_spec *spec, struct err *e)
{
    char module[sizeof spec->name];
    snprintf(module, sizeof module, "%.*s", module_len(spec->name), spec->name);
    err_t rc = spelling_find_kv(s, to->kv, module, e);
    if (rc != OK || to->kv[0].tensor == NULL) return rc;
    to->found = true;
    p->bytes += source_bytes(&to->kv[0]) + source_bytes(&to->kv[1]);
    return OK;
}

static int by_name(const void *a, const void *b, void *arg)
{
    const struct slot_spec *specs = arg;
    size_t x = *(const size_t *)a, y = *(const size_t *)b;
    int c = strcmp(specs[x].name, specs[y].name);
    return c ? c : (x > y) - (x < y);
}

/* first[i]: is slot i the first of its name?  *twice: does any name have two? */
static err_t mark_first(bool *first, const struct slot_spec *specs, size_t n, bool *twice,
                        struct err *e)
{
    size_t *order = mem_try_array(n + 1, sizeof *order);
    if (order == NULL) return err_set(e, ERR_NOMEM, "no memory to sort %zu names", n);
    for (size_t i = 0; i < n; i++)
        order[i] = i;
    qsort_r(order, n, sizeof *order, by_name, (void *)(uintptr_t)specs);
    *twice = false;
    for (size_t i = 0; i < n; i++) {
        bool same = i > 0 && strcmp(specs[order[i]].name, specs[order[i - 1]].name) == 0;
        first[order[i]] = !same;
        *twice = *twice || same;
    }
    mem_free(order);
    return OK;
}

static err_t find_all(struct plan *p, struct spelling *s, const struct slot_spec *specs,
                      const bool *first, bool *have, struct err *e)
{
    for (size_t i = 0; i < p->n; i++) {
        struct planned *to = &p->slots[i];
        have[i] = true;
        if (!first[i]) continue;
        err_t rc = specs[i].shape.kind == RESIDENT_F32 ? find_kv(p, s, to, &specs[i], e)
                                                       : find_weight(p, s, to, &specs[i], e);
        if (rc == ERR_NOTFOUND)
            have[i] = false;
        else if (rc != OK)
            return rc;
    }
    return OK;
}

/* Slots that are encoded together come together. */
static err_t check_runs(const struct plan *p, const struct slot_spec *specs, struct err *e)
{
    for (size_t i = 0; i < p->n; i++) {
        const struct slot_spec *s = &specs[i];
        size_t first = i - s->amax_at;
        if (!p->slots[i].found || !s->encode || s->amax_n < 2 ||
            p->slots[i].weight.format == s->shape.format ||
            !format_needs_amax(&formats[s->shape.format]))
            continue;
        for (size_t k = first; k < first + s->amax_n; k++)
            if (!p->slots[k].found)
                return err_set(e, ERR_INPUT,
                               "tensor %s: is quantized here together with what is missing: %s",
                               s->name, specs[k].name);
    }
    return OK;
}

static err_t check_part(const struct plan *p, const struct slot_spec *specs, struct err *e)
{
    for (size_t i = 0; i < p->n; i++)
        if (p->slots[i].found) return check_runs(p, specs, e);
    return err_set(e, ERR_INPUT, "no tensors of the model were given");
}

/* `whole`: every slot must be found. */
static err_t fill(struct plan *p, const struct slot_spec *specs, bool whole, struct err *e)
{
    struct spelling s = {0};
    bool twice = false, *marks = mem_try_array(p->n + 1, 2 * sizeof *marks);
    p->slots = mem_try_array(p->n + 1, sizeof p->slots[0]);
    if (marks == NULL || p->slots == NULL) {
        mem_free(marks);
        return err_set(e, ERR_NOMEM, "no memory to plan %zu weights", p->n);
    }
    bool *first = marks, *have = marks + p->n;
    err_t rc = mark_first(first, specs, p->n, &twice, e);
    if (rc == OK) rc = spelling_open(&s, &p->checkpoint, e);
    s.partial = !whole;
    if (rc == OK) rc = find_all(p, &s, specs, first, have, e);
    if (rc == OK) rc = spelling_rest(&s, twice, e);
    if (rc == OK) rc = whole ? plan_missing(specs, p->n, have, e) : check_part(p, specs, e);
    spelling_close(&s);
    mem_free(marks);
    return rc;
}

err_t plan_open(struct plan *p, const char *dir, const struct slot_spec *specs, size_t n,
                struct err *e)
{
    struct plan t = {.n = n};
    err_t rc = checkpoint_open(&t.checkpoint, dir, e);
    if (rc != OK) return rc;
    rc = quant_config_load(&t.config, dir, e);
    if (rc == OK) rc = fill(&t, specs, true, e);
    if (rc != OK) {
        plan_close(&t);
        return rc;
    }
    *p = t;
    return OK;
}

err_t plan_open_part(struct plan *p, const struct st_file *files, size_t n_files,
                     const struct slot_spec *specs, size_t n, struct err *e)
{
    struct plan t = {.n = n};
    err_t rc = checkpoint_of(&t.checkpoint, files, n_files, e);
    if (rc == OK) rc = fill(&t, specs, false, e);
    if (rc != OK) {
        plan_close(&t);
        return rc;
    }
    *p = t;
    return OK;
}

void plan_close(struct plan *p)
{
    checkpoint_close(&p->checkpoint);
    quant_config_free(p->config);
    mem_free(p->slots);
    *p = (struct plan){0};
}

err_t plan_formats(const struct plan *p, struct slot_spec *specs, struct err *e)
{
    for (size_t i = 0; i < p->n; i++) {
        const struct planned *w = &p->slots[i];
        if (!w->found || specs[i].shape.kind == RESIDENT_F32) continue;
        if (specs[i].shape.kind == RESIDENT_MATRIX)
            specs[i].shape.format = w->weight.format;
        else if (w->weight.format != FORMAT_BF16)
            return err_set(e, ERR_UNSUPPORTED, "module %.*s: %s is not implemented here (bf16 is)",
                           module_len(specs[i].name), specs[i].name,
                           formats[w->weight.format].name);
    }
    return OK;
}

static bool is_quantized(const struct plan *p)
{
    for (size_t i = 0; i < p->n; i++)
        if (p->slots[i].found && p->slots[i].weight.format != FORMAT_BF16) return true;
    return false;
}

err_t plan_encode(const struct plan *p, struct slot_spec *specs, format_t format, unsigned accept,
                  struct err *e)
{
    bool quantized = is_quantized(p);
    for (size_t i = 0; i < p->n; i++) {
        format_t f = p->slots[i].found ? p->slots[i].weight.format : FORMAT_BF16;
        if (f != FORMAT_BF16 && !(accept & 1u << f))
            return err_set(e, ERR_INPUT,
                           "%.*s is %s: only a BF16 checkpoint is quantized while it is loaded",
                           module_len(specs[i].name), specs[i].name, formats[f].name);
    }
    for (size_t i = 0; !quantized && i < p->n; i++) {
        if (!specs[i].linear) continue;
        specs[i].shape.format = format;
        specs[i].encode = format != FORMAT_BF16;
    }
    return OK;
}

err_t plan_check(const struct plan *p, const struct slot_spec *specs, struct err *e)
{
    bool quantized = is_quantized(p);
    for (size_t i = 0; i < p->n; i++) {
        const struct planned *w = &p->slots[i];
        if (!w->found || specs[i].shape.kind == RESIDENT_F32) continue;
        format_t now = specs[i].shape.format, next = w->weight.format;
        if (next == now || (specs[i].encode && !quantized)) continue;
        return err_set(e, ERR_STATE, "%.*s: %s -> %s", module_len(specs[i].name), specs[i].name,
                       formats[now].name, formats[next].name);
    }
    return OK;
}

err_t plan_missing(const struct slot_spec *specs, size_t n, const bool *have, struct err *e)
{
    struct buf b = {0};
    size_t missing = 0;
    for (size_t i = 0; i < n; i++) {
        if (have[i] || specs[i].optional) continue;
        if (missing++ < MAX_NAMED) buf_printf(&b, "%s%s", b.len ? ", " : "", specs[i].name);
    }
    if (missing == 0) return OK;
    if (missing > MAX_NAMED) buf_printf(&b, " and %zu more", missing - MAX_NAMED);
    err_t rc = err_set(e, ERR_INPUT, "missing tensors: %s", b.data ? b.data : "");
    buf_release(&b);
    return rc;
}
