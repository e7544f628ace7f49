/*
 * bench_cuda_model.c - the whole model on a GPU: Qwen3-30B-A3B's shape with random weights.
 *
 *     build/bench/bench_cuda_model FORMAT [LAYERS] [PROMPTS]      FORMAT: bf16, nvfp4, fp8-block,
 * mxfp8, ...
 *
 * Prints the time to stage random weights, a decode step at batch 1 ... 1209 with a context of
 * 1,000 tokens (greedy) beside the time to read what it must read at 4,390 GB/s, prefill of 8,192
 * tokens, and the pause of an update (a second generation is staged, then committed: the copy into
 * place).  Each figure is the median of several runs.  With PROMPTS, the gsm8k-shaped load too:
 * every prompt of the file (int32 count, then for each its length and ids) goes through the engine
 * at once; output lengths are drawn from a seed (mean 140, at most 512), end tokens ignored.
 */
#include "backend/cuda/device.h"
#include "base/clock.h"
#include "base/mem.h"
#include "engine/engine.h"
#include "model/cuda/cuda.h"
#include "weight/dummy.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { CONTEXT = 1000, REPEAT = 15, PREFILL = 8192, MAX_BATCH = 1209, MAX_RUNNING = 1536 };
#define READ_GB_S 4390.0

struct rig {
    struct config c;
    struct device *d;
    struct weights *w;
    struct store *store;
    struct model *m;
    int32_t pages;
    format_t format;
};

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

static double stage(struct rig *g, uint64_t seed, double *commit_s)
{
    struct err e = {0};
    struct update *u;
    double t = clock_s();
    must(update_begin(&u, g->store, &e), &e);
    must(dummy_stage(u, seed, 16, NULL, &e), &e);
    must(update_prepare(u, &e), &e);
    double staged = clock_s();
    update_commit(u);
    *commit_s = clock_s() - staged;
    update_free(u);
    must(weights_error(g->w, &e), &e);
    return staged - t;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *t, int n)
{
    qsort(t, (size_t)n, sizeof *t, by_value);
    return t[n / 2];
}

/* Bytes that a decode step must read: each expert that some token chose once, the rest once, KV. */
static double step_bytes(const struct rig *g, int batch)
{
    const struct config *c = &g->c;
    const struct format *f = &formats[g->format];
    double h = c->hidden_size, q = (double)c->n_heads * c->head_dim;
    double kv = (double)c->n_kv_heads * c->head_dim;
    double hit = 1 - pow(1 - (double)c->top_k / c->n_experts, batch);
    double per = f->elem_bits / 8.0;
    if (f->scale != SCALE_NONE && f->group_cols)
        per +=
            (double)f->scale_bytes / ((double)f->group_cols * (f->group_rows ? f->group_rows : 1));
    double linear = h * (2 * q + 2 * kv) + 3 * h * c->moe_intermediate_size * c->n_experts * hit;
    double rest = 2 * h * c->n_experts + 4.0 * kv * batch * CONTEXT;
    return (linear * per + rest) * c->n_layers + 2 * h * c->vocab_size;
}

struct batch {
    int32_t *ids, *pos, *seq, **tables;
    struct step_seq *seqs;
    struct sample_input *in;
    struct sample_output *out;
    struct step_row *rows;
};

static struct batch batch_new(const struct rig *g, int n_tokens, int n_seqs)
{
    size_t n = (size_t)n_tokens, s = (size_t)n_seqs, pages = (size_t)(g->pages / n_seqs);
    struct batch b = {.ids = mem_alloc(n * 4),
                      .pos = mem_alloc(n * 4),
                      .seq = mem_alloc(n * 4),
                      .tables = mem_alloc(s * sizeof(int32_t *)),
                      .seqs = mem_alloc(s * sizeof *b.seqs),
                      .in = mem_alloc(s * sizeof *b.in),
                      .out = mem_alloc(s * sizeof *b.out),
                      .rows = mem_alloc(s * sizeof *b.rows)};
    for (size_t i = 0; i < s; i++) {
        b.tables[i] = mem_alloc(pages * 4);
        for (size_t p = 0; p < pages; p++)
            b.tables[i][p] = (int32_t)(i * pages + p);
        b.seqs[i] = (struct step_seq){b.tables[i], (int32_t)pages};
    }
    return b;
}

static void batch_free(struct batch *b, int n_seqs)
{
    for (int i = 0; i < n_seqs; i++)
        mem_free(b->tables[i]);
    void *all[] = {b->ids, b->pos, b->seq, b->tables, b->seqs, b->in, b->out, b->rows};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        mem_free(all[i]);
}

/* Seconds of one step of n_seqs x per_seq tokens at positions first, ...; of its submission alone
 * in *submit. */
static double step(struct rig *g, struct batch *b, int n_seqs, int per_seq, int first,
                   double *submit)
{
    static const struct sample_params greedy = {.top_p = 1, .repetition_penalty = 1};
    struct err e = {0};
    int n = 0;
    for (int s = 0; s < n_seqs; s++) {
        for (int i = 0; i < per_seq; i++, n++) {
            b->ids[n] = (int32_t)((uint32_t)(s * 7919 + (first + i) * 104729 + 12345) *
                                  2654435761u % 151000u);
            b->pos[n] = first + i;
            b->seq[n] = s;
        }
        b->in[s] = (struct sample_input){
            .target = -1, .params = &greedy, .position = (uint64_t)(first + per_seq)};
        b->rows[s] = (struct step_row){n - 1, &b->in[s], &b->out[s]};
    }
    struct step st = {n, b->ids, b->pos, b->seq, n_seqs, b->seqs, n_seqs, b->rows};
    double t = clock_s();
    model_submit(g->m, &st);
    *submit = clock_s() - t;
    must(model_collect(g->m, &st, &e), &e);
    t = clock_s() - t;
    for (int s = 0; s < n_seqs; s++)
        if (!b->out[s].finite) fprintf(stderr, "logits of row %d are not finite\n", s), exit(1);
    return t;
}

static double decode_ms(struct rig *g, int batch, double *submit_ms)
{
    struct batch b = batch_new(g, batch, batch);
    double t[REPEAT], submit[REPEAT + 3];
    for (int i = 0; i < REPEAT + 3; i++) {
        double s = step(g, &b, batch, 1, CONTEXT + i, &submit[i < 3 ? REPEAT : i - 3]);
        if (i >= 3) t[i - 3] = s;
    }
    batch_free(&b, batch);
    *submit_ms = median(submit, REPEAT) * 1e3;
    return median(t, REPEAT) * 1e3;
}

static double prefill_s(struct rig *g, int n_seqs, int per_seq)
{
    struct batch b = batch_new(g, n_seqs * per_seq, n_seqs);
    double t[5], submit;
    (void)step(g, &b, n_seqs, per_seq, 0, &submit);
    for (int i = 0; i < 5; i++)
        t[i] = step(g, &b, n_seqs, per_seq, 0, &submit);
    batch_free(&b, n_seqs);
    return median(t, 5);
}

/* --- the gsm8k-shaped load */
static int32_t length_of(uint64_t i)
{
    uint64_t z = (i + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 31) * 0xbf58476d1ce4e5b9u;
    double u = ((double)((z ^ z >> 29) >> 11) + 0.5) * 0x1p-53;
    double n = 60 - 80 * log(u); /* mean 140 */
    return n > 512 ? 512 : (int32_t)n;
}

static void load_run(struct rig *g, const char *path)
{
    struct err e = {0};
    FILE *f = fopen(path, "rb");
    int32_t count, n;
    if (!f || fread(&count, 4, 1, f) != 1) fprintf(stderr, "%s: cannot be read\n", path), exit(1);
    struct request **r = mem_alloc((size_t)count * sizeof *r);
    double outputs = 0, prompts = 0, cached = 0;
    for (int32_t i = 0; i < count; i++) {
        r[i] = request_new();
        if (fread(&n, 4, 1, f) != 1) exit(1);
        r[i]->prompt = mem_alloc((size_t)n * 4);
        if (fread(r[i]->prompt, 4, (size_t)n, f) != (size_t)n) exit(1);
        snprintf(r[i]->rid, sizeof r[i]->rid, "r%d", i);
        r[i]->n_prompt = n;
        r[i]->max_new_tokens = length_of((uint64_t)i);
        r[i]->ignore_eos = true;
        prompts += n;
    }
    fclose(f);
    struct engine_options o = {.config = &g->c,
                               .store = g->store,
                               .model = g->m,
                               .n_kv_pages = g->pages,
                               .max_running = MAX_RUNNING,
                               .chunk_tokens = PREFILL,
                               .max_step_tokens = PREFILL,
                               .context_len = 40960,
                               .weight_version = "0",
                               .model_path = "random"};
    struct engine *en;
    for (int pass = 0; pass < 2; pass++) { /* the first pass captures the graphs */
        must(engine_new(&en, &o, &e), &e);
        double t = clock_s();
        for (int32_t i = 0; i < count; i++)
            must(engine_submit(en, r[i], &e), &e);
        outputs = cached = 0;
        for (int32_t i = 0; i < count; i++) {
            for (bool done = false; !done; usleep(200)) {
                pthread_mutex_lock(&r[i]->lock);
                done = r[i]->done;
                pthread_mutex_unlock(&r[i]->lock);
            }
            if (r[i]->finish != FINISH_LENGTH)
                fprintf(stderr, "r%d: %s\n", i, r[i]->finish_message), exit(1);
            outputs += r[i]->n_output;
            cached += r[i]->cached_tokens;
        }
        t = clock_s() - t;
        struct engine_stats s;
        engine_stat(en, &s);
        printf("gsm8k-shaped load, pass %d: %d prompts of %.0f tokens (%.0f cached), %.0f output "
               "tokens in %.2f s: "
               "%.0f output tok/s; %lld steps, %lld retractions\n",
               pass, count, prompts / count, cached / count, outputs, t, outputs / t,
               (long long)s.steps, (long long)s.retractions);
        fflush(stdout);
        engine_stop(en, 0);
        for (int32_t i = 0; pass == 0 && i < count; i++) {
            struct request *again = request_new();
            again->prompt = r[i]->prompt;
            r[i]->prompt = NULL;
            memcpy(again->rid, r[i]->rid, sizeof again->rid);
            again->n_prompt = r[i]->n_prompt;
            again->max_new_tokens = r[i]->max_new_tokens;
            again->ignore_eos = true;
            request_unref(r[i]);
            r[i] = again;
        }
    }
}

int main(int argc, char **argv)
{
    static const int batches[] = {1, 8, 32, 64, 256, MAX_BATCH};
    struct rig g = {.format = format_find(argc > 1 ? argv[1] : "nvfp4")};
    struct err e = {0};
    struct slot_spec *specs;
    struct cuda_needs needs;
    size_t n, free_bytes;
    double commit;
    if (g.format == FORMAT_COUNT) fprintf(stderr, "unknown format\n"), exit(2);
    shape(&g.c, argc > 2 ? atoi(argv[2]) : 48);
    must(device_open(&g.d, 0, 0, &e), &e);
    must(weights_new(&g.w, g.d, &e), &e);
    must(model_specs(&g.c, &specs, &n, &e), &e);
    for (size_t i = 0; i < n; i++)
        if (specs[i].linear) specs[i].shape.format = g.format;
    must(store_new(&g.store, specs, n, weights_memory(g.w), &e), &e);
    printf("%s, %s, %d layers: weights %.2f GB, %.4f of the bytes stored\n",
           device_about(g.d)->name, formats[g.format].name, g.c.n_layers,
           (double)store_bytes(g.store) * 1e-9,
           (double)store_bytes(g.store) / (double)dummy_bytes(specs, n));
    double first = stage(&g, 1, &commit);
    printf("random weights made and staged in %.2f s\n", first);
    struct cuda_options o = {.no_graphs = getenv("NO_GRAPHS") != NULL,
                             .n_kv_pages = MAX_RUNNING * 90,
                             .max_step_tokens = PREFILL,
                             .max_seqs = MAX_RUNNING};
    must(cuda_model_needs(&needs, g.d, &g.c, &o, &e), &e);
    size_t work = needs.step + needs.partial, page = needs.kv_page;
    must(device_free_bytes(&free_bytes, g.d, &e), &e);
    size_t left = free_bytes - store_bytes(g.store) - work - ((size_t)3 << 30);
    if (left / page < (size_t)o.n_kv_pages) o.n_kv_pages = (int32_t)(left / page);
    g.pages = o.n_kv_pages;
    must(cuda_model_new(&g.m, &g.c, g.store, g.d, &o, &e), &e);
    printf("step buffers %.2f GB, KV %.2f GB = %d tokens\n", (double)work * 1e-9,
           (double)page * g.pages * 1e-9, g.pages * 16);
    for (size_t i = 0; i < sizeof batches / sizeof batches[0]; i++) {
        if ((CONTEXT + REPEAT + 3) * (size_t)batches[i] > (size_t)g.pages * 16) continue;
        double submit, ms = decode_ms(&g, batches[i], &submit),
                       floor_ms = step_bytes(&g, batches[i]) / READ_GB_S * 1e-6;
        printf("decode, batch %4d: %7.3f ms a step (%.3f to submit), %8.0f tok/s; floor %.3f ms: "
               "%.0f%%\n",
               batches[i], ms, submit, batches[i] / ms * 1e3, floor_ms, 100 * floor_ms / ms);
        fflush(stdout);
    }
    double one = prefill_s(&g, 1, PREFILL), many = prefill_s(&g, 8, PREFILL / 8);
    printf("prefill: one prompt of %d in %.1f ms, %.0f tok/s; 8 of %d in %.1f ms, %.0f tok/s\n",
           PREFILL, one * 1e3, PREFILL / one, PREFILL / 8, many * 1e3, PREFILL / many);
    double again = stage(&g, 2, &commit);
    printf("update: staged in %.2f s, commit (the pause) %.2f ms for %.2f GB\n", again,
           commit * 1e3, (double)store_bytes(g.store) * 1e-9);
    fflush(stdout);
    if (argc > 3) load_run(&g, argv[3]);
    model_free(g.m);
    store_free(g.store);
    weights_free(g.w);
    device_close(g.d);
    mem_free(specs);
    return 0;
}
