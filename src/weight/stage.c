/* stage.c - a planned checkpoint, or part of one, into the spare arena, by several threads; in place: read to
 * be checked, later once more into the resident arena. */
#include "base/buf.h"
#include "base/mem.h"
#include "weight/manifest.h"
#include "weight/update_internal.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define CHUNK_BYTES ((size_t)4 << 20)
#define TURN_BYTES  ((size_t)256 << 10) /* of who takes turns: about 0.1 ms */
/* A chunk of a transposed source reads all columns of its rows: few and large. */
#define TRANSPOSED_BYTES ((size_t)32 << 20)
#define MAX_THREADS      64

struct load;
struct job;
typedef err_t job_fn(struct load *l, const struct job *j, struct stage_room *room, struct err *e);

/* Slots [slot, slot + n) that one thread stages. */
struct job {
    job_fn *run;
    size_t slot, n;
    const struct st_file *file; /* where it begins */
    uint64_t at;
};

struct load {
    struct update *u;
    const struct plan *plan;
    struct update_progress *progress;
    bool any_bf16, overwrite;
    struct job *jobs;
    size_t n;
    atomic_size_t next;
    atomic_bool stop;
    pthread_mutex_t lock; /* of rc and error */
    err_t rc;
    struct err error;
};

/* ---- pieces ---- */

static bool takes_turns(const struct load *l)
{
    return l->progress && l->progress->turn && !l->overwrite;
}

static void wait_turn(const struct load *l)
{
    if (takes_turns(l)) update_turn(l->progress, true);
}

static void advance(struct load *l, const struct source *s, size_t rows)
{
    if (l->progress == NULL || s->rows == 0) return;
    atomic_fetch_add(&l->progress->bytes_done, source_bytes(s) / s->rows * rows);
    if (l->progress->tick) l->progress->tick(l->progress->ctx);
}

/* Nothing stops an overwrite but an error. */
static bool stopped(struct load *l)
{
    return atomic_load(&l->stop) ||
           (l->progress && !l->overwrite && atomic_load(&l->progress->cancel));
}

/* Rows to read at once: whole groups, some MiB. */
static size_t chunk_rows(const struct load *l, const struct source *s, format_t f)
{
    size_t bytes = takes_turns(l) ? TURN_BYTES : CHUNK_BYTES;
    size_t row = source_row_bytes(s);
    size_t group = formats[f].group_rows > MEMORY_ROWS ? formats[f].group_rows : MEMORY_ROWS;
    bool transposed = s->col_stride != 1 && s->cols > 1;
    size_t n = row ? (transposed ? TRANSPOSED_BYTES : bytes) / row : (size_t)s->rows;
    n = n / group * group;
    if (n == 0) n = group;
    return n < s->rows ? n : (size_t)s->rows;
}

static err_t read_rows(struct load *l, const struct source *s, part_t part, size_t row0, size_t n,
                       struct stage_room *room, const char *name, struct err *e)
{
    struct source_scratch *own = part == PART_SCALE ? &room->scale : &room->data;
    void *to = room->lent[part];
    size_t bytes;
    if (!mul_size(&bytes, n, source_row_bytes(s)))
        return err_set(e, ERR_TOOBIG, "tensor %s: a row does not fit in memory", name);
    err_t rc = to ? OK : stage_reserve(own, bytes, name, e);
    if (rc == OK && !to) to = own->data;
    wait_turn(l);
    if (rc == OK) rc = source_read(s, row0, n, to, &room->file, e);
    if (rc != OK) return rc;
    digest_add(&room->sum[part], to, bytes);
    advance(l, s, n);
    return OK;
}

/* Memory from which the device can copy by itself, for the next rows of a slot and their scales: one piece. */
static void *borrow(const struct load *l, const struct spelled *w, size_t rows, size_t scales,
                    struct stage_room *room)
{
    enum { ALIGN = 64 };
    size_t data = 0, scale = 0;
    if (!l->u->next || !mul_size(&data, rows, source_row_bytes(&w->part[PART_DATA]))) return NULL;
    if (scales && !mul_size(&scale, scales, source_row_bytes(&w->part[PART_SCALE]))) return NULL;
    if (!add_size(&data, data, ALIGN - 1) || !add_size(&scale, scale, data)) return NULL;
    char *lent = store_lend(l->u->store, scale);
    room->lent[PART_DATA] = lent;
    room->lent[PART_SCALE] = lent && scales ? lent + data / ALIGN * ALIGN : NULL;
    return lent;
}

static err_t read_scalar(struct load *l, const struct source *s, float *x, struct stage_room *room,
                         struct err *e)
{
    err_t rc = source_read(s, 0, 1, x, &room->file, e);
    if (rc == OK) advance(l, s, 1);
    return rc;
}

/* All of a slot has been read. */
static err_t end_slot(struct load *l, size_t slot, struct stage_room *room, struct err *e)
{
    if (stopped(l)) return OK;
    err_t rc = stage_sum_end(l->u, slot, room, e);
    if (rc == OK) update_mark(l->u, slot);
    return rc;
}

/* ---- as stored ---- */

/* Tensor and input scale.  An input scale that is missing, zero, negative or not finite comes from
 * an expert that no calibration token reached: it means "none". */
static err_t stage_scalars(struct load *l, const struct job *j, float *tensor,
                           struct stage_room *room, struct err *e)
{
    const struct spelled *w = &l->plan->slots[j->slot].weight;
    float x = NAN;
    err_t rc = OK;
    if (formats[w->format].tensor) {
        const struct source *s = &w->part[PART_TENSOR];
        rc = read_scalar(l, s, tensor, room, e);
        if (rc != OK) return rc;
        digest_add(&room->sum[PART_TENSOR], tensor, sizeof *tensor);
        if (!format_check_tensor_scale(*tensor))
            update_note(l->u, j->slot, PART_TENSOR, 0, "tensor %s: scale 0 is %g", s->tensor->name,
                        (double)*tensor);
        update_put(l->u, j->slot, PART_TENSOR, 0, 1, tensor);
    }
    if (formats[w->format].scale == SCALE_NONE) return OK;
    if (w->part[PART_INPUT].tensor) rc = read_scalar(l, &w->part[PART_INPUT], &x, room, e);
    if (rc != OK) return rc;
    if (!isfinite(x) || x <= 0.0f) x = NAN;
    digest_add(&room->sum[PART_INPUT], &x, sizeof x);
    update_put(l->u, j->slot, PART_INPUT, 0, 1, &x);
    return OK;
}

static err_t stage_copy(struct load *l, const struct job *j, struct stage_room *room, struct err *e)
{
    const struct slot_spec *p = store_spec(l->u->store, j->slot);
    const struct spelled *w = &l->plan->slots[j->slot].weight;
    size_t rows = (size_t)p->shape.rows, step = chunk_rows(l, &w->part[PART_DATA], w->format);
    struct rows r = {.slot = j->slot, .tensor = 1.0f, .names = w, .any_bf16 = l->any_bf16};
    stage_sum_begin(room);
    err_t rc = stage_scalars(l, j, &r.tensor, room, e);
    for (; rc == OK && r.row0 < rows && !stopped(l); r.row0 += r.n) {
        size_t first, scales;
        r.n = rows - r.row0 < step ? rows - r.row0 : step;
        scales = stage_scale_rows(w->format, rows, r.row0, r.n, &first);
        void *lent = borrow(l, w, r.n, scales, room);
        rc = read_rows(l, &w->part[PART_DATA], PART_DATA, r.row0, r.n, room, p->name, e);
        if (rc == OK && scales)
            rc = read_rows(l, &w->part[PART_SCALE], PART_SCALE, first, scales, room, p->name, e);
        if (rc == OK) {
            wait_turn(l);
            r.data = lent ? room->lent[PART_DATA] : room->data.data;
            r.scale = !scales ? NULL : lent ? room->lent[PART_SCALE] : room->scale.data;
            stage_rows(l->u, &r);
        }
        store_take_back(l->u->store, lent);
        room->lent[PART_DATA] = room->lent[PART_SCALE] = NULL;
        if (rc != OK) break;
    }
    return rc == OK ? end_slot(l, j->slot, room, e) : rc;
}

/* The scales of K and V, side by side. */
static err_t stage_kv(struct load *l, const struct job *j, struct stage_room *room, struct err *e)
{
    const struct planned *w = &l->plan->slots[j->slot];
    float kv[2];
    stage_sum_begin(room);
    for (int i = 0; i < 2; i++) {
        err_t rc = read_scalar(l, &w->kv[i], &kv[i], room, e);
        if (rc != OK) return rc;
        if (!isfinite(kv[i]) || kv[i] <= 0.0f)
            update_note(l->u, j->slot, PART_DATA, (size_t)i, "tensor %s: scale 0 is %g",
                        w->kv[i].tensor->name, (double)kv[i]);
    }
    digest_add(&room->sum[PART_DATA], kv, sizeof kv);
    update_put(l->u, j->slot, PART_DATA, 0, 1, kv);
    return end_slot(l, j->slot, room, e);
}

/* ---- encoded ---- */

/* The largest magnitude of all slots of a job, whose values are read a first time here. */
static err_t job_amax(float *amax, struct load *l, const struct job *j, struct stage_room *room,
                      struct err *e)
{
    err_t rc = OK;
    for (size_t i = j->slot; rc == OK && i < j->slot + j->n; i++) {
        const struct slot_spec *p = store_spec(l->u->store, i);
        const struct source *s = &l->plan->slots[i].weight.part[PART_DATA];
        size_t rows = (size_t)p->shape.rows, step = chunk_rows(l, s, p->shape.format);
        for (size_t r = 0, n; rc == OK && r < rows && !stopped(l); r += n) {
            n = rows - r < step ? rows - r : step;
            rc = stage_reserve(&room->data, n * source_row_bytes(s), p->name, e);
            wait_turn(l);
            if (rc == OK) rc = source_read(s, r, n, room->data.data, &room->file, e);
            if (rc == OK)
                rc = stage_amax(amax, room->data.data, n * (size_t)s->cols, room, p->name, e);
        }
    }
    return rc;
}

static err_t encode_slot(struct load *l, size_t slot, float amax, struct stage_room *room,
                         struct err *e)
{
    const struct slot_spec *p = store_spec(l->u->store, slot);
    const struct source *s = &l->plan->slots[slot].weight.part[PART_DATA];
    size_t rows = (size_t)p->shape.rows, step = chunk_rows(l, s, p->shape.format);
    struct encode en;
    encode_init(&en, p->shape.format, encode_rule_find(p->shape.format, NULL), rows,
                (size_t)p->shape.cols, amax);
    stage_sum_begin(room);
    stage_encoded_scalars(l->u, &en, slot);
    err_t rc = OK;
    for (size_t r = 0, n; rc == OK && r < rows && !stopped(l); r += n) {
        n = rows - r < step ? rows - r : step;
        rc = read_rows(l, s, PART_DATA, r, n, room, p->name, e);
        if (rc != OK) break;
        wait_turn(l);
        rc = stage_encoded(l->u, &en, slot, r, n, room->data.data, room, e);
    }
    return rc == OK ? end_slot(l, slot, room, e) : rc;
}

static err_t stage_encode(struct load *l, const struct job *j, struct stage_room *room,
                          struct err *e)
{
    float amax = 0.0f;
    err_t rc = OK;
    if (format_needs_amax(&formats[store_spec(l->u->store, j->slot)->shape.format]))
        rc = l->overwrite ? OK : job_amax(&amax, l, j, room, e);
    if (!isfinite(amax)) amax = 0.0f; /* the values are refused, whatever they are divided by */
    if (l->overwrite)
        amax = l->u->amax[j->slot]; /* of what was verified */
    else if (l->u->amax)
        l->u->amax[j->slot] = amax;
    for (size_t i = 0; rc == OK && i < j->n; i++)
        rc = encode_slot(l, j->slot + i, amax, room, e);
    return rc;
}

/* ---- the plan as jobs ---- */

static bool encodes(const struct load *l, size_t slot)
{
    const struct slot_spec *p = store_spec(l->u->store, slot);
    const struct planned *w = &l->plan->slots[slot];
    return w->found && p->encode && w->weight.format != p->shape.format;
}

/* Neighbours that must be encoded together are one job, of the first of them. */
static size_t job_slots(const struct load *l, size_t slot)
{
    const struct slot_spec *p = store_spec(l->u->store, slot);
    size_t n = 1;
    if (!format_needs_amax(&formats[p->shape.format])) return 1;
    while (p->amax_at + n < p->amax_n && encodes(l, slot + n))
        n++;
    return n;
}

static err_t add_job(struct load *l, size_t slot, size_t *n, struct err *e)
{
    const struct slot_spec *p = store_spec(l->u->store, slot);
    const struct planned *w = &l->plan->slots[slot];
    bool f32 = p->shape.kind == RESIDENT_F32, encode = encodes(l, slot);
    *n = encode ? job_slots(l, slot) : 1;
    if (!w->found) return OK;
    for (size_t i = slot; i < slot + *n; i++)
        if (l->u->staged[i] && !l->overwrite)
            return err_set(e, ERR_INPUT, "tensor %s: given twice in one update",
                           store_spec(l->u->store, i)->name);
    const struct source *s = f32 ? &w->kv[0] : &w->weight.part[PART_DATA];
    l->jobs[l->n++] = (struct job){
        .run = f32      ? stage_kv
               : encode ? stage_encode
                        : stage_copy,
        .slot = slot,
        .n = *n,
        .file = s->file,
        .at = s->tensor->offset + s->first, /* orders the slabs of a fused tensor well enough */
    };
    return OK;
}

/* In file order, so that the disk reads forward. */
static int by_place(const void *a, const void *b)
{
    const struct job *x = a, *y = b;
    if (x->file != y->file) return x->file < y->file ? -1 : 1;
    if (x->at != y->at) return x->at < y->at ? -1 : 1;
    return (x->slot > y->slot) - (x->slot < y->slot);
}

static err_t load_plan(struct load *l, struct err *e)
{
    l->jobs = mem_try_array(l->plan->n + 1, sizeof l->jobs[0]);
    if (l->jobs == NULL) return err_set(e, ERR_NOMEM, "no memory to plan the loading");
    for (size_t i = 0, n; i < l->plan->n; i += n) {
        err_t rc = add_job(l, i, &n, e);
        if (rc != OK) return rc;
    }
    qsort(l->jobs, l->n, sizeof l->jobs[0], by_place);
    if (l->progress) {
        atomic_store(&l->progress->bytes_done, 0);
        atomic_store(&l->progress->bytes_total, l->plan->bytes);
    }
    return OK;
}

/* A loader thread: the first error stops all. */
static void *load_thread(void *arg)
{
    struct load *l = arg;
    struct stage_room room = {0};
    size_t i;
    while (!stopped(l) && (i = atomic_fetch_add(&l->next, 1)) < l->n) {
        struct err e = {0};
        err_t rc = l->jobs[i].run(l, &l->jobs[i], &room, &e);
        if (rc == OK) continue;
        pthread_mutex_lock(&l->lock);
        if (l->rc == OK) {
            l->rc = rc;
            l->error = e;
        }
        pthread_mutex_unlock(&l->lock);
        atomic_store(&l->stop, true);
    }
    if (takes_turns(l)) update_turn(l->progress, false);
    store_flush(l->u->store);
    stage_room_free(&room);
    return NULL;
}

static void *new_thread(void *arg)
{
    (void)pthread_setname_np(pthread_self(), "loader");
    return load_thread(arg);
}

static err_t load_run(struct load *l, int n_threads, struct err *e)
{
    pthread_t threads[MAX_THREADS];
    int n = 0,
        want = (n_threads < MAX_THREADS ? n_threads : MAX_THREADS) - 1; /* the caller is one */
    pthread_mutex_init(&l->lock, NULL);
    while (n < want && pthread_create(&threads[n], NULL, new_thread, l) == 0)
        n++;
    load_thread(l);
    for (int i = 0; i < n; i++)
        pthread_join(threads[i], NULL);
    pthread_mutex_destroy(&l->lock);
    if (l->rc == OK && stopped(l)) {
        l->u->broken = true;
        return err_set(e, ERR_STATE, "the update was cancelled");
    }
    if (l->rc == OK) return OK;
    l->u->broken = true;
    return err_set(e, l->rc, "%s", l->error.msg);
}

/* Takes the plan. */
static err_t stage_plan(struct update *u, struct plan *plan, const struct stage_options *o,
                        struct update_progress *progress, struct err *e)
{
    struct load l = {.u = u, .plan = plan, .progress = progress, .any_bf16 = o->any_bf16};
    err_t rc = plan_check(plan, store_spec(u->store, 0), e);
    if (rc == OK && o->manifest) rc = manifest_check(o->manifest, &plan->checkpoint, progress, e);
    if (rc == OK) rc = load_plan(&l, e);
    if (rc == OK) rc = load_run(&l, o->n_threads, e);
    mem_free(l.jobs);
    if (rc == OK && u->in_place)
        *u->kept = (struct kept){*plan, o->any_bf16};
    else
        plan_close(plan);
    return rc;
}

err_t update_stage_folder(struct update *u, const char *dir, const struct stage_options *o,
                          struct update_progress *progress, struct err *e)
{
    struct plan plan;
    err_t rc = update_check_open(u, e);
    if (rc == OK) rc = plan_open(&plan, dir, store_spec(u->store, 0), store_slots(u->store), e);
    return rc == OK ? stage_plan(u, &plan, o, progress, e) : rc;
}

err_t update_stage_dir(struct update *u, const char *dir, int n_threads,
                       struct update_progress *progress, struct err *e)
{
    const struct stage_options o = {.n_threads = n_threads};
    return update_stage_folder(u, dir, &o, progress, e);
}

err_t update_stage_part(struct update *u, const struct st_file *files, size_t n_files,
                        const struct stage_options *o, struct update_progress *progress,
                        struct err *e)
{
    struct plan plan;
    err_t rc = update_check_open(u, e);
    if (rc == OK)
        rc = plan_open_part(&plan, files, n_files, store_spec(u->store, 0), store_slots(u->store),
                            e);
    if (rc == OK) rc = stage_plan(u, &plan, o, progress, e);
    if (rc == OK) update_keep_rest(u);
    return rc;
}

err_t update_overwrite(struct update *u, int n_threads, struct update_progress *progress,
                       struct err *e)
{
    CHECK(u->state == PREPARED && u->in_place);
    const struct plan *plan = &u->kept->plan;
    struct load l = {.u = u,
                     .plan = plan,
                     .progress = progress,
                     .any_bf16 = u->kept->any_bf16,
                     .overwrite = true};
    err_t rc = OK;
    for (size_t i = 0; rc == OK && i < plan->checkpoint.n_files; i++)
        rc = st_unchanged(&plan->checkpoint.files[i], e);
    if (rc == OK) rc = load_plan(&l, e);
    if (rc == OK) {
        u->touched = true;
        u->next = store_reopen(u->store);
        rc = load_run(&l, n_threads, e);
        if (rc == OK) update_fill_absent(u);
        if (rc == OK) rc = store_check(u->store, e);
        u->next = NULL;
        if (rc == OK) store_rewritten(u->store);
    }
    mem_free(l.jobs);
    u->state = COMMITTED;
    return rc;
}
