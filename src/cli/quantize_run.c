#include "cli/quantize_run.h"

#include "base/mem.h"
#include <math.h>
#include <pthread.h>
#include <string.h>

#define BATCH_BYTES ((uint64_t)256 << 20)
#define GROUP_ROWS  128 /* of every format's row groups a multiple */
#define JOB_ELEMS   ((size_t)4 << 20)
#define PIECE_ELEMS ((size_t)1 << 18) /* f32 values that a job holds at once, about */

struct job {
    size_t weight, row0, n;
    float amax;
};

struct run {
    const struct quantize_plan *p;
    struct st_writer *w;
    const struct quantize_progress *progress;
    struct job *jobs;
    size_t n_jobs, cap_jobs;
    float *amax;          /* [n_weights], of the first weight that shares it */
    pthread_mutex_t lock; /* of what follows */
    size_t failed;        /* the first job that failed, SIZE_MAX: none */
    struct err err;
    uint64_t done, total; /* bytes of canonical data of the source */
};

/* Buffers of one job. */
struct piece {
    size_t rows;           /* at most */
    float *x;              /* [rows][cols] */
    uint8_t *data, *scale; /* source parts, then encoded parts */
    struct source_scratch scratch;
};

static size_t rows_of(size_t elems, size_t cols)
{
    size_t n = elems / (cols ? cols : 1) / GROUP_ROWS * GROUP_ROWS;
    return n ? n : GROUP_ROWS;
}

static size_t larger(size_t a, size_t b)
{
    return a > b ? a : b;
}

static void piece_free(struct piece *b)
{
    mem_free(b->x);
    mem_free(b->data);
    mem_free(b->scale);
    source_scratch_free(&b->scratch);
}

static err_t piece_make(struct piece *b, const struct quantize_weight *w, struct err *e)
{
    size_t data[2], scale[2];
    *b = (struct piece){.rows = rows_of(PIECE_ELEMS, w->cols)};
    if (b->rows > w->rows) b->rows = w->rows;
    bool ok = format_bytes(w->src.format, b->rows, w->cols, &data[0], &scale[0]) &&
              format_bytes(w->to, b->rows, w->cols, &data[1], &scale[1]);
    if (ok) {
        b->x = mem_try_array(b->rows * w->cols, sizeof *b->x);
        b->data = mem_try(larger(data[0], data[1]));
        b->scale = mem_try(larger(larger(scale[0], scale[1]), 4));
    }
    if (b->x && b->data && b->scale) return OK;
    piece_free(b);
    return err_set(e, ERR_NOMEM, "%s: no memory for %zu rows", w->module, b->rows);
}

static err_t read_scalar(float *out, const struct source *s, struct err *e)
{
    struct source_scratch scratch = {0};
    err_t rc = source_read(s, 0, 1, out, &scratch, e);
    source_scratch_free(&scratch);
    return rc;
}

/* Rows of the scale grid that rows [row0, row0 + n) have, and the first of them. */
static size_t scale_span(format_t f, size_t row0, size_t n, size_t *first)
{
    *first = formats[f].group_rows ? row0 / formats[f].group_rows : 0;
    return format_scale_rows(f, n);
}

/* Rows of the source as f32. */
static err_t read_rows(struct piece *b, const struct quantize_weight *w, size_t row0, size_t n,
                       struct err *e)
{
    const struct spelled *s = &w->src;
    size_t first, scale_rows = scale_span(s->format, row0, n, &first);
    struct format_parts p = {s->format, n, w->cols, b->data, b->scale, 1.0f};
    err_t rc = source_read(&s->part[PART_DATA], row0, n, b->data, &b->scratch, e);
    if (rc == OK && scale_rows)
        rc = source_read(&s->part[PART_SCALE], first, scale_rows, b->scale, &b->scratch, e);
    if (rc == OK && s->part[PART_TENSOR].tensor)
        rc = read_scalar(&p.tensor, &s->part[PART_TENSOR], e);
    for (size_t i = 0; rc == OK && i < n; i++)
        format_decode_row(b->x + i * w->cols, &p, i);
    return rc;
}

/* ---- jobs ---- */

static void fail(struct run *r, size_t job, const struct err *e)
{
    pthread_mutex_lock(&r->lock);
    if (job < r->failed) {
        r->failed = job;
        r->err = *e;
    }
    pthread_mutex_unlock(&r->lock);
}

/* false: an earlier job has failed, or the user gave up. */
static bool go_on(struct run *r, size_t job)
{
    struct err e = {0};
    if (r->progress->stop && r->progress->stop(r->progress->ctx)) {
        (void)err_set(&e, ERR_STATE, "interrupted");
        fail(r, job, &e);
    }
    pthread_mutex_lock(&r->lock);
    bool ok = r->failed > job;
    pthread_mutex_unlock(&r->lock);
    return ok;
}

static void report(struct run *r, uint64_t bytes)
{
    pthread_mutex_lock(&r->lock);
    r->done += bytes;
    if (r->progress->report) r->progress->report(r->progress->ctx, r->done, r->total);
    pthread_mutex_unlock(&r->lock);
}

static err_t check_finite(const struct quantize_weight *w, const float *x, size_t row0, size_t n,
                          struct err *e)
{
    for (size_t i = 0; i < n; i++)
        if (!isfinite(encode_amax(0.0f, x + i * w->cols, w->cols)))
            return err_set(e, ERR_INPUT, "%s: row %zu holds a value that is not finite", w->module,
                           row0 + i);
    return OK;
}

static err_t job_amax(const struct quantize_weight *w, struct job *j, struct err *e)
{
    struct piece b;
    err_t rc = piece_make(&b, w, e);
    if (rc != OK) return rc;
    j->amax = 0.0f;
    for (size_t r = 0; r < j->n && rc == OK; r += b.rows) {
        size_t n = j->n - r < b.rows ? j->n - r : b.rows;
        rc = read_rows(&b, w, j->row0 + r, n, e);
        if (rc == OK) rc = check_finite(w, b.x, j->row0 + r, n, e);
        if (rc == OK) j->amax = encode_amax(j->amax, b.x, n * w->cols);
    }
    piece_free(&b);
    return rc;
}

static err_t put_scale(const struct run *r, const struct quantize_weight *w, uint8_t *scale,
                       size_t first, size_t rows, struct err *e)
{
    size_t n = rows * format_scale_cols(w->to, w->cols), at, out = w->out[PART_SCALE];
    size_t bytes = (size_t)formats[w->to].scale_bytes;
    if (!format_check_scales(w->to, scale, n, &at))
        return err_set(e, ERR_INPUT, "%s: values too large or too small for %s (scale %zu)",
                       w->module, formats[w->to].name, at);
    if (r->p->outs[out].dtype == ST_BF16) {
        for (size_t i = 0; i < n; i++) {
            float s;
            memcpy(&s, scale + 4 * i, sizeof s);
            uint16_t h = format_to_bf16(s);
            memcpy(scale + 2 * i, &h, sizeof h);
        }
        bytes = 2;
    }
    return st_writer_put(r->w, out, first * format_scale_cols(w->to, w->cols) * bytes, scale,
                         n * bytes, e);
}

static err_t encode_piece(const struct run *r, const struct encode *enc, struct piece *b,
                          const struct quantize_weight *w, size_t row0, size_t n, struct err *e)
{
    err_t rc = read_rows(b, w, row0, n, e);
    if (rc == OK) rc = check_finite(w, b->x, row0, n, e);
    if (rc != OK) return rc;
    encode_rows(enc, b->x, row0, n, b->data, b->scale);
    size_t row_bytes = format_row_bytes(w->to, w->cols), first;
    rc = st_writer_put(r->w, w->out[PART_DATA], row0 * row_bytes, b->data, n * row_bytes, e);
    size_t scale_rows = scale_span(w->to, row0, n, &first);
    bool one = formats[w->to].group_rows == 0; /* written with row 0 */
    if (rc == OK && scale_rows && (!one || row0 == 0))
        rc = put_scale(r, w, b->scale, first, scale_rows, e);
    return rc;
}

static err_t job_encode(const struct run *r, const struct quantize_weight *w, const struct job *j,
                        struct err *e)
{
    struct piece b;
    struct encode enc;
    const struct encode_rule *rule =
        w->to == FORMAT_BF16 ? encode_rule_find(FORMAT_BF16, NULL) : r->p->rule;
    err_t rc = piece_make(&b, w, e);
    if (rc != OK) return rc;
    encode_init(&enc, w->to, rule, w->rows, w->cols, r->amax[w->share]);
    for (size_t i = 0; i < j->n && rc == OK; i += b.rows) {
        size_t n = j->n - i < b.rows ? j->n - i : b.rows;
        rc = encode_piece(r, &enc, &b, w, j->row0 + i, n, e);
    }
    piece_free(&b);
    float tensor = r->p->spell->inverse ? enc.inverse : enc.tensor;
    if (rc == OK && j->row0 == 0 && w->out[PART_TENSOR] != SIZE_MAX)
        rc = st_writer_put(r->w, w->out[PART_TENSOR], 0, &tensor, sizeof tensor, e);
    return rc;
}

/* Canonical rows as they are: data and scales of the range. */
static err_t job_copy(const struct run *r, const struct quantize_weight *w, const struct job *j,
                      struct err *e)
{
    struct piece b;
    err_t rc = piece_make(&b, w, e);
    if (rc != OK) return rc;
    size_t row_bytes = format_row_bytes(w->to, w->cols), first;
    for (size_t i = 0; i < j->n && rc == OK; i += b.rows) {
        size_t n = j->n - i < b.rows ? j->n - i : b.rows, row0 = j->row0 + i;
        rc = source_read(&w->src.part[PART_DATA], row0, n, b.data, &b.scratch, e);
        if (rc == OK)
            rc = st_writer_put(r->w, w->out[PART_DATA], row0 * row_bytes, b.data, n * row_bytes, e);
        size_t rows = scale_span(w->to, row0, n, &first);
        if (rows == 0 || (formats[w->to].group_rows == 0 && row0 > 0)) continue;
        if (rc == OK)
            rc = source_read(&w->src.part[PART_SCALE], first, rows, b.scale, &b.scratch, e);
        if (rc == OK) rc = put_scale(r, w, b.scale, first, rows, e);
    }
    piece_free(&b);
    float tensor;
    if (rc != OK || j->row0 > 0 || w->out[PART_TENSOR] == SIZE_MAX) return rc;
    rc = read_scalar(&tensor, &w->src.part[PART_TENSOR], e);
    if (r->p->spell->inverse) tensor = 1.0f / tensor;
    return rc == OK ? st_writer_put(r->w, w->out[PART_TENSOR], 0, &tensor, sizeof tensor, e) : rc;
}

static bool needs_amax(const struct quantize_weight *w)
{
    return !w->copy && format_needs_amax(&formats[w->to]);
}

static uint64_t job_bytes(const struct quantize_weight *w, const struct job *j)
{
    return (uint64_t)j->n * format_row_bytes(w->src.format, w->cols);
}

static void run_amax(void *arg, int i)
{
    struct run *r = arg;
    struct job *j = &r->jobs[i];
    const struct quantize_weight *w = &r->p->weights[j->weight];
    struct err e = {0};
    if (!needs_amax(w) || !go_on(r, (size_t)i)) return;
    if (job_amax(w, j, &e) != OK) fail(r, (size_t)i, &e);
}

static void run_write(void *arg, int i)
{
    struct run *r = arg;
    const struct job *j = &r->jobs[i];
    const struct quantize_weight *w = &r->p->weights[j->weight];
    struct err e = {0};
    if (!go_on(r, (size_t)i)) return;
    err_t rc = w->copy ? job_copy(r, w, j, &e) : job_encode(r, w, j, &e);
    if (rc != OK) fail(r, (size_t)i, &e);
    report(r, job_bytes(w, j));
}

/* ---- batches ---- */

static err_t add_jobs(struct run *r, size_t weight, struct err *e)
{
    const struct quantize_weight *w = &r->p->weights[weight];
    size_t step = rows_of(JOB_ELEMS, w->cols);
    for (size_t row = 0; row < w->rows; row += step) {
        if (r->n_jobs == r->cap_jobs) {
            size_t cap = r->cap_jobs ? 2 * r->cap_jobs : 1024;
            struct job *v = mem_retry(r->jobs, r->cap_jobs * sizeof *v, cap * sizeof *v);
            if (v == NULL) return err_set(e, ERR_NOMEM, "no memory for %zu jobs", cap);
            r->jobs = v;
            r->cap_jobs = cap;
        }
        size_t n = w->rows - row < step ? w->rows - row : step;
        r->jobs[r->n_jobs++] = (struct job){weight, row, n, 0.0f};
    }
    return OK;
}

/* Scalars that are neither encoded nor ranges of rows. */
static err_t put_inputs(const struct run *r, size_t from, size_t to, struct err *e)
{
    err_t rc = OK;
    for (size_t i = from; i < to && rc == OK; i++) {
        const struct quantize_weight *w = &r->p->weights[i];
        float x = 1.0f;
        if (w->out[PART_INPUT] == SIZE_MAX) continue;
        if (!r->p->spell->unit_input) rc = read_scalar(&x, &w->src.part[PART_INPUT], e);
        if (r->p->spell->inverse) x = 1.0f / x;
        if (rc == OK) rc = st_writer_put(r->w, w->out[PART_INPUT], 0, &x, sizeof x, e);
    }
    return rc;
}

static err_t run_batch(struct run *r, struct pool *pool, size_t from, size_t to, struct err *e)
{
    r->n_jobs = 0;
    for (size_t i = from; i < to; i++) {
        err_t rc = add_jobs(r, i, e);
        if (rc != OK) return rc;
    }
    pool_run(pool, run_amax, r, (int)r->n_jobs);
    for (size_t i = 0; i < r->n_jobs; i++) {
        float *a = &r->amax[r->p->weights[r->jobs[i].weight].share];
        *a = encode_amax(*a, &r->jobs[i].amax, 1);
    }
    if (r->failed == SIZE_MAX) pool_run(pool, run_write, r, (int)r->n_jobs);
    if (r->failed != SIZE_MAX) {
        if (e) *e = r->err;
        return r->err.code;
    }
    return put_inputs(r, from, to, e);
}

static err_t run_kv(const struct run *r, struct err *e)
{
    err_t rc = OK;
    for (size_t i = 0; i < r->p->n_kv && rc == OK; i++) {
        float x;
        rc = read_scalar(&x, &r->p->kv[i].src, e);
        if (rc == OK) rc = st_writer_put(r->w, r->p->kv[i].out, 0, &x, sizeof x, e);
    }
    return rc;
}

err_t quantize_run(const struct quantize_plan *p, struct st_writer *w, struct pool *pool,
                   const struct quantize_progress *progress, struct err *e)
{
    struct run r = {.p = p,
                    .w = w,
                    .progress = progress,
                    .lock = PTHREAD_MUTEX_INITIALIZER,
                    .failed = SIZE_MAX,
                    .amax = mem_try_array(p->n_weights, sizeof(float))};
    err_t rc = r.amax ? OK : err_set(e, ERR_NOMEM, "no memory for %zu weights", p->n_weights);
    for (size_t i = 0; i < p->n_weights; i++)
        r.total += job_bytes(&p->weights[i], &(struct job){.n = p->weights[i].rows});
    for (size_t i = 0, end; i < p->n_weights && rc == OK; i = end) {
        uint64_t bytes = 0;
        /* A batch ends where nothing is shared across its end. */
        for (end = i; end < p->n_weights && (bytes < BATCH_BYTES || p->weights[end].share < end);
             end++)
            bytes += source_bytes(&p->weights[end].src.part[PART_DATA]);
        rc = run_batch(&r, pool, i, end, e);
    }
    if (rc == OK) rc = run_kv(&r, e);
    mem_free(r.jobs);
    mem_free(r.amax);
    return rc;
}
