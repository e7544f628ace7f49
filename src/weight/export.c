#include "weight/export.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define SUFFIX ".weight"

/* Behind a module's name, by format; NULL: no such tensor. */
static const struct spelled_as {
    st_dtype_t data, scale;
    const char *scale_name, *tensor_name, *input_name;
} spelled[FORMAT_COUNT] = {
    [FORMAT_BF16] = {.data = ST_BF16},
    [FORMAT_FP8_BLOCK] = {ST_F8_E4M3, ST_F32, ".weight_scale_inv", NULL, ".input_scale"},
    [FORMAT_FP8_TENSOR] = {ST_F8_E4M3, ST_F32, ".weight_scale", NULL, ".input_scale"},
    [FORMAT_FP8_CHANNEL] = {ST_F8_E4M3, ST_F32, ".weight_scale", NULL, ".input_scale"},
    [FORMAT_MXFP8] = {ST_F8_E4M3, ST_U8, ".weight_scale_inv", NULL, ".input_scale"},
    [FORMAT_NVFP4] = {ST_U8, ST_F8_E4M3, ".weight_scale", ".weight_scale_2", ".input_scale"},
    [FORMAT_MXFP4] = {ST_U8, ST_U8, ".weight_scale", NULL, ".input_scale"},
};

/* Of the slot that has the scales of K and V. */
#define KV_SUFFIX ".kv_scale"
static const char *const kv_names[2] = {".k_proj.k_scale", ".v_proj.v_scale"};

static int stem(const char *name, const char *suffix)
{
    size_t n = strlen(name), k = strlen(suffix);
    return (int)(n > k && strcmp(name + n - k, suffix) == 0 ? n - k : n);
}

static void name_it(struct export_tensor *t, const char *slot, const char *slot_suffix,
                    const char *suffix)
{
    snprintf(t->name, sizeof t->name, "%.*s%s", stem(slot, slot_suffix), slot, suffix);
}

static size_t kv_tensors(const struct slot_spec *p, struct export_tensor out[EXPORT_MAX])
{
    for (size_t i = 0; i < 2; i++) {
        out[i] = (struct export_tensor){.dtype = ST_F32, .part = PART_DATA, .rows = 1};
        out[i].row_bytes = 2 * sizeof(float);
        out[i].at = i * sizeof(float);
        out[i].bytes = sizeof(float);
        name_it(&out[i], p->name, KV_SUFFIX, kv_names[i]);
    }
    return 2;
}

static size_t add(struct export_tensor *t, const struct slot_spec *p, part_t part, st_dtype_t dtype,
                  const char *suffix)
{
    const struct resident *r = &p->shape;
    if (suffix == NULL) return 0;
    *t = (struct export_tensor){.part = part, .dtype = dtype};
    name_it(t, p->name, SUFFIX, suffix);
    t->rows = layout_part_rows(r->format, part, (size_t)r->rows);
    t->row_bytes = layout_part_row_bytes(r->format, part, (size_t)r->cols);
    t->bytes = t->rows * t->row_bytes;
    uint64_t cols = t->row_bytes * 8 / (uint64_t)st_dtype_bits(dtype);
    bool vector = part == PART_DATA && p->n_dims == 1;
    bool alone = part != PART_DATA && t->rows == 1 && cols == 1 &&
                 (part != PART_SCALE || formats[r->format].group_cols == 0) &&
                 (part != PART_SCALE || formats[r->format].group_rows == 0);
    if (!vector && !alone) t->shape[t->n_dims++] = t->rows;
    if (!alone) t->shape[t->n_dims++] = cols;
    return 1;
}

size_t export_tensors(const struct slot_spec *p, struct export_tensor out[EXPORT_MAX])
{
    if (p->shape.kind == RESIDENT_F32) return kv_tensors(p, out);
    const struct spelled_as *s = &spelled[p->shape.format];
    size_t n = add(&out[0], p, PART_DATA, s->data, SUFFIX);
    n += add(&out[n], p, PART_SCALE, s->scale, s->scale_name);
    n += add(&out[n], p, PART_TENSOR, ST_F32, s->tensor_name);
    n += add(&out[n], p, PART_INPUT, ST_F32, s->input_name);
    return n;
}

static bool match(const struct store *s, size_t slot, const char *name, size_t *tensor)
{
    struct export_tensor t[EXPORT_MAX];
    size_t n = export_tensors(store_spec(s, slot), t);
    for (size_t i = 0; i < n; i++) {
        if (strcmp(t[i].name, name) != 0) continue;
        *tensor = i;
        return true;
    }
    return false;
}

err_t export_find(const struct store *s, const char *name, size_t *slot, size_t *tensor,
                  struct err *e)
{
    static const char *const scales[] = {".weight_scale_inv", ".weight_scale", ".weight_scale_2",
                                         ".input_scale"};
    char other[160];
    *slot = store_find(s, name);
    if (*slot != SIZE_MAX && match(s, *slot, name, tensor)) return OK;
    for (size_t i = 0; i < sizeof scales / sizeof scales[0] + 2; i++) {
        bool kv = i < 2;
        const char *suffix = kv ? kv_names[i] : scales[i - 2];
        int n = stem(name, suffix);
        if (name[n] == 0 || n > 120) continue;
        snprintf(other, sizeof other, "%.*s%s", n, name, kv ? KV_SUFFIX : SUFFIX);
        *slot = store_find(s, other);
        if (*slot != SIZE_MAX && match(s, *slot, name, tensor)) return OK;
    }
    return err_set(
        e, ERR_NOTFOUND,
        "name: %.200s is not resident; must be a tensor's name as Hugging Face's checkpoint "
        "has it, such as %s",
        name, store_slots(s) ? store_spec(s, 0)->name : "");
}

bool export_has(const struct slot_spec *p, const struct export_tensor *t, const void *bytes)
{
    float x;
    if (t->part != PART_INPUT && p->shape.kind != RESIDENT_F32) return true;
    memcpy(&x, bytes, sizeof x);
    if (p->shape.kind == RESIDENT_F32) return !p->optional || x != p->absent;
    return x > 0.0f; /* zero and NaN are "none" */
}

bool export_header(struct buf *out, const struct export_tensor *t, size_t n)
{
    struct buf h = {0};
    size_t at = 0;
    for (size_t i = 0; i < n; i++) {
        buf_printf(&h, "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[", i ? "," : "{", t[i].name,
                   st_dtype_name(t[i].dtype));
        for (int d = 0; d < t[i].n_dims; d++)
            buf_printf(&h, "%s%llu", d ? "," : "", (unsigned long long)t[i].shape[d]);
        buf_printf(&h, "],\"data_offsets\":[%zu,%zu]}", at, at + t[i].bytes);
        at += t[i].bytes;
    }
    buf_puts(&h, "}");
    while (h.len % 8 && !h.failed)
        buf_putc(&h, ' ');
    unsigned char len[8];
    for (int i = 0; i < 8; i++)
        len[i] = (unsigned char)((uint64_t)h.len >> 8 * i);
    bool ok = !h.failed && buf_put(out, len, sizeof len) && buf_put(out, h.data, h.len);
    buf_release(&h);
    return ok;
}
