/*
 * The experts of one layer of Qwen3-30B-A3B's shape (128 experts, hidden 2048, inner 768, top 8) for 1
 * to 4096 tokens in every weight format: gate, up, SwiGLU, down, combine, routed at random.
 *
 *     build/bench/bench_moe [--isa NAME] [--threads N] [--formats bf16,nvfp4,...] [--tokens 1,64,...]
 *                           [--clock cpu]   seconds of this process, for one thread on a shared machine
 *
 * Beside each time stands what the machine did in this run: bytes of weights read (each expert that some
 * token chose, once) as a share of the read bandwidth, and multiply-adds as a share of the peak, both
 * measured between the formats, since a shared machine changes.
 */
#include "backend/cpu/cpu.h"
#include "backend/layout.h"
#include "machine.h"

#include <stdio.h>
#include <stdlib.h>

enum { EXPERTS = 128, HIDDEN = 2048, INNER = 768, TOP_K = 8, TOKENS_MAX = 4096 };
enum { PANELS = 4, COLS = PANELS * 16, ROWS = GEMM_ROWS };

struct layer {
    const struct backend_ops *ops;
    struct matrix gate[EXPERTS], up[EXPERTS], down[EXPERTS];
    uint8_t *memory;
    size_t expert_bytes;
    struct fixed *fixed_x, *fixed_h; /* x and h, for 4-bit formats */
    float *x, *h, *y, *out; /* [tokens][HIDDEN], [rows][INNER], [rows][HIDDEN], [tokens][HIDDEN] */
    int32_t *src, *row_of;  /* token of a row; row of (token, k) */
    int32_t first[EXPERTS + 1], active[EXPERTS], n_active;
};

static uint64_t rng = 1;

static uint32_t next(void)
{
    rng = rng * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(rng >> 33);
}

static void fill_resident(uint8_t *p, format_t f, size_t rows, size_t cols)
{
    size_t data, scale;
    if (!format_bytes(f, rows, cols, &data, &scale)) abort();
    uint8_t *canon = mem_alloc(data > scale ? data : scale);
    for (size_t i = 0; i < data; i++)
        canon[i] = (uint8_t)next();
    if (f == FORMAT_BF16)
        for (size_t i = 1; i < data; i += 2)
            canon[i] = (uint8_t)(0x3c | (canon[i] & 0x80));
    for (size_t i = 0; i < data && formats[f].elem == ELEM_E4M3; i++)
        if ((canon[i] & 0x7f) == 0x7f) canon[i] = 0;
    layout_put(p, f, rows, cols, PART_DATA, 0, rows, canon);
    size_t n = formats[f].scale_bytes ? scale / (size_t)formats[f].scale_bytes : 0;
    for (size_t i = 0; i < n; i++)
        if (formats[f].scale == SCALE_F32)
            ((float *)(void *)canon)[i] = 1e-3f;
        else
            canon[i] =
                (uint8_t)(formats[f].scale == SCALE_E8M0 ? 117 + next() % 4 : 8 + next() % 64);
    layout_put(p, f, rows, cols, PART_SCALE, 0, layout_part_rows(f, PART_SCALE, rows), canon);
    const float tensor = 1e-3f;
    layout_put(p, f, rows, cols, PART_TENSOR, 0, layout_part_rows(f, PART_TENSOR, rows), &tensor);
    mem_free(canon);
}

/* One expert is filled and copied: values do not matter, places do. */
static void experts_new(struct layer *l, format_t f)
{
    size_t a, b;
    if (!layout_bytes(&a, f, INNER, HIDDEN) || !layout_bytes(&b, f, HIDDEN, INNER)) abort();
    a = (a + 63) / 64 * 64;
    b = (b + 63) / 64 * 64;
    l->expert_bytes = 2 * a + b;
    l->memory = mem_alloc(l->expert_bytes * EXPERTS);
    fill_resident(l->memory, f, INNER, HIDDEN);
    fill_resident(l->memory + a, f, INNER, HIDDEN);
    fill_resident(l->memory + 2 * a, f, HIDDEN, INNER);
    for (size_t e = 0; e < EXPERTS; e++) {
        uint8_t *p = l->memory + e * l->expert_bytes;
        if (e > 0) memcpy(p, l->memory, l->expert_bytes);
        l->gate[e] = layout_matrix(f, INNER, HIDDEN, p);
        l->up[e] = layout_matrix(f, INNER, HIDDEN, p + a);
        l->down[e] = layout_matrix(f, HIDDEN, INNER, p + 2 * a);
    }
}

/* TOP_K different experts a token, rows in order of expert. */
static void route(struct layer *l, int tokens)
{
    static uint8_t ids[TOKENS_MAX][TOP_K];
    memset(l->first, 0, sizeof l->first);
    for (int t = 0; t < tokens; t++)
        for (int k = 0; k < TOP_K; k++) {
            bool seen;
            do {
                ids[t][k] = (uint8_t)(next() % EXPERTS);
                seen = false;
                for (int j = 0; j < k; j++)
                    seen |= ids[t][j] == ids[t][k];
            } while (seen);
            l->first[ids[t][k] + 1]++;
        }
    l->n_active = 0;
    for (int e = 0; e < EXPERTS; e++) {
        if (l->first[e + 1]) l->active[l->n_active++] = e;
        l->first[e + 1] += l->first[e];
    }
    int32_t at[EXPERTS];
    memcpy(at, l->first, sizeof at);
    for (int t = 0; t < tokens; t++)
        for (int k = 0; k < TOP_K; k++) {
            int32_t row = at[ids[t][k]]++;
            l->src[row] = t;
            l->row_of[t * TOP_K + k] = row;
        }
}

static void fix_x(void *arg, int i)
{
    const struct layer *l = arg;
    fixed_row(l->fixed_x + (size_t)i * fixed_blocks(HIDDEN), l->x + (size_t)i * HIDDEN, HIDDEN);
}

static void fix_h(void *arg, int i)
{
    const struct layer *l = arg;
    for (size_t r = (size_t)l->first[l->active[i]]; r < (size_t)l->first[l->active[i] + 1]; r++)
        fixed_row(l->fixed_h + r * fixed_blocks(INNER), l->h + r * INNER, INNER);
}

static void gate_up(void *arg, int i)
{
    const struct layer *l = arg;
    int e = l->active[i / (INNER / COLS)];
    size_t p = (size_t)(i % (INNER / COLS)) * PANELS, at = (size_t)l->first[e];
    float g[ROWS * COLS], u[ROWS * COLS];
    struct gemm t = {.a = l->x,
                     .lda = HIDDEN,
                     .idx = l->src + at,
                     .fixed = l->fixed_x,
                     .w = &l->gate[e],
                     .ldo = COLS,
                     .col0 = p * 16};
    for (size_t left = (size_t)(l->first[e + 1] - l->first[e]), n; left > 0; left -= n, at += n) {
        n = left < ROWS ? left : ROWS;
        t.w = &l->gate[e];
        t.out = g;
        l->ops->gemm(&t, n, p, PANELS);
        t.w = &l->up[e];
        t.out = u;
        l->ops->gemm(&t, n, p, PANELS);
        for (size_t r = 0; r < n; r++)
            l->ops->swiglu(l->h + (at + r) * INNER + p * 16, g + r * COLS, u + r * COLS, COLS);
        t = gemm_from_row(t, n);
    }
}

static void down(void *arg, int i)
{
    const struct layer *l = arg;
    int e = l->active[i / (HIDDEN / COLS)];
    size_t p = (size_t)(i % (HIDDEN / COLS)) * PANELS, at = (size_t)l->first[e];
    size_t n = (size_t)(l->first[e + 1] - l->first[e]);
    struct gemm t = {.a = l->h + at * INNER,
                     .lda = INNER,
                     .fixed = l->fixed_h + at * fixed_blocks(INNER),
                     .w = &l->down[e],
                     .out = l->y + at * HIDDEN,
                     .ldo = HIDDEN};
    l->ops->gemm(&t, n, p, PANELS);
    for (size_t r = 0; r < n; r++)
        l->ops->round(t.out + r * HIDDEN + p * 16, t.out + r * HIDDEN + p * 16, COLS);
}

static void combine(void *arg, int i)
{
    const struct layer *l = arg;
    const float *rows[TOP_K], w[TOP_K] = {.125f, .125f, .125f, .125f, .125f, .125f, .125f, .125f};
    for (int k = 0; k < TOP_K; k++)
        rows[k] = l->y + (size_t)l->row_of[i * TOP_K + k] * HIDDEN;
    l->ops->combine(l->out + (size_t)i * HIDDEN, rows, w, TOP_K, HIDDEN);
}

static double step(struct layer *l, struct pool *pool, int tokens, bool cpu)
{
    double t = machine_now(cpu);
    bool fixed = matrix_fixed(&l->down[0]);
    if (fixed) pool_run(pool, fix_x, l, tokens);
    pool_run(pool, gate_up, l, l->n_active * (INNER / COLS));
    if (fixed) pool_run(pool, fix_h, l, l->n_active);
    pool_run(pool, down, l, l->n_active * (HIDDEN / COLS));
    pool_run(pool, combine, l, tokens);
    return machine_now(cpu) - t;
}

static void measure(struct layer *l, struct pool *pool, const char *name, int tokens,
                    double bandwidth, double peak, bool cpu)
{
    double best = 1e9, bytes = 0, begin = machine_now(cpu);
    for (int r = 0; r < 3 || (r < 200 && machine_now(cpu) - begin < 1.0); r++) {
        route(l, tokens);
        double read = (double)l->n_active * (double)l->expert_bytes, t = step(l, pool, tokens, cpu);
        if (best < 1e9 && t / read * bytes > best) continue; /* seconds a byte: routings differ */
        best = t;
        bytes = read;
    }
    double flop = 2.0 * 3 * HIDDEN * INNER * TOP_K * tokens;
    printf("%-12s %5d %12.1f us %7.2f GB/s %4.0f%% %9.1f GFLOP/s", name, tokens, best * 1e6,
           bytes / best / 1e9, 100 * bytes / best / bandwidth, flop / best / 1e9);
    printf(peak > 0 ? " %4.0f%%\n" : "    -\n", 100 * flop / best / peak);
    fflush(stdout);
}

static bool listed(const char *list, const char *name)
{
    size_t n = strlen(name);
    for (const char *p = list; p; p = strchr(p, ',') ? strchr(p, ',') + 1 : NULL)
        if (strncmp(p, name, n) == 0 && (p[n] == 0 || p[n] == ',')) return true;
    return list == NULL;
}

int main(int argc, char **argv)
{
    const char *isa = NULL, *only = NULL, *tokens = NULL;
    bool cpu = false;
    int threads = pool_cpus();
    for (int i = 1; i + 1 < argc; i += 2)
        if (strcmp(argv[i], "--isa") == 0)
            isa = argv[i + 1];
        else if (strcmp(argv[i], "--threads") == 0)
            threads = (int)strtol(argv[i + 1], NULL, 10);
        else if (strcmp(argv[i], "--clock") == 0)
            cpu = strcmp(argv[i + 1], "cpu") == 0;
        else if (strcmp(argv[i], "--formats") == 0)
            only = argv[i + 1];
        else if (strcmp(argv[i], "--tokens") == 0)
            tokens = argv[i + 1];
    static struct layer l;
    struct err e = {0};
    if (cpu_ops_get(&l.ops, isa, &e) != OK) {
        fprintf(stderr, "bench_moe: %s\n", e.msg);
        return 1;
    }
    struct pool *pool = pool_new(threads);
    size_t rows = (size_t)TOKENS_MAX * TOP_K;
    l.x = mem_alloc((size_t)TOKENS_MAX * HIDDEN * 4);
    l.out = mem_alloc((size_t)TOKENS_MAX * HIDDEN * 4);
    l.h = mem_alloc(rows * INNER * 4);
    l.fixed_x = mem_alloc(TOKENS_MAX * fixed_blocks(HIDDEN) * sizeof *l.fixed_x);
    l.fixed_h = mem_alloc(rows * fixed_blocks(INNER) * sizeof *l.fixed_h);
    l.y = mem_alloc(rows * HIDDEN * 4);
    l.src = mem_alloc(rows * 4);
    l.row_of = mem_alloc(rows * 4);
    for (size_t i = 0; i < (size_t)TOKENS_MAX * HIDDEN; i++)
        l.x[i] = act_round((float)next() * 0x1p-30f - 1.0f);
    printf("%s, %d threads; experts %d, hidden %d, inner %d, top %d\n", l.ops->name, threads,
           EXPERTS, HIDDEN, INNER, TOP_K);
    printf("format      tokens         time    weights, share     arithmetic, share\n");
    for (int f = 0; f < FORMAT_COUNT; f++) {
        if (!listed(only, formats[f].name)) continue;
        double bandwidth = machine_bandwidth(pool, 5, cpu),
               peak = machine_peak(pool, l.ops->name, 40, cpu);
        printf("# memory read %.1f GB/s, multiply-add peak %.1f GFLOP/s\n", bandwidth / 1e9,
               peak / 1e9);
        experts_new(&l, (format_t)f);
        for (int n = 1; n <= TOKENS_MAX; n *= 4) {
            char text[16];
            snprintf(text, sizeof text, "%d", n);
            if (listed(tokens, text)) measure(&l, pool, formats[f].name, n, bandwidth, peak, cpu);
        }
        mem_free(l.memory);
    }
    pool_free(pool);
    return 0;
}
