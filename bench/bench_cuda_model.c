/*
 * bench_cuda_model.c - the whole model on a GPU: Qwen3-30B-A3B's shape with random weights.
 *
 *     build/bench/bench_cuda_model FORMAT [LAYERS [PROMPTS]] [--json FILE] [--batch 1,64] [--part NAME,..]
 *                                  [--repeat 15] [--no-graphs] [--updates 1] [--staging host [--ready 1]]
 *
 * FORMAT: of the attention's and the experts' matrices, bf16, nvfp4, fp8-block, mxfp8, ...; or mix: experts in
 * NVFP4, attention and the last four layers in BF16.
 * Parts, all by default:
 *   decode    a step at batch 1 ... 1209 with a context of 1,000 tokens, greedy; and at 1,209 with 960 of them in
 *             pages that all sequences share, as a load of one prompt prefix has them
 *   prefill   a step of one prompt of 8,192 tokens, and of 8 of 1,024
 *   load      with PROMPTS: gsm_load.h
 *   update    other random weights are staged beside the first, then committed (the pause: the copy into place);
 *             the checksum of the resident bytes must change.  Of up to 20 GB, else it is left out.  --updates of
 *             them, one after the other; --staging host: they wait in host memory, which --ready threads pin before
 *             (0: the first update does)
 * Each figure is the median of several runs, beside its floor: the greater of the bytes it must read / 4,390 GB/s
 * (stored bytes of every weight that some token needs, KV) and its operations / 670 TFLOP/s.
 */
#include "backend/backend.h"
#include "backend/cuda/device.h"
#include "base/clock.h"
#include "base/mem.h"
#include "full_config.h"
#include "gsm_load.h"
#include "model/cuda/cuda.h"
#include "model/cuda/cuda_model.h"
#include "record.h"
#include "weight/dummy.h"
#include <getopt.h>
#include <pthread.h>
#include <string.h>

enum {
    CONTEXT = 1000,
    REPEAT_MAX = 15,
    WARM = 3,
    PREFILL = 8192,
    MAX_BATCH = 1209,
    MAX_RUNNING = 1536,
    SHARED = 960,   /* tokens of a shared prefix */
    MIX_LAST = 4,   /* layers that `mix` leaves in BF16 */
    PAGES_EACH = 64 /* of CONTEXT + REPEAT_MAX + WARM tokens */
};
#define READ_GB_S   4390.0
#define TFLOP_S     670.0
#define SPARE_BYTES ((size_t)3 << 30) /* left to the driver, graphs and the like */
#define HASH_BYTES  ((size_t)20 << 30)

enum { PART_DECODE = 1, PART_PREFILL = 2, PART_LOAD = 4, PART_UPDATE = 8, PARTS_ALL = 15 };

struct args {
    const char *format, *prompts, *json, *batches;
    int layers, repeat;
    unsigned parts;
    bool no_graphs, on_host;
    int updates, ready;
};

struct rig {
    struct config c;
    struct device *d;
    struct weights *w;
    struct store *store;
    struct model *m;
    int32_t pages;
    int repeat;
    const char *format;
    struct record record;
};

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

struct need {
    double bytes, flops;
};

static bool is_expert(const struct slot_spec *p)
{
    return strstr(p->name, ".mlp.experts.") != NULL;
}

/* What a step of `tokens` tokens must do to the weights; `rows` of them are sampled.  Each expert that some token
 * chose (by chance, uniformly) is read once, all else but the embedding once. */
static struct need weights_need(const struct rig *g, double tokens, double rows)
{
    const struct config *c = &g->c;
    struct need n = {0};
    double share = (double)c->top_k / c->n_experts, hit = 1 - pow(1 - share, tokens);
    for (size_t i = 0; i < store_slots(g->store); i++) {
        const struct slot_spec *p = store_spec(g->store, i);
        if (p->shape.kind != RESIDENT_MATRIX) continue;
        bool head = strcmp(p->name, "lm_head.weight") == 0;
        n.bytes += (double)dummy_bytes(p, 1) * (is_expert(p) ? hit : 1);
        n.flops += 2.0 * (double)p->shape.rows * (double)p->shape.cols *
                   (head           ? rows
                    : is_expert(p) ? tokens * share
                                   : tokens);
    }
    return n;
}

/* And attention: keys that are read (each once), pairs of query and key. */
static void attention_need(struct need *n, const struct rig *g, double keys, double pairs)
{
    const struct config *c = &g->c;
    n->bytes += 4.0 * c->n_kv_heads * c->head_dim * keys * c->n_layers;
    n->flops += 4.0 * c->n_heads * c->head_dim * pairs * c->n_layers;
}

static double floor_ms(const struct need *n)
{
    double read = n->bytes / READ_GB_S * 1e-6, work = n->flops / TFLOP_S * 1e-9;
    return read > work ? read : work;
}

struct batch {
    int32_t *ids, *pos, *seq, **tables;
    struct step_seq *seqs;
    struct sample_input *in;
    struct sample_output *out;
    struct step_row *rows;
};

/* The first `shared` pages of all sequences are the same. */
static struct batch batch_new(const struct rig *g, int n_tokens, int n_seqs, size_t shared)
{
    size_t n = (size_t)n_tokens, s = (size_t)n_seqs, own = ((size_t)g->pages - shared) / s;
    size_t pages = shared + own;
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
            b.tables[i][p] = (int32_t)(p < shared ? p : shared + i * own + p - shared);
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
    const struct step st = {.n_tokens = n,
                            .ids = b->ids,
                            .pos = b->pos,
                            .seq = b->seq,
                            .n_seqs = n_seqs,
                            .seqs = b->seqs,
                            .n_rows = n_seqs,
                            .rows = b->rows};
    double t = clock_s();
    model_submit(g->m, &st);
    *submit = clock_s() - t;
    must(model_collect(g->m, &st, &e), &e);
    t = clock_s() - t;
    for (int s = 0; s < n_seqs; s++)
        if (!b->out[s].finite) fprintf(stderr, "logits of row %d are not finite\n", s), exit(1);
    return t;
}

static void decode(struct rig *g, int batch, int shared)
{
    struct batch b = batch_new(g, batch, batch, (size_t)shared / 16);
    double t[REPEAT_MAX], submit[REPEAT_MAX], ignored;
    for (int i = 0; i < WARM; i++)
        (void)step(g, &b, batch, 1, CONTEXT + i, &ignored);
    for (int i = 0; i < g->repeat; i++)
        t[i] = step(g, &b, batch, 1, CONTEXT + WARM + i, &submit[i]);
    batch_free(&b, batch);
    double ms = median(t, g->repeat) * 1e3, submit_ms = median(submit, g->repeat) * 1e3;
    struct need n = weights_need(g, batch, batch);
    attention_need(&n, g, shared + (double)batch * (CONTEXT - shared), (double)batch * CONTEXT);
    printf("decode, batch %4d%s: %7.3f ms a step (%.3f to submit), %8.0f tok/s; floor %.3f ms: "
           "%.0f%%\n",
           batch, shared ? " (960 shared)" : "", ms, submit_ms, batch / ms * 1e3, floor_ms(&n),
           100 * floor_ms(&n) / ms);
    fflush(stdout);
    record_begin(&g->record);
    record_text(&g->record, "what", "decode"), record_text(&g->record, "format", g->format);
    record_num(&g->record, "layers", g->c.n_layers), record_num(&g->record, "batch", batch);
    record_num(&g->record, "context", CONTEXT), record_num(&g->record, "shared", shared);
    record_num(&g->record, "ms", ms), record_num(&g->record, "submit_ms", submit_ms);
    record_num(&g->record, "tok_s", batch / ms * 1e3),
        record_num(&g->record, "floor_ms", floor_ms(&n));
    record_end(&g->record);
}

static void decode_all(struct rig *g, const char *batches)
{
    for (const char *p = batches; *p; p += strspn(p, ",")) {
        char *end;
        long batch = strtol(p, &end, 10);
        if (end == p || batch < 1 || batch > MAX_BATCH)
            fprintf(stderr, "--batch: %s\n", p), exit(2);
        p = end;
        if (batch * PAGES_EACH <= g->pages) decode(g, (int)batch, 0);
        if (batch == MAX_BATCH) decode(g, (int)batch, SHARED);
    }
}

static void prefill(struct rig *g, int n_seqs, int per_seq)
{
    struct batch b = batch_new(g, n_seqs * per_seq, n_seqs, 0);
    double t[5], submit, s, all = (double)n_seqs * per_seq;
    int n_times = g->repeat < 5 ? g->repeat : 5;
    (void)step(g, &b, n_seqs, per_seq, 0, &submit);
    for (int i = 0; i < n_times; i++)
        t[i] = step(g, &b, n_seqs, per_seq, 0, &submit);
    batch_free(&b, n_seqs);
    s = median(t, n_times);
    struct need n = weights_need(g, all, n_seqs);
    attention_need(&n, g, all, all * (per_seq + 1) / 2);
    printf("prefill, %d of %d: %.1f ms, %.0f tok/s; floor %.1f ms: %.0f%%\n", n_seqs, per_seq,
           s * 1e3, all / s, floor_ms(&n), floor_ms(&n) / s * 0.1);
    fflush(stdout);
    record_begin(&g->record);
    record_text(&g->record, "what", "prefill"), record_text(&g->record, "format", g->format);
    record_num(&g->record, "layers", g->c.n_layers), record_num(&g->record, "prompts", n_seqs);
    record_num(&g->record, "tokens", per_seq), record_num(&g->record, "ms", s * 1e3);
    record_num(&g->record, "tok_s", all / s), record_num(&g->record, "floor_ms", floor_ms(&n));
    record_end(&g->record);
}

static void load(struct rig *g, const char *path)
{
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
    struct gsm_load l;
    struct gsm_result r;
    gsm_read(&l, path);
    gsm_run(&r, &l, &o);
    printf(
        "gsm8k-shaped load: %d prompts of %.0f tokens (%.0f cached), %.0f output tokens in %.2f s: "
        "%.0f output tok/s; %lld steps, %lld retractions\n",
        l.count, l.prompts / l.count, r.cached / l.count, r.outputs, r.seconds,
        r.outputs / r.seconds, r.steps, r.retractions);
    fflush(stdout);
    record_begin(&g->record);
    record_text(&g->record, "what", "gsm8k-shaped load"),
        record_text(&g->record, "format", g->format);
    record_num(&g->record, "layers", g->c.n_layers), record_num(&g->record, "requests", l.count);
    record_num(&g->record, "prompt_tokens", l.prompts),
        record_num(&g->record, "cached_tokens", r.cached);
    record_num(&g->record, "output_tokens", r.outputs),
        record_num(&g->record, "seconds", r.seconds);
    record_num(&g->record, "tok_s", r.outputs / r.seconds),
        record_num(&g->record, "steps", (double)r.steps);
    record_num(&g->record, "retractions", (double)r.retractions);
    record_end(&g->record);
}

/* Needs the memory of a second generation: after the model and its KV are gone. */
static void update(struct rig *g, uint64_t seed, bool on_host)
{
    double commit, bytes = (double)store_bytes(g->store);
    uint64_t before = store_hash(g->store); /* by the device's bytes */
    double staged = stage(g, seed, &commit);
    uint64_t after = store_hash(g->store);
    if (before == after) fprintf(stderr, "update: the resident bytes are as before\n"), exit(1);
    printf("update: %.2f GB of random weights made and staged in %s memory in %.2f s, commit (the "
           "pause) %.2f ms; checksum %016llx, before %016llx\n",
           bytes * 1e-9, on_host ? "host" : "device", staged, commit * 1e3,
           (unsigned long long)after, (unsigned long long)before);
    fflush(stdout);
    record_begin(&g->record);
    record_text(&g->record, "what", "update, random weights"),
        record_text(&g->record, "format", g->format);
    record_text(&g->record, "staging", on_host ? "host" : "device");
    record_num(&g->record, "layers", g->c.n_layers), record_num(&g->record, "bytes", bytes);
    record_num(&g->record, "stage_s", staged), record_num(&g->record, "commit_ms", commit * 1e3);
    record_end(&g->record);
}

static void *ready_main(void *arg)
{
    struct err e = {0};
    for (bool more = true; more;)
        must(store_ready(arg, &more, &e), &e);
    return NULL;
}

/* As a server does after its start; threads 0: the first update pins. */
static void stage_on_host(struct rig *g, int threads)
{
    struct err e = {0};
    pthread_t t[64];
    int n = 0;
    double t0 = clock_s();
    must(weights_stage_on_host(g->w, store_bytes(g->store), &e), &e);
    while (n < threads && n < 64 && pthread_create(&t[n], NULL, ready_main, g->store) == 0)
        n++;
    for (int i = 0; i < n; i++)
        pthread_join(t[i], NULL);
    if (n)
        printf("%.2f GB of host memory pinned by %d threads in %.2f s\n",
               (double)store_bytes(g->store) * 1e-9, n, clock_s() - t0);
}

/* --- */
/* Random keys and values below 1 in size: zeros would be cheaper to multiply. */
static void fill_kv(const struct rig *g)
{
    enum { BLOCK = 16 << 20 };
    const struct cuda_model *m = (const struct cuda_model *)g->m;
    struct err e = {0};
    uint16_t *block = mem_alloc(BLOCK);
    uint64_t s = 1;
    for (size_t i = 0; i < BLOCK / 2; i++) {
        s = s * 6364136223846793005u + 1442695040888963407u;
        block[i] = f32_to_bf16((float)(int32_t)(s >> 32) * 0x1p-31f);
    }
    for (size_t at = 0, n; at < region_mapped(m->kv); at += n) {
        size_t left = region_mapped(m->kv) - at;
        n = left < BLOCK ? left : BLOCK;
        queue_copy(m->q, region_base(m->kv) + at, at ? region_base(m->kv) : host_addr(block), n);
    }
    must(queue_sync(m->q, &e), &e);
    mem_free(block);
}

static void choose_formats(struct slot_spec *specs, size_t n, const char *name, int layers)
{
    char last[64];
    bool mix = strcmp(name, "mix") == 0;
    format_t f = mix ? FORMAT_NVFP4 : format_find(name);
    if (f == FORMAT_COUNT) fprintf(stderr, "%s: unknown format\n", name), exit(2);
    for (size_t i = 0; i < n; i++) {
        if (!specs[i].linear || (mix && !is_expert(&specs[i]))) continue;
        bool keep = false;
        for (int l = layers - MIX_LAST; mix && l < layers; l++) {
            snprintf(last, sizeof last, "model.layers.%d.", l);
            keep = keep || strncmp(specs[i].name, last, strlen(last)) == 0;
        }
        if (!keep) specs[i].shape.format = f;
    }
}

static void open_model(struct rig *g, const struct args *a)
{
    struct err e = {0};
    struct cuda_needs needs;
    size_t free_bytes;
    struct cuda_options o = {.no_graphs = a->no_graphs,
                             .n_kv_pages = MAX_RUNNING * 90,
                             .max_step_tokens = PREFILL,
                             .max_seqs = MAX_RUNNING};
    must(cuda_model_needs(&needs, g->d, &g->c, &o, &e), &e);
    size_t work = needs.step + needs.partial, page = needs.kv_page;
    must(device_free_bytes(&free_bytes, g->d, &e), &e);
    size_t left = free_bytes - work - SPARE_BYTES;
    if (left / page < (size_t)o.n_kv_pages) o.n_kv_pages = (int32_t)(left / page);
    g->pages = o.n_kv_pages;
    must(cuda_model_new(&g->m, &g->c, g->store, g->d, &o, &e), &e);
    fill_kv(g);
    printf("step buffers %.2f GB, KV %.2f GB = %d tokens\n", (double)work * 1e-9,
           (double)page * g->pages * 1e-9, g->pages * 16);
}

static void open_weights(struct rig *g, const struct args *a)
{
    struct err e = {0};
    struct slot_spec *specs;
    size_t n, before, after;
    double commit;
    must(weights_new(&g->w, g->d, &e), &e);
    must(model_specs(&g->c, &specs, &n, &e), &e);
    choose_formats(specs, n, a->format, a->layers);
    must(store_new(&g->store, specs, n, weights_memory(g->w), &e), &e);
    must(device_free_bytes(&before, g->d, &e), &e);
    double s = stage(g, 1, &commit), bytes = (double)store_bytes(g->store),
           stored = (double)dummy_bytes(specs, n);
    must(device_free_bytes(&after, g->d, &e), &e);
    printf("%s, %s, %d layers: weights %.2f GB, %.4f of the bytes stored, %.4f by the driver; made "
           "and staged in %.2f s\n",
           device_about(g->d)->name, a->format, g->c.n_layers, bytes * 1e-9, bytes / stored,
           (double)(before - after) / stored, s);
    fflush(stdout);
    record_begin(&g->record);
    record_text(&g->record, "what", "memory"), record_text(&g->record, "format", g->format);
    record_num(&g->record, "layers", g->c.n_layers), record_num(&g->record, "stored_bytes", stored);
    record_num(&g->record, "resident_bytes", bytes),
        record_num(&g->record, "driver_bytes", (double)(before - after));
    record_end(&g->record);
    mem_free(specs);
}

static unsigned parts_of(const char *list)
{
    static const char *const names[] = {"decode", "prefill", "load", "update"};
    unsigned parts = 0;
    for (size_t len; *list; list += len + (list[len] == ',')) {
        size_t i = 0;
        len = strcspn(list, ",");
        while (i < 4 && (strlen(names[i]) != len || strncmp(list, names[i], len) != 0))
            i++;
        if (i == 4) fprintf(stderr, "--part: %s: decode, prefill, load or update\n", list), exit(2);
        parts |= 1u << i;
    }
    return parts;
}

static struct args arguments(int argc, char **argv)
{
    static const struct option options[] = {
        {"json", 1, NULL, 'j'},    {"batch", 1, NULL, 'b'},     {"part", 1, NULL, 'p'},
        {"repeat", 1, NULL, 'r'},  {"no-graphs", 0, NULL, 'n'}, {"updates", 1, NULL, 'u'},
        {"staging", 1, NULL, 's'}, {"ready", 1, NULL, 'y'},     {NULL, 0, NULL, 0}};
    struct args a = {.format = "nvfp4",
                     .layers = 48,
                     .repeat = REPEAT_MAX,
                     .batches = "1,8,32,64,256,1209",
                     .updates = 1,
                     .ready = 1,
                     .parts = PARTS_ALL};
    for (int c; (c = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        if (c == 'j')
            a.json = optarg;
        else if (c == 'b')
            a.batches = optarg;
        else if (c == 'p')
            a.parts = parts_of(optarg);
        else if (c == 'r')
            a.repeat = atoi(optarg);
        else if (c == 'n')
            a.no_graphs = true;
        else if (c == 'u')
            a.updates = atoi(optarg);
        else if (c == 'y')
            a.ready = atoi(optarg);
        else if (c == 's' && (strcmp(optarg, "host") == 0 || strcmp(optarg, "device") == 0))
            a.on_host = optarg[0] == 'h';
        else
            exit(2);
    }
    if (optind < argc) a.format = argv[optind++];
    if (optind < argc) a.layers = atoi(argv[optind++]);
    if (optind < argc) a.prompts = argv[optind];
    if (a.layers < 1) fprintf(stderr, "LAYERS: at least 1\n"), exit(2);
    if (a.repeat < 1 || a.repeat > REPEAT_MAX)
        fprintf(stderr, "--repeat: 1 .. %d\n", REPEAT_MAX), exit(2);
    return a;
}

int main(int argc, char **argv)
{
    struct args a = arguments(argc, argv);
    struct rig g = {.format = a.format, .repeat = a.repeat};
    struct err e = {0};
    record_open(&g.record, a.json, "model");
    shape(&g.c, a.layers);
    must(device_open(&g.d, 0, 0, &e), &e);
    open_weights(&g, &a);
    if (a.parts != PART_UPDATE) open_model(&g, &a);
    if (a.parts & PART_DECODE) decode_all(&g, a.batches);
    if (a.parts & PART_PREFILL) prefill(&g, 1, PREFILL), prefill(&g, 8, PREFILL / 8);
    if (a.parts & PART_LOAD && a.prompts) load(&g, a.prompts);
    if (g.m) model_free(g.m);
    if (a.on_host) stage_on_host(&g, a.ready);
    for (int i = 0; i < a.updates && a.parts & PART_UPDATE && store_bytes(g.store) <= HASH_BYTES;
         i++)
        update(&g, (uint64_t)i + 2, a.on_host);
    store_free(g.store);
    weights_free(g.w);
    device_close(g.d);
    record_close(&g.record);
    return 0;
}
