/* Weights of a handle, packing, and the trtllm layouts. */
#include "backend/layout.h"
#include "base/mem.h"
#include "model/moe_api.h"
#include "model/moe_trtllm.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

_Static_assert((int)MOULT_FORMAT_MXFP4 == (int)FORMAT_MXFP4 &&
                   (int)MOULT_FORMAT_NVFP4 == (int)FORMAT_NVFP4 &&
                   (int)MOULT_ACT_NVFP4_PER_TOKEN == (int)ACT_NVFP4_PER_TOKEN &&
                   (int)MOULT_ROUTE_TOPK_SIGMOID == (int)ROUTE_TOPK_SIGMOID &&
                   (int)MOULT_PART_BIAS == (int)TRTLLM_BIAS,
               "the public numbers are those of the modules");

static const char *const names[MOE_MATRICES] = {"gate", "up", "down"};

err_t api_check_matrices(const moult_matrices *m, const char *name, struct err *e)
{
    if (m->format < 0 || m->format >= FORMAT_COUNT)
        return err_set(e, ERR_INPUT, "%s.format: %d; allowed: 0 to %d", name, m->format,
                       FORMAT_COUNT - 1);
    const struct format *f = &formats[m->format];
    if (m->data == NULL) return err_set(e, ERR_INPUT, "%s.data: NULL", name);
    if ((m->scale != NULL) != (f->scale != SCALE_NONE))
        return err_set(e, ERR_INPUT, "%s.scale: %s %s one", name, f->name,
                       m->scale ? "has not" : "needs");
    if ((m->tensor_scale != NULL) != f->tensor)
        return err_set(e, ERR_INPUT, "%s.tensor_scale: %s %s one", name, f->name,
                       m->tensor_scale ? "has not" : "needs");
    return OK;
}

/* First bad place of a matrix, into e. */
err_t api_check_values(const struct format_parts *p, struct err *e)
{
    size_t data, scale, at = 0, n = p->rows * p->cols;
    const struct format *f = &formats[p->format];
    if (!format_bytes(p->format, p->rows, p->cols, &data, &scale))
        return err_set(e, ERR_INPUT, "%zu x %zu overflow", p->rows, p->cols);
    if (!format_check_data(p->format, p->data, n, &at))
        return err_set(e, ERR_INPUT, "data[%zu][%zu] is NaN or infinite", at / p->cols,
                       at % p->cols);
    if (f->scale != SCALE_NONE &&
        !format_check_scales(p->format, p->scale, scale / (size_t)f->scale_bytes, &at))
        return err_set(e, ERR_INPUT, "scale[%zu] is NaN, negative or out of range", at);
    if (f->scale != SCALE_NONE && !format_check_zero_blocks(p, 0, p->rows, &at))
        return err_set(e, ERR_INPUT, "scale[%zu] is 2^-127 over elements that are not zero", at);
    if (f->tensor && !format_check_tensor_scale(p->tensor))
        return err_set(e, ERR_INPUT, "tensor_scale: %g", (double)p->tensor);
    return OK;
}

static void put(void *resident, const struct format_parts *p, float input)
{
    const void *parts[PART_COUNT] = {p->data, p->scale, &p->tensor, &input};
    for (int i = 0; i < PART_COUNT; i++) {
        size_t rows = layout_part_rows(p->format, (part_t)i, p->rows);
        if (rows) layout_put(resident, p->format, p->rows, p->cols, (part_t)i, 0, rows, parts[i]);
    }
}

/* Every second row from `first`; NULL without memory. */
static void *gather(const void *from, size_t first, size_t rows, size_t row_bytes)
{
    char *to = mem_try_array(rows, row_bytes);
    for (size_t r = 0; to && r < rows; r++)
        memcpy(to + r * row_bytes, (const char *)from + (2 * r + first) * row_bytes, row_bytes);
    return to;
}

err_t api_find(struct api_source *s, const struct moult_moe *m, const moult_moe_weights *w,
               int32_t x, int which, struct err *e)
{
    bool fused = w->arrangement != MOULT_GATE_AND_UP && which != MOE_DOWN;
    const moult_matrices *from = which == MOE_DOWN            ? &w->down
                                 : fused || which == MOE_GATE ? &w->gate
                                                              : &w->up;
    format_t f = (format_t)from->format;
    size_t hidden = (size_t)m->shape.hidden, inner = (size_t)m->shape.inner, i = (size_t)x;
    size_t rows = which == MOE_DOWN ? hidden : inner, cols = which == MOE_DOWN ? inner : hidden;
    size_t data, scale, stack = fused ? 2 * rows : rows,
                        index = fused ? 2 * i + (which == MOE_UP) : i;
    if (!format_bytes(f, stack, cols, &data, &scale))
        return err_set(e, ERR_INPUT, "%zu x %zu overflow", stack, cols);
    const char *d = (const char *)from->data + i * data;
    const char *c = from->scale ? (const char *)from->scale + i * scale : NULL;
    *s = (struct api_source){.p = {f, rows, cols, d, c, 1.0f},
                             .input = from->input_scale ? from->input_scale[index] : NAN};
    if (from->tensor_scale) s->p.tensor = from->tensor_scale[index];
    if (!fused) return OK;
    bool by_row = c && formats[f].group_rows > 0;
    size_t row = format_row_bytes(f, cols);
    size_t scale_row = format_scale_cols(f, cols) * (size_t)formats[f].scale_bytes;
    if (w->arrangement == MOULT_FUSED_INTERLEAVED) {
        s->gathered[0] = gather(d, which == MOE_UP, rows, row);
        s->gathered[1] = by_row ? gather(c, which == MOE_UP, rows, scale_row) : NULL;
        s->p.data = s->gathered[0];
        if (by_row) s->p.scale = s->gathered[1];
        return s->p.data && (!by_row || s->p.scale) ? OK
                                                    : err_set(e, ERR_NOMEM, "no memory for rows");
    }
    if ((which == MOE_UP) != (w->arrangement == MOULT_FUSED_UP_GATE)) { /* the second half */
        s->p.data = d + rows * row;
        if (by_row) s->p.scale = c + format_scale_rows(f, rows) * scale_row;
    }
    return OK;
}

void api_release(struct api_source *s)
{
    mem_free(s->gathered[0]);
    mem_free(s->gathered[1]);
}

struct pack_loop {
    const struct moult_moe *m;
    const moult_moe_weights *w;
    struct moe_set *s;
    struct err *errs; /* [n_local][MOE_MATRICES] */
};

static err_t pack_one(const struct pack_loop *l, int i, struct err *e)
{
    struct api_source s = {0};
    size_t bytes;
    err_t rc = api_find(&s, l->m, l->w, i / MOE_MATRICES, i % MOE_MATRICES, e);
    if (rc == OK) rc = api_check_values(&s.p, e);
    if (rc == OK && !layout_bytes(&bytes, s.p.format, s.p.rows, s.p.cols))
        rc = err_set(e, ERR_INPUT, "%zu x %zu overflow", s.p.rows, s.p.cols);
    if (rc == OK && (l->s->owned[i] = mem_try(bytes)) == NULL)
        rc = err_set(e, ERR_NOMEM, "no memory for %zu bytes", bytes);
    if (rc == OK) {
        put(l->s->owned[i], &s.p, s.input);
        l->s->matrices[i] = layout_matrix(s.p.format, s.p.rows, s.p.cols, l->s->owned[i]);
    }
    api_release(&s);
    return rc;
}

static void pack_task(void *arg, int i)
{
    const struct pack_loop *l = arg;
    (void)pack_one(l, i, &l->errs[i]);
}

static err_t pack_all(const struct moult_moe *m, const moult_moe_weights *w, struct moe_set *s,
                      struct err *e)
{
    int n = m->shape.n_local * MOE_MATRICES;
    struct pack_loop l = {m, w, s, mem_try_array((size_t)n, sizeof(struct err))};
    s->owned = mem_try_array((size_t)n, sizeof *s->owned);
    err_t rc = l.errs && s->owned ? OK : err_set(e, ERR_NOMEM, "no memory for %d matrices", n);
    if (rc == OK) pool_run(m->pool, pack_task, &l, n);
    for (int i = 0; rc == OK && i < n; i++)
        if (l.errs[i].code != OK)
            rc = err_set(e, l.errs[i].code, "expert %d, %s: %s",
                         m->shape.local_offset + i / MOE_MATRICES, names[i % MOE_MATRICES],
                         l.errs[i].msg);
    mem_free(l.errs);
    return rc;
}

static err_t take_resident(const struct moult_moe *m, const moult_moe_weights *w, struct moe_set *s,
                           struct err *e)
{
    const int32_t f[MOE_MATRICES] = {w->gate.format, w->up.format, w->down.format};
    size_t hidden = (size_t)m->shape.hidden, inner = (size_t)m->shape.inner;
    if (w->resident == NULL) return err_set(e, ERR_INPUT, "resident: NULL");
    for (int i = 0; i < m->shape.n_local * MOE_MATRICES; i++) {
        int which = i % MOE_MATRICES;
        if (f[which] < 0 || f[which] >= FORMAT_COUNT)
            return err_set(e, ERR_INPUT, "%s.format: %d; allowed: 0 to %d", names[which], f[which],
                           FORMAT_COUNT - 1);
        if (w->resident[i] == NULL) return err_set(e, ERR_INPUT, "resident[%d]: NULL", i);
        bool down = which == MOE_DOWN;
        s->matrices[i] = layout_matrix((format_t)f[which], down ? hidden : inner,
                                       down ? inner : hidden, w->resident[i]);
    }
    return OK;
}

err_t api_check_arrangement(const struct moult_moe *m, const moult_moe_weights *w, struct err *e)
{
    if (w->arrangement < 0 || w->arrangement > MOULT_RESIDENT)
        return err_set(e, ERR_INPUT, "arrangement: %d; allowed: 0 to %d", w->arrangement,
                       MOULT_RESIDENT);
    if (w->arrangement == MOULT_RESIDENT) return OK;
    bool fused = w->arrangement != MOULT_GATE_AND_UP;
    err_t rc = api_check_matrices(&w->gate, "gate", e);
    if (rc == OK && !fused) rc = api_check_matrices(&w->up, "up", e);
    if (rc == OK && fused && w->up.data)
        rc = err_set(e, ERR_INPUT, "up.data: a fused arrangement has gate and up in `gate`");
    if (rc == OK) rc = api_check_matrices(&w->down, "down", e);
    if (rc != OK || !fused) return rc;
    uint32_t group = formats[w->gate.format].group_rows;
    if (group > 1 && w->arrangement == MOULT_FUSED_INTERLEAVED)
        return err_set(e, ERR_INPUT, "gate.format: blocks of %u rows cannot be interleaved", group);
    if (group > 1 && (uint32_t)m->shape.inner % group)
        return err_set(e, ERR_INPUT,
                       "intermediate_size: %d; fused with blocks of %u rows it must be "
                       "a multiple",
                       m->shape.inner, group);
    return OK;
}

/* n floats, every step-th from `from`; NULL stays NULL. */
static bool copy(float **to, const float *from, size_t n, size_t step)
{
    *to = NULL;
    if (from == NULL) return true;
    *to = mem_try_array(n, sizeof **to);
    for (size_t i = 0; *to && i < n; i++)
        (*to)[i] = from[i * step];
    return *to != NULL;
}

/* Biases of the pair, from whichever order the rows have. */
static bool copy_pair(struct moe_set *s, const moult_moe_weights *w, size_t experts, size_t inner)
{
    size_t n = experts * inner;
    const float *from = w->gate_bias;
    if (w->arrangement == MOULT_GATE_AND_UP || w->arrangement == MOULT_RESIDENT || from == NULL)
        return copy(&s->gate_bias, from, n, 1) && copy(&s->up_bias, w->up_bias, n, 1);
    if (w->arrangement == MOULT_FUSED_INTERLEAVED)
        return copy(&s->gate_bias, from, n, 2) && copy(&s->up_bias, from + 1, n, 2);
    s->gate_bias = mem_try_array(n, sizeof(float));
    s->up_bias = mem_try_array(n, sizeof(float));
    if (!s->gate_bias || !s->up_bias) return false;
    bool up_first = w->arrangement == MOULT_FUSED_UP_GATE;
    float *first = up_first ? s->up_bias : s->gate_bias;
    float *second = up_first ? s->gate_bias : s->up_bias;
    for (size_t x = 0; x < experts; x++) {
        memcpy(first + x * inner, from + 2 * x * inner, inner * sizeof *first);
        memcpy(second + x * inner, from + (2 * x + 1) * inner, inner * sizeof *first);
    }
    return true;
}

err_t api_copy_vectors(const struct moult_moe *m, const moult_moe_weights *w, struct moe_set *s,
                       struct err *e)
{
    size_t n = (size_t)m->shape.n_local, hidden = (size_t)m->shape.hidden;
    if (w->up_bias && w->arrangement != MOULT_GATE_AND_UP && w->arrangement != MOULT_RESIDENT)
        return err_set(e, ERR_INPUT, "up_bias: a fused arrangement has both in gate_bias");
    if (!copy_pair(s, w, n, (size_t)m->shape.inner) ||
        !copy(&s->down_bias, w->down_bias, n * hidden, 1) || !copy(&s->alpha, w->alpha, n, 1) ||
        !copy(&s->beta, w->beta, n, 1) || !copy(&s->limit, w->limit, n, 1))
        return err_set(e, ERR_NOMEM, "no memory for biases");
    s->view = (struct moe_weights){.experts = s->matrices,
                                   .gate_bias = s->gate_bias,
                                   .up_bias = s->up_bias,
                                   .down_bias = s->down_bias,
                                   .alpha = s->alpha,
                                   .beta = s->beta,
                                   .limit = s->limit,
                                   .input_in = w->input_scale_in,
                                   .input_down = w->input_scale_down};
    return OK;
}

void api_set_free(const struct moult_moe *m, struct moe_set *s)
{
    if (s == NULL) return;
    for (int i = 0; s->owned && i < m->shape.n_local * MOE_MATRICES; i++)
        mem_free(s->owned[i]);
    void *all[] = {s->owned, s->matrices, s->gate_bias, s->up_bias, s->down_bias,
                   s->alpha, s->beta,     s->limit,     s};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        mem_free(all[i]);
}

static err_t make_set(struct moe_set *s, const struct moult_moe *m, const moult_moe_weights *w,
                      struct err *e)
{
    err_t rc = api_device(m, w->device, w->stream, e);
    if (rc == OK) rc = api_check_arrangement(m, w, e);
    if (rc != OK) return rc;
    s->matrices = mem_try_array((size_t)m->shape.n_local * MOE_MATRICES, sizeof *s->matrices);
    if (s->matrices == NULL) return err_set(e, ERR_NOMEM, "no memory for the matrices");
    rc = w->arrangement == MOULT_RESIDENT ? take_resident(m, w, s, e) : pack_all(m, w, s, e);
    if (rc == OK) rc = api_copy_vectors(m, w, s, e);
    return rc == OK ? moe_op_check_inputs(m->op, &s->view, e) : rc;
}

int32_t moult_moe_set_weights(moult_moe *m, const moult_moe_weights *weights, moult_error *err)
{
    struct err e = {0};
    moult_moe_weights w;
    if (m == NULL) return api_return(err, err_set(&e, ERR_INPUT, "moe: NULL"), &e);
    err_t rc = api_read(&w, sizeof w, offsetof(moult_moe_weights, gate_bias), weights, &e);
    if (rc != OK) return api_return(err, rc, &e);
    if (m->gpu) return api_return(err, gpu_set_weights(m, &w, &e), &e);
    struct moe_set *s = mem_alloc(sizeof *s);
    rc = make_set(s, m, &w, &e);
    if (rc == OK) {
        api_set_free(m, m->set);
        m->set = s;
    } else {
        api_set_free(m, s);
    }
    return api_return(err, rc, &e);
}

/* Packing */

static err_t check_size(int32_t format, int64_t rows, int64_t cols, size_t *bytes, struct err *e)
{
    size_t data, scale;
    if (format < 0 || format >= FORMAT_COUNT)
        return err_set(e, ERR_INPUT, "format: %d; allowed: 0 to %d", format, FORMAT_COUNT - 1);
    if (rows < 1 || cols < 1 || rows > INT32_MAX || cols > INT32_MAX ||
        !format_bytes((format_t)format, (uint64_t)rows, (uint64_t)cols, &data, &scale) ||
        !layout_bytes(bytes, (format_t)format, (uint64_t)rows, (uint64_t)cols))
        return err_set(e, ERR_INPUT, "rows %lld, cols %lld: must be positive and fit memory",
                       (long long)rows, (long long)cols);
    return OK;
}

int32_t moult_resident_bytes(size_t *out, int32_t format, int64_t rows, int64_t cols,
                             moult_error *err)
{
    struct err e = {0};
    size_t bytes;
    err_t rc = check_size(format, rows, cols, &bytes, &e);
    if (rc == OK && out == NULL) rc = err_set(&e, ERR_INPUT, "out: NULL");
    if (rc == OK) *out = bytes;
    return api_return(err, rc, &e);
}

int32_t moult_pack(void *resident, const moult_matrices *m, int64_t rows, int64_t cols,
                   moult_error *err)
{
    struct err e = {0};
    size_t bytes;
    err_t rc = resident && m ? api_check_matrices(m, "matrix", &e)
                             : err_set(&e, ERR_INPUT, "%s: NULL", m ? "resident" : "matrix");
    if (rc == OK) rc = check_size(m->format, rows, cols, &bytes, &e);
    if (rc != OK) return api_return(err, rc, &e);
    struct format_parts p = {(format_t)m->format,
                             (size_t)rows,
                             (size_t)cols,
                             m->data,
                             m->scale,
                             m->tensor_scale ? *m->tensor_scale : 1.0f};
    rc = api_check_values(&p, &e);
    if (rc == OK) {
        memset(resident, 0, bytes);
        put(resident, &p, m->input_scale ? *m->input_scale : NAN);
    }
    return api_return(err, rc, &e);
}

int32_t moult_unpack(const moult_matrix_out *out, int32_t format, int64_t rows, int64_t cols,
                     const void *resident, moult_error *err)
{
    struct err e = {0};
    size_t bytes;
    err_t rc = check_size(format, rows, cols, &bytes, &e);
    if (rc == OK && (!out || !resident)) rc = err_set(&e, ERR_INPUT, "out, resident: NULL");
    if (rc != OK) return api_return(err, rc, &e);
    void *parts[PART_COUNT] = {out->data, out->scale, out->tensor_scale, out->input_scale};
    for (int i = 0; i < PART_COUNT; i++) {
        size_t n = layout_part_rows((format_t)format, (part_t)i, (size_t)rows);
        if (n && parts[i])
            layout_get(parts[i], (format_t)format, (size_t)rows, (size_t)cols, (part_t)i, 0, n,
                       resident);
    }
    return MOULT_OK;
}

/* trtllm */

static err_t read_trtllm(struct trtllm *out, size_t *bytes, const moult_trtllm *from, struct err *e)
{
    moult_trtllm t;
    err_t rc = api_read(&t, sizeof t, offsetof(moult_trtllm, block_major), from, e);
    if (rc != OK) return rc;
    if (t.format < 0 || t.format >= FORMAT_COUNT)
        return err_set(e, ERR_INPUT, "format: %d; allowed: 0 to %d", t.format, FORMAT_COUNT - 1);
    if (t.matrix != MOULT_TRTLLM_W13 && t.matrix != MOULT_TRTLLM_W2)
        return err_set(e, ERR_INPUT, "matrix: %d; allowed: 0 (w13), 1 (w2)", t.matrix);
    if (t.part < 0 || t.part > MOULT_PART_BIAS)
        return err_set(e, ERR_INPUT, "part: %d; allowed: 0 to %d", t.part, MOULT_PART_BIAS);
    *out = (struct trtllm){.format = (format_t)t.format,
                           .w13 = t.matrix == MOULT_TRTLLM_W13,
                           .part = (trtllm_part_t)t.part,
                           .rows = t.rows > 0 ? (size_t)t.rows : 0,
                           .cols = t.cols > 0 ? (size_t)t.cols : 0,
                           .block_major = t.block_major != 0};
    return trtllm_check(bytes, out, e);
}

static err_t read_pair(struct trtllm *t, const moult_trtllm *from, const void *gate, const void *up,
                       const void *stored, struct err *e)
{
    size_t bytes;
    err_t rc = read_trtllm(t, &bytes, from, e);
    if (rc == OK && (!gate || !stored || t->w13 != (up != NULL)))
        rc = err_set(e, ERR_INPUT, "gate, stored, up: w13 needs all three, w2 all but up");
    return rc;
}

int32_t moult_trtllm_bytes(size_t *out, const moult_trtllm *from, moult_error *err)
{
    struct err e = {0};
    struct trtllm t;
    size_t bytes;
    err_t rc = read_trtllm(&t, &bytes, from, &e);
    if (rc == OK && out == NULL) rc = err_set(&e, ERR_INPUT, "out: NULL");
    if (rc == OK) *out = bytes;
    return api_return(err, rc, &e);
}

int32_t moult_trtllm_export(void *stored, const moult_trtllm *from, const void *gate,
                            const void *up, moult_error *err)
{
    struct err e = {0};
    struct trtllm t;
    err_t rc = read_pair(&t, from, gate, up, stored, &e);
    if (rc == OK) trtllm_export(stored, &t, gate, up);
    return api_return(err, rc, &e);
}

int32_t moult_trtllm_import(void *gate, void *up, const moult_trtllm *from, const void *stored,
                            moult_error *err)
{
    struct err e = {0};
    struct trtllm t;
    err_t rc = read_pair(&t, from, gate, up, stored, &e);
    if (rc == OK) trtllm_import(gate, up, &t, stored);
    return api_return(err, rc, &e);
}
