/*
 * bench_cuda_engine.c - decode through the engine on a GPU, the host a step behind and not.
 *
 *     build/bench/bench_cuda_engine [FORMAT] [LAYERS] [MODE]      nvfp4, 48, both (or on, off)
 *
 * Qwen3-30B-A3B's shape with random weights.  For each batch that many requests with prompts of 32 tokens
 * draw 128 tokens each; times are of their decode steps alone.  *Host* is what passes from the end of a step's
 * collection to the end of the next submission: the engine's own work and the launches.  *Wait* is what
 * the host then waits for the device.  Without overlap the device idles for the host's time; with it
 * only if there is no wait.  Ids of both must be the same.
 */
#include "backend/cuda/device.h"
#include "base/clock.h"
#include "base/mem.h"
#include "engine/engine.h"
#include "model/cuda/cuda.h"
#include "model/ops.h"
#include "weight/dummy.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { PROMPT = 32, NEW = 128, MAX_BATCH = 256 };

/* A model that notes where the engine's thread spends its time. */
struct timed {
    struct model base;
    struct model *inner;
    double last;             /* when it last came back from a collection */
    double host, wait, submit; /* seconds, of n steps */
    int n;
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
    if (st->n_tokens != st->n_seqs || t->last == 0) return; /* prompts */
    t->submit += end - begin;
    t->host += end - t->last;
    t->last = 0; /* of a step behind the one in flight: from the collection before it */
    t->n++;
}

static err_t timed_collect(struct model *m, const struct step *st, struct err *e)
{
    struct timed *t = (struct timed *)m;
    double begin = clock_s();
    err_t rc = model_collect(t->inner, st, e);
    t->last = clock_s();
    if (st->n_tokens == st->n_seqs) t->wait += t->last - begin;
    return rc;
}

static const struct model_ops timed_ops = {.isa = timed_isa,
                                           .can = timed_can,
                                           .kv_clear = timed_clear,
                                           .submit = timed_submit,
                                           .collect = timed_collect};

static void must(err_t rc, const struct err *e)
{
    if (rc == OK) return;
    fprintf(stderr, "%s\n", e->msg);
    exit(1);
}

static void shape(struct config *c, int layers)
{
    struct err e = {0};
    char json[1024];
    snprintf(
        json, sizeof json,
        "{\"model_type\":\"qwen3_moe\",\"vocab_size\":151936,\"hidden_size\":2048,"
        "\"intermediate_size\":6144,\"moe_intermediate_size\":768,\"num_hidden_layers\":%d,"
        "\"num_attention_heads\":32,\"num_key_value_heads\":4,\"head_dim\":128,\"num_experts\":128,"
        "\"num_experts_per_tok\":8,\"norm_topk_prob\":true,\"rms_norm_eps\":1e-6,"
        "\"rope_theta\":1000000.0,\"max_position_embeddings\":40960,\"tie_word_embeddings\":false,"
        "\"eos_token_id\":151645}",
        layers);
    must(config_parse(c, json, strlen(json), &e), &e);
}

static struct request *request(int i)
{
    struct request *r = request_new();
    snprintf(r->rid, sizeof r->rid, "r%d", i);
    r->prompt = mem_alloc(PROMPT * sizeof(int32_t));
    for (int k = 0; k < PROMPT; k++)
        r->prompt[k] = (int32_t)((uint32_t)(i * 7919 + k * 104729 + 12345) * 2654435761u % 151000u);
    r->n_prompt = PROMPT;
    r->max_new_tokens = NEW;
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

/* `ids` [batch][NEW]: filled, or compared.  Not warm: a first pass captures the graphs. */
static void run(struct timed *t, const struct engine_options *o, int batch, int32_t *ids, bool warm, bool compare)
{
    struct request *r[MAX_BATCH];
    struct engine *en;
    struct err e = {0};
    for (int pass = warm; pass < 2; pass++) {
        must(engine_new(&en, o, &e), &e);
        t->host = t->wait = t->submit = t->last = t->n = 0;
        for (int i = 0; i < batch; i++)
            must(engine_submit(en, r[i] = request(i), &e), &e);
        int64_t first = 0, last = 0;
        for (int i = 0; i < batch; i++) {
            wait_for(r[i]);
            if (r[i]->t_first > first) first = r[i]->t_first;
            if (r[i]->t_end > last) last = r[i]->t_end;
            if (pass == 1 && compare && memcmp(ids + i * NEW, r[i]->output_ids, NEW * sizeof *ids) != 0)
                fprintf(stderr, "batch %d, request %d: other ids than without overlap\n", batch, i), exit(1);
            if (pass == 1 && !compare) memcpy(ids + i * NEW, r[i]->output_ids, NEW * sizeof *ids);
        }
        engine_stop(en, 0);
        for (int i = 0; i < batch; i++)
            request_unref(r[i]);
        double s = (double)(last - first) * 1e-9, n = t->n ? t->n : 1;
        if (pass == 1)
            printf("batch %4d, overlap %-3s: %8.0f tok/s, %7.3f ms a step; host %6.1f us (submit %5.1f), wait %7.1f us\n",
                   batch, o->overlap == OVERLAP_OFF ? "off" : "on", batch * (NEW - 1) / s, s * 1e3 / (NEW - 1),
                   t->host / n * 1e6, t->submit / n * 1e6, t->wait / n * 1e6);
        fflush(stdout);
    }
}

int main(int argc, char **argv)
{
    static const int batches[] = {1, 8, 64, MAX_BATCH};
    static int32_t ids[MAX_BATCH * NEW];
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
    struct cuda_options co = {.n_kv_pages = MAX_BATCH * (PROMPT + NEW) / KV_PAGE + MAX_BATCH,
                              .max_step_tokens = 8192,
                              .max_seqs = MAX_BATCH,
                              .no_graphs = getenv("NO_GRAPHS") != NULL};
    must(cuda_model_new(&t.inner, &c, store, d, &co, &e), &e);
    struct engine_options o = {.config = &c,
                               .store = store,
                               .model = &t.base,
                               .n_kv_pages = co.n_kv_pages,
                               .max_running = MAX_BATCH,
                               .max_step_tokens = 8192,
                               .context_len = 40960,
                               .no_prefix_cache = true};
    printf("%s, %s, %d layers; a request draws %d tokens after %d\n", device_about(d)->name, formats[format].name,
           c.n_layers, NEW, PROMPT);
    for (size_t i = 0; i < sizeof batches / sizeof batches[0]; i++) {
        o.overlap = OVERLAP_OFF;
        if (strcmp(mode, "on") != 0) run(&t, &o, batches[i], ids, false, false);
        o.overlap = OVERLAP_AUTO;
        if (strcmp(mode, "off") != 0) run(&t, &o, batches[i], ids, both, both);
    }
    model_free(t.inner);
    store_free(store);
    weights_free(w);
    device_close(d);
    mem_free(specs);
    return 0;
}
