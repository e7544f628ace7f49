/*
 * bench_cuda.c - the two grouped GEMMs of a MoE layer on a GPU, beside their roofline floor.
 *
 *     bench_cuda [JSON-FILE [FORMATS [M [SIZE]]]]
 *
 * FORMATS: names, comma-separated; M: one number of tokens; SIZE: of the kernel (gemm_shape.h), else as
 * gemm_launch chooses.
 *
 * Shape of Qwen3-30B-A3B: 128 experts, top 8, hidden 2048, intermediate 768; uniform random
 * routing.  A graph runs LAYERS pairs with weights and routings of their own (no weight is still in
 * the L2 cache), the time is the median of the replays divided by LAYERS.  The experts of a layer
 * share their content, not their addresses. Then the dense linears of attention and the head by the
 * same kernels, as one group. Floor: the greater of bytes of the experts touched / 4,390 GB/s and
 * operations / 670 TFLOP/s.
 */
#include "backend/backend.h"
#include "backend/cuda/gemm.h"
#include "backend/cuda/repack.h"
#include "base/mem.h"
#include <stdio.h>
#include <stdlib.h>

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
    struct region *weights;
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

static void row(struct bench *b, format_t f, int m, double expert_bytes, FILE *json, int *comma)
{
    route(b, m);
    double t1 = time_graph(b, f, m, 1), t2 = time_graph(b, f, m, 2), t = time_graph(b, f, m, 3);
    double flops = 2.0 * m * TOP_K * 3.0 * HIDDEN * INNER, bytes = b->experts * expert_bytes;
    double floor = bytes / READ_BYTES_S * 1e6 > flops / FLOPS_S * 1e6 ? bytes / READ_BYTES_S * 1e6
                                                                      : flops / FLOPS_S * 1e6;
    printf("%-10s %6d %7.1f %9.1f %9.1f %9.1f %9.1f %6.0f%% %8.0f %8.1f\n", formats[f].name, m,
           b->experts, t1, t2, t, floor, 100.0 * floor / t, bytes / t * 1e-3, flops / t * 1e-6);
    fflush(stdout);
    if (!json) return;
    fprintf(json,
            "%s\n  {\"format\": \"%s\", \"m\": %d, \"experts\": %.2f, \"gemm1_us\": %.2f, "
            "\"gemm2_us\": %.2f, "
            "\"both_us\": %.2f, \"floor_us\": %.2f, \"gb_s\": %.0f, \"tflop_s\": %.1f}",
            *comma ? "," : "", formats[f].name, m, b->experts, t1, t2, t, floor, bytes / t * 1e-3,
            flops / t * 1e-6);
    *comma = 1;
}

/* Dense linears, in BF16: copies of their own for each launch of the graph. */
static const struct dense {
    const char *name;
    uint32_t n, k;
    int copies;
    gemm_out_t out;
} dense[] = {{"qkv", 5120, 2048, 8, GEMM_F32},
             {"o", 2048, 4096, 8, GEMM_ADD},
             {"head", 151936, 2048, 2, GEMM_F32}};

static void dense_row(struct bench *b, const struct dense *s, devptr_t out, int m, FILE *json)
{
    struct graph *g;
    float ms[REPLAYS];
    queue_capture(b->q);
    for (int l = 0; l < s->copies; l++) {
        struct gemm_args a = {.x = (const void *)(uintptr_t)b->x,
                              .w = (const struct gemm_weight *)(uintptr_t)b->gate[l],
                              .out = (void *)(uintptr_t)out,
                              .ldx = (int32_t)s->k,
                              .ldo = (int32_t)s->n,
                              .k = (int32_t)s->k,
                              .n = (int32_t)s->n,
                              .n_groups = 1,
                              .n_rows = m,
                              .out_kind = (int32_t)s->out,
                              .prefetch = 1};
        gemm_launch(&b->gemm, b->q, FORMAT_BF16, &a, m, true);
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
    double t = (double)ms[REPLAYS / 2] * 1e3 / s->copies, bytes = 2.0 * s->n * s->k,
           flops = 2.0 * m * s->n * s->k;
    double floor = bytes / READ_BYTES_S * 1e6 > flops / FLOPS_S * 1e6 ? bytes / READ_BYTES_S * 1e6
                                                                      : flops / FLOPS_S * 1e6;
    printf("%-10s %6d %37.1f %9.1f %6.0f%% %8.0f %8.1f\n", s->name, m, t, floor, 100.0 * floor / t,
           bytes / t * 1e-3, flops / t * 1e-6);
    fflush(stdout);
    if (json)
        fprintf(json, ",\n  {\"dense\": \"%s\", \"m\": %d, \"us\": %.2f, \"floor_us\": %.2f}",
                s->name, m, t, floor);
}

static void dense_all(struct bench *b, FILE *json)
{
    static const int ms[] = {1, 8, 32, 64, 256, 1209};
    devptr_t out;
    MUST(device_alloc(&out, b->d, (size_t)151936 * 1209 * 4, &err));
    for (size_t i = 0; i < sizeof dense / sizeof *dense; i++) {
        size_t tiles;
        if (!layout_cuda_bytes(&tiles, FORMAT_BF16, dense[i].n, dense[i].k)) exit(1);
        for (int l = 0; l < dense[i].copies; l++) { /* what the experts left there: random bf16 */
            struct gemm_weight w = {
                (const void *)(uintptr_t)(region_base(b->weights) + (size_t)l * tiles), NULL};
            queue_copy(b->q, b->gate[l], host_addr(&w), sizeof w);
            MUST(queue_sync(b->q, &err));
        }
        for (size_t j = 0; j < sizeof ms / sizeof *ms; j++)
            dense_row(b, &dense[i], out, ms[j], json);
    }
    device_free(b->d, out);
}

int main(int argc, char **argv)
{
    static const format_t todo[] = {FORMAT_NVFP4, FORMAT_FP8_BLOCK, FORMAT_MXFP8, FORMAT_MXFP4,
                                    FORMAT_BF16};
    uint32_t wanted = 0;
    static const int ms[] = {1, 8, 64, 256, 1209, 4096, 16384};
    static struct bench b;
    int comma = 0;
    FILE *json = argc > 1 ? fopen(argv[1], "w") : NULL;
    b.size = argc > 4 ? atoi(argv[4]) : -1;
    MUST(device_open(&b.d, 0, 0, &err));
    MUST(queue_new(&b.q, b.d, &err));
    for (size_t i = 0; i < sizeof todo / sizeof *todo; i++)
        if (argc < 3 || strstr(argv[2], formats[todo[i]].name)) wanted |= 1u << todo[i];
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
    if (json) fprintf(json, "{\"device\": \"%s\", \"rows\": [", device_about(b.d)->name);
    for (size_t i = 0; i < sizeof todo / sizeof *todo; i++) {
        if (!(wanted >> todo[i] & 1)) continue;
        devptr_t at = region_base(b.weights);
        size_t each = make_weights(&b, b.gate, at, todo[i], INNER, HIDDEN),
               all = each * LAYERS * EXPERTS;
        make_weights(&b, b.up, at + all, todo[i], INNER, HIDDEN);
        make_weights(&b, b.down, at + 2 * all, todo[i], HIDDEN, INNER);
        for (size_t j = 0; j < sizeof ms / sizeof *ms; j++)
            if (argc < 4 || atoi(argv[3]) == ms[j])
                row(&b, todo[i], ms[j], 3.0 * (double)each, json, &comma);
    }
    if (wanted >> FORMAT_BF16 & 1 && argc < 4) dense_all(&b, json);
    if (json) fprintf(json, "\n]}\n"), fclose(json);
    region_free(b.weights);
    queue_free(b.q);
    device_close(b.d);
    return 0;
}
