#include "weight/spelling_shape.h"

#include "base/buf.h"

/* What a dtype can be: elements of data, scales, and how each becomes canonical. */
static const struct kind {
    bool is_data, is_scale;
    elem_t elem;
    scale_t scale;
    convert_t data_convert, scale_convert;
} kinds[ST_U64 + 1] = {
    [ST_BF16] = {true, true, ELEM_BF16, SCALE_F32, CONVERT_BF16, CONVERT_BF16_F32},
    [ST_F16] = {true, true, ELEM_BF16, SCALE_F32, CONVERT_F16_BF16, CONVERT_F16_F32},
    [ST_F32] = {true, true, ELEM_BF16, SCALE_F32, CONVERT_F32_BF16, CONVERT_F32},
    [ST_F8_E4M3] = {true, true, ELEM_E4M3, SCALE_E4M3, CONVERT_BYTE, CONVERT_BYTE},
    [ST_U8] = {true, true, ELEM_E2M1, SCALE_E8M0, CONVERT_BYTE, CONVERT_BYTE},
    [ST_F4] = {.is_data = true, .elem = ELEM_E2M1, .data_convert = CONVERT_BYTE},
    [ST_F8_E8M0] = {.is_scale = true, .scale = SCALE_E8M0, .scale_convert = CONVERT_BYTE},
};

/* A shape in stored elements: F4 in bytes, gpt-oss's blocks of 16 bytes as one dimension. */
struct view {
    int n;
    uint64_t d[ST_MAX_DIMS];
};

static struct view view_of(const struct st_tensor *t, bool blocks)
{
    struct view v = {.n = t->n_dims};
    for (int i = 0; i < v.n; i++)
        v.d[i] = t->shape[i];
    if (t->dtype == ST_F4 && v.n > 0) v.d[v.n - 1] = (v.d[v.n - 1] + 1) / 2;
    if (blocks && v.n > 2 && v.d[v.n - 1] == 16) {
        v.d[v.n - 2] *= 16;
        v.n--;
    }
    return v;
}

static void put_dims(struct buf *b, const uint64_t *d, int n)
{
    buf_puts(b, "[");
    for (int i = 0; i < n; i++)
        buf_printf(b, "%s%llu", i ? ", " : "", (unsigned long long)d[i]);
    buf_puts(b, "]");
}

/* Where in a tensor the module lies. */
struct place {
    const struct found *f;
    bool transposed;
};

/* Shapes of the whole tensor that mean a part of rows x cols: at most 4 spellings of one.  The
 * first is the one to name.  `flat`: a last dimension of 1 may be left out. */
static int shapes(struct view out[4], const struct place *p, uint64_t experts, uint64_t rows,
                  uint64_t cols, bool flat)
{
    const struct found *f = p->f;
    uint64_t all = rows * f->halves;
    struct view v = {0};
    int n = 0;
    if (f->fused) v.d[v.n++] = experts;
    int at = v.n;
    v.n = at + 2;
    v.d[at] = p->transposed ? cols : all;
    v.d[at + 1] = p->transposed ? all : cols;
    out[n++] = v;
    if (flat && cols == 1) { /* [N] */
        struct view w = v;
        w.n = at + 1;
        w.d[at] = all;
        out[n++] = w;
    }
    if (!p->transposed) { /* [gr, 1, gc, 1]: ModelOpt's blocks before they are squeezed */
        struct view w = v;
        w.n = at + 4;
        w.d[at + 1] = w.d[at + 3] = 1;
        w.d[at + 2] = cols;
        out[n++] = w;
    }
    return n;
}

/* Of a fused module: as many as its data has. */
static uint64_t experts_of(const struct found *f)
{
    const struct checkpoint_entry *t = f->part[PART_DATA];
    return f->fused && t->tensor->n_dims > 0 ? t->tensor->shape[0] : 0;
}

static bool same(const struct view *a, const struct view *b)
{
    if (a->n != b->n) return false;
    for (int i = 0; i < a->n; i++)
        if (a->d[i] != b->d[i]) return false;
    return true;
}

static bool fits(const struct view *v, const struct place *p, uint64_t rows, uint64_t cols,
                 bool flat)
{
    struct view want[4];
    uint64_t experts = experts_of(p->f);
    if (v->n == 0 || (p->f->fused && p->f->expert >= experts)) return false;
    int n = shapes(want, p, experts, rows, cols, flat);
    for (int i = 0; i < n; i++)
        if (same(v, &want[i])) return true;
    return false;
}

static struct source rectangle(const struct place *p, const struct checkpoint_entry *t,
                               uint64_t rows, uint64_t cols, convert_t convert)
{
    const struct found *f = p->f;
    struct source s = {.file = t->file, .tensor = t->tensor, .rows = rows, .cols = cols};
    s.convert = convert;
    s.first = f->expert * f->halves * rows * cols;
    if (p->transposed) {
        s.first += f->half * rows;
        s.row_stride = 1;
        s.col_stride = f->halves * rows;
    } else if (f->interleaved) {
        s.first += f->half * cols;
        s.row_stride = f->halves * cols;
        s.col_stride = 1;
    } else {
        s.first += f->half * rows * cols;
        s.row_stride = cols;
        s.col_stride = 1;
    }
    return s;
}

/* One float: alone, or of an expert, or of an expert's half. */
static bool scalar(struct source *s, const struct found *f, const struct checkpoint_entry *t)
{
    struct view v = view_of(t->tensor, false);
    uint64_t rest = 1;
    for (int i = 1; i < v.n; i++)
        rest *= v.d[i]; /* the product of all is known to fit */
    *s = (struct source){.file = t->file,
                         .tensor = t->tensor,
                         .rows = 1,
                         .cols = 1,
                         .row_stride = 1,
                         .col_stride = 1};
    s->convert = kinds[t->tensor->dtype].scale_convert;
    if (v.n == 0 || (v.d[0] == 1 && rest == 1)) return true;
    if (!f->fused || v.d[0] != experts_of(f)) return false;
    s->first = f->expert * rest + (rest == 2 ? f->half : 0);
    return rest == 1 || (rest == 2 && f->halves == 2);
}

static bool is_float(const struct st_tensor *t)
{
    return kinds[t->dtype].is_scale && kinds[t->dtype].scale == SCALE_F32;
}

/* ---- data ---- */

static err_t bad_shape(struct err *e, const struct found *f, const struct view *v, int n_dims,
                       uint64_t rows, uint64_t cols)
{
    const struct st_tensor *t = f->part[PART_DATA]->tensor;
    struct place p = {f, false};
    struct view want[4];
    struct buf b = {0};
    if (f->fused && v->n > 0 && f->expert >= experts_of(f))
        return err_set(e, ERR_INPUT, "tensor %s: %llu experts, the model needs more", t->name,
                       (unsigned long long)experts_of(f));
    (void)shapes(want, &p, experts_of(f), rows, cols, false);
    put_dims(&b, t->shape, t->n_dims);
    buf_puts(&b, ", the model needs ");
    if (n_dims == 1)
        put_dims(&b, &cols, 1);
    else
        put_dims(&b, want[0].d, want[0].n);
    err_t rc = err_set(e, ERR_INPUT, "tensor %s: shape %s", t->name, b.data ? b.data : "");
    buf_release(&b);
    return rc;
}

/* Columns as stored. */
static uint64_t stored(elem_t elem, uint64_t cols)
{
    return elem == ELEM_E2M1 ? cols / 2 + cols % 2 : cols;
}

/* Both ways round fit (2I = H): the layer's other fused tensor tells. */
static bool sibling_transposed(const struct found *f, uint64_t rows, uint64_t cols)
{
    if (f->sibling == NULL || !kinds[f->sibling->tensor->dtype].is_data) return false;
    struct found other = {.fused = true, .halves = 3 - f->halves, .part = {f->sibling}};
    struct place straight = {&other, false}, turned = {&other, true};
    struct view v = view_of(f->sibling->tensor, false);
    uint64_t r = cols, c = stored(kinds[f->sibling->tensor->dtype].elem, rows);
    return !fits(&v, &straight, r, c, false) && fits(&v, &turned, r, c, false);
}

static err_t match_data(struct spelled *w, struct place *p, int n_dims, uint64_t rows,
                        uint64_t cols, struct err *e)
{
    const struct checkpoint_entry *t = p->f->part[PART_DATA];
    const struct kind *k = &kinds[t->tensor->dtype];
    if (!k->is_data || (n_dims == 1 && k->elem != ELEM_BF16))
        return err_set(e, ERR_UNSUPPORTED, "tensor %s: dtype: %s is not %s", t->tensor->name,
                       st_dtype_name(t->tensor->dtype),
                       n_dims == 1 ? "BF16, F16 or F32" : "BF16, F16, F32, F8_E4M3, U8 or F4");
    struct view v = view_of(t->tensor, p->f->interleaved);
    uint64_t c = stored(k->elem, cols);
    bool vector = n_dims == 1 && v.n == 1 && v.d[0] == cols;
    if (t->tensor->dtype == ST_F4 && cols % 2)
        return err_set(e, ERR_UNSUPPORTED, "tensor %s: F4 of an odd number of columns",
                       t->tensor->name);
    if (!vector && n_dims == 1) return bad_shape(e, p->f, &v, 1, 1, cols);
    if (!vector) {
        struct place turned = {p->f, true};
        bool straight = fits(&v, p, rows, c, false);
        bool flipped = p->f->fused && !p->f->interleaved && fits(&v, &turned, rows, c, false);
        if (!straight && !flipped) return bad_shape(e, p->f, &v, 2, rows, c);
        if (straight && flipped && p->f->partial && p->f->sibling == NULL)
            return err_set(e, ERR_INPUT,
                           "tensor %s: its shape fits both ways round; the other fused tensor of "
                           "its layer is missing, which would tell",
                           t->tensor->name);
        p->transposed = flipped && (!straight || sibling_transposed(p->f, rows, cols));
    }
    w->part[PART_DATA] = rectangle(p, t, rows, c, k->data_convert);
    if (p->f->fused && p->f->interleaved) w->arrangement = "interleaved";
    if (p->transposed) w->arrangement = "fused transposed";
    return OK;
}

/* ---- scales ---- */

static bool whole(const struct format *f) /* one scale for all */
{
    return f->group_rows == 0 && f->group_cols == 0;
}

static bool match_grid(struct source *s, const struct place *p, format_t f, uint64_t rows,
                       uint64_t cols)
{
    const struct checkpoint_entry *t = p->f->part[PART_SCALE];
    struct view v = view_of(t->tensor, false);
    if (whole(&formats[f])) return scalar(s, p->f, t);
    /* halves that share a group cannot be parted */
    if (p->f->halves > 1 && formats[f].group_rows > 1 &&
        (rows % formats[f].group_rows || p->f->interleaved))
        return false;
    uint64_t r = format_scale_rows(f, (size_t)rows), c = format_scale_cols(f, (size_t)cols);
    if (!fits(&v, p, r, c, formats[f].group_cols == 0)) return false;
    *s = rectangle(p, t, r, c, kinds[t->tensor->dtype].scale_convert);
    return true;
}

static bool takes(format_t f, const struct kind *data, const struct kind *scale)
{
    return formats[f].elem == data->elem && formats[f].scale == scale->scale;
}

static err_t bad_grid(struct err *e, const struct place *p, const struct kind *data,
                      const struct kind *scale, uint64_t rows, uint64_t cols)
{
    const struct st_tensor *t = p->f->part[PART_SCALE]->tensor;
    uint64_t shape[2] = {rows, cols};
    struct buf b = {0};
    bool any = false;
    put_dims(&b, t->shape, t->n_dims);
    buf_puts(&b, ", a weight of ");
    put_dims(&b, shape, 2);
    buf_puts(&b, " needs");
    for (int f = 0; scale->is_scale && f < FORMAT_COUNT; f++) {
        struct view want[4];
        if (!takes((format_t)f, data, scale)) continue;
        (void)shapes(want, p, experts_of(p->f), format_scale_rows((format_t)f, (size_t)rows),
                     format_scale_cols((format_t)f, (size_t)cols), false);
        if (whole(&formats[f])) want[0].n = 0;
        buf_puts(&b, any ? " or " : " ");
        put_dims(&b, want[0].d, want[0].n);
        buf_printf(&b, " (%s)", formats[f].name);
        any = true;
    }
    err_t rc =
        any ? err_set(e, ERR_INPUT, "tensor %s: shape %s", t->name, b.data ? b.data : "")
            : err_set(e, ERR_UNSUPPORTED, "tensor %s: dtype: %s is no scale of %s", t->name,
                      st_dtype_name(t->dtype), st_dtype_name(p->f->part[PART_DATA]->tensor->dtype));
    buf_release(&b);
    return rc;
}

static err_t match_scale(struct spelled *w, const struct place *p, uint64_t rows, uint64_t cols,
                         struct err *e)
{
    const struct kind *data = &kinds[p->f->part[PART_DATA]->tensor->dtype];
    const struct kind *scale = &kinds[p->f->part[PART_SCALE]->tensor->dtype];
    for (int f = 0; scale->is_scale && f < FORMAT_COUNT; f++) {
        if (!takes((format_t)f, data, scale) ||
            !match_grid(&w->part[PART_SCALE], p, (format_t)f, rows, cols))
            continue;
        w->format = (format_t)f;
        return OK;
    }
    return bad_grid(e, p, data, scale, rows, cols);
}

/* The tensor scale and the input scale. */
static err_t match_scalar(struct spelled *w, const struct found *f, part_t part, struct err *e)
{
    const struct checkpoint_entry *t = f->part[part];
    if (t == NULL) return OK;
    if (!is_float(t->tensor) || !scalar(&w->part[part], f, t))
        return err_set(e, ERR_INPUT, "tensor %s: must be one number%s of F32, BF16 or F16",
                       t->tensor->name, f->fused ? ", or one an expert," : "");
    w->part[part].inverse = f->inverse[part];
    return OK;
}

err_t shape_scalar(struct source *s, const struct checkpoint_entry *t, struct err *e)
{
    static const struct found alone = {.halves = 1};
    if (is_float(t->tensor) && scalar(s, &alone, t)) return OK;
    return err_set(e, ERR_INPUT, "tensor %s: must be one number of F32, BF16 or F16",
                   t->tensor->name);
}

/* A part that the format does not have. */
static err_t stray(struct err *e, const struct found *f, part_t part, format_t format)
{
    return err_set(e, ERR_INPUT, "tensor %s: not expected: %s is %s", f->part[part]->tensor->name,
                   f->part[PART_DATA]->tensor->name, formats[format].name);
}

err_t shape_match(struct spelled *w, const struct found *f, int n_dims, uint64_t rows,
                  uint64_t cols, part_t *absent, struct err *e)
{
    struct place p = {f, false};
    err_t rc = match_data(w, &p, n_dims, rows, cols, e);
    if (rc != OK) return rc;
    if (kinds[f->part[PART_DATA]->tensor->dtype].elem == ELEM_BF16) {
        w->format = FORMAT_BF16;
        for (int part = PART_SCALE; part < PART_COUNT; part++)
            if (f->part[part]) return stray(e, f, (part_t)part, FORMAT_BF16);
        return OK;
    }
    if (f->part[PART_SCALE] == NULL) {
        *absent = PART_SCALE;
        return OK;
    }
    rc = match_scale(w, &p, rows, cols, e);
    if (rc == OK && !formats[w->format].tensor && f->part[PART_TENSOR])
        return stray(e, f, PART_TENSOR, w->format);
    if (rc == OK && formats[w->format].tensor && !f->part[PART_TENSOR]) *absent = PART_TENSOR;
    if (rc == OK) rc = match_scalar(w, f, PART_TENSOR, e);
    if (rc == OK) rc = match_scalar(w, f, PART_INPUT, e);
    return rc;
}
