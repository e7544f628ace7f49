/*
 * bench_cuda_moe.c - the MoE layer of a served model alone, on the GPU, beside its floor.
 *
 *     build/bench/bench_cuda_moe [--json FILE] [--format NAME,NAME] [--tokens 1,64,16384]
 *
 * Shape of Qwen3-30B-A3B: 128 experts, top 8, hidden 2048, intermediate 768.  The code that is timed is the
 * model's own (cuda_moe): a graph of LAYERS layers with weights of their own, all of them random; the time is the
 * median of the replays divided by LAYERS.
 *   layer     router, top-k and plan, GEMM 1 with SwiGLU, GEMM 2, combine (with the norm that follows it)
 *   experts   GEMM 1 to combine, for the routing of the layer before
 * Tokens are random, and the router's weights: routing is close to uniform; `experts` says how many of the 128 had a
 * token.  Floor: the greater of the stored bytes of those experts (and the router) / 4,390 GB/s and operations /
 * 670 TFLOP/s.
 */
#include "backend/backend.h"
#include "backend/cuda/device.h"
#include "base/mem.h"
#include "model/cuda/cuda.h"
#include "model/cuda/cuda_model.h"
#include "record.h"
#include "weight/dummy.h"
#include "weight/update.h"
#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    LAYERS = 8,
    REPLAYS = 15,
    M_MAX = 16384,
    EXPERTS = 128,
    TOP_K = 8,
    HIDDEN = 2048,
    INNER = 768
};
#define READ_BYTES_S 4390e9
#define FLOP_S       670e12

struct rig {
    struct device *d;
    struct weights *w;
    struct store *store;
    struct cuda_model *m;
    struct event *from, *to;
    struct config c;
    format_t format;
    struct record record;
};

static void must(err_t rc, const struct err *e)
{
    if (rc == OK) return;
    fprintf(stderr, "bench_cuda_moe: %s\n", e->msg);
    exit(1);
}

static void shape(struct config *c)
{
    static const char json[] =
        "{\"model_type\":\"qwen3_moe\",\"vocab_size\":4096,\"hidden_size\":2048,\"intermediate_"
        "size\":6144,"
        "\"moe_intermediate_size\":768,\"num_hidden_layers\":8,\"num_attention_heads\":32,"
        "\"num_key_value_heads\":4,\"head_dim\":128,\"num_experts\":128,\"num_experts_per_tok\":8,"
        "\"norm_topk_prob\":true,\"rms_norm_eps\":1e-6,\"rope_theta\":1000000.0,"
        "\"max_position_embeddings\":4096,\"tie_word_embeddings\":false,\"eos_token_id\":0}";
    struct err e = {0};
    must(config_parse(c, json, strlen(json), &e), &e);
}

static void open_format(struct rig *g, format_t f)
{
    struct err e = {0};
    struct slot_spec *specs;
    struct update *u;
    struct model *m;
    size_t n;
    g->format = f;
    must(weights_new(&g->w, g->d, &e), &e);
    must(model_specs(&g->c, &specs, &n, &e), &e);
    for (size_t i = 0; i < n; i++)
        if (specs[i].linear) specs[i].shape.format = f;
    must(store_new(&g->store, specs, n, weights_memory(g->w), &e), &e);
    must(update_begin(&u, g->store, &e), &e);
    must(dummy_stage(u, 1, 16, NULL, &e), &e);
    must(update_prepare(u, &e), &e);
    update_commit(u);
    update_free(u);
    const struct cuda_options o = {.n_kv_pages = 16, .max_step_tokens = M_MAX, .max_seqs = 1};
    must(cuda_model_new(&m, &g->c, g->store, g->d, &o, &e), &e);
    g->m = (struct cuda_model *)m;
    mem_free(specs);
}

static void close_format(struct rig *g)
{
    model_free(&g->m->base);
    store_free(g->store);
    weights_free(g->w);
}

/* Tokens anew: bf16 of size about 1 in m->a, and a zero residual stream. */
static void fresh_tokens(struct rig *g, int m)
{
    struct err e = {0};
    size_t n = (size_t)m * HIDDEN;
    uint16_t *a = mem_alloc(n * 2);
    uint64_t s = (uint64_t)m;
    for (size_t i = 0; i < n; i++) {
        float sum = 0;
        for (int k = 0; k < 3; k++) {
            s = s * 6364136223846793005u + 1442695040888963407u;
            sum += (float)(int32_t)(s >> 32) * 0x1p-31f;
        }
        a[i] = f32_to_bf16(sum);
    }
    queue_copy(g->m->q, host_addr(g->m->a), host_addr(a), n * 2);
    queue_fill(g->m->q, host_addr(g->m->x), 0, n * 4);
    must(queue_sync(g->m->q, &e), &e);
    mem_free(a);
}

static int by_value(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

/* Microseconds a layer. */
static double time_layers(struct rig *g, int m, bool routed)
{
    struct err e = {0};
    struct graph *graph;
    float ms[REPLAYS];
    const struct cuda_slice s = {.m = g->m, .n = m};
    fresh_tokens(g, m);
    cuda_moe(&s, 0, true);
    queue_capture(g->m->q);
    for (int l = 0; l < LAYERS; l++)
        cuda_moe(&s, l, routed);
    must(queue_capture_end(g->m->q, &graph, &e), &e);
    int n = m >= 4096 ? 7 : REPLAYS;
    for (int i = -2; i < n; i++) {
        queue_record(g->m->q, g->from);
        queue_graph(g->m->q, graph);
        queue_record(g->m->q, g->to);
        must(queue_sync(g->m->q, &e), &e);
        if (i >= 0) must(event_ms(&ms[i], g->from, g->to, &e), &e);
    }
    qsort(ms, (size_t)n, sizeof *ms, by_value);
    graph_free(graph);
    return (double)ms[n / 2] * 1e3 / LAYERS;
}

static int experts_touched(struct rig *g, int m)
{
    struct err e = {0};
    int32_t offsets[EXPERTS + 1];
    int n = 0;
    queue_copy(g->m->q, host_addr(offsets), host_addr(g->m->offsets), sizeof offsets);
    must(queue_sync(g->m->q, &e), &e);
    for (int i = 0; i < EXPERTS; i++)
        n += offsets[i + 1] > offsets[i];
    if (offsets[EXPERTS] != m * TOP_K)
        fprintf(stderr, "%d rows of experts\n", offsets[EXPERTS]), exit(1);
    return n;
}

static double floor_us(double bytes, double flops)
{
    return fmax(bytes / READ_BYTES_S, flops / FLOP_S) * 1e6;
}

static void row(struct rig *g, int m)
{
    double layer = time_layers(g, m, true), part = time_layers(g, m, false);
    int touched = experts_touched(g, m);
    struct slot_spec up = {.shape = {RESIDENT_MATRIX, g->format, INNER, HIDDEN}}, down = up;
    down.shape.rows = HIDDEN, down.shape.cols = INNER;
    double bytes = touched * (2.0 * (double)dummy_bytes(&up, 1) + (double)dummy_bytes(&down, 1));
    double flops = 6.0 * m * TOP_K * HIDDEN * INNER, router = 2.0 * EXPERTS * HIDDEN;
    double part_floor = floor_us(bytes, flops),
           layer_floor = floor_us(bytes + router, flops + router * m);
    printf("%-10s %6d %7d %9.1f %8.1f %5.0f%% %11.1f %8.1f %5.0f%% %7.0f %8.1f\n",
           formats[g->format].name, m, touched, layer, layer_floor, 100 * layer_floor / layer, part,
           part_floor, 100 * part_floor / part, bytes / part * 1e-3, flops / part * 1e-6);
    fflush(stdout);
    record_begin(&g->record);
    record_text(&g->record, "what", "MoE layer"),
        record_text(&g->record, "format", formats[g->format].name);
    record_num(&g->record, "tokens", m), record_num(&g->record, "experts", touched);
    record_num(&g->record, "layer_us", layer),
        record_num(&g->record, "layer_floor_us", layer_floor);
    record_num(&g->record, "experts_us", part),
        record_num(&g->record, "experts_floor_us", part_floor);
    record_end(&g->record);
}

int main(int argc, char **argv)
{
    static const struct option options[] = {{"json", 1, NULL, 'j'},
                                            {"format", 1, NULL, 'f'},
                                            {"tokens", 1, NULL, 't'},
                                            {NULL, 0, NULL, 0}};
    char all_formats[] = "bf16,nvfp4,fp8-block,mxfp8,mxfp4",
         all_tokens[] = "1,8,32,64,128,256,512,1024,1209,2048,4096,8192,16384";
    char *names = all_formats, *tokens = all_tokens, *save, *name, *m;
    const char *json = NULL;
    struct rig g = {0};
    struct err e = {0};
    for (int c; (c = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        if (c == 'j')
            json = optarg;
        else if (c == 'f')
            names = optarg;
        else if (c == 't')
            tokens = optarg;
        else
            return 2;
    }
    record_open(&g.record, json, "moe");
    shape(&g.c);
    must(device_open(&g.d, 0, 0, &e), &e);
    must(event_new(&g.from, g.d, true, &e), &e);
    must(event_new(&g.to, g.d, true, &e), &e);
    printf("%s\n%-10s %6s %7s %9s %8s %6s %11s %8s %6s %7s %8s\n", device_about(g.d)->name,
           "format", "tokens", "experts", "layer us", "floor", "", "experts us", "floor", "",
           "GB/s", "TFLOP/s");
    for (name = strtok_r(names, ",", &save); name; name = strtok_r(NULL, ",", &save)) {
        format_t f = format_find(name);
        if (f == FORMAT_COUNT) fprintf(stderr, "%s: unknown format\n", name), exit(2);
        open_format(&g, f);
        char *list = mem_dup(tokens), *at;
        for (m = strtok_r(list, ",", &at); m; m = strtok_r(NULL, ",", &at)) {
            int n = atoi(m);
            if (n < 1 || n > M_MAX) fprintf(stderr, "--tokens: %s: 1 .. %d\n", m, M_MAX), exit(2);
            row(&g, n);
        }
        mem_free(list);
        close_format(&g);
    }
    event_free(g.from), event_free(g.to);
    device_close(g.d);
    record_close(&g.record);
    return 0;
}
