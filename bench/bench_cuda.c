/*
 * bench_cuda.c - the two grouped GEMMs of a MoE layer on a GPU, each alone, and the dense linears.
 *
 *     bench_cuda [--json FILE] [--format NAME,NAME] [--tokens 1,64,16384] [--size N]
 *
 * Shape of Qwen3-30B-A3B: 128 experts, top 8, hidden 2048, intermediate 768; uniform random
 * routing.  A graph runs LAYERS pairs with weights and routings of their own (no weight is still in
 * the L2 cache), the time is the median of the replays divided by LAYERS.  The experts of a layer
 * share their content, not their addresses. Then, without --tokens, the dense linears of attention,
 * the router and the head by the same kernels, as one group (BF16 and NVFP4). Floor: the greater of
 * bytes of the experts touched / 4,390 GB/s and operations / 670 TFLOP/s.
 */
#include "backend/backend.h"
#include "backend/cuda/gemm.h"
#include "backend/cuda/repack.h"
#include "base/mem.h"
#include "record.h"
#include <getopt.h>
#include <string.h>

enum {
    EXPERTS = 128,
    TOP_K = 8,
    HIDDEN = 2048,
    INNER = 768,
    LAYERS = 8,
    REPLAYS = 15,
    M_MAX = 16384
};
#define READ_BYTES_S 4390e9
#define FLOPS_S      670e12

static struct err err;
#define MUST(call)                                                              \
    do {                                                                        \
        if ((call) != OK) fprintf(stderr, "%s: %s\n", #call, err.msg), exit(1); \
    } while (0)

static uint64_t noise = 1;
static uint32_t random_u32(void)
{
    noise = noise * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(noise >> 32);
}

struct bench {
    struct device *d;
    struct queue *q;
    struct gemm_kernels gemm;
    struct repack repack;
    struct event *ev[2];
    devptr_t x, h, y;                    /* [M][HIDDEN], [M * TOP_K][INNER], [M * TOP_K][HIDDEN] */
    devptr_t first[LAYERS], src[LAYERS]; /* routing of each layer */
    double experts;                      /* touched, mean over the layers */
    devptr_t gate[LAYERS], up[LAYERS], down[LAYERS]; /* tables of struct gemm_weight */
    devptr_t linear[32];                             /* the same of dense linears */
    struct region *weights;
    struct record record;
    int size; /* of the kernel; < 0: as gemm_launch chooses */
};

static uint16_t random_bf16(void)
{
    return f32_to_bf16((float)(int32_t)random_u32() * 0x1p-31f);
}

/* Canonical bytes of a matrix whose codes are all valid. */
static void fill_canonical(format_t f, uint8_t *data, size_t n_data, uint8_t *scale, size_t n_scale)
{
    for (size_t i = 0; i < n_data; i++)
        data[i] = (uint8_t)random_u32();
    for (size_t i = 0; formats[f].elem == ELEM_BF16 && i + 1 < n_data; i += 2) {
        uint16_t h = random_bf16();
        memcpy(data + i, &h, 2);
    }
    for (size_t i = 0; formats[f].elem == ELEM_E4M3 && i < n_data; i++)
        if ((data[i] & 0x7f) == 0x7f) data[i] ^= 1;
    for (size_t i = 0; i < n_scale; i++)
        scale[i] = formats[f].scale == SCALE_E4M3 ? 0x30 : 120;
    for (size_t i = 0; formats[f].scale == SCALE_F32 && i + 3 < n_scale; i += 4) {
        float v = 0.002f;
        memcpy(scale + i, &v, 4);
    }
}

static devptr_t upload(struct bench *b, const void *p, size_t bytes)
{
    devptr_t out = 0;
    MUST(device_alloc(&out, b->d, bytes, &err));
    queue_copy(b->q, out, host_addr(p), bytes);
    MUST(queue_sync(b->q, &err));
    return out;
}

/* One matrix made on the device, then copied to every expert of every layer; a table for each
 * layer. */
static size_t make_weights(struct bench *b, devptr_t table[LAYERS], devptr_t at, format_t f,
                           uint32_t rows, uint32_t cols)
{
    size_t n_data, n_scale, tiles;
    if (!format_bytes(f, rows, cols, &n_data, &n_scale) ||
        !layout_cuda_bytes(&tiles, f, rows, cols))
        exit(1);
    uint8_t *data = mem_alloc(n_data), *scale = mem_alloc(n_scale + 4);
    float one = 0.01f;
    fill_canonical(f, data, n_data, scale, n_scale);
    devptr_t dd = upload(b, data, n_data), ds = upload(b, scale, n_scale + 4),
             dt = upload(b, &one, 4);
    struct layout_args a = {(void *)(uintptr_t)at, (void *)(uintptr_t)dd, (void *)(uintptr_t)ds,
                            rows, cols};
    repack_to_tiles(&b->repack, b->q, f, &a);
    struct gemm_weight t[EXPERTS];
    for (int l = 0; l < LAYERS; l++) {
        for (int e = 0; e < EXPERTS; e++) {
            devptr_t to = at + ((size_t)l * EXPERTS + (size_t)e) * tiles;
            if (to != at) queue_copy(b->q, to, at, tiles);
            t[e] = (struct gemm_weight){(const void *)(uintptr_t)to,
                                        (const float *)(uintptr_t)(formats[f].tensor ? dt : ds)};
        }
        table[l] = upload(b, t, sizeof t);
    }
    MUST(queue_sync(b->q, &err));
    device_free(b->d, dd);
    mem_free(data);
    mem_free(scale);
    return tiles;
}

static void route(struct bench *b, int m)
{
    static int32_t id[M_MAX * TOP_K], src[M_MAX * TOP_K];
    int32_t first[EXPERTS + 1];
    b->experts = 0;
    for (int l = 0; l < LAYERS; l++) {
        memset(first, 0, sizeof first);
        for (int i = 0; i < m; i++)
            for (int j = 0; j < TOP_K; j++) {
                int e, old;
                do {
                    e = (int)(random_u32() % EXPERTS);
                    for (old = 0; old < j && id[i * TOP_K + old] != e; old++)
                        ;
                } while (old < j);
                id[i * TOP_K + j] = e;
                first[e + 1]++;
            }
        for (int e = 0; e < EXPERTS; e++) {
            b->experts += (first[e + 1] > 0) / (double)LAYERS;
            first[e + 1] += first[e];
        }
        int32_t next[EXPERTS];
        memcpy(next, first, sizeof next);
        for (int i = 0; i < m * TOP_K; i++)
            src[next[id[i]]++] = i / TOP_K;
        queue_copy(b->q, b->first[l], host_addr(first), sizeof first);
        queue_copy(b->q, b->src[l], host_addr(src), (size_t)m * TOP_K * 4);
        MUST(queue_sync(b->q, &err));
    }
}

static void layer(struct bench *b, format_t f, int l, int m, int which)
{
    const struct gemm_args one = {.x = (const void *)(uintptr_t)b->x,
                                  .src = (const int32_t *)(uintptr_t)b->src[l],
                                  .first = (const int32_t *)(uintptr_t)b->first[l],
                                  .w = (const struct gemm_weight *)(uintptr_t)b->gate[l],
                                  .up = (const struct gemm_weight *)(uintptr_t)b->up[l],
                                  .out = (void *)(uintptr_t)b->h,
                                  .ldx = HIDDEN,
                                  .ldo = INNER,
                                  .k = HIDDEN,
                                  .n = INNER,
                                  .n_groups = EXPERTS,
                                  .out_kind = GEMM_SWIGLU};
    const struct gemm_args two = {.x = (const void *)(uintptr_t)b->h,
                                  .first = (const int32_t *)(uintptr_t)b->first[l],
                                  .w = (const struct gemm_weight *)(uintptr_t)b->down[l],
                                  .out = (void *)(uintptr_t)b->y,
                                  .ldx = INNER,
                                  .ldo = HIDDEN,
                                  .k = INNER,
                                  .n = HIDDEN,
                                  .n_groups = EXPERTS,
                                  .out_kind = GEMM_BF16};
    for (int i = 0; i < 2; i++) {
        const struct gemm_args *a = i ? &two : &one;
        if (!(which >> i & 1)) continue;
        if (b->size < 0)
            gemm_launch(&b->gemm, b->q, f, a, (int64_t)m * TOP_K, true);
        else
            gemm_launch_size(&b->gemm, b->q, f, a, b->size, true);
    }
}

static int compare_float(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

/* Microseconds a layer; which: 1 GEMM 1, 2 GEMM 2, 3 both. */
static double time_graph(struct bench *b, format_t f, int m, int which)
{
    struct graph *g;
    float ms[REPLAYS];
    queue_capture(b->q);
    for (int l = 0; l < LAYERS; l++)
        layer(b, f, l, m, which);
    MUST(queue_capture_end(b->q, &g, &err));
    int n = m >= 4096 ? 7 : REPLAYS;
    for (int i = -2; i < n; i++) {
        queue_record(b->q, b->ev[0]);
        queue_graph(b->q, g);
        queue_record(b->q, b->ev[1]);
        MUST(queue_sync(b->q, &err));
        if (i >= 0) MUST(event_ms(&ms[i], b->ev[0], b->ev[1], &err));
    }
    qsort(ms, (size_t)n, sizeof *ms, compare_float);
    graph_free(g);
    return (double)ms[n / 2] * 1e3 / LAYERS;
}

static void row(struct bench *b, format_t f, int m, double expert_bytes)
{
    route(b, m);
    double t1 = time_graph(b, f, m, 1), t2 = time_graph(b, f, m, 2), t = time_graph(b, f, m, 3);
    double flops = 2.0 * m * TOP_K * 3.0 * HIDDEN * INNER, bytes = b->experts * expert_bytes;
    double floor = bytes / READ_BYTES_S * 1e6 > flops / FLOPS_S * 1e6 ? bytes / READ_BYTES_S * 1e6
                                                                      : flops / FLOPS_S * 1e6;
    printf("%-10s %6d %7.1f %9.1f %9.1f %9.1f %9.1f %6.0f%% %8.0f %8.1f\n", formats[f].name, m,
           b->experts, t1, t2, t, floor, 100.0 * floor / t, bytes / t * 1e-3, flops / t * 1e-6);
    fflush(stdout);
    record_begin(&b->record);
    record_text(&b->record, "what", "grouped GEMMs"),
        record_text(&b->record, "format", formats[f].name);
    record_num(&b->record, "tokens", m), record_num(&b->record, "experts", b->experts);
    record_num(&b->record, "gemm1_us", t1), record_num(&b->record, "gemm2_us", t2);
    record_num(&b->record, "both_us", t), record_num(&b->record, "floor_us", floor);
    record_end(&b->record);
}

/* Dense linears: copies of their own for each launch of the graph (routers fit into the L2 cache
 * all the same).  q, k and v are parts of one. */
enum { DENSE_COPIES = 32 };
static const struct dense {
    const char *name;
    uint32_t n, k;
    int copies, parts;
    uint32_t part[4];
} dense[] = {{"qkv", 5120, 2048, DENSE_COPIES, 3, {0, 4096, 4608, 5120}},
             {"o", 2048, 4096, DENSE_COPIES, 1, {0, 2048}},
             {"router", 128, 2048, DENSE_COPIES, 1, {0, 128}},
             {"head", 151936, 2048, 2, 1, {0, 151936}}};

/* Tables of copy l; what the experts left at `at` are random weights. */
static size_t dense_weights(struct bench *b, const struct dense *s, format_t f)
{
    size_t all = 0, bytes;
    float one = 0.01f;
    devptr_t scale = upload(b, &one, 4);
    for (int l = 0; l < s->copies; l++) {
        struct gemm_weight w[GEMM_PARTS_MAX] = {0};
        for (int p = 0; p < s->parts; p++) {
            if (!layout_cuda_bytes(&bytes, f, s->part[p + 1] - s->part[p], s->k)) exit(1);
            w[p].tiles = (const void *)(uintptr_t)(region_base(b->weights) + all);
            w[p].scale = (const float *)(uintptr_t)scale;
            all += bytes;
        }
        b->linear[l] = upload(b, w, sizeof w);
    }
    return all / (size_t)s->copies;
}

static void dense_row(struct bench *b, const struct dense *s, format_t f, double bytes,
                      devptr_t out, int m)
{
    struct graph *g;
    float ms[REPLAYS];
    queue_capture(b->q);
    for (int l = 0; l < s->copies; l++) {
        struct gemm_args a = {.x = (const void *)(uintptr_t)b->x,
                              .w = (const struct gemm_weight *)(uintptr_t)b->linear[l],
                              .out = (void *)(uintptr_t)out,
                              .ldx = (int32_t)s->k,
                              .ldo = (int32_t)s->n,
                              .k = (int32_t)s->k,
                              .n = (int32_t)s->n,
                              .n_groups = s->parts,
                              .n_rows = m,
                              .out_kind = GEMM_F32,
                              .prefetch = 1};
        for (int p = 0; p <= s->parts; p++)
            a.part[p] = (int32_t)s->part[p];
        gemm_launch(&b->gemm, b->q, f, &a, m, true);
    }
    MUST(queue_capture_end(b->q, &g, &err));
    for (int i = -2; i < REPLAYS; i++) {
        queue_record(b->q, b->ev[0]);
        queue_graph(b->q, g);
        queue_record(b->q, b->ev[1]);
        MUST(queue_sync(b->q, &err));
        if (i >= 0) MUST(event_ms(&ms[i], b->ev[0], b->ev[1], &err));
    }
    qsort(ms, REPLAYS, sizeof *ms, compare_float);
    graph_free(g);
    double t = (double)ms[REPLAYS / 2] * 1e3 / s->copies, flops = 2.0 * m * s->n * s->k;
    double floor = bytes / READ_BYTES_S * 1e6 > flops / FLOPS_S * 1e6 ? bytes / READ_BYTES_S * 1e6
                                                                      : flops / FLOPS_S * 1e6;
    printf("%-10s %-6s %6d %30.1f %9.1f %6.0f%% %8.0f %8.1f\n", formats[f].name, s->name, m, t,
           floor, 100.0 * floor / t, bytes / t * 1e-3, flops / t * 1e-6);
    fflush(stdout);
    record_begin(&b->record);
    record_text(&b->record, "what", "dense linear"), record_text(&b->record, "linear", s->name);
    record_text(&b->record, "format", formats[f].name), record_num(&b->record, "tokens", m);
    record_num(&b->record, "us", t), record_num(&b->record, "floor_us", floor);
    record_end(&b->record);
}

/* With the weights of format f that the experts left: the router and the head are BF16. */
static void dense_all(struct bench *b, format_t f)
{
    static const int ms[] = {1, 8, 32, 64, 128, 256, 1209, 8192};
    devptr_t out;
    MUST(device_alloc(&out, b->d, (size_t)151936 * 1209 * 4, &err));
    for (size_t i = 0; i < sizeof dense / sizeof *dense; i++) {
        if (f != FORMAT_BF16 && dense[i].parts == 1 && dense[i].k == 2048) continue;
        size_t bytes = dense_weights(b, &dense[i], f);
        for (size_t j = 0; j < sizeof ms / sizeof *ms; j++)
            if (ms[j] <= 1209 || dense[i].n < 151936)
                dense_row(b, &dense[i], f, (double)bytes, out, ms[j]);
    }
    device_free(b->d, out);
}

int main(int argc, char **argv)
{
    static const format_t todo[] = {FORMAT_NVFP4, FORMAT_FP8_BLOCK, FORMAT_MXFP8, FORMAT_MXFP4,
                                    FORMAT_BF16};
    static const struct option options[] = {{"json", 1, NULL, 'j'},
                                            {"format", 1, NULL, 'f'},
                                            {"tokens", 1, NULL, 't'},
                                            {"size", 1, NULL, 's'},
                                            {NULL, 0, NULL, 0}};
    uint32_t wanted = 0;
    static struct bench b = {.size = -1};
    const char *json = NULL, *names = NULL, *tokens = NULL;
    for (int c; (c = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        if (c == 'j')
            json = optarg;
        else if (c == 'f')
            names = optarg;
        else if (c == 't')
            tokens = optarg;
        else if (c == 's')
            b.size = atoi(optarg);
        else
            return 2;
    }
    record_open(&b.record, json, "gemm");
    MUST(device_open(&b.d, 0, 0, &err));
    MUST(queue_new(&b.q, b.d, &err));
    for (size_t i = 0; i < sizeof todo / sizeof *todo; i++)
        if (!names || strstr(names, formats[todo[i]].name)) wanted |= 1u << todo[i];
    MUST(gemm_open(&b.gemm, b.d, wanted, &err));
    MUST(repack_open(&b.repack, b.d, &err));
    MUST(event_new(&b.ev[0], b.d, true, &err));
    MUST(event_new(&b.ev[1], b.d, true, &err));
    MUST(region_new(&b.weights, b.d, (size_t)LAYERS * EXPERTS * 3 * HIDDEN * INNER * 2, &err));
    MUST(region_map(b.weights, region_bytes(b.weights), &err));
    size_t nx = (size_t)M_MAX * HIDDEN;
    uint16_t *x = mem_alloc(nx * 2);
    for (size_t i = 0; i < nx; i++)
        x[i] = random_bf16();
    b.x = upload(&b, x, nx * 2);
    MUST(device_alloc(&b.h, b.d, (size_t)M_MAX * TOP_K * INNER * 2, &err));
    MUST(device_alloc(&b.y, b.d, (size_t)M_MAX * TOP_K * HIDDEN * 2, &err));
    for (int l = 0; l < LAYERS; l++) {
        MUST(device_alloc(&b.first[l], b.d, (EXPERTS + 1) * 4, &err));
        MUST(device_alloc(&b.src[l], b.d, (size_t)M_MAX * TOP_K * 4, &err));
    }
    printf("%s\n%-10s %6s %7s %9s %9s %9s %9s %7s %8s %8s\n", device_about(b.d)->name, "format",
           "M", "experts", "gemm1 us", "gemm2 us", "both us", "floor us", "floor/t", "GB/s",
           "TFLOP/s");
    for (size_t i = 0; i < sizeof todo / sizeof *todo; i++) {
        if (!(wanted >> todo[i] & 1)) continue;
        devptr_t at = region_base(b.weights);
        size_t each = make_weights(&b, b.gate, at, todo[i], INNER, HIDDEN),
               all = each * LAYERS * EXPERTS;
        make_weights(&b, b.up, at + all, todo[i], INNER, HIDDEN);
        make_weights(&b, b.down, at + 2 * all, todo[i], HIDDEN, INNER);
        char *list = mem_dup(tokens ? tokens : "1,8,64,256,1209,4096,16384"), *rest;
        for (char *m = strtok_r(list, ",", &rest); m; m = strtok_r(NULL, ",", &rest)) {
            int n = atoi(m);
            if (n < 1 || n > M_MAX) fprintf(stderr, "--tokens: %s: 1 .. %d\n", m, M_MAX), exit(2);
            row(&b, todo[i], n, 3.0 * (double)each);
        }
        mem_free(list);
        if ((todo[i] == FORMAT_BF16 || todo[i] == FORMAT_NVFP4) && !tokens) dense_all(&b, todo[i]);
    }
    record_close(&b.record);
    region_free(b.weights);
    queue_free(b.q);
    device_close(b.d);
    return 0;
}
