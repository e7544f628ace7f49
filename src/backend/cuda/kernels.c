#include "backend/cuda/kernels.h"
#include "base/mem.h"
#include <stdio.h>

enum {
    NORM_THREADS = 256,
    NORM_TURN = NORM_THREADS * 8, /* columns that a block holds without a second turn */
    ROPE_HEADS = 8,
    ROUTE_WARPS = 32,
    ROUTE_SPREAD = 8,        /* of a block where all blocks run at once */
    ROUTE_SMEM = 208 * 1024, /* at most */
    ATTN_THREADS = 288,
    ATTN_PREFILL_THREADS = 384,
    SAMPLE_THREADS = 512
};

struct kernels {
    struct kernels_shape s;
    uint32_t n_sms;
    int nt[ATTN_KINDS]; /* query columns / 8 */
    bool wgmma;         /* ATTN_PREFILL is attn_prefill.cu's */
    struct kernel norm[NORM_SOURCES], norm_route, rope, swiglu, round, route, route_plan, attn_plan,
        attn[ATTN_KINDS], attn_few, attn_prefix;
    struct kernel sample_adjust, sample_row, sample_finish;
};

static const char *const norm_names[NORM_SOURCES] = {
    [NORM_PLAIN] = "plain", [NORM_EMBED] = "embed", [NORM_ADD] = "add", [NORM_COMBINE] = "combine"};
static const char *const kv_names[KV_TYPE_COUNT] = {"bf16", "e4m3"};

err_t kernels_check(const struct kernels_shape *s, struct err *e)
{
    if (s->hidden < 8 || s->hidden > NORM_MAX || s->hidden % 8)
        return err_set(e, ERR_UNSUPPORTED,
                       "hidden_size: %d; allowed on a GPU: multiples of 8 up to %d", s->hidden,
                       NORM_MAX);
    if (s->head_dim != 64 && s->head_dim != 128 && s->head_dim != 256)
        return err_set(e, ERR_UNSUPPORTED, "head_dim: %d; allowed on a GPU: 64, 128, 256",
                       s->head_dim);
    if (s->n_kv_heads < 1 || s->n_heads < 1 || s->n_heads % s->n_kv_heads ||
        s->n_heads / s->n_kv_heads > ATTN_GROUP_MAX)
        return err_set(
            e, ERR_UNSUPPORTED,
            "num_attention_heads: %d with %d KV heads; allowed on a GPU: 1 to %d a KV head",
            s->n_heads, s->n_kv_heads, ATTN_GROUP_MAX);
    if (s->n_experts < 0 || s->n_experts > ROUTE_EXPERTS_MAX)
        return err_set(e, ERR_UNSUPPORTED, "num_experts: %d; allowed on a GPU: up to %d",
                       s->n_experts, ROUTE_EXPERTS_MAX);
    if (s->top_k < 0 || s->top_k > ROUTE_TOP_K_MAX || s->top_k > s->n_experts)
        return err_set(e, ERR_UNSUPPORTED,
                       "num_experts_per_tok: %d of %d; allowed on a GPU: up to %d", s->top_k,
                       s->n_experts, ROUTE_TOP_K_MAX);
    if (s->vocab < 1 || s->vocab > SAMPLE_VOCAB_MAX)
        return err_set(e, ERR_UNSUPPORTED, "vocab_size: %d; allowed on a GPU: up to %d", s->vocab,
                       SAMPLE_VOCAB_MAX);
    return OK;
}

/* sample_row: the logits of a block's parts. */
static size_t sample_smem(const struct kernels_shape *s)
{
    size_t parts = ((size_t)s->vocab + SAMPLE_PART - 1) / SAMPLE_PART;
    return (parts + SAMPLE_CLUSTER - 1) / SAMPLE_CLUSTER * SAMPLE_PART * sizeof(float);
}

/* norm_route: weights of 16 experts, rows in f32 and BF16, logits. */
static size_t norm_route_smem(int32_t hidden, int32_t n_experts, int32_t tokens)
{
    size_t n = (size_t)hidden, experts = (size_t)n_experts, t = (size_t)tokens;
    size_t row = n * sizeof(float) + (n + 8) * sizeof(uint16_t) + experts * sizeof(float);
    return n * 16 * sizeof(uint16_t) + t * row;
}

struct wanted {
    struct kernel *to;
    const char *name;
    size_t args_bytes, smem_bytes;
};

static err_t find(struct kernels *k, struct device *d, struct err *e)
{
    const struct kernels_shape *s = &k->s;
    char rope[32], attn[ATTN_KINDS][32], few[32], prefix[32], norm[NORM_SOURCES][32];
    int turns = s->hidden <= NORM_TURN ? 1 : s->hidden <= 2 * NORM_TURN ? 2 : 4;
    const char *route = s->n_experts <= 128   ? "route_4"
                        : s->n_experts <= 256 ? "route_8"
                                              : "route_16";
    size_t counts = ROUTE_WARPS * sizeof(uint32_t) * (size_t)s->n_experts;
    size_t sets = (size_t)ROUTE_SMEM;
    snprintf(rope, sizeof rope, "rope_%s_%d", kv_names[s->kv], s->head_dim);
    for (int i = 0; i < NORM_SOURCES; i++)
        snprintf(norm[i], sizeof norm[i], "norm_%s_%d", norm_names[i], turns);
    snprintf(few, sizeof few, "attn_few_%s", kv_names[s->kv]);
    size_t attn_smem[ATTN_KINDS];
    err_t rc = OK;
    for (int i = 0; i < ATTN_KINDS; i++) {
        attn_smem[i] = (size_t)ATTN_SMEM(s->kv, s->head_dim, k->nt[i]);
        snprintf(attn[i], sizeof attn[i], "attn_%s_%d_%d", kv_names[s->kv], s->head_dim, k->nt[i]);
    }
    if (k->wgmma) {
        snprintf(prefix, sizeof prefix, "attn_prefix_%s_%d", kv_names[s->kv], s->head_dim);
        rc = device_kernel(&k->attn_prefix, d, prefix, sizeof(struct attn_args), ATTN_PREFILL_SMEM,
                           e);
        attn_smem[ATTN_PREFILL] = ATTN_PREFILL_SMEM;
        snprintf(attn[ATTN_PREFILL], sizeof attn[ATTN_PREFILL], "attn_prefill_%s_%d",
                 kv_names[s->kv], s->head_dim);
    }
    const struct wanted all[] = {
        {&k->norm[NORM_PLAIN], norm[NORM_PLAIN], sizeof(struct norm_args), 0},
        {&k->norm[NORM_EMBED], norm[NORM_EMBED], sizeof(struct norm_args), 0},
        {&k->norm[NORM_ADD], norm[NORM_ADD], sizeof(struct norm_args), 0},
        {&k->norm[NORM_COMBINE], norm[NORM_COMBINE], sizeof(struct norm_args), 0},
        {&k->norm_route, "norm_route", sizeof(struct norm_route_args),
         norm_route_smem(NORM_ROUTE_HIDDEN, NORM_ROUTE_EXPERTS, NORM_ROUTE_TOKENS)},
        {&k->rope, rope, sizeof(struct rope_args), 0},
        {&k->swiglu, "swiglu", sizeof(struct swiglu_args), 0},
        {&k->round, "round_rows", sizeof(struct round_args), 0},
        {&k->route, route, sizeof(struct route_args), sets},
        {&k->route_plan, "route_plan", sizeof(struct route_args), counts},
        {&k->attn_plan, "attn_plan", sizeof(struct attn_plan_args), 0},
        {&k->attn[ATTN_DECODE], attn[ATTN_DECODE], sizeof(struct attn_args),
         attn_smem[ATTN_DECODE]},
        {&k->attn_few, few, sizeof(struct attn_few_args), ATTN_FEW_SMEM(s->kv, ATTN_FEW_CHUNKS)},
        {&k->attn[ATTN_SHORT], attn[ATTN_SHORT], sizeof(struct attn_args), attn_smem[ATTN_SHORT]},
        {&k->attn[ATTN_PREFILL], attn[ATTN_PREFILL], sizeof(struct attn_args),
         attn_smem[ATTN_PREFILL]},
        {&k->sample_adjust, "sample_adjust", sizeof(struct sample_args), 0},
        {&k->sample_row, "sample_row", sizeof(struct sample_args), sample_smem(s)},
        {&k->sample_finish, "sample_finish", sizeof(struct sample_args), 0},
    };
    for (size_t i = 0; i < sizeof all / sizeof all[0] && rc == OK; i++)
        rc = device_kernel(all[i].to, d, all[i].name, all[i].args_bytes, all[i].smem_bytes, e);
    return rc;
}

/* Which kernels attention takes. */
static struct kernels choose(const struct device *d, const struct kernels_shape *s)
{
    struct kernels k = {.s = *s, .n_sms = (uint32_t)device_about(d)->n_sms};
    k.nt[ATTN_DECODE] = s->n_heads / s->n_kv_heads <= 8 ? 1 : 2;
    k.nt[ATTN_SHORT] = 8;
    k.wgmma = s->head_dim == 128;
    k.nt[ATTN_PREFILL] = k.wgmma ? ATTN_PREFILL_COLUMNS / 8 : 8;
    return k;
}

err_t kernels_new(struct kernels **out, struct device *d, const struct kernels_shape *s,
                  struct err *e)
{
    err_t rc = kernels_check(s, e);
    if (rc != OK) return rc;
    struct kernels *k = mem_alloc(sizeof *k);
    *k = choose(d, s);
    rc = find(k, d, e);
    if (rc != OK) {
        kernels_free(k);
        return rc;
    }
    *out = k;
    return OK;
}

void kernels_free(struct kernels *k)
{
    mem_free(k);
}

void kernels_norm(const struct kernels *k, struct queue *q, norm_source_t source,
                  const struct norm_args *a, int32_t rows, bool programmatic)
{
    CHECK(a->n % 8 == 0 && a->n <= k->s.hidden && a->top_k <= ROUTE_TOP_K_MAX);
    if (rows < 1) return;
    struct launch l = {
        .grid = {(uint32_t)rows}, .threads = NORM_THREADS, .programmatic = programmatic};
    queue_launch(q, &k->norm[source], l, a);
}

void kernels_rope(const struct kernels *k, struct queue *q, const struct rope_args *a,
                  int32_t tokens, bool programmatic)
{
    if (tokens < 1) return;
    uint32_t units = (uint32_t)(a->n_heads + 2 * a->n_kv_heads);
    struct launch l = {.grid = {(uint32_t)tokens, (units + ROPE_HEADS - 1) / ROPE_HEADS},
                       .threads = ROPE_HEADS * 16,
                       .programmatic = programmatic};
    queue_launch(q, &k->rope, l, a);
}

void kernels_swiglu(const struct kernels *k, struct queue *q, const struct swiglu_args *a,
                    int32_t rows, bool programmatic)
{
    CHECK(a->n % 4 == 0 && a->ld % 4 == 0);
    if (rows < 1) return;
    struct launch l = {.grid = {(uint32_t)rows, ((uint32_t)a->n + 1023) / 1024},
                       .threads = 256,
                       .programmatic = programmatic};
    queue_launch(q, &k->swiglu, l, a);
}

void kernels_round(const struct kernels *k, struct queue *q, const struct round_args *a,
                   int32_t rows, bool programmatic)
{
    CHECK(a->n % 8 == 0 && a->kind >= 0 && a->kind < ROUND_KINDS);
    if (rows < 1) return;
    queue_launch(
        q, &k->round,
        (struct launch){.grid = {(uint32_t)rows}, .threads = 256, .programmatic = programmatic}, a);
}

/* Shared memory by what this many tokens need: a small block starts beside other kernels'. */
static void launch_route(const struct kernels *k, struct queue *q, const struct route_args *a,
                         bool programmatic)
{
    struct route_args args = *a;
    struct kernel route = k->route;
    size_t row = (size_t)a->n_local * sizeof(uint32_t), counts = ROUTE_WARPS * row;
    size_t words = ((size_t)a->n_tokens + 31) / 32;
    if (words > ROUTE_SMEM / (2 * row)) words = ROUTE_SMEM / (2 * row);
    args.set_words = (int32_t)words;
    route.smem_bytes = (uint32_t)(2 * words * row > counts ? 2 * words * row : counts);
    args.block_tokens = a->n_tokens <= ROUTE_FEW                          ? ROUTE_FEW
                        : a->n_tokens <= ROUTE_SPREAD * (int32_t)k->n_sms ? ROUTE_SPREAD
                                                                          : ROUTE_WARPS;
    struct launch l = {
        .grid = {(uint32_t)((a->n_tokens + args.block_tokens - 1) / args.block_tokens)},
        .threads = ROUTE_WARPS * 32,
        .programmatic = programmatic};
    queue_launch(q, &route, l, &args);
}

void kernels_route(const struct kernels *k, struct queue *q, const struct route_args *a,
                   bool programmatic)
{
    CHECK(a->n_experts <= k->s.n_experts && a->n_local >= 1 && a->n_local <= k->s.n_experts &&
          a->top_k <= ROUTE_TOP_K_MAX && a->n_tokens <= ROUTE_TOKENS_MAX);
    if (a->logits) {
        launch_route(k, q, a, programmatic);
        return;
    }
    struct launch l = {.grid = {1}, .threads = ROUTE_WARPS * 32, .programmatic = programmatic};
    queue_launch(q, &k->route_plan, l, a);
}

bool kernels_norm_routes(const struct kernels *k, int32_t tokens)
{
    int32_t n = k->s.hidden;
    return tokens <= NORM_ROUTE_TOKENS && k->s.n_experts >= 1 &&
           k->s.n_experts <= NORM_ROUTE_EXPERTS && n <= NORM_ROUTE_HIDDEN && n % 256 == 0 &&
           NORM_ROUTE_THREADS % (n / 8) == 0;
}

void kernels_norm_route(const struct kernels *k, struct queue *q, const struct norm_route_args *a,
                        bool programmatic)
{
    CHECK(kernels_norm_routes(k, a->route.n_tokens) && a->norm.n == k->s.hidden &&
          a->route.n_experts == k->s.n_experts && a->route.n_local >= 1 &&
          a->route.n_local <= k->s.n_experts && a->route.top_k <= ROUTE_TOP_K_MAX);
    if (a->route.n_tokens < 1) return;
    struct norm_route_args args = *a;
    args.segment = gemm_segment(k->s.n_experts, k->s.hidden);
    args.n_segments = (k->s.hidden + args.segment - 1) / args.segment;
    struct kernel norm_route = k->norm_route;
    norm_route.smem_bytes =
        (uint32_t)norm_route_smem(k->s.hidden, k->s.n_experts, a->route.n_tokens);
    uint32_t blocks = ((uint32_t)k->s.n_experts + 15) / 16;
    struct launch l = {.grid = {blocks},
                       .threads = NORM_ROUTE_THREADS,
                       .cluster = blocks,
                       .programmatic = programmatic};
    queue_launch(q, &norm_route, l, &args);
}

int32_t kernels_attn_tokens(const struct kernels *k, attn_kind_t kind)
{
    return k->nt[kind] * 8 / (k->s.n_heads / k->s.n_kv_heads);
}

static uint32_t attn_grid(const struct kernels *k, attn_kind_t kind)
{
    return k->n_sms * (uint32_t)ATTN_PER_SM(k->s.head_dim, k->nt[kind]);
}

size_t kernels_attn_bytes(const struct kernels *k, attn_kind_t kind, int32_t max_chunks)
{
    if (k->wgmma && kind == ATTN_PREFILL) return 0; /* pairs are never cut */
    size_t columns = (size_t)k->nt[kind] * 8;
    return attn_grid(k, kind) * (size_t)max_chunks * columns * ((size_t)k->s.head_dim + 2) *
           sizeof(float);
}

size_t kernels_attn_bytes_of(const struct device *d, const struct kernels_shape *s,
                             int32_t max_chunks)
{
    struct kernels k = choose(d, s);
    size_t most = 1;
    for (attn_kind_t kind = 0; kind < ATTN_KINDS; kind++) {
        size_t bytes = kernels_attn_bytes(&k, kind, max_chunks);
        if (bytes > most) most = bytes;
    }
    return most;
}

static void plan(const struct kernels *k, struct queue *q, const struct attn_plan_args *a,
                 uint32_t runs, bool of_prefix, bool programmatic)
{
    CHECK(a->first_chunk > 0 && a->first_chunk <= ATTN_CHUNK && a->first_chunk % KV_ROWS == 0);
    struct attn_plan_args args = *a;
    args.n_runs = (int32_t)runs;
    args.of_prefix = of_prefix;
    queue_launch(q, &k->attn_plan,
                 (struct launch){.grid = {1}, .threads = 32, .programmatic = programmatic}, &args);
}

void kernels_attn_plan(const struct kernels *k, struct queue *q, attn_kind_t kind,
                       const struct attn_plan_args *a, bool programmatic)
{
    plan(k, q, a, attn_grid(k, kind), false, programmatic);
}

void kernels_attn(const struct kernels *k, struct queue *q, attn_kind_t kind,
                  const struct attn_args *a, bool programmatic)
{
    CHECK(a->group == k->s.n_heads / k->s.n_kv_heads && a->n_kv_heads == k->s.n_kv_heads);
    if (a->n_blocks < 1) return;
    struct launch l = {
        .grid = {attn_grid(k, kind)}, .threads = ATTN_THREADS, .programmatic = programmatic};
    if (k->wgmma && kind == ATTN_PREFILL) l.threads = ATTN_PREFILL_THREADS;
    queue_launch(q, &k->attn[kind], l, a);
}

bool kernels_attn_is_few(const struct kernels *k, int32_t tokens, int32_t max_chunks)
{
    const struct kernels_shape *s = &k->s;
    return s->head_dim == ATTN_FEW_DIM && s->n_heads / s->n_kv_heads <= ATTN_FEW_GROUP &&
           max_chunks >= 1 && max_chunks <= ATTN_FEW_CHUNKS &&
           (max_chunks & (max_chunks - 1)) == 0 &&
           (int64_t)tokens * s->n_kv_heads * max_chunks <= k->n_sms;
}

void kernels_attn_few(const struct kernels *k, struct queue *q, const struct attn_few_args *a,
                      int32_t tokens, int32_t max_chunks, bool programmatic)
{
    CHECK(kernels_attn_is_few(k, tokens, max_chunks) && a->rope.n_heads == k->s.n_heads &&
          a->rope.n_kv_heads == k->s.n_kv_heads);
    if (tokens < 1) return;
    struct kernel few = k->attn_few;
    few.smem_bytes = (uint32_t)ATTN_FEW_SMEM(k->s.kv, max_chunks);
    struct launch l = {.grid = {(uint32_t)max_chunks, (uint32_t)k->s.n_kv_heads, (uint32_t)tokens},
                       .threads = ATTN_FEW_THREADS,
                       .cluster = (uint32_t)max_chunks,
                       .programmatic = programmatic};
    queue_launch(q, &few, l, a);
}

bool kernels_attn_shares(const struct kernels *k)
{
    return k->wgmma;
}

void kernels_attn_prefix_plan(const struct kernels *k, struct queue *q,
                              const struct attn_plan_args *a, bool programmatic)
{
    plan(k, q, a, k->n_sms, true, programmatic);
}

void kernels_attn_prefix(const struct kernels *k, struct queue *q, const struct attn_args *a,
                         bool programmatic)
{
    CHECK(k->wgmma && a->state && a->state_ml && a->first_chunk == ATTN_CHUNK);
    if (a->n_blocks < 1) return;
    struct launch l = {
        .grid = {k->n_sms}, .threads = ATTN_PREFILL_THREADS, .programmatic = programmatic};
    queue_launch(q, &k->attn_prefix, l, a);
}

void kernels_sample(const struct kernels *k, struct queue *q, const struct sample_args *a,
                    int32_t rows, bool programmatic)
{
    CHECK(a->vocab == k->s.vocab && a->ld % 4 == 0);
    if (rows < 1) return;
    struct launch row = {.grid = {(uint32_t)rows}, .threads = 256, .programmatic = programmatic};
    queue_launch(q, &k->sample_adjust, row, a);
    queue_launch(q, &k->sample_row,
                 (struct launch){.grid = {SAMPLE_CLUSTER, (uint32_t)rows},
                                 .threads = SAMPLE_THREADS,
                                 .cluster = SAMPLE_CLUSTER,
                                 .programmatic = programmatic},
                 a);
    row.threads = 1024;
    queue_launch(q, &k->sample_finish, row, a);
}
