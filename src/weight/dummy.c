#include "weight/dummy.h"
#include "base/mem.h"
#include "weight/update_internal.h"
#include <math.h>
#include <pthread.h>
#include <string.h>

enum { MAX_THREADS = 64 };
#define CHUNK_BYTES ((size_t)4 << 20)

struct work {
    struct update *u;
    struct update_progress *progress;
    uint64_t seed;
    _Atomic size_t next;
    _Atomic bool no_memory;
};

/* splitmix64. */
static uint64_t draw(uint64_t *s)
{
    uint64_t z = *s += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* Bytes in which bits outside `keep` are zero and those of `set` are added. */
static void fill(uint8_t *to, size_t n, uint64_t keep, uint64_t set, uint64_t *s)
{
    for (size_t i = 0; i < n; i += 8) {
        uint64_t v = (draw(s) & keep) + set;
        memcpy(to + i, &v, n - i < 8 ? n - i : 8);
    }
}

#define ALL(byte) (0x0101010101010101u * (uint64_t)(byte))
#define ALL16(h)  (0x0001000100010001u * (uint64_t)(h))

/* Random elements of about size 1/4 .. 2 before their scales; see scale_of. */
void dummy_fill_data(uint8_t *to, format_t f, size_t n, size_t cols, uint64_t *s)
{
    if (formats[f].elem == ELEM_E2M1) {
        fill(to, n, ~(uint64_t)0, 0, s);
    } else if (formats[f].elem == ELEM_E4M3) {
        fill(to, n, ALL(0xbf), 0, s); /* a sign and 0 .. 1.875 */
    } else { /* a sign and 1/4 .. 1 times 2^-k, k so that it is about 1 / sqrt(cols) */
        int k = (int)(log2((double)cols) / 2.0);
        fill(to, n, ALL16(0x80ff), ALL16((uint64_t)(125 - k) << 7), s);
    }
}

/* What brings random elements of a format to the size 1 / sqrt(cols): their rms is about 2.9 (E2M1)
 * or 0.8 (E4M3). */
float dummy_scale(format_t f, size_t cols)
{
    return (formats[f].elem == ELEM_E2M1 ? 0.35f : 1.2f) / sqrtf((float)cols);
}

void dummy_fill_scale(uint8_t *to, format_t f, size_t bytes, size_t cols, uint64_t *s)
{
    float want = dummy_scale(f, cols);
    if (formats[f].scale == SCALE_F32)
        for (size_t i = 0; i < bytes; i += sizeof want)
            memcpy(to + i, &want, sizeof want);
    else if (formats[f].scale == SCALE_E8M0)
        memset(to, 127 + (int)lrintf(log2f(want)), bytes);
    else
        fill(to, bytes, ALL(0x07), ALL(0x38), s); /* 1 .. 1.875; the tensor scale does the rest */
}

static bool put_part(struct work *w, size_t slot, part_t part, size_t rows, size_t row_bytes,
                     uint64_t *s)
{
    const struct resident *r = &store_spec(w->u->store, slot)->shape;
    size_t step = CHUNK_BYTES / (row_bytes ? row_bytes : 1) / MEMORY_ROWS * MEMORY_ROWS;
    if (step == 0) step = MEMORY_ROWS;
    if (step > rows) step = rows;
    uint8_t *room = mem_try(step * row_bytes + 8);
    if (room == NULL) return false;
    for (size_t r0 = 0, n; r0 < rows; r0 += n) {
        n = rows - r0 < step ? rows - r0 : step;
        update_turn(w->progress, true);
        if (part == PART_DATA)
            dummy_fill_data(room, r->format, n * row_bytes, (size_t)r->cols, s);
        else
            dummy_fill_scale(room, r->format, n * row_bytes, (size_t)r->cols, s);
        update_put(w->u, slot, part, r0, n, room);
        if (w->progress) atomic_fetch_add(&w->progress->bytes_done, n * row_bytes);
    }
    mem_free(room);
    return true;
}

static bool put_matrix(struct work *w, size_t slot, uint64_t *s)
{
    const struct resident *r = &store_spec(w->u->store, slot)->shape;
    size_t rows = (size_t)r->rows, cols = (size_t)r->cols,
           scales = format_scale_rows(r->format, rows);
    if (!put_part(w, slot, PART_DATA, rows, format_row_bytes(r->format, cols), s)) return false;
    if (formats[r->format].scale != SCALE_NONE &&
        !put_part(w, slot, PART_SCALE, scales,
                  format_scale_cols(r->format, cols) * (size_t)formats[r->format].scale_bytes, s))
        return false;
    float tensor = dummy_scale(r->format, cols), none = 0.0f;
    if (formats[r->format].tensor) update_put(w->u, slot, PART_TENSOR, 0, 1, &tensor);
    if (r->format != FORMAT_BF16) update_put(w->u, slot, PART_INPUT, 0, 1, &none);
    return true;
}

/* Vectors: 1.  The embedding: random. */
static bool put_plain(struct work *w, size_t slot, uint64_t *s)
{
    const struct slot_spec *p = store_spec(w->u->store, slot);
    size_t cols = (size_t)p->shape.cols, elem = p->shape.kind == RESIDENT_F32 ? 4 : 2;
    if (p->n_dims == 2 && p->shape.kind == RESIDENT_PLAIN)
        return put_part(w, slot, PART_DATA, (size_t)p->shape.rows, cols * elem, s);
    uint8_t *row = mem_try_array(cols, elem);
    if (row == NULL) return false;
    for (size_t i = 0; i < cols; i++) {
        const float one = 1.0f;
        const uint16_t one_bf16 = 0x3f80;
        memcpy(row + i * elem, elem == 4 ? (const void *)&one : (const void *)&one_bf16, elem);
    }
    for (size_t r = 0; r < p->shape.rows; r++)
        update_put(w->u, slot, PART_DATA, r, 1, row);
    mem_free(row);
    return true;
}

static void *worker(void *arg)
{
    struct work *w = arg;
    const struct store *store = w->u->store;
    for (size_t i; (i = atomic_fetch_add(&w->next, 1)) < store_slots(store) && !w->no_memory;) {
        const struct slot_spec *p = store_spec(store, i);
        if (store_find(store, p->name) != i) continue; /* a tied head has its first slot's values */
        uint64_t s = w->seed ^ (i + 1) * 0xd1b54a32d192ed03u;
        bool ok = p->shape.kind == RESIDENT_MATRIX ? put_matrix(w, i, &s) : put_plain(w, i, &s);
        if (!ok) w->no_memory = true;
        update_mark(w->u, i);
    }
    update_turn(w->progress, false);
    store_flush(store);
    return NULL;
}

uint64_t dummy_bytes(const struct slot_spec *specs, size_t n)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < n; i++) {
        const struct resident *r = &specs[i].shape;
        size_t data = 0, scale = 0;
        if (r->kind == RESIDENT_MATRIX && format_bytes(r->format, r->rows, r->cols, &data, &scale))
            sum += data + scale + (formats[r->format].tensor ? sizeof(float) : 0);
        else
            sum += r->rows * r->cols * (r->kind == RESIDENT_F32 ? 4 : 2);
    }
    return sum;
}

err_t dummy_stage(struct update *u, uint64_t seed, int n_threads, struct update_progress *progress,
                  struct err *e)
{
    err_t rc = update_check_open(u, e);
    if (rc != OK) return rc;
    struct work w = {.u = u, .progress = progress, .seed = seed};
    pthread_t threads[MAX_THREADS];
    int n = 0, want = n_threads < MAX_THREADS ? n_threads : MAX_THREADS;
    if (progress) {
        atomic_store(&progress->bytes_done, 0);
        atomic_store(&progress->bytes_total, store_bytes(u->store));
    }
    while (n < want - 1 && pthread_create(&threads[n], NULL, worker, &w) == 0)
        n++;
    worker(&w);
    for (int i = 0; i < n; i++)
        pthread_join(threads[i], NULL);
    return w.no_memory ? err_set(e, ERR_NOMEM, "no memory for random weights") : OK;
}
