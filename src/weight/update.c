#include "weight/update.h"

#include "base/buf.h"
#include "base/mem.h"
#include "weight/cast.h"
#include "weight/checkpoint.h"
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHUNK_BYTES ((size_t)4 << 20)
#define MAX_NAMED   8
#define MAX_THREADS 64

struct update {
    struct store *store;
    void *next, *former;
    bool *staged; /* per slot */
    enum { OPEN, PREPARED, COMMITTED } state;
    bool broken;          /* a stage failed half-way: its slots hold anything */
    pthread_mutex_t lock; /* of bad_* */
    size_t bad_slot;      /* lowest slot with a value that is not finite; SIZE_MAX: none */
    uint64_t bad_at;      /* its first such element */
};

err_t update_begin(struct update **out, struct store *s, struct err *e)
{
    if (!store_claim(s)) return err_set(e, ERR_STATE, "another weight update is in progress");
    struct update *u = mem_try(sizeof *u);
    bool *staged = mem_try(store_slots(s));
    void *next = u && staged ? store_arena_new(s) : NULL;
    if (next == NULL) {
        mem_free(staged);
        mem_free(u);
        store_unclaim(s);
        return err_set(e, ERR_NOMEM, "no memory for a second generation of weights (%zu bytes)",
                       store_bytes(s));
    }
    u->store = s;
    u->next = next;
    u->staged = staged;
    u->bad_slot = SIZE_MAX;
    pthread_mutex_init(&u->lock, NULL);
    *out = u;
    return OK;
}

static void note_not_finite(struct update *u, size_t slot, uint64_t at)
{
    pthread_mutex_lock(&u->lock);
    if (slot < u->bad_slot || (slot == u->bad_slot && at < u->bad_at)) {
        u->bad_slot = slot;
        u->bad_at = at;
    }
    pthread_mutex_unlock(&u->lock);
}

/* Rows [row0, row0 + n) of the tensor whose first slot is `slot`, into every slot of that name. */
static void put_rows(struct update *u, size_t slot, const uint16_t *rows, size_t row0, size_t n)
{
    size_t cols = (size_t)store_spec(u->store, slot)->shape.cols, len = n * cols;
    unsigned bad = 0;
    for (size_t i = 0; i < len; i++)
        bad |= !cast_bf16_finite(rows[i]);
    for (size_t i = 0; bad && i < len; i++) {
        if (cast_bf16_finite(rows[i])) continue;
        note_not_finite(u, slot, row0 * cols + i);
        break;
    }
    for (; slot != SIZE_MAX; slot = store_find_next(u->store, slot))
        store_put(u->store, u->next, slot, PART_DATA, row0, n, rows);
}

static void mark_staged(struct update *u, size_t slot)
{
    for (; slot != SIZE_MAX; slot = store_find_next(u->store, slot))
        u->staged[slot] = true;
}

static err_t check_open(const struct update *u, struct err *e)
{
    if (u->state == OPEN && !u->broken) return OK;
    return err_set(e, ERR_STATE,
                   u->broken ? "this weight update has failed"
                             : "this weight update takes no more tensors");
}

static err_t check_shape(const struct slot_spec *p, int n_dims, uint64_t rows, uint64_t cols,
                         struct err *e)
{
    if (n_dims == p->n_dims && rows == p->shape.rows && cols == p->shape.cols) return OK;
    char want[64];
    if (p->n_dims == 1)
        snprintf(want, sizeof want, "[%llu]", (unsigned long long)p->shape.cols);
    else
        snprintf(want, sizeof want, "[%llu, %llu]", (unsigned long long)p->shape.rows,
                 (unsigned long long)p->shape.cols);
    if (n_dims == 1)
        return err_set(e, ERR_INPUT, "tensor %s: shape [%llu], the model needs %s", p->name,
                       (unsigned long long)cols, want);
    if (n_dims == 2)
        return err_set(e, ERR_INPUT, "tensor %s: shape [%llu, %llu], the model needs %s", p->name,
                       (unsigned long long)rows, (unsigned long long)cols, want);
    return err_set(e, ERR_INPUT, "tensor %s: %d dimensions, the model needs %s", p->name, n_dims,
                   want);
}

err_t update_stage(struct update *u, const char *name, const uint16_t *bf16, uint64_t rows,
                   uint64_t cols, struct err *e)
{
    err_t rc = check_open(u, e);
    if (rc != OK) return rc;
    size_t slot = store_find(u->store, name);
    if (slot == SIZE_MAX) return err_set(e, ERR_INPUT, "tensor %.200s: unknown to the model", name);
    const struct slot_spec *p = store_spec(u->store, slot);
    rc = check_shape(p, p->n_dims == 1 && rows == 1 ? 1 : 2, rows, cols, e);
    if (rc != OK) return rc;
    if (u->staged[slot]) return err_set(e, ERR_INPUT, "tensor %s: given twice in one update", name);
    put_rows(u, slot, bf16, 0, (size_t)rows);
    mark_staged(u, slot);
    return OK;
}

/* Tensors that say nothing the model needs: rotary tables (recomputed), and the head of a tied
 * model, which is the embedding whatever the file holds (as transformers reads it). */
static bool ignored(const struct store *s, const char *name)
{
    static const char rotary[] = "rotary_emb.inv_freq";
    size_t n = strlen(name), k = sizeof rotary - 1;
    if (n >= k && strcmp(name + n - k, rotary) == 0) return true;
    if (strcmp(name, "lm_head.weight") != 0) return false;
    size_t embed = store_find(s, "model.embed_tokens.weight");
    return embed != SIZE_MAX && store_find_next(s, embed) != SIZE_MAX;
}

static size_t elem_bytes(st_dtype_t d)
{
    return d == ST_BF16 || d == ST_F16 ? 2 : d == ST_F32 ? 4 : 0;
}

/* One tensor to be read. */
struct job {
    const struct st_file *file;
    const struct st_tensor *tensor;
    size_t slot; /* the first of its name */
};

struct load {
    struct update *u;
    struct update_progress *progress;
    struct job *jobs;
    size_t n;
    atomic_size_t next;
    atomic_bool stop;
    pthread_mutex_t lock; /* of rc and error */
    err_t rc;
    struct err error;
};

static err_t job_check(struct load *l, const struct checkpoint_entry *c, struct err *e)
{
    const struct st_tensor *t = c->tensor;
    size_t slot = store_find(l->u->store, t->name);
    if (slot == SIZE_MAX) {
        if (ignored(l->u->store, t->name)) return OK;
        return err_set(e, ERR_INPUT, "tensor %s: unknown to the model (in %s)", t->name,
                       c->file->path);
    }
    if (elem_bytes(t->dtype) == 0)
        return err_set(e, ERR_UNSUPPORTED, "tensor %s: dtype: %s is not BF16, F16 or F32", t->name,
                       st_dtype_name(t->dtype));
    err_t rc = check_shape(store_spec(l->u->store, slot), t->n_dims,
                           t->n_dims == 2 ? t->shape[0] : 1, t->shape[t->n_dims == 2], e);
    if (rc != OK) return rc;
    if (l->u->staged[slot])
        return err_set(e, ERR_INPUT, "tensor %s: given twice in one update", t->name);
    l->jobs[l->n++] = (struct job){c->file, t, slot};
    return OK;
}

/* In file order, so that the disk reads forward. */
static int by_place(const void *a, const void *b)
{
    const struct job *x = a, *y = b;
    if (x->file != y->file) return x->file < y->file ? -1 : 1;
    return (x->tensor->offset > y->tensor->offset) - (x->tensor->offset < y->tensor->offset);
}

static err_t load_plan(struct load *l, const struct checkpoint *c, struct err *e)
{
    l->jobs = mem_try_array(c->n_tensors, sizeof l->jobs[0]);
    if (l->jobs == NULL) return err_set(e, ERR_NOMEM, "no memory to plan the loading");
    uint64_t total = 0;
    for (size_t i = 0; i < c->n_tensors; i++) {
        err_t rc = job_check(l, &c->entries[i], e);
        if (rc != OK) return rc;
    }
    for (size_t i = 0; i < l->n; i++)
        total += l->jobs[i].tensor->bytes;
    if (l->n) qsort(l->jobs, l->n, sizeof l->jobs[0], by_place);
    if (l->progress) {
        atomic_store(&l->progress->bytes_done, 0);
        atomic_store(&l->progress->bytes_total, total);
    }
    return OK;
}

/* To BF16 in place; BF16 itself is left as it is. */
static void to_bf16(void *data, st_dtype_t dtype, size_t n)
{
    uint16_t *to = data;
    const char *from = data;
    if (dtype == ST_F16)
        for (size_t i = 0; i < n; i++)
            to[i] = cast_f16_bits(to[i]);
    if (dtype == ST_F32)
        for (size_t i = 0; i < n; i++) {
            uint32_t u;
            memcpy(&u, from + i * sizeof u, sizeof u);
            uint16_t b = cast_f32_bits(u);
            memcpy((char *)data + i * sizeof b, &b, sizeof b);
        }
}

static err_t job_run(struct load *l, const struct job *j, void **buf, size_t *cap, struct err *e)
{
    const struct slot_spec *p = store_spec(l->u->store, j->slot);
    size_t row_bytes, rows = (size_t)p->shape.rows, cols = (size_t)p->shape.cols, step;
    if (!mul_size(&row_bytes, cols, elem_bytes(j->tensor->dtype)))
        return err_set(e, ERR_TOOBIG, "tensor %s: a row does not fit in memory", p->name);
    step = row_bytes && row_bytes < CHUNK_BYTES ? CHUNK_BYTES / row_bytes : 1;
    if (step > rows) step = rows;
    if (step * row_bytes > *cap) {
        mem_free(*buf);
        *cap = 0;
        *buf = mem_try(step * row_bytes);
        if (*buf == NULL) return err_set(e, ERR_NOMEM, "tensor %s: no memory to read it", p->name);
        *cap = step * row_bytes;
    }
    for (size_t r = 0; r < rows; r += step) {
        if (atomic_load(&l->stop)) return OK;
        size_t n = rows - r < step ? rows - r : step;
        err_t rc = st_read(j->file, j->tensor, (uint64_t)r * row_bytes, *buf, n * row_bytes, e);
        if (rc != OK) return rc;
        to_bf16(*buf, j->tensor->dtype, n * cols);
        put_rows(l->u, j->slot, *buf, r, n);
        if (l->progress) atomic_fetch_add(&l->progress->bytes_done, n * row_bytes);
    }
    mark_staged(l->u, j->slot);
    return OK;
}

/* A loader thread: the first error stops all. */
static void *load_thread(void *arg)
{
    struct load *l = arg;
    void *buf = NULL;
    size_t cap = 0, i;
    while (!atomic_load(&l->stop) && (i = atomic_fetch_add(&l->next, 1)) < l->n) {
        struct err e = {0};
        err_t rc = job_run(l, &l->jobs[i], &buf, &cap, &e);
        if (rc == OK) continue;
        pthread_mutex_lock(&l->lock);
        if (l->rc == OK) {
            l->rc = rc;
            l->error = e;
        }
        pthread_mutex_unlock(&l->lock);
        atomic_store(&l->stop, true);
    }
    mem_free(buf);
    return NULL;
}

static err_t load_run(struct load *l, int n_threads, struct err *e)
{
    pthread_t threads[MAX_THREADS];
    int n = 0, want = n_threads < MAX_THREADS ? n_threads : MAX_THREADS;
    pthread_mutex_init(&l->lock, NULL);
    while (n < want - 1 && pthread_create(&threads[n], NULL, load_thread, l) == 0)
        n++;
    load_thread(l);
    for (int i = 0; i < n; i++)
        pthread_join(threads[i], NULL);
    pthread_mutex_destroy(&l->lock);
    if (l->rc == OK) return OK;
    l->u->broken = true;
    return err_set(e, l->rc, "%s", l->error.msg);
}

err_t update_stage_dir(struct update *u, const char *dir, int n_threads,
                       struct update_progress *progress, struct err *e)
{
    struct checkpoint c;
    struct load l = {.u = u, .progress = progress};
    err_t rc = check_open(u, e);
    if (rc == OK) rc = checkpoint_open(&c, dir, e);
    if (rc != OK) return rc;
    rc = load_plan(&l, &c, e);
    if (rc == OK) rc = load_run(&l, n_threads, e);
    mem_free(l.jobs);
    checkpoint_close(&c);
    return rc;
}

static err_t check_complete(const struct update *u, struct err *e)
{
    struct buf b = {0};
    size_t missing = 0;
    for (size_t i = 0; i < store_slots(u->store); i++) {
        const char *name = store_spec(u->store, i)->name;
        if (u->staged[i] || store_find(u->store, name) != i) continue;
        if (missing++ < MAX_NAMED) buf_printf(&b, "%s%s", b.len ? ", " : "", name);
    }
    if (missing == 0) return OK;
    if (missing > MAX_NAMED) buf_printf(&b, " and %zu more", missing - MAX_NAMED);
    err_t rc = err_set(e, ERR_INPUT, "missing tensors: %s", b.data ? b.data : "");
    buf_release(&b);
    return rc;
}

err_t update_prepare(struct update *u, struct err *e)
{
    err_t rc = check_open(u, e);
    if (rc == OK) rc = check_complete(u, e);
    if (rc != OK) return rc;
    if (u->bad_slot != SIZE_MAX)
        return err_set(e, ERR_INPUT, "tensor %s: element %llu is not finite in BF16",
                       store_spec(u->store, u->bad_slot)->name, (unsigned long long)u->bad_at);
    u->state = PREPARED;
    return OK;
}

void update_commit(struct update *u)
{
    CHECK(u->state == PREPARED);
    u->former = u->next;
    u->next = NULL;
    store_swap(u->store, &u->former);
    u->state = COMMITTED;
}

void update_free(struct update *u)
{
    if (u == NULL) return;
    store_arena_free(u->store, u->next);
    store_arena_free(u->store, u->former);
    store_unclaim(u->store);
    pthread_mutex_destroy(&u->lock);
    mem_free(u->staged);
    mem_free(u);
}
