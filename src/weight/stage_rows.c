/* stage_rows.c - rows of a slot: checked, encoded if they must be, put. */
#include "weight/update_internal.h"

#include "base/mem.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

void stage_room_free(struct stage_room *r)
{
    source_scratch_free(&r->file);
    source_scratch_free(&r->data);
    source_scratch_free(&r->scale);
    source_scratch_free(&r->floats);
    source_scratch_free(&r->codes);
}

err_t stage_reserve(struct source_scratch *s, size_t bytes, const char *name, struct err *e)
{
    if (bytes <= s->cap) return OK;
    source_scratch_free(s);
    s->data = mem_try(bytes);
    if (s->data == NULL)
        return err_set(e, ERR_NOMEM, "tensor %s: no memory to read it (%zu bytes)", name, bytes);
    s->cap = bytes;
    return OK;
}

size_t stage_scale_rows(format_t f, size_t rows, size_t row0, size_t n, size_t *first)
{
    size_t group = formats[f].group_rows, all = format_scale_rows(f, rows);
    if (group == 0) { /* one row of scales, with the first rows of data */
        *first = 0;
        return row0 == 0 ? all : 0;
    }
    size_t end = row0 + n == rows ? all : (row0 + n) / group;
    *first = row0 / group;
    return end - *first;
}

/* ---- checks ---- */

/* "tensor T" or, of a fused one, "tensor T (slot)". */
static void name_of(char out[400], const struct update *u, const struct rows *r, part_t part)
{
    const char *slot = store_spec(u->store, r->slot)->name;
    const struct st_tensor *t = r->names ? r->names->part[part].tensor : NULL;
    if (t == NULL)
        snprintf(out, 400, "%s", slot);
    else if (*r->names->arrangement)
        snprintf(out, 400, "%.250s (%s)", t->name, slot);
    else
        snprintf(out, 400, "%.390s", t->name);
}

static const char *const bad_data[] = {[ELEM_BF16] = "not finite in BF16", [ELEM_E4M3] = "NaN"};
static const char *const bad_scale[] = {
    [SCALE_F32] = "NaN, infinite or negative",
    [SCALE_E8M0] = "NaN or outside 2^-117 .. 2^119",
    [SCALE_E4M3] = "NaN or negative",
};

/* The first code that is not zero, of E2M1 rows; SIZE_MAX: none. */
static size_t first_code(const void *data, size_t rows, size_t cols)
{
    const uint8_t *d = data;
    size_t row_bytes = cols / 2 + cols % 2;
    for (size_t r = 0; r < rows; r++)
        for (size_t c = 0; c < cols; c++)
            if (d[r * row_bytes + c / 2] >> 4 * (c % 2) & 7) return r * cols + c;
    return SIZE_MAX;
}

static void check_data(struct update *u, const struct rows *r, const struct resident *s)
{
    size_t at = 0, cols = (size_t)s->cols;
    char name[400];
    if (format_check_data(s->format, r->data, r->n * cols, &at)) return;
    at += r->row0 * cols;
    name_of(name, u, r, PART_DATA);
    update_note(u, r->slot, PART_DATA, at, "tensor %s: element %zu is %s", name, at,
                bad_data[formats[s->format].elem]);
}

static void check_scales(struct update *u, const struct rows *r, const struct resident *s)
{
    format_t f = s->format;
    size_t first, cols = format_scale_cols(f, (size_t)s->cols), at = 0;
    size_t n = stage_scale_rows(f, (size_t)s->rows, r->row0, r->n, &first);
    char name[400];
    const char *why = bad_scale[formats[f].scale];
    if (format_check_scales(f, r->scale, n * cols, &at)) {
        struct format_parts p = {.format = f,
                                 .rows = r->n,
                                 .cols = (size_t)s->cols,
                                 .data = r->data,
                                 .scale = r->scale,
                                 .tensor = 1.0f};
        if (format_check_zero_blocks(&p, 0, r->n, &at)) return;
        why = "2^-127, and its elements are not all zero";
    }
    at += first * cols;
    name_of(name, u, r, PART_SCALE);
    update_note(u, r->slot, PART_SCALE, at, "tensor %s: scale %zu, of row %zu, is %s", name, at,
                at / cols * (formats[f].group_rows ? formats[f].group_rows : 1), why);
}

static void check_tensor(struct update *u, const struct rows *r, const struct resident *s)
{
    char name[400];
    size_t at;
    if (r->tensor != 0.0f || (at = first_code(r->data, r->n, (size_t)s->cols)) == SIZE_MAX) return;
    at += r->row0 * (size_t)s->cols;
    name_of(name, u, r, PART_TENSOR);
    update_note(u, r->slot, PART_TENSOR, at, "tensor %s: scale 0, but element %zu is not zero",
                name, at);
}

void stage_rows(struct update *u, const struct rows *r)
{
    const struct resident *s = &store_spec(u->store, r->slot)->shape;
    if (!r->any_bf16 || formats[s->format].elem != ELEM_BF16) check_data(u, r, s);
    if (r->scale) check_scales(u, r, s);
    if (formats[s->format].tensor) check_tensor(u, r, s);
    update_put(u, r->slot, PART_DATA, r->row0, r->n, r->data);
    if (r->scale == NULL) return;
    size_t first, n = stage_scale_rows(s->format, (size_t)s->rows, r->row0, r->n, &first);
    update_put(u, r->slot, PART_SCALE, first, n, r->scale);
}

/* ---- checksums ---- */

void stage_sum_begin(struct stage_room *room)
{
    for (int i = 0; i < PART_COUNT; i++)
        digest_init(&room->sum[i], DIGEST_XXH3_128);
}

err_t stage_sum_end(struct update *u, size_t slot, const struct stage_room *room, struct err *e)
{
    struct digest all;
    unsigned char sum[DIGEST_BYTES];
    digest_init(&all, DIGEST_XXH3_128);
    for (int i = 0; i < PART_COUNT; i++) {
        digest_get(&room->sum[i], sum);
        digest_add(&all, sum, SUM_BYTES);
    }
    digest_get(&all, sum);
    if (u->touched && memcmp(u->sums[slot], sum, SUM_BYTES) != 0)
        return err_set(e, ERR_IO, "tensor %s: not the bytes that were verified",
                       store_spec(u->store, slot)->name);
    memcpy(u->sums[slot], sum, SUM_BYTES);
    return OK;
}

/* ---- encoding ---- */

static void widen(float *to, const uint16_t *from, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        uint32_t bits = (uint32_t)from[i] << 16;
        memcpy(&to[i], &bits, sizeof bits);
    }
}

err_t stage_amax(float *amax, const uint16_t *bf16, size_t n, struct stage_room *room,
                 const char *name, struct err *e)
{
    err_t rc = stage_reserve(&room->floats, n * sizeof(float), name, e);
    if (rc != OK) return rc;
    widen(room->floats.data, bf16, n);
    *amax = encode_amax(*amax, room->floats.data, n);
    return OK;
}

err_t stage_encoded(struct update *u, const struct encode *en, size_t slot, size_t row0, size_t n,
                    const uint16_t *bf16, struct stage_room *room, struct err *e)
{
    const struct slot_spec *p = store_spec(u->store, slot);
    format_t f = p->shape.format;
    size_t cols = (size_t)p->shape.cols, first, at;
    size_t scales = stage_scale_rows(f, (size_t)p->shape.rows, row0, n, &first);
    if (!format_check_data(FORMAT_BF16, bf16, n * cols, &at)) { /* nothing to encode: refused */
        at += row0 * cols;
        update_note(u, slot, PART_DATA, at, "tensor %s: element %zu is not finite in BF16", p->name,
                    at);
        return OK;
    }
    err_t rc = stage_reserve(&room->floats, n * cols * sizeof(float), p->name, e);
    if (rc == OK) rc = stage_reserve(&room->codes, n * format_row_bytes(f, cols), p->name, e);
    if (rc == OK)
        rc = stage_reserve(&room->scale,
                           scales * format_scale_cols(f, cols) * (size_t)formats[f].scale_bytes,
                           p->name, e);
    if (rc != OK) return rc;
    widen(room->floats.data, bf16, n * cols);
    encode_rows(en, room->floats.data, row0, n, room->codes.data, room->scale.data);
    update_put(u, slot, PART_DATA, row0, n, room->codes.data);
    if (scales) update_put(u, slot, PART_SCALE, first, scales, room->scale.data);
    return OK;
}

void stage_encoded_scalars(struct update *u, const struct encode *en, size_t slot)
{
    const float input = NAN;
    if (formats[en->format].tensor) update_put(u, slot, PART_TENSOR, 0, 1, &en->tensor);
    update_put(u, slot, PART_INPUT, 0, 1, &input);
}
