/*
 * bench_cuda_attn.c - attention of Qwen3-30B-A3B's shape (32 query, 4 KV heads, head_dim 128) on
 * the GPU, beside its floor.
 *
 *     build/bench/bench_cuda_attn [--json FILE] [part of a line's name]
 *
 * Decode: K and V bytes over 4,390 GB/s (the read bandwidth measured on an H200).  Prefill: 4 *
 * head_dim operations a query head and causal pair over 670 TFLOP/s (what the chip sustains).  Each
 * line is a graph of launches over enough layers of random KV to leave the L2 cache, median of its
 * replays, per launch.
 */
#include "backend/backend.h"
#include "backend/cuda/kernels.h"
#include "base/mem.h"
#include "record.h"
#include <getopt.h>
#include <string.h>

enum { HEADS = 32, KV_HEADS = 4, HEAD_DIM = 128, REPEATS = 15 };
#define READ_GBS 4390.0
#define TFLOPS   670.0

struct rig {
    struct device *d;
    struct queue *q;
    struct event *from, *to;
    struct record record;
};

struct bench {
    const char *name;
    kv_type_t kv;
    attn_kind_t kind;
    int32_t seqs, context, tokens; /* the last `tokens` of each sequence are queries */
    int32_t shared;                /* leading tokens whose pages all sequences share */
    bool cascade;                  /* whole shared chunks are read once for many sequences */
    bool few;                      /* by kernels_attn_few, with norms, rotation and KV write */
};

static void must(err_t rc, const struct err *e)
{
    if (rc == OK) return;
    fprintf(stderr, "bench_cuda_attn: %s\n", e->msg);
    exit(1);
}

static devptr_t alloc(struct rig *r, size_t bytes)
{
    struct err e = {0};
    devptr_t p = 0;
    must(device_alloc(&p, r->d, bytes, &e), &e);
    return p;
}

static devptr_t upload(struct rig *r, const void *from, size_t bytes)
{
    struct err e = {0};
    devptr_t p = alloc(r, bytes);
    queue_copy(r->q, p, host_addr(from), bytes);
    must(queue_sync(r->q, &e), &e);
    return p;
}

/* Random bf16 or e4m3 values below 2 in size, repeated through the buffer. */
static devptr_t random_kv(struct rig *r, kv_type_t kv, size_t bytes)
{
    enum { BLOCK = 4 << 20 };
    struct err e = {0};
    uint8_t *block = mem_alloc(BLOCK);
    uint64_t s = 1;
    for (size_t i = 0; i < BLOCK; i += 2) {
        s = s * 6364136223846793005u + 1442695040888963407u;
        uint16_t h = (uint16_t)(s >> 40);
        h = kv == KV_BF16 ? f32_to_bf16((float)(int16_t)h * 0x1p-14f) : (uint16_t)(h & 0xbfbf);
        memcpy(block + i, &h, 2);
    }
    devptr_t p = alloc(r, bytes);
    for (size_t at = 0; at < bytes; at += BLOCK)
        queue_copy(r->q, p + at, host_addr(block), bytes - at < BLOCK ? bytes - at : BLOCK);
    must(queue_sync(r->q, &e), &e);
    mem_free(block);
    return p;
}

struct setup {
    int32_t n_blocks, n_tokens, n_pages, table_ld, n_shared;
    struct attn_block *blocks, *shared;
    int32_t *pos, *tables;
};

static int by_keys(const void *a, const void *b, void *pos)
{
    const struct attn_block *x = a, *y = b;
    const int32_t *p = pos;
    return p[x->token + x->n - 1] - p[y->token + y->n - 1];
}

static void setup_new(struct setup *s, const struct bench *b, int32_t most, int32_t most_shared)
{
    *s = (struct setup){.n_tokens = b->seqs * b->tokens,
                        .table_ld = (b->context + KV_ROWS - 1) / KV_ROWS};
    s->blocks = mem_alloc((size_t)s->n_tokens * sizeof *s->blocks);
    s->shared = mem_alloc((size_t)s->n_tokens * sizeof *s->shared);
    for (int32_t i = 0; b->cascade && i < b->seqs; i += most_shared)
        s->shared[s->n_shared++] = (struct attn_block){
            i, b->seqs - i < most_shared ? b->seqs - i : most_shared, i, b->shared / ATTN_CHUNK};
    s->pos = mem_alloc((size_t)s->n_tokens * 4);
    s->tables = mem_alloc((size_t)(b->seqs * s->table_ld) * 4);
    int32_t own = s->table_ld - b->shared / KV_ROWS;
    s->n_pages = b->shared / KV_ROWS + b->seqs * own;
    for (int32_t i = 0; i < b->seqs; i++) {
        for (int32_t p = 0; p < s->table_ld; p++) {
            int32_t page = p < b->shared / KV_ROWS
                               ? p
                               : b->shared / KV_ROWS + (p - b->shared / KV_ROWS) * b->seqs + i;
            s->tables[i * s->table_ld + p] = page;
        }
        for (int32_t t = 0; t < b->tokens; t += most) {
            int32_t n = b->tokens - t < most ? b->tokens - t : most;
            s->blocks[s->n_blocks++] = (struct attn_block){i * b->tokens + t, n, i,
                                                           b->cascade ? b->shared / ATTN_CHUNK : 0};
        }
        for (int32_t t = 0; t < b->tokens; t++)
            s->pos[i * b->tokens + t] = b->context - b->tokens + t;
    }
    if (b->kind == ATTN_PREFILL) /* as a step lays them: in the order of their keys */
        qsort_r(s->blocks, (size_t)s->n_blocks, sizeof *s->blocks, by_keys, s->pos);
}

static int by_value(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

/* Median ms of a graph. */
static float replay(struct rig *r, const struct graph *g)
{
    struct err e = {0};
    float ms[REPEATS];
    for (int i = -3; i < REPEATS; i++) {
        queue_record(r->q, r->from);
        queue_graph(r->q, g);
        queue_record(r->q, r->to);
        must(queue_sync(r->q, &e), &e);
        if (i >= 0) must(event_ms(&ms[i], r->from, r->to, &e), &e);
    }
    qsort(ms, REPEATS, sizeof ms[0], by_value);
    return ms[REPEATS / 2];
}

static void report(const struct rig *r, const struct bench *b, double us)
{
    double bytes = 0.0, ops = 0.0;
    for (int32_t t = 0; t < b->tokens; t++)
        ops += 4.0 * HEAD_DIM * HEADS * (double)b->seqs * (double)(b->context - b->tokens + t + 1);
    bytes = 2.0 * KV_HEADS * HEAD_DIM * (b->kv == KV_BF16 ? 2.0 : 1.0) *
            ((double)b->shared + (double)b->seqs * (double)(b->context - b->shared));
    double memory = bytes / READ_GBS * 1e-3, compute = ops / TFLOPS * 1e-6,
           floor_us = memory > compute ? memory : compute;
    printf("%-34s %9.1f us   floor %8.1f  %4.0f %%   %6.0f GB/s  %5.0f TFLOP/s\n", b->name, us,
           floor_us, 100.0 * floor_us / us, bytes / us * 1e-3, ops / us * 1e-6);
    fflush(stdout);
    record_begin(&r->record);
    record_text(&r->record, "what", b->name), record_num(&r->record, "us", us);
    record_num(&r->record, "floor_us", floor_us);
    record_end(&r->record);
}

/* The same work from q, k and v as the projections leave them; 4 MiB of any numbers stand for all
 * of those. */
static struct attn_few_args few_of(struct rig *r, const struct bench *b, const struct attn_args *a,
                                   const int32_t *pos)
{
    struct attn_few_args f = {.out = a->out, .scale = a->scale};
    if (!b->few) return f;
    int32_t *seq = mem_alloc((size_t)b->seqs * 4);
    for (int32_t i = 0; i < b->seqs; i++)
        seq[i] = i;
    devptr_t numbers = random_kv(r, KV_BF16, 4u << 20);
    f.rope = (struct rope_args){.qkv = (const float *)numbers,
                                .ld = (HEADS + 2 * KV_HEADS) * HEAD_DIM,
                                .q_norm = (const uint16_t *)numbers,
                                .k_norm = (const uint16_t *)numbers,
                                .cos = (const float *)numbers,
                                .sin = (const float *)numbers,
                                .pos = pos,
                                .seq = (const int32_t *)upload(r, seq, (size_t)b->seqs * 4),
                                .tables = a->tables,
                                .table_ld = a->table_ld,
                                .n_heads = HEADS,
                                .n_kv_heads = KV_HEADS,
                                .eps = 1e-6f,
                                .k_scale = 1.0f,
                                .v_scale = 1.0f};
    mem_free(seq);
    return f;
}

static void run(struct rig *r, const struct bench *b)
{
    struct err e = {0};
    struct kernels_shape shape = {.hidden = 2048,
                                  .vocab = 151936,
                                  .n_heads = HEADS,
                                  .n_kv_heads = KV_HEADS,
                                  .head_dim = HEAD_DIM,
                                  .n_experts = 128,
                                  .top_k = 8,
                                  .kv = b->kv};
    struct kernels *k = NULL;
    struct setup s;
    must(kernels_new(&k, r->d, &shape, &e), &e);
    setup_new(&s, b, kernels_attn_tokens(k, b->kind), kernels_attn_tokens(k, ATTN_PREFILL));
    size_t layer = (size_t)s.n_pages * KV_HEADS * kv_tile_bytes(b->kv, HEAD_DIM);
    int32_t layers = (int32_t)((400u << 20) / (2 * layer) + 1),
            max_chunks = (b->context + ATTN_CHUNK - 1) / ATTN_CHUNK;
    layers = layers > 96 ? 96 : layers;
    devptr_t kp = random_kv(r, b->kv, layer * (size_t)layers),
             vp = random_kv(r, b->kv, layer * (size_t)layers);
    size_t rows = (size_t)s.n_tokens * HEADS * HEAD_DIM * 2,
           counters = (size_t)(s.n_blocks * KV_HEADS) * 4;
    devptr_t dev[] = {random_kv(r, KV_BF16, rows),
                      alloc(r, rows),
                      upload(r, s.tables, (size_t)(b->seqs * s.table_ld) * 4),
                      upload(r, s.blocks, (size_t)s.n_blocks * sizeof *s.blocks),
                      upload(r, s.pos, (size_t)s.n_tokens * 4),
                      alloc(r, ((size_t)s.n_blocks + 1) * sizeof(struct attn_span)),
                      alloc(r, kernels_attn_bytes(k, b->kind, max_chunks)),
                      alloc(r, counters),
                      kp,
                      vp,
                      alloc(r, rows * 2),
                      alloc(r, (size_t)s.n_tokens * HEADS * 8),
                      upload(r, s.shared, (size_t)s.n_shared * sizeof *s.shared),
                      alloc(r, ((size_t)s.n_shared + 1) * sizeof(struct attn_span))};
    struct attn_plan_args p = {.blocks = (const struct attn_block *)dev[3],
                               .pos = (const int32_t *)dev[4],
                               .spans = (struct attn_span *)dev[5],
                               .n_blocks = s.n_blocks,
                               .n_kv_heads = KV_HEADS,
                               .first_chunk = ATTN_CHUNK};
    struct attn_args a = {.q = (const uint16_t *)dev[0],
                          .out = (uint16_t *)dev[1],
                          .tables = (const int32_t *)dev[2],
                          .table_ld = s.table_ld,
                          .spans = (const struct attn_span *)dev[5],
                          .partial = (float *)dev[6],
                          .arrived = (uint32_t *)dev[7],
                          .state = (float *)dev[10],
                          .state_ml = (float *)dev[11],
                          .n_blocks = s.n_blocks,
                          .n_kv_heads = KV_HEADS,
                          .group = HEADS / KV_HEADS,
                          .max_chunks = max_chunks,
                          .first_chunk = ATTN_CHUNK,
                          .scale = 1.0f / sqrtf((float)HEAD_DIM),
                          .v_scale = 1.0f};
    struct attn_args prefix = a;
    prefix.spans = (const struct attn_span *)dev[13];
    prefix.n_blocks = s.n_shared;
    queue_fill(r->q, dev[7], 0, counters);
    if (s.n_shared) {
        struct attn_plan_args of_prefix = p;
        of_prefix.blocks = (const struct attn_block *)dev[12];
        of_prefix.spans = (struct attn_span *)dev[13];
        of_prefix.n_blocks = s.n_shared;
        kernels_attn_prefix_plan(k, r->q, &of_prefix, false);
    }
    kernels_attn_plan(k, r->q, b->kind, &p, false);
    must(queue_sync(r->q, &e), &e);
    struct attn_few_args few = few_of(r, b, &a, p.pos);
    struct graph *g = NULL;
    queue_capture(r->q);
    for (int32_t i = 0; i < layers; i++) {
        prefix.k = a.k = (const void *)(kp + layer * (size_t)i);
        prefix.v = a.v = (const void *)(vp + layer * (size_t)i);
        if (s.n_shared) kernels_attn_prefix(k, r->q, &prefix, i > 0);
        few.rope.k = (void *)(uintptr_t)a.k;
        few.rope.v = (void *)(uintptr_t)a.v;
        if (b->few)
            kernels_attn_few(k, r->q, &few, s.n_tokens, max_chunks, i > 0);
        else
            kernels_attn(k, r->q, b->kind, &a, i > 0);
    }
    must(queue_capture_end(r->q, &g, &e), &e);
    report(r, b, (double)replay(r, g) * 1e3 / (double)layers);
    graph_free(g);
    for (size_t i = 0; i < sizeof dev / sizeof dev[0]; i++)
        device_free(r->d, dev[i]);
    mem_free(s.blocks), mem_free(s.shared), mem_free(s.pos), mem_free(s.tables);
    kernels_free(k);
}

int main(int argc, char **argv)
{
    static const struct bench benches[] = {
        {"decode bf16, batch 1 x 1,000", KV_BF16, ATTN_DECODE, 1, 1000, 1, 0, false, false},
        {"decode bf16, batch 8 x 1,000", KV_BF16, ATTN_DECODE, 8, 1000, 1, 0, false, false},
        {"few bf16, batch 1 x 200", KV_BF16, ATTN_DECODE, 1, 200, 1, 0, false, true},
        {"few bf16, batch 1 x 1,000", KV_BF16, ATTN_DECODE, 1, 1000, 1, 0, false, true},
        {"few bf16, batch 1 x 2,000", KV_BF16, ATTN_DECODE, 1, 2000, 1, 0, false, true},
        {"few bf16, batch 8 x 1,000", KV_BF16, ATTN_DECODE, 8, 1000, 1, 0, false, true},
        {"decode bf16, batch 64 x 1,000", KV_BF16, ATTN_DECODE, 64, 1000, 1, 0, false, false},
        {"decode bf16, batch 64 x 1,024", KV_BF16, ATTN_DECODE, 64, 1024, 1, 0, false, false},
        {"decode bf16, batch 256 x 1,000", KV_BF16, ATTN_DECODE, 256, 1000, 1, 0, false, false},
        {"decode bf16, batch 256 x 1,024", KV_BF16, ATTN_DECODE, 256, 1024, 1, 0, false, false},
        {"decode bf16, 1,209 x 1,100, 960 shared", KV_BF16, ATTN_DECODE, 1209, 1100, 1, 960, false,
         false},
        {"the same, read once", KV_BF16, ATTN_DECODE, 1209, 1100, 1, 960, true, false},
        {"decode bf16, batch 1 x 32,768", KV_BF16, ATTN_DECODE, 1, 32768, 1, 0, false, false},
        {"decode e4m3, batch 1 x 1,000", KV_E4M3, ATTN_DECODE, 1, 1000, 1, 0, false, false},
        {"few e4m3, batch 1 x 1,000", KV_E4M3, ATTN_DECODE, 1, 1000, 1, 0, false, true},
        {"decode e4m3, batch 64 x 1,000", KV_E4M3, ATTN_DECODE, 64, 1000, 1, 0, false, false},
        {"decode e4m3, batch 256 x 1,000", KV_E4M3, ATTN_DECODE, 256, 1000, 1, 0, false, false},
        {"prefill bf16, 1 x 8,192", KV_BF16, ATTN_PREFILL, 1, 8192, 8192, 0, false, false},
        {"prefill bf16, 8 x 1,024", KV_BF16, ATTN_PREFILL, 8, 1024, 1024, 0, false, false},
        {"prefill bf16, 512 after 7,680", KV_BF16, ATTN_PREFILL, 1, 8192, 512, 0, false, false},
        {"prefill bf16, 64 x 128 after 1,000", KV_BF16, ATTN_PREFILL, 64, 1128, 128, 0, false,
         false},
        {"short bf16, 512 after 7,680", KV_BF16, ATTN_SHORT, 1, 8192, 512, 0, false, false},
        {"short bf16, 32 after 32,736", KV_BF16, ATTN_SHORT, 1, 32768, 32, 0, false, false},
        {"prefill e4m3, 1 x 8,192", KV_E4M3, ATTN_PREFILL, 1, 8192, 8192, 0, false, false},
    };
    static const struct option options[] = {{"json", 1, NULL, 'j'}, {NULL, 0, NULL, 0}};
    struct rig r = {0};
    struct err e = {0};
    const char *json = NULL;
    for (int c; (c = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        if (c != 'j') return 2;
        json = optarg;
    }
    record_open(&r.record, json, "attention");
    must(device_open(&r.d, 0, 0, &e), &e);
    must(queue_new(&r.q, r.d, &e), &e);
    must(event_new(&r.from, r.d, true, &e), &e);
    must(event_new(&r.to, r.d, true, &e), &e);
    printf("%s\n", device_about(r.d)->name);
    for (size_t i = 0; i < sizeof benches / sizeof benches[0]; i++)
        if (optind >= argc || strstr(benches[i].name, argv[optind])) run(&r, &benches[i]);
    event_free(r.from), event_free(r.to);
    queue_free(r.q);
    device_close(r.d);
    record_close(&r.record);
    return 0;
}
