/*
 * bench_cuda_rows.c - the small kernels of a step at Qwen3-30B-A3B's shape on the GPU.
 *
 *     build/bench/bench_cuda_rows [--json FILE]
 *
 * us a launch (sampling: its three kernels) at 1 to 8,192 rows: a graph of LAUNCHES programmatic
 * launches over the same buffers, median of its replays.  Up to some 1,000 rows the buffers lie in
 * the L2 cache, as they do in a step; the logits of sampling do not beyond 64 rows.
 */
#include "backend/backend.h"
#include "backend/cuda/kernels.h"
#include "base/mem.h"
#include "record.h"
#include <getopt.h>

enum {
    HIDDEN = 2048,
    HEADS = 32,
    KV_HEADS = 4,
    HEAD_DIM = 128,
    EXPERTS = 128,
    TOP_K = 8,
    VOCAB = 151936,
    POSITIONS = 4096,
    ROWS_MAX = 8192,
    SAMPLE_ROWS_MAX = 1209,
    LAUNCHES = 40,
    REPEATS = 9
};
enum { QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM };

static struct device *d;
static struct queue *q;
static struct event *from, *to;
static struct kernels *k;
static struct record record;

static void must(err_t rc, const struct err *e)
{
    if (rc == OK) return;
    fprintf(stderr, "bench_cuda_rows: %s\n", e->msg);
    exit(1);
}

static uint32_t noise(void)
{
    static uint64_t s = 1;
    s = s * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(s >> 32);
}

static devptr_t upload(const void *p, size_t bytes)
{
    struct err e = {0};
    devptr_t out = 0;
    must(device_alloc(&out, d, bytes, &e), &e);
    if (p)
        queue_copy(q, out, host_addr(p), bytes);
    else
        queue_fill(q, out, 0, bytes);
    must(queue_sync(q, &e), &e);
    return out;
}

/* Sums of three uniforms times scale, repeated each 2^20; bf16 or f32. */
static devptr_t random_numbers(size_t n, float scale, bool bf16)
{
    enum { BLOCK = 1 << 20 };
    struct err e = {0};
    size_t size = bf16 ? 2 : 4;
    char *p = mem_alloc(BLOCK * size);
    for (size_t i = 0; i < BLOCK; i++) {
        float f = ((float)noise() + (float)noise() + (float)noise()) * 0x1p-32f - 1.5f;
        f *= scale;
        uint16_t h = f32_to_bf16(f);
        memcpy(p + i * size, bf16 ? (const void *)&h : (const void *)&f, size);
    }
    devptr_t out = upload(NULL, n * size);
    for (size_t i = 0; i < n; i += BLOCK)
        queue_copy(q, out + i * size, host_addr(p), (n - i < BLOCK ? n - i : BLOCK) * size);
    must(queue_sync(q, &e), &e);
    mem_free(p);
    return out;
}

static devptr_t integers(size_t n, uint32_t below, uint32_t step)
{
    int32_t *p = mem_alloc(n * 4);
    for (size_t i = 0; i < n; i++)
        p[i] = (int32_t)(step ? (uint32_t)i * step % below : noise() % below);
    devptr_t out = upload(p, n * 4);
    mem_free(p);
    return out;
}

typedef void launch_fn(const void *args, int32_t rows, bool programmatic);

static void launch_add(const void *a, int32_t rows, bool p)
{
    kernels_norm(k, q, NORM_ADD, a, rows, p);
}
static void launch_combine(const void *a, int32_t rows, bool p)
{
    kernels_norm(k, q, NORM_COMBINE, a, rows, p);
}
static void launch_rope(const void *a, int32_t rows, bool p)
{
    kernels_rope(k, q, a, rows, p);
}
static void launch_route(const void *a, int32_t rows, bool p)
{
    struct route_args args = *(const struct route_args *)a;
    args.n_tokens = rows;
    kernels_route(k, q, &args, p);
}
static void launch_norm_route(const void *a, int32_t rows, bool p)
{
    struct norm_route_args args = *(const struct norm_route_args *)a;
    args.route.n_tokens = rows;
    kernels_norm_route(k, q, &args, p);
}
static void launch_sample(const void *a, int32_t rows, bool p)
{
    kernels_sample(k, q, a, rows, p);
}

static int by_value(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

static double us_of(launch_fn *launch, const void *args, int32_t rows)
{
    struct err e = {0};
    struct graph *g = NULL;
    float ms[REPEATS];
    queue_capture(q);
    for (int i = 0; i < LAUNCHES; i++)
        launch(args, rows, i > 0);
    must(queue_capture_end(q, &g, &e), &e);
    for (int i = -2; i < REPEATS; i++) {
        queue_record(q, from);
        queue_graph(q, g);
        queue_record(q, to);
        must(queue_sync(q, &e), &e);
        if (i >= 0) must(event_ms(&ms[i], from, to, &e), &e);
    }
    graph_free(g);
    qsort(ms, REPEATS, sizeof ms[0], by_value);
    return (double)ms[REPEATS / 2] * 1e3 / LAUNCHES;
}

static void line(const char *name, launch_fn *launch, const void *args, int32_t most)
{
    static const int32_t rows[] = {1, 8, 64, 256, 1209, 8192};
    printf("%-34s", name);
    for (size_t i = 0; i < sizeof rows / sizeof rows[0] && rows[i] <= most; i++) {
        double us = us_of(launch, args, rows[i]);
        printf(" %9.1f", us);
        record_begin(&record);
        record_text(&record, "what", name), record_num(&record, "rows", rows[i]),
            record_num(&record, "us", us);
        record_end(&record);
    }
    printf("\n");
    fflush(stdout);
}

static void bench_layer(void)
{
    size_t n = (size_t)ROWS_MAX * HIDDEN,
           kv = (size_t)(ROWS_MAX / KV_ROWS + 1) * KV_HEADS * kv_tile_bytes(KV_BF16, HEAD_DIM);
    struct norm_args norm = {.x = (float *)random_numbers(n, 1.0f, false),
                             .y = (const float *)random_numbers(n, 0.01f, false),
                             .expert = (const uint16_t *)random_numbers(n * TOP_K, 0.01f, true),
                             .row_of = (const int32_t *)integers(ROWS_MAX * TOP_K, ROWS_MAX, 7919),
                             .packed = (const uint32_t *)integers(ROWS_MAX * TOP_K, 0x3f80, 0),
                             .w = (const uint16_t *)random_numbers(HIDDEN, 1.0f, true),
                             .out = (uint16_t *)upload(NULL, n * 2),
                             .n = HIDDEN,
                             .top_k = TOP_K,
                             .eps = 1e-6f};
    struct rope_args rope = {
        .qkv = (const float *)random_numbers((size_t)ROWS_MAX * QKV, 1.0f, false),
        .ld = QKV,
        .q_norm = norm.w,
        .k_norm = norm.w,
        .cos = norm.y,
        .sin = norm.y,
        .pos = (const int32_t *)integers(ROWS_MAX, POSITIONS, 1),
        .seq = (const int32_t *)integers(ROWS_MAX, 1, 1),
        .tables = (const int32_t *)integers(POSITIONS / KV_ROWS, ROWS_MAX / KV_ROWS, 1),
        .table_ld = POSITIONS / KV_ROWS,
        .q = (uint16_t *)upload(NULL, (size_t)ROWS_MAX * HEADS * HEAD_DIM * 2),
        .k = (void *)upload(NULL, kv),
        .v = (void *)upload(NULL, kv),
        .n_heads = HEADS,
        .n_kv_heads = KV_HEADS,
        .eps = 1e-6f,
        .k_scale = 1.0f,
        .v_scale = 1.0f};
    size_t entries = (size_t)ROWS_MAX * TOP_K;
    struct route_args route = {
        .logits = (const float *)random_numbers((size_t)ROWS_MAX * EXPERTS, 4.0f, false),
        .packed = (uint32_t *)upload(NULL, entries * 4),
        .offsets = (int32_t *)upload(NULL, (EXPERTS + 1) * 4),
        .token_of = (int32_t *)upload(NULL, entries * 4),
        .row_of = (int32_t *)upload(NULL, entries * 4),
        .ticket = (uint32_t *)upload(NULL, 4),
        .n_experts = EXPERTS,
        .top_k = TOP_K,
        .n_local = EXPERTS,
        .normalise = 1};
    struct gemm_weight w = {(const void *)random_numbers(HIDDEN * EXPERTS, 0.02f, true), NULL};
    struct norm_route_args norm_route = {
        .norm = norm, .route = route, .router = (const struct gemm_weight *)upload(&w, sizeof w)};
    line("residual add + norm", launch_add, &norm, ROWS_MAX);
    line("combine + norm", launch_combine, &norm, ROWS_MAX);
    line("q/k norm, rope, KV write", launch_rope, &rope, ROWS_MAX);
    line("route: top-k and plan", launch_route, &route, ROWS_MAX);
    line("add + norm, router, route: one", launch_norm_route, &norm_route, NORM_ROUTE_TOKENS);
}

static void bench_sample(const char *name, struct sample_spec spec)
{
    struct sample_spec *specs = mem_alloc(SAMPLE_ROWS_MAX * sizeof *specs);
    for (int i = 0; i < SAMPLE_ROWS_MAX; i++) {
        specs[i] = spec;
        specs[i].seed = noise();
    }
    size_t rows = SAMPLE_ROWS_MAX;
    devptr_t dev[] = {random_numbers(rows * VOCAB, 6.0f, false),
                      upload(specs, rows * sizeof *specs),
                      upload(NULL, rows * sizeof(struct sample_result)),
                      upload(NULL, rows * sizeof(struct sample_state)),
                      upload(NULL, rows * SAMPLE_ORDER * 8),
                      upload(NULL, rows * 8),
                      upload(NULL, rows * VOCAB * 4)};
    struct sample_args a = {.logits = (float *)dev[0],
                            .ld = VOCAB,
                            .specs = (const struct sample_spec *)dev[1],
                            .out = (struct sample_result *)dev[2],
                            .states = (struct sample_state *)dev[3],
                            .order = (uint64_t *)dev[4],
                            .lowered = (int32_t *)dev[5],
                            .counts = (uint32_t *)dev[6],
                            .vocab = VOCAB};
    line(name, launch_sample, &a, SAMPLE_ROWS_MAX);
    for (size_t i = 0; i < sizeof dev / sizeof dev[0]; i++)
        device_free(d, dev[i]);
    mem_free(specs);
}

int main(int argc, char **argv)
{
    static const struct option options[] = {{"json", 1, NULL, 'j'}, {NULL, 0, NULL, 0}};
    struct err e = {0};
    const char *json = NULL;
    for (int c; (c = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        if (c != 'j') return 2;
        json = optarg;
    }
    record_open(&record, json, "rows");
    struct kernels_shape shape = {.hidden = HIDDEN,
                                  .vocab = VOCAB,
                                  .n_heads = HEADS,
                                  .n_kv_heads = KV_HEADS,
                                  .head_dim = HEAD_DIM,
                                  .n_experts = EXPERTS,
                                  .top_k = TOP_K};
    must(device_open(&d, 0, 0, &e), &e);
    must(queue_new(&q, d, &e), &e);
    must(event_new(&from, d, true, &e), &e);
    must(event_new(&to, d, true, &e), &e);
    must(kernels_new(&k, d, &shape, &e), &e);
    printf("%-34s %9d %9d %9d %9d %9d %9d   (us)\n", device_about(d)->name, 1, 8, 64, 256, 1209,
           8192);
    bench_layer();
    struct sample_spec s = {.target = -1, .top_p = 1.0f, .repetition_penalty = 1.0f};
    bench_sample("sample: greedy", s);
    s.temperature = 1.0f;
    bench_sample("sample: temperature 1", s);
    s.top_k = 20;
    s.top_p = 0.95f;
    bench_sample("sample: top_k 20, top_p 0.95", s);
    s.top_k = 0;
    bench_sample("sample: top_p 0.95", s);
    s.top_p = 1.0f;
    s.n_top = 20;
    bench_sample("sample: 20 top logprobs", s);
    kernels_free(k);
    event_free(from), event_free(to);
    queue_free(q);
    device_close(d);
    record_close(&record);
    return 0;
}
