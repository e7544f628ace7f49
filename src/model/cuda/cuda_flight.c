/* cuda_flight.c - pinned memory of the steps in flight, its way to the device, and the results' way
 * back. */
#include "base/carve.h"
#include "model/cuda/cuda_model.h"
#include <string.h>

enum { UPLOAD_BLOCKS = 64 };

static bool place(struct cuda_flight *f, const struct cuda_model *m, const char *base,
                  size_t *bytes)
{
    struct step_arrays *h = &f->host;
    size_t n = (size_t)m->cap, seqs = (size_t)m->cap_seqs;
    struct carve c = carve_at((uintptr_t)base);
    CARVE(c, h->ids, n, 1);
    CARVE(c, h->pos, n, 1);
    CARVE(c, h->seq, n, 1);
    CARVE(c, h->pick, n, 1);
    for (int i = 0; i < ATTN_LISTS; i++)
        CARVE(c, h->blocks[i], n, 1);
    CARVE(c, h->specs, n, 1);
    CARVE(c, h->tables, seqs, (size_t)m->max_pages);
    CARVE(c, f->results, n, 1);
    CARVE(c, f->clear, (size_t)m->n_pages, 1);
    if (m->tells) CARVE(c, f->packed, n * (size_t)m->c.n_layers, (size_t)m->c.top_k);
    *bytes = c.bytes;
    return c.ok;
}

static err_t flight_new(struct cuda_flight *f, const struct cuda_model *m, struct err *e)
{
    size_t bytes;
    if (!place(f, m, NULL, &bytes))
        return err_set(e, ERR_NOMEM, "steps of %d tokens do not fit in memory", m->cap);
    err_t rc = event_new(&f->done, m->d, false, e);
    if (rc == OK) rc = host_alloc(&f->block, m->d, bytes, e);
    if (rc == OK) (void)place(f, m, f->block, &bytes);
    return rc;
}

err_t cuda_flights_new(struct cuda_model *m, struct err *e)
{
    err_t rc = device_kernel(&m->upload_kernel, m->d, "step_upload",
                             sizeof(struct step_upload_args), 0, e);
    if (rc == OK)
        rc = device_kernel(&m->download_kernel, m->d, "step_download",
                           sizeof(struct step_download_args), 0, e);
    for (int i = 0; rc == OK && i < CUDA_FLIGHTS; i++)
        rc = flight_new(&m->flights[i], m, e);
    return rc;
}

void cuda_flights_free(struct cuda_model *m)
{
    for (int i = 0; i < CUDA_FLIGHTS; i++) {
        struct cuda_flight *f = &m->flights[i];
        device_free(m->d, host_addr(f->extra));
        host_free(m->d, f->host.extra);
        host_free(m->d, f->block);
        event_free(f->done);
    }
}

struct cuda_flight *cuda_next(struct cuda_model *m)
{
    CHECK(m->n_submitted - m->n_collected < CUDA_FLIGHTS);
    return &m->flights[m->n_submitted % CUDA_FLIGHTS];
}

bool cuda_reserve_extra(struct cuda_model *m, struct cuda_flight *f, size_t words)
{
    if (words <= f->cap_extra) return true;
    struct err e = {0};
    void *host = NULL;
    devptr_t dev = 0;
    size_t bytes;
    if (!add_size(&words, words, words / 2 + 8) || !mul_size(&bytes, words, sizeof(int32_t)))
        return false;
    bytes = bytes / 16 * 16; /* of which it is copied in pieces */
    if (host_alloc(&host, m->d, bytes, &e) != OK || device_alloc(&dev, m->d, bytes, &e) != OK) {
        host_free(m->d, host);
        return false;
    }
    host_free(m->d, f->host.extra);
    device_free(m->d, host_addr(f->extra));
    f->host.extra = host;
    f->extra = (int32_t *)(uintptr_t)dev;
    f->cap_extra = bytes / sizeof(int32_t) - 3;
    return true;
}

static void add_piece(struct step_upload_args *a, void *dst, const void *src, size_t n, size_t elem)
{
    if (n == 0) return;
    CHECK(a->n_pieces < STEP_IO_PIECES);
    a->pieces[a->n_pieces++] =
        (struct step_piece){.dst = dst, .src = src, .units = (uint32_t)((n * elem + 15) / 16)};
}

/* The pages' list goes with the rest. */
static void add_clear(struct step_upload_args *a, const struct cuda_model *m,
                      const struct cuda_flight *f)
{
    add_piece(a, m->clear_dev, f->clear, (size_t)f->n_clear, sizeof *f->clear);
}

static void launch(struct cuda_model *m, struct cuda_flight *f, const struct step_upload_args *a)
{
    queue_launch(m->q, &m->upload_kernel,
                 (struct launch){.grid = {UPLOAD_BLOCKS}, .threads = STEP_IO_THREADS}, a);
    if (f->n_clear == 0) return;
    struct clear_args c = {.kv = (char *)(uintptr_t)region_base(m->kv),
                           .pages = m->clear_dev,
                           .half_bytes = m->kv_half,
                           .page_bytes = m->kv_half / (size_t)m->n_pages};
    queue_launch(m->q, &m->clear_kernel,
                 (struct launch){.grid = {(uint32_t)f->n_clear, (uint32_t)m->c.n_layers * 2},
                                 .threads = CLEAR_THREADS},
                 &c);
    f->n_clear = 0;
}

void cuda_clear_pages(struct cuda_model *m, struct cuda_flight *f)
{
    struct step_upload_args a = {0};
    if (f->n_clear == 0) return;
    add_clear(&a, m, f);
    launch(m, f, &a);
}

void cuda_upload(const struct cuda_slice *s, int32_t n_seqs, size_t extra)
{
    struct cuda_model *m = s->m;
    struct cuda_flight *f = s->f;
    const struct step_arrays *h = &f->host, *d = &m->dev;
    size_t n = (size_t)s->n, rows = (size_t)s->n_rows;
    struct step_upload_args a = {
        .ids = d->ids, .host_ids = h->ids, .drawn = m->drawn, .n_ids = s->n};
    add_piece(&a, d->pos, h->pos, n, sizeof *h->pos);
    add_piece(&a, d->seq, h->seq, n, sizeof *h->seq);
    for (int list = 0; list < ATTN_LISTS; list++)
        add_piece(&a, d->blocks[list], h->blocks[list], (size_t)s->n_blocks[list],
                  sizeof *h->blocks[list]);
    add_piece(&a, d->tables, h->tables, (size_t)n_seqs * (size_t)s->table_ld, sizeof *h->tables);
    add_piece(&a, d->pick, h->pick, rows, sizeof *h->pick);
    add_piece(&a, d->specs, h->specs, rows, sizeof *h->specs);
    add_piece(&a, f->extra, h->extra, extra, sizeof *h->extra);
    add_clear(&a, m, f);
    launch(m, f, &a);
}

void cuda_download(const struct cuda_slice *s, bool experts)
{
    struct cuda_model *m = s->m;
    struct cuda_flight *f = s->f;
    struct step_download_args a = {.results = m->results, .host = f->results, .n = s->n_rows};
    uint32_t per_block = STEP_IO_THREADS / 32;
    if (s->n_rows > 0)
        queue_launch(m->q, &m->download_kernel,
                     (struct launch){.grid = {((uint32_t)s->n_rows + per_block - 1) / per_block},
                                     .threads = STEP_IO_THREADS},
                     &a);
    f->n_packed = s->n;
    if (experts)
        queue_copy(m->q, host_addr(f->packed), host_addr(m->packed),
                   (size_t)s->n * (size_t)m->c.n_layers * (size_t)m->c.top_k * sizeof(uint32_t));
}

/* Experts of tokens [t0, t0 + n). */
static void hand_experts(const struct cuda_model *m, const struct cuda_flight *f,
                         const struct step *st, int32_t t0, int32_t n)
{
    size_t k = (size_t)m->c.top_k, layers = (size_t)m->c.n_layers;
    if (!m->tells || !st->experts) return;
    for (size_t l = 0; l < layers; l++)
        for (size_t i = 0; i < (size_t)n; i++) {
            const uint32_t *from = f->packed + (l * (size_t)f->n_packed + i) * k;
            int16_t *to = st->experts + (((size_t)t0 + i) * layers + l) * k;
            for (size_t j = 0; j < k; j++)
                to[j] = m->c.dense[l] ? 0 : (int16_t)(from[j] >> 16);
        }
}

void cuda_hand_over(const struct cuda_model *m, const struct cuda_flight *f, const struct step *st,
                    int32_t t0, int32_t n)
{
    int32_t at = 0;
    hand_experts(m, f, st, t0, n);
    for (int32_t r = 0; r < st->n_rows; r++) {
        int32_t t = st->rows[r].token - t0;
        if (t < 0 || t >= n) continue;
        const struct sample_result *from = &f->results[at++];
        struct sample_output *to = st->rows[r].out;
        to->id = from->id;
        to->logprob = from->logprob;
        to->finite = from->finite != 0;
        to->n_top = from->n_top;
        memcpy(to->top_ids, from->top_ids, (size_t)from->n_top * sizeof(int32_t));
        memcpy(to->top_logprobs, from->top_logprobs, (size_t)from->n_top * sizeof(float));
    }
}
