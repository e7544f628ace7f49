#include "base/log.h"
#include "base/mem.h"
#include "model/cuda/cuda_model.h"
#include <stdlib.h>
#include <string.h>

static int32_t min_i32(int32_t a, int32_t b)
{
    return a < b ? a : b;
}

/* Tokens of a graph that serves n: coarser as n grows, so that few graphs cover all. */
static int32_t round_tokens(int32_t n)
{
    int32_t step = n <= 8 ? 1 : n <= 64 ? 8 : n <= 256 ? 32 : 128;
    return (n + step - 1) / step * step;
}

static int32_t round_chunks(int32_t n)
{
    int32_t r = 1;
    while (r < n)
        r *= 2;
    return r;
}

static void fail(struct cuda_model *m, err_t rc, const char *text)
{
    if (m->failed != OK) return;
    m->failed = rc;
    (void)err_set(&m->error, rc, "%s", text);
}

/* --- the arrays of a step --- */

static int32_t max_chunks_of(const struct step *st, int32_t t0, int32_t n)
{
    int32_t last = 0;
    for (int32_t i = 0; i < n; i++)
        if (st->pos[t0 + i] > last) last = st->pos[t0 + i];
    return last / ATTN_CHUNK + 1;
}

/* Prompts in this step from which on the prefill kernel keeps all multiprocessors busy. */
enum { MANY_PAIRS = 132 };

/* `n` tokens of one sequence. */
static void add_blocks(struct cuda_slice *s, int32_t token, int32_t n)
{
    struct step_arrays *h = &s->f->host;
    int32_t per_block = kernels_attn_tokens(s->m->kernels, ATTN_PREFILL);
    bool many = (int64_t)s->n * s->m->c.n_kv_heads >= (int64_t)MANY_PAIRS * per_block;
    attn_kind_t kind = n == 1 ? ATTN_DECODE : many ? ATTN_PREFILL : ATTN_SHORT;
    int32_t most = kernels_attn_tokens(s->m->kernels, kind);
    for (int32_t i = 0; i < n; i += most)
        h->blocks[kind][s->n_blocks[kind]++] = (struct attn_block){
            .token = token + i, .n = min_i32(n - i, most), .seq = h->seq[token]};
}

static int by_keys(const void *a, const void *b, void *pos)
{
    const struct attn_block *x = a, *y = b;
    const int32_t *p = pos;
    int32_t i = p[x->token + x->n - 1], j = p[y->token + y->n - 1];
    return i != j ? (i > j) - (i < j) : (x->token > y->token) - (x->token < y->token);
}

static void lay_tokens(struct cuda_slice *s, const struct step *st, int32_t t0, int32_t n)
{
    struct step_arrays *h = &s->f->host;
    for (int32_t i = 0; i < n; i++) {
        h->ids[i] = st->ids[t0 + i];
        h->pos[i] = st->pos[t0 + i];
        h->seq[i] = st->seq[t0 + i];
    }
    for (int32_t i = 0, run; i < n; i += run) {
        for (run = 1; i + run < n && h->seq[i + run] == h->seq[i];)
            run++;
        add_blocks(s, i, run);
    }
    /* The kernel deals out blocks in this order: so that every multiprocessor gets long and short. */
    qsort_r(h->blocks[ATTN_PREFILL], (size_t)s->n_blocks[ATTN_PREFILL], sizeof(struct attn_block),
            by_keys, h->pos);
    for (int32_t i = 0; i < st->n_seqs; i++) {
        int32_t pages = min_i32(st->seqs[i].n_pages, s->table_ld);
        memcpy(h->tables + (size_t)i * (size_t)s->table_ld, st->seqs[i].pages,
               (size_t)pages * sizeof(int32_t));
    }
}

/* Leading chunks that two decoding tokens' sequences have in common, whole and seen whole. */
static int32_t common_chunks(const struct step *st, const struct step_arrays *h,
                             const struct attn_block *a, const struct attn_block *b)
{
    enum { PAGES = ATTN_CHUNK / KV_PAGE };
    int32_t limit = min_i32(h->pos[a->token], h->pos[b->token]) + 1, n = 0;
    const int32_t *x = st->seqs[a->seq].pages, *y = st->seqs[b->seq].pages;
    while ((n + 1) * ATTN_CHUNK <= limit &&
           memcmp(x + n * PAGES, y + n * PAGES, PAGES * sizeof *x) == 0)
        n++;
    return n;
}

/* Neighbours in the step that share their first chunks have those read once for all of them; at
 * most `room` groups. */
static void share_prefixes(struct cuda_slice *s, const struct step *st, int32_t room)
{
    struct cuda_model *m = s->m;
    struct step_arrays *h = &s->f->host;
    struct attn_block *b = h->blocks[ATTN_DECODE], *out = h->blocks[ATTN_PREFIX];
    int32_t most = kernels_attn_tokens(m->kernels, ATTN_PREFILL), n = s->n_blocks[ATTN_DECODE];
    if (m->broken || !kernels_attn_shares(m->kernels)) return;
    for (int32_t i = 0, end; i < n && s->n_blocks[ATTN_PREFIX] < room; i = end) {
        int32_t chunks = i + 1 < n ? common_chunks(st, h, &b[i], &b[i + 1]) : 0;
        for (end = i + 1; chunks > 0 && end < n && end - i < most; end++)
            if (b[end].token != b[end - 1].token + 1 ||
                common_chunks(st, h, &b[i], &b[end]) < chunks)
                break;
        if (end - i < 2) continue;
        for (int32_t j = i; j < end; j++)
            b[j].prefix = chunks;
        out[s->n_blocks[ATTN_PREFIX]++] = (struct attn_block){
            .token = b[i].token, .n = end - i, .seq = b[i].seq, .prefix = chunks};
    }
}

/* Groups of a decode step of n tokens: room for twice as many as full ones would be. */
static int32_t prefix_room(const struct cuda_model *m, int32_t n)
{
    return 2 * (n / kernels_attn_tokens(m->kernels, ATTN_PREFILL) + 1);
}

/* Up to `n` tokens of padding. */
static void pad_tokens(struct cuda_slice *s, int32_t n)
{
    struct step_arrays *h = &s->f->host;
    for (int32_t i = s->n; i < n; i++) {
        h->ids[i] = h->pos[i] = 0;
        h->seq[i] = -1;
        h->blocks[ATTN_DECODE][s->n_blocks[ATTN_DECODE]++] = (struct attn_block){0};
    }
    s->n = n;
    if (s->n_blocks[ATTN_PREFIX] == 0) return;
    while (s->n_blocks[ATTN_PREFIX] < prefix_room(s->m, n))
        h->blocks[ATTN_PREFIX][s->n_blocks[ATTN_PREFIX]++] = (struct attn_block){0};
}

static size_t extra_of(const struct sample_input *in)
{
    if (in->target >= 0) return 0;
    const struct sample_params *p = in->params;
    return (size_t)(sample_has_penalty(p) ? in->n_output : 0) + 2 * (size_t)p->n_bias +
           (size_t)in->n_barred;
}

/* Copies n words to the block of extras; their address on the device. */
static const void *add_extra(struct cuda_flight *f, size_t *at, const void *from, int32_t n)
{
    if (n == 0) return NULL;
    memcpy(f->host.extra + *at, from, (size_t)n * sizeof(int32_t));
    const void *dev = f->extra + *at;
    *at += (size_t)n;
    return dev;
}

static struct sample_spec spec_of(struct cuda_flight *f, const struct sample_input *in, size_t *at)
{
    struct sample_spec d = {
        .target = in->target, .n_top = in->n_top, .top_p = 1.0f, .repetition_penalty = 1.0f};
    if (in->target >= 0) return d;
    const struct sample_params *p = in->params;
    d.temperature = p->temperature;
    d.top_p = p->top_p;
    d.min_p = p->min_p;
    d.top_k = p->top_k;
    d.frequency_penalty = p->frequency_penalty;
    d.presence_penalty = p->presence_penalty;
    d.repetition_penalty = p->repetition_penalty;
    d.sample_index = p->sample_index;
    d.seed = p->seed;
    d.position = in->position;
    d.n_output = sample_has_penalty(p) ? in->n_output : 0;
    d.n_bias = p->n_bias;
    d.n_barred = in->n_barred;
    d.output_ids = add_extra(f, at, in->output_ids, d.n_output);
    d.bias_ids = add_extra(f, at, p->bias_ids, d.n_bias);
    d.bias = add_extra(f, at, p->bias, d.n_bias);
    d.barred = add_extra(f, at, in->barred, d.n_barred);
    return d;
}

/* Rows whose tokens lie in [t0, t0 + n); returns the words of extras. */
static size_t lay_rows(struct cuda_slice *s, const struct step *st, int32_t t0, int32_t n)
{
    struct cuda_flight *f = s->f;
    size_t extra = 0;
    for (int32_t r = 0; r < st->n_rows; r++) {
        int32_t t = st->rows[r].token - t0;
        if (t < 0 || t >= n) continue;
        f->host.pick[s->n_rows] = t;
        f->host.specs[s->n_rows++] = spec_of(f, st->rows[r].in, &extra);
    }
    return extra;
}

static void pad_rows(struct cuda_slice *s, int32_t n)
{
    for (; s->n_rows < n; s->n_rows++) {
        s->f->host.pick[s->n_rows] = 0;
        s->f->host.specs[s->n_rows] =
            (struct sample_spec){.target = 0, .top_p = 1.0f, .repetition_penalty = 1.0f};
    }
}

/* --- running it --- */

/* Kept until the next step.  A page given out and taken back several times between two steps is noted each
 * time: a full list is worked off at once. */
void cuda_kv_clear(struct model *base, int32_t page)
{
    struct cuda_model *m = (struct cuda_model *)base;
    struct cuda_flight *f = cuda_next(m);
    if (f->n_clear == m->n_pages) {
        struct err e = {0};
        cuda_clear_pages(m, f);
        err_t rc = queue_sync(m->q, &e);
        if (rc != OK) fail(m, rc, e.msg);
    }
    f->clear[f->n_clear++] = page;
}

static void launch_all(const struct cuda_slice *s)
{
    cuda_forward(s);
    for (int32_t r = 0, n; r < s->n_rows; r += n) {
        n = min_i32(s->n_rows - r, CUDA_ROWS);
        cuda_head(s, r, n, true);
    }
}

/* A driver that cannot record programmatic launches records plain ones; one that cannot record at
 * all leaves the model without graphs. */
static bool capture(const struct cuda_slice *s, struct graph **out)
{
    struct cuda_model *m = s->m;
    struct err e = {0};
    for (int attempt = 0; attempt < 2; attempt++) {
        queue_capture(m->q);
        launch_all(s);
        if (queue_capture_end(m->q, out, &e) == OK) return true;
        log_line(LOG_WARN, "a decode step was not captured%s: %s",
                 m->plain ? ", no graphs are used" : "", e.msg);
        if (m->plain) break;
        m->plain = true;
    }
    m->plain = false;
    m->graphs_off = true;
    return false;
}

/* NULL: there are too many, or none can be made: launch kernel by kernel. */
static const struct graph *graph_for(const struct cuda_slice *s)
{
    struct cuda_model *m = s->m;
    for (int32_t i = 0; i < m->n_graphs; i++)
        if (m->graphs[i].n_tokens == s->n && m->graphs[i].n_chunks == s->max_chunks &&
            m->graphs[i].n_prefix == s->n_blocks[ATTN_PREFIX])
            return m->graphs[i].graph;
    if (m->n_graphs == CUDA_GRAPHS) return NULL;
    struct graph_entry *g = &m->graphs[m->n_graphs];
    if (!capture(s, &g->graph)) return NULL;
    g->n_tokens = s->n;
    g->n_chunks = s->max_chunks;
    g->n_prefix = s->n_blocks[ATTN_PREFIX];
    m->n_graphs++;
    return g->graph;
}

/* One token of each sequence, each with a row: what graphs are made for. */
static bool is_decode(const struct cuda_slice *s, const struct step *st)
{
    return !s->m->graphs_off && s->n == st->n_tokens && s->n == st->n_seqs && s->n == st->n_rows &&
           s->n == s->n_blocks[ATTN_DECODE] &&
           round_tokens(s->n) <= min_i32(s->m->cap, CUDA_GRAPH_TOKENS);
}

/* A token each of few sequences. */
static bool is_few(const struct cuda_slice *s)
{
    return !s->m->broken && s->n == s->n_blocks[ATTN_DECODE] &&
           kernels_attn_is_few(s->m->kernels, round_tokens(s->n), s->max_chunks);
}

/* Broken on purpose (model_break_invariance), the first chunk's keys depend on the step. */
static struct cuda_slice slice_of(struct cuda_model *m, const struct step *st, int32_t t0,
                                  int32_t n)
{
    struct cuda_slice s = {.m = m, .f = cuda_next(m), .n = n, .first_chunk = ATTN_CHUNK};
    if (m->broken) s.first_chunk = (1 + n / KV_ROWS % (ATTN_CHUNK / KV_ROWS)) * KV_ROWS;
    if (s.first_chunk > ATTN_CHUNK) s.first_chunk = ATTN_CHUNK;
    s.max_chunks = round_chunks(max_chunks_of(st, t0, n));
    s.table_ld = s.max_chunks * (ATTN_CHUNK / KV_PAGE);
    s.max_chunks += m->broken; /* a short first chunk may make one more */
    return s;
}

static void run_slice(struct cuda_model *m, const struct step *st, int32_t t0, int32_t n)
{
    struct cuda_slice s = slice_of(m, st, t0, n);
    lay_tokens(&s, st, t0, n);
    s.few = is_few(&s);
    if (!s.few) share_prefixes(&s, st, prefix_room(m, n));
    size_t extra = lay_rows(&s, st, t0, n);
    bool decode = is_decode(&s, st);
    if (decode) {
        pad_tokens(&s, round_tokens(n));
        pad_rows(&s, s.n);
    }
    cuda_upload(&s, st->n_seqs, extra);
    const struct graph *g = decode ? graph_for(&s) : NULL;
    if (g)
        queue_graph(m->q, g);
    else
        launch_all(&s);
    cuda_download(&s, m->tells && st->experts);
}

static void run_slices(struct cuda_model *m, struct cuda_flight *f, const struct step *st)
{
    for (int32_t t = 0, n; t < st->n_tokens; t += n) {
        n = min_i32(st->n_tokens - t, m->cap);
        run_slice(m, st, t, n);
        if (t + n == st->n_tokens) break; /* the last one is collected later */
        struct err e = {0};
        err_t rc = queue_sync(m->q, &e);
        if (rc != OK) {
            fail(m, rc, e.msg);
            return;
        }
        cuda_hand_over(m, f, st, t, n);
    }
}

static size_t extras_of(const struct step *st)
{
    size_t n = 0;
    for (int32_t r = 0; r < st->n_rows; r++)
        n += extra_of(st->rows[r].in);
    return n;
}

void cuda_submit(struct model *base, const struct step *st)
{
    struct cuda_model *m = (struct cuda_model *)base;
    struct cuda_flight *f = cuda_next(m);
    if (m->failed == OK) {
        device_use(m->d); /* whatever thread this is: graphs are made in the current context */
        cuda_read_scales(m);
        cuda_read_inputs(m);
        f->no_memory = !cuda_reserve_extra(m, f, extras_of(st));
        if (f->no_memory)
            cuda_clear_pages(m, f); /* other sequences may go on with them */
        else
            run_slices(m, f, st);
        queue_record(m->q, f->done);
    }
    m->n_submitted++;
}

static err_t wait_for(struct cuda_model *m, struct cuda_flight *f, struct err *why)
{
    err_t rc = event_sync(f->done, why);
    return rc == OK ? queue_error(m->q, why) : rc;
}

err_t cuda_collect(struct model *base, const struct step *st, struct err *e)
{
    struct cuda_model *m = (struct cuda_model *)base;
    struct cuda_flight *f = &m->flights[m->n_collected % CUDA_FLIGHTS];
    struct err why = {0};
    CHECK(m->n_collected != m->n_submitted);
    m->n_collected++;
    err_t rc = m->failed == OK ? wait_for(m, f, &why) : m->failed;
    if (rc != OK) fail(m, rc, why.msg);
    if (m->failed != OK) return err_set(e, m->failed, "%s", m->error.msg);
    if (f->no_memory)
        return err_set(e, ERR_NOMEM, "no memory for the sampling parameters of a step");
    int32_t last = st->n_tokens > 0 ? (st->n_tokens - 1) / m->cap * m->cap : 0;
    cuda_hand_over(m, f, st, last, st->n_tokens - last);
    return OK;
}

err_t cuda_logits(struct model *base, const struct step *st, const int32_t *tokens, int32_t n,
                  float *logits, struct err *e)
{
    struct cuda_model *m = (struct cuda_model *)base;
    CHECK(st->n_tokens <= m->cap && n <= m->cap);
    struct cuda_slice s = slice_of(m, st, 0, st->n_tokens);
    cuda_read_scales(m);
    cuda_read_inputs(m);
    lay_tokens(&s, st, 0, s.n);
    memcpy(s.f->host.pick, tokens, (size_t)n * sizeof(int32_t));
    s.n_rows = n;
    cuda_upload(&s, st->n_seqs, 0);
    cuda_forward(&s);
    size_t vocab = (size_t)m->c.vocab_size;
    for (int32_t r = 0, k; r < n; r += k) {
        k = min_i32(n - r, CUDA_ROWS);
        cuda_head(&s, r, k, false);
        for (int32_t i = 0; i < k; i++)
            queue_copy(m->q, host_addr(logits + (size_t)(r + i) * vocab),
                       host_addr(m->logits + (size_t)i * (size_t)m->ld_logits),
                       vocab * sizeof(float));
        err_t rc = queue_sync(m->q, e);
        if (rc != OK) return rc;
    }
    return OK;
}
