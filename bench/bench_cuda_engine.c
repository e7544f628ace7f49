/*
 * bench_cuda_engine.c - decode through the engine on a GPU, the host a step behind and not.
 *
 *     build/bench/bench_cuda_engine [FORMAT] [LAYERS] [MODE] [BATCH]
 *                                    nvfp4     48     both, on or off    all of the table
 *
 * Qwen3-30B-A3B's shape with random weights.  Times are of steps in which every request of a batch
 * decodes: *host* is what passes from the end of a step's collection to the end of the next
 * submission, the engine's own work and the launches; *wait* what the host then waits for the
 * device.  Without overlap the device idles for the host's time; with it only if there is no wait.
 * Ids of both must be the same.
 */
#include "backend/cuda/device.h"
#include "base/clock.h"
#include "base/mem.h"
#include "engine/engine.h"
#include "full_config.h"
#include "model/cuda/cuda.h"
#include "model/ops.h"
#include "weight/dummy.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_BATCH = 1209, MAX_NEW = 128, MAX_STEP = 8192 };

struct load {
    int batch;
    int shared, prompt; /* tokens that all prompts begin with; tokens of a prompt */
    int n_new;
};
static const struct load loads[] = {{1, 0, 32, 128},
                                    {8, 0, 32, 128},
                                    {64, 0, 32, 128},
                                    {256, 0, 32, 128},
                                    {MAX_BATCH, 1424, 1520, 48}};

/* A model that notes where the engine's thread spends its time. */
struct timed {
    struct model base;
    struct model *inner;
    double last;               /* when it last came back from a collection */
    double host, wait, submit; /* seconds, of n steps */
    int n, batch;
};

static struct model *inner_of(const struct model *m)
{
    return ((const struct timed *)m)->inner;
}

static const char *timed_isa(const struct model *m)
{
    return model_isa(inner_of(m));
}

static unsigned timed_can(const struct model *m)
{
    return model_can(inner_of(m));
}

static void timed_clear(struct model *m, int32_t page)
{
    model_kv_clear(inner_of(m), page);
}

static void timed_submit(struct model *m, const struct step *st)
{
    struct timed *t = (struct timed *)m;
    double begin = clock_s();
    model_submit(t->inner, st);
    double end = clock_s();
    if (st->n_tokens != t->batch || st->n_seqs != t->batch || t->last == 0) return;
    t->submit += end - begin;
    t->host += end - t->last;
    t->n++;
}

static err_t timed_collect(struct model *m, const struct step *st, struct err *e)
{
    struct timed *t = (struct timed *)m;
    double begin = clock_s();
    err_t rc = model_collect(t->inner, st, e);
    t->last = clock_s();
    if (st->n_tokens == t->batch && st->n_seqs == t->batch) t->wait += t->last - begin;
    return rc;
}

static const struct model_ops timed_ops = {.isa = timed_isa,
                                           .can = timed_can,
                                           .kv_clear = timed_clear,
                                           .submit = timed_submit,
                                           .collect = timed_collect};

static struct request *request(const struct load *l, int i)
{
    struct request *r = request_new();
    snprintf(r->rid, sizeof r->rid, "r%d", i);
    r->prompt = mem_alloc((size_t)l->prompt * sizeof(int32_t));
    for (int k = 0; k < l->prompt; k++)
        r->prompt[k] = (int32_t)((uint32_t)((k < l->shared ? 0 : i * 7919) + k * 104729 + 12345) *
                                 2654435761u % 151000u);
    r->n_prompt = l->prompt;
    r->max_new_tokens = l->n_new;
    r->ignore_eos = true;
    r->sp.seed = (uint64_t)i;
    return r;
}

static void wait_for(struct request *r)
{
    for (bool done = false; !done; usleep(500)) {
        pthread_mutex_lock(&r->lock);
        done = r->done;
        pthread_mutex_unlock(&r->lock);
    }
    if (r->finish != FINISH_LENGTH) fprintf(stderr, "%s: %s\n", r->rid, r->finish_message), exit(1);
}

/* `ids` [batch][MAX_NEW]: filled, or compared.  Not warm: a first pass captures the graphs. */
static void run(struct timed *t, const struct engine_options *o, const struct load *l, int32_t *ids,
                bool warm, bool compare)
{
    struct request *r[MAX_BATCH];
    struct engine *en;
    struct err e = {0};
    for (int pass = warm; pass < 2; pass++) {
        must(engine_new(&en, o, &e), &e);
        t->host = t->wait = t->submit = t->last = t->n = 0;
        t->batch = l->batch;
        for (int i = 0; i < l->batch; i++)
            must(engine_submit(en, r[i] = request(l, i), &e), &e);
        size_t bytes = (size_t)l->n_new * sizeof *ids;
        for (int i = 0; i < l->batch; i++) {
            wait_for(r[i]);
            if (pass == 1 && compare && memcmp(ids + i * MAX_NEW, r[i]->output_ids, bytes) != 0)
                fprintf(stderr, "batch %d, request %d: other ids than without overlap\n", l->batch,
                        i),
                    exit(1);
            if (pass == 1 && !compare) memcpy(ids + i * MAX_NEW, r[i]->output_ids, bytes);
        }
        engine_stop(en, 0);
        for (int i = 0; i < l->batch; i++)
            request_unref(r[i]);
        double n = t->n ? t->n : 1, s = (t->host + t->wait) / n;
        if (pass == 1)
            printf("batch %4d, overlap %-3s: %8.0f tok/s, %7.3f ms a step; host %6.1f us (submit "
                   "%5.1f), wait %7.1f us; "
                   "%d steps\n",
                   l->batch, o->overlap == OVERLAP_OFF ? "off" : "on", l->batch / s, s * 1e3,
                   t->host / n * 1e6, t->submit / n * 1e6, t->wait / n * 1e6, t->n);
        fflush(stdout);
    }
}

int main(int argc, char **argv)
{
    static int32_t ids[MAX_BATCH * MAX_NEW];
    format_t format = format_find(argc > 1 ? argv[1] : "nvfp4");
    const char *mode = argc > 3 ? argv[3] : "both";
    bool both = strcmp(mode, "both") == 0;
    struct config c;
    struct device *d;
    struct weights *w;
    struct store *store;
    struct slot_spec *specs;
    struct update *u;
    struct timed t = {.base = {&timed_ops}};
    struct err e = {0};
    size_t n;
    if (format == FORMAT_COUNT) fprintf(stderr, "unknown format\n"), exit(2);
    shape(&c, argc > 2 ? atoi(argv[2]) : 48);
    must(device_open(&d, 0, 0, &e), &e);
    must(weights_new(&w, d, &e), &e);
    must(model_specs(&c, &specs, &n, &e), &e);
    for (size_t i = 0; i < n; i++)
        if (specs[i].linear) specs[i].shape.format = format;
    must(store_new(&store, specs, n, weights_memory(w), &e), &e);
    must(update_begin(&u, store, &e), &e);
    must(dummy_stage(u, 1, 16, NULL, &e), &e);
    must(update_prepare(u, &e), &e);
    update_commit(u);
    update_free(u);
    struct cuda_options co = {.n_kv_pages = MAX_BATCH * 12,
                              .max_step_tokens = MAX_STEP,
                              .max_seqs = MAX_BATCH,
                              .no_graphs = getenv("NO_GRAPHS") != NULL};
    must(cuda_model_new(&t.inner, &c, store, d, &co, &e), &e);
    struct engine_options o = {.config = &c,
                               .store = store,
                               .model = &t.base,
                               .n_kv_pages = co.n_kv_pages,
                               .max_running = MAX_BATCH,
                               .max_step_tokens = MAX_STEP,
                               .context_len = 40960};
    printf("%s, %s, %d layers\n", device_about(d)->name, formats[format].name, c.n_layers);
    for (size_t i = 0; i < sizeof loads / sizeof loads[0]; i++) {
        if (argc > 4 && atoi(argv[4]) != loads[i].batch) continue;
        o.overlap = OVERLAP_OFF;
        if (strcmp(mode, "on") != 0) run(&t, &o, &loads[i], ids, false, false);
        o.overlap = OVERLAP_AUTO;
        if (strcmp(mode, "off") != 0) run(&t, &o, &loads[i], ids, both, both);
    }
    model_free(t.inner);
    store_free(store);
    weights_free(w);
    device_close(d);
    mem_free(specs);
    return 0;
}
