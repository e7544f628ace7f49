/*
 * test_attn_few.c - the kernel of decode steps of few tokens leaves what kernels_rope and
 * kernels_attn leave, which test_rows and test_attn compare with the CPU and with float64.
 */
#include "backend/cuda/kernels.h"
#include "cuda/gpu.h"
#include <math.h>

static struct gpu gpu;

enum { DIM = ATTN_FEW_DIM, TABLE = 128, PAGES = 1031, TOKENS = 8, POSITIONS = 2048 };

struct shape {
    kv_type_t kv;
    int32_t heads, kv_heads, chunks;
    int32_t n, pos[TOKENS]; /* < 0: padding */
};

struct rig {
    const struct shape *s;
    struct kernels *kernels;
    size_t page_bytes, out_bytes;
    devptr_t qkv, norm, cos, sin, pos, seq, tables, pages;
};

static devptr_t random_f32(size_t n, float scale, uint64_t *seed)
{
    float *p = mem_alloc(n * 4);
    for (size_t i = 0; i < n; i++)
        p[i] = noise_f32(seed) * scale * (i % 131 == 7 ? 8.0f : 1.0f);
    devptr_t d = gpu_new(&gpu, p, n * 4);
    mem_free(p);
    return d;
}

/* K, then V: any numbers, in rows that are not filled yet too. */
static devptr_t random_pages(const struct shape *s, size_t bytes, uint64_t *seed)
{
    uint8_t *p = mem_alloc(2 * bytes);
    for (size_t i = 0; i < 2 * bytes; i += 2) {
        uint16_t h = f32_to_bf16(noise_f32(seed) * 3.0f);
        memcpy(p + i, &h, 2);
        if (s->kv == KV_E4M3)
            for (size_t j = i; j < i + 2; j++)
                if ((p[j] & 0x7f) == 0x7f) p[j] ^= 1;
    }
    devptr_t d = gpu_new(&gpu, p, 2 * bytes);
    mem_free(p);
    return d;
}

static void rig_new(struct rig *r, const struct shape *s, uint64_t seed)
{
    struct kernels_shape shape = {.hidden = 256,
                                  .vocab = 1000,
                                  .n_heads = s->heads,
                                  .n_kv_heads = s->kv_heads,
                                  .head_dim = DIM,
                                  .kv = s->kv};
    int32_t pos[TOKENS], seq[TOKENS], tables[TOKENS * TABLE];
    uint16_t norm[2 * DIM];
    r->s = s;
    MUST(kernels_new(&r->kernels, gpu.d, &shape, &must_e));
    for (int32_t t = 0; t < s->n; t++) {
        pos[t] = s->pos[t] < 0 ? 0 : s->pos[t];
        seq[t] = s->pos[t] < 0 ? -1 : t;
    }
    for (int32_t i = 0; i < TOKENS * TABLE; i++)
        tables[i] =
            i * 77 % PAGES; /* each a page of its own: PAGES is a prime above TOKENS * TABLE */
    for (int i = 0; i < 2 * DIM; i++)
        norm[i] = f32_to_bf16(1.0f + noise_f32(&seed));
    r->page_bytes = (size_t)PAGES * (size_t)s->kv_heads * kv_tile_bytes(s->kv, DIM);
    r->out_bytes = (size_t)(s->n * s->heads * DIM) * 2;
    r->qkv = random_f32((size_t)(s->n * (s->heads + 2 * s->kv_heads) * DIM), 2.0f, &seed);
    r->cos = random_f32((size_t)POSITIONS * DIM / 2, 1.0f, &seed);
    r->sin = random_f32((size_t)POSITIONS * DIM / 2, 1.0f, &seed);
    r->norm = gpu_new(&gpu, norm, sizeof norm);
    r->pos = gpu_new(&gpu, pos, (size_t)s->n * 4);
    r->seq = gpu_new(&gpu, seq, (size_t)s->n * 4);
    r->tables = gpu_new(&gpu, tables, sizeof tables);
    r->pages = random_pages(s, r->page_bytes, &seed);
}

static void rig_free(struct rig *r)
{
    devptr_t dev[] = {r->qkv, r->cos, r->sin, r->norm, r->pos, r->seq, r->tables, r->pages};
    for (size_t i = 0; i < sizeof dev / sizeof dev[0]; i++)
        gpu_free(&gpu, dev[i]);
    kernels_free(r->kernels);
}

static struct rope_args rope_of(const struct rig *r, devptr_t q)
{
    const struct shape *s = r->s;
    return (struct rope_args){.qkv = (const float *)r->qkv,
                              .ld = (s->heads + 2 * s->kv_heads) * DIM,
                              .q_norm = (const uint16_t *)r->norm,
                              .k_norm = (const uint16_t *)r->norm + DIM,
                              .cos = (const float *)r->cos,
                              .sin = (const float *)r->sin,
                              .pos = (const int32_t *)r->pos,
                              .seq = (const int32_t *)r->seq,
                              .tables = (const int32_t *)r->tables,
                              .table_ld = TABLE,
                              .q = (uint16_t *)q,
                              .k = (void *)r->pages,
                              .v = (void *)(r->pages + r->page_bytes),
                              .n_heads = s->heads,
                              .n_kv_heads = s->kv_heads,
                              .eps = 1e-6f,
                              .k_scale = s->kv == KV_BF16 ? 1.0f : 0.75f,
                              .v_scale = s->kv == KV_BF16 ? 1.0f : 1.37f};
}

static float scale_of(const struct rig *r)
{
    return (r->s->kv == KV_BF16 ? 1.0f : 0.75f) / sqrtf((float)DIM);
}

static void two_kernels(const struct rig *r, devptr_t out)
{
    const struct shape *s = r->s;
    struct attn_block blocks[TOKENS] = {0};
    size_t counters = (size_t)(s->n * s->kv_heads) * 4;
    for (int32_t t = 0; t < s->n; t++)
        if (s->pos[t] >= 0) blocks[t] = (struct attn_block){t, 1, t, 0};
    devptr_t q = gpu_new(&gpu, NULL, r->out_bytes), dblocks = gpu_new(&gpu, blocks, sizeof blocks),
             spans = gpu_new(&gpu, NULL, (TOKENS + 1) * sizeof(struct attn_span)),
             partial = gpu_new(&gpu, NULL, kernels_attn_bytes(r->kernels, ATTN_DECODE, s->chunks)),
             arrived = gpu_new(&gpu, NULL, counters);
    queue_fill(gpu.q, arrived, 0, counters);
    struct attn_plan_args p = {.blocks = (const struct attn_block *)dblocks,
                               .pos = (const int32_t *)r->pos,
                               .spans = (struct attn_span *)spans,
                               .n_blocks = s->n,
                               .n_kv_heads = s->kv_heads,
                               .first_chunk = ATTN_CHUNK};
    struct rope_args rope = rope_of(r, q);
    struct attn_args a = {.q = (const uint16_t *)q,
                          .out = (uint16_t *)out,
                          .k = rope.k,
                          .v = rope.v,
                          .tables = rope.tables,
                          .table_ld = TABLE,
                          .spans = (const struct attn_span *)spans,
                          .partial = (float *)partial,
                          .arrived = (uint32_t *)arrived,
                          .n_blocks = s->n,
                          .n_kv_heads = s->kv_heads,
                          .group = s->heads / s->kv_heads,
                          .max_chunks = s->chunks,
                          .first_chunk = ATTN_CHUNK,
                          .scale = scale_of(r),
                          .v_scale = rope.v_scale};
    kernels_attn_plan(r->kernels, gpu.q, ATTN_DECODE, &p, false);
    kernels_rope(r->kernels, gpu.q, &rope, s->n, false);
    kernels_attn(r->kernels, gpu.q, ATTN_DECODE, &a, false);
    MUST(queue_sync(gpu.q, &must_e));
    devptr_t dev[] = {q, dblocks, spans, partial, arrived};
    for (size_t i = 0; i < sizeof dev / sizeof dev[0]; i++)
        gpu_free(&gpu, dev[i]);
}

/* Before: the pages as they were; afterwards [0] is what one kernel left, [1] what two did. */
static void check(const struct shape *s, uint64_t seed)
{
    struct rig r;
    rig_new(&r, s, seed);
    assert_true(kernels_attn_is_few(r.kernels, s->n, s->chunks));
    uint8_t *out[2], *pages[2], *before = mem_alloc(2 * r.page_bytes);
    gpu_read(&gpu, before, r.pages, 2 * r.page_bytes);
    for (int two = 0; two < 2; two++) {
        out[two] = mem_alloc(r.out_bytes);
        pages[two] = mem_alloc(2 * r.page_bytes);
        queue_copy(gpu.q, r.pages, host_addr(before), 2 * r.page_bytes);
        devptr_t dout = gpu_new(&gpu, NULL, r.out_bytes);
        struct attn_few_args a = {
            .rope = rope_of(&r, 0), .out = (uint16_t *)dout, .scale = scale_of(&r)};
        if (two)
            two_kernels(&r, dout);
        else
            kernels_attn_few(r.kernels, gpu.q, &a, s->n, s->chunks, true);
        gpu_read(&gpu, out[two], dout, r.out_bytes);
        gpu_read(&gpu, pages[two], r.pages, 2 * r.page_bytes);
        gpu_free(&gpu, dout);
    }
    size_t differ = 0, row = r.out_bytes / (size_t)s->n;
    for (int32_t t = 0; t < s->n; t++)
        for (size_t i = 0; i < row; i++)
            differ += out[0][(size_t)t * row + i] != out[1][(size_t)t * row + i];
    if (differ || memcmp(pages[0], pages[1], 2 * r.page_bytes))
        fail_msg("%s, %d/%d heads, %d tokens from position %d: %zu bytes of out differ, pages %s",
                 s->kv == KV_BF16 ? "bf16" : "e4m3", s->heads, s->kv_heads, s->n, s->pos[0], differ,
                 memcmp(pages[0], pages[1], 2 * r.page_bytes) ? "differ" : "agree");
    assert_true(memcmp(pages[0], before, 2 * r.page_bytes) != 0 || s->pos[0] < 0);
    for (int i = 0; i < 2; i++)
        mem_free(out[i]), mem_free(pages[i]);
    mem_free(before);
    rig_free(&r);
}

static void one_kernel_or_two(void **state)
{
    (void)state;
    static const int32_t heads[][2] = {{32, 4}, {4, 2}, {5, 1}, {8, 8}};
    static const struct shape steps[] = {
        {.chunks = 1, .n = 1, .pos = {0}},
        {.chunks = 1, .n = 4, .pos = {255, 15, -1, 16}},
        {.chunks = 2, .n = 2, .pos = {256, 300}},
        {.chunks = 4, .n = 1, .pos = {999}},
        {.chunks = 4, .n = 4, .pos = {1023, 3, 511, 640}},
        {.chunks = 8, .n = 2, .pos = {2047, 1100}},
        {.chunks = 8, .n = 1, .pos = {-1}},
        {.chunks = 1, .n = 8, .pos = {1, 2, 31, 47, 100, 128, 200, 254}},
        {.chunks = 4, .n = 8, .pos = {999, 998, 512, 767, 768, 769, 255, 1000}}};
    for (size_t i = 0; i < sizeof heads / sizeof heads[0]; i++)
        for (size_t j = 0; j < (gpu.few ? 3 : sizeof steps / sizeof steps[0]); j++)
            for (kv_type_t kv = 0; kv < KV_TYPE_COUNT; kv++) {
                struct shape s = steps[j];
                s.kv = kv, s.heads = heads[i][0], s.kv_heads = heads[i][1];
                if (s.n * s.kv_heads * s.chunks <= 132) check(&s, i * 100 + j);
            }
}

int main(void)
{
    if (!gpu_open(&gpu)) return 0;
    const struct CMUnitTest tests[] = {cmocka_unit_test(one_kernel_or_two)};
    int rc = cmocka_run_group_tests(tests, NULL, NULL);
    gpu_close(&gpu);
    return rc;
}
