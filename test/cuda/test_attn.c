/*
 * test_attn.c - paged attention on the GPU.
 *
 * Against float64 over the keys as stored, and against the CPU backend; then bits: prefill, short,
 * decode, decode alone, other cuts of the prompt, and the same sequences in other batches must
 * agree exactly, over one to five chunks.  Last, decode gets chunks that begin elsewhere: the
 * comparison must then fail.
 */
#include "backend/cpu/cpu.h"
#include "backend/cuda/kernels.h"
#include "cuda/gpu.h"
#include "format/format.h"
#include <math.h>

static struct gpu gpu;

enum { SEQS = 11, TABLE = 80, PAGES = 320 };
static const int32_t many[SEQS] = {1, 15, 16, 17, 255, 256, 257, 300, 511, 800, 1270},
                     few[SEQS] = {1, 2, 3, 5, 7, 15, 16, 17, 20, 31, 290};
static const int32_t *lengths = many;

struct rig {
    kv_type_t kv;
    int32_t hd, heads, kv_heads, group, tokens;
    float scale, v_scale;
    uint16_t *q;  /* [tokens][heads * hd], all positions of all sequences */
    float *k, *v; /* [tokens][kv_heads * hd], as stored (decoded, without the scales) */
    int32_t first[SEQS + 1];
    int32_t *pos, *tables;
    struct kernels *kernels;
    devptr_t dq, dpos, dtables, dk, dv;
};

static size_t tile_byte(kv_type_t kv, int row, int d)
{
    int size = kv == KV_BF16 ? 2 : 1, piece = d % 64 * size / 16,
        turn = kv == KV_BF16 ? row % 8 : row / 2 % 4;
    return (size_t)(d / 64 * KV_ROWS * 64 * size + row * 64 * size + (piece ^ turn) * 16 +
                    d % 64 * size % 16);
}

/* x rounded to the KV type, and put to its place in a tile. */
static float store_elem(const struct rig *r, uint8_t *tile, int row, int d, float x)
{
    uint16_t h = f32_to_bf16(x);
    uint8_t b = format_to_e4m3(x);
    uint8_t *at = tile + tile_byte(r->kv, row, d);
    if (r->kv == KV_BF16)
        memcpy(at, &h, 2);
    else
        *at = b;
    return r->kv == KV_BF16 ? bf16_to_f32(h) : format_e4m3(b);
}

static void fill_kv(struct rig *r, uint64_t seed)
{
    size_t tile = kv_tile_bytes(r->kv, r->hd), bytes = (size_t)PAGES * (size_t)r->kv_heads * tile;
    size_t nkv = (size_t)(r->kv_heads * r->hd);
    uint8_t *kp = mem_alloc(bytes), *vp = mem_alloc(bytes);
    for (int s = 0; s < SEQS; s++)
        for (int32_t p = 0; p < lengths[s]; p++)
            for (int h = 0; h < r->kv_heads; h++) {
                size_t at =
                    ((size_t)r->tables[s * TABLE + p / KV_ROWS] * (size_t)r->kv_heads + (size_t)h) *
                    tile;
                size_t to = (size_t)(r->first[s] + p) * nkv + (size_t)(h * r->hd);
                for (int d = 0; d < r->hd; d++) {
                    float outlier = d % 37 == 5 ? 6.0f : 1.0f;
                    r->k[to + (size_t)d] =
                        store_elem(r, kp + at, p % KV_ROWS, d, noise_f32(&seed) * 3.0f * outlier);
                    r->v[to + (size_t)d] =
                        store_elem(r, vp + at, p % KV_ROWS, d, noise_f32(&seed) * 2.0f);
                }
            }
    r->dk = gpu_new(&gpu, kp, bytes);
    r->dv = gpu_new(&gpu, vp, bytes);
    mem_free(kp), mem_free(vp);
}

static void rig_new(struct rig *r, kv_type_t kv, int32_t hd, int32_t heads, int32_t kv_heads)
{
    *r = (struct rig){
        .kv = kv, .hd = hd, .heads = heads, .kv_heads = kv_heads, .group = heads / kv_heads};
    r->scale = 1.0f / sqrtf((float)hd) * (kv == KV_BF16 ? 1.0f : 0.75f);
    r->v_scale = kv == KV_BF16 ? 1.0f : 1.37f;
    for (int s = 0; s < SEQS; s++)
        r->first[s + 1] = r->first[s] + lengths[s];
    r->tokens = r->first[SEQS];
    size_t nq = (size_t)(heads * hd), nkv = (size_t)(kv_heads * hd), n = (size_t)r->tokens;
    uint64_t seed = (uint64_t)(hd + heads);
    r->q = mem_alloc(n * nq * 2);
    r->k = mem_alloc(n * nkv * 4);
    r->v = mem_alloc(n * nkv * 4);
    r->pos = mem_alloc(n * 4);
    r->tables = mem_alloc(SEQS * TABLE * 4);
    for (size_t i = 0; i < n * nq; i++)
        r->q[i] = f32_to_bf16(noise_f32(&seed) * 1.5f);
    int32_t page = 0;
    for (int s = 0; s < SEQS; s++) {
        for (int32_t p = 0; p < lengths[s]; p++)
            r->pos[r->first[s] + p] = p;
        for (int32_t p = 0; p < lengths[s]; p += KV_ROWS, page++)
            r->tables[s * TABLE + p / KV_ROWS] =
                page * 77 % PAGES; /* 77 and 320 have no common factor */
    }
    assert_true(page <= PAGES);
    fill_kv(r, seed);
    struct kernels_shape shape = {.hidden = 256,
                                  .vocab = 1000,
                                  .n_heads = heads,
                                  .n_kv_heads = kv_heads,
                                  .head_dim = hd,
                                  .kv = kv};
    MUST(kernels_new(&r->kernels, gpu.d, &shape, &must_e));
    r->dq = gpu_new(&gpu, r->q, n * nq * 2);
    r->dpos = gpu_new(&gpu, r->pos, n * 4);
    r->dtables = gpu_new(&gpu, r->tables, SEQS * TABLE * 4);
}

static void rig_free(struct rig *r)
{
    devptr_t dev[] = {r->dq, r->dpos, r->dtables, r->dk, r->dv};
    for (size_t i = 0; i < sizeof dev / sizeof dev[0]; i++)
        gpu_free(&gpu, dev[i]);
    mem_free(r->q), mem_free(r->k), mem_free(r->v), mem_free(r->pos), mem_free(r->tables);
    kernels_free(r->kernels);
}

/* What kernels_attn_prefix leaves for the `shared` blocks. */
static void run_prefix(struct rig *r, const struct attn_block *shared, int32_t n,
                       struct attn_args a)
{
    devptr_t dblocks = gpu_new(&gpu, shared, (size_t)n * sizeof *shared);
    devptr_t spans = gpu_new(&gpu, NULL, ((size_t)n + 1) * sizeof(struct attn_span));
    struct attn_plan_args p = {(const struct attn_block *)dblocks,
                               (const int32_t *)r->dpos,
                               (struct attn_span *)spans,
                               n,
                               r->kv_heads,
                               0,
                               0,
                               ATTN_CHUNK};
    a.spans = (const struct attn_span *)spans;
    a.n_blocks = n;
    kernels_attn_prefix_plan(r->kernels, gpu.q, &p, true);
    kernels_attn_prefix(r->kernels, gpu.q, &a, true);
    MUST(queue_sync(gpu.q, &must_e));
    gpu_free(&gpu, dblocks), gpu_free(&gpu, spans);
}

/* One run over blocks; out [tokens][heads * hd] keeps 0xAA where no block is. */
static void run_shared(struct rig *r, attn_kind_t kind, const struct attn_block *blocks, int32_t n,
                       int32_t first_chunk, const struct attn_block *shared, int32_t n_shared,
                       uint16_t *out)
{
    size_t bytes = (size_t)r->tokens * (size_t)(r->heads * r->hd) * 2,
           counters = (size_t)(n * r->kv_heads) * 4;
    int32_t max_chunks = (lengths[SEQS - 1] + ATTN_CHUNK - 1) / ATTN_CHUNK + 1;
    uint32_t *zeros = mem_alloc(counters), *after = mem_alloc(counters);
    devptr_t dout = gpu_new(&gpu, NULL, bytes),
             dblocks = gpu_new(&gpu, blocks, (size_t)n * sizeof *blocks);
    devptr_t spans = gpu_new(&gpu, NULL, ((size_t)n + 1) * sizeof(struct attn_span));
    devptr_t partial = gpu_new(&gpu, NULL, kernels_attn_bytes(r->kernels, kind, max_chunks));
    devptr_t arrived = gpu_new(&gpu, zeros, counters);
    devptr_t state = n_shared ? gpu_new(&gpu, NULL, bytes * 2) : 0;
    devptr_t state_ml =
        n_shared ? gpu_new(&gpu, NULL, (size_t)r->tokens * (size_t)r->heads * 8) : 0;
    struct attn_plan_args p = {(const struct attn_block *)dblocks,
                               (const int32_t *)r->dpos,
                               (struct attn_span *)spans,
                               n,
                               r->kv_heads,
                               0,
                               0,
                               first_chunk};
    struct attn_args a = {.q = (const uint16_t *)r->dq,
                          .out = (uint16_t *)dout,
                          .k = (const void *)r->dk,
                          .v = (const void *)r->dv,
                          .tables = (const int32_t *)r->dtables,
                          .table_ld = TABLE,
                          .spans = (const struct attn_span *)spans,
                          .partial = (float *)partial,
                          .arrived = (uint32_t *)arrived,
                          .state = (float *)state,
                          .state_ml = (float *)state_ml,
                          .n_blocks = n,
                          .n_kv_heads = r->kv_heads,
                          .group = r->group,
                          .max_chunks = max_chunks,
                          .first_chunk = first_chunk,
                          .scale = r->scale,
                          .v_scale = r->v_scale};
    if (n_shared) run_prefix(r, shared, n_shared, a);
    kernels_attn_plan(r->kernels, gpu.q, kind, &p, true);
    kernels_attn(r->kernels, gpu.q, kind, &a, true);
    gpu_read(&gpu, out, dout, bytes);
    gpu_read(&gpu, after, arrived, counters);
    assert_memory_equal(after, zeros, counters);
    devptr_t dev[] = {dout, dblocks, spans, partial, arrived, state, state_ml};
    for (size_t i = 0; i < sizeof dev / sizeof dev[0]; i++)
        gpu_free(&gpu, dev[i]);
    mem_free(zeros), mem_free(after);
}

static void run(struct rig *r, attn_kind_t kind, const struct attn_block *blocks, int32_t n,
                int32_t first_chunk, uint16_t *out)
{
    run_shared(r, kind, blocks, n, first_chunk, NULL, 0, out);
}

/* All tokens of all sequences in pieces of at most `most` tokens; `uneven`: of changing sizes. */
static int32_t cut(const struct rig *r, int32_t most, bool uneven, struct attn_block *out)
{
    int32_t n = 0;
    uint64_t seed = 5;
    for (int32_t s = 0; s < SEQS; s++)
        for (int32_t p = 0, len; p < lengths[s]; p += len) {
            len = uneven ? 1 + (int32_t)(noise_u32(&seed) % (uint32_t)most) : most;
            if (len > lengths[s] - p) len = lengths[s] - p;
            if (uneven && n % 13 == 4) out[n++] = (struct attn_block){0}; /* padding */
            out[n++] = (struct attn_block){r->first[s] + p, len, s, 0};
        }
    return n;
}

/* One token a block: every `step`-th, and the last of each sequence. */
static int32_t single(const struct rig *r, int32_t step, struct attn_block *out)
{
    int32_t n = 0;
    for (int32_t s = SEQS; s-- > 0;)
        for (int32_t p = 0; p < lengths[s]; p++)
            if ((r->first[s] + p) % step == 0 || p == lengths[s] - 1)
                out[n++] = (struct attn_block){r->first[s] + p, 1, s, 0};
    return n;
}

static const uint16_t *row(const struct rig *r, const uint16_t *out, int32_t token)
{
    return out + (size_t)token * (size_t)(r->heads * r->hd);
}

/* Elements that differ in the rows of the blocks. */
static size_t differences(const struct rig *r, const struct attn_block *blocks, int32_t n,
                          const uint16_t *a, const uint16_t *b)
{
    size_t count = 0;
    for (int32_t i = 0; i < n; i++)
        for (int32_t j = 0; j < blocks[i].n * r->heads * r->hd; j++)
            count += row(r, a, blocks[i].token)[j] != row(r, b, blocks[i].token)[j];
    return count;
}

static void exact_row(const struct rig *r, int32_t token, int seq, int head, double *out)
{
    int32_t n = r->pos[token] + 1, first = r->first[seq];
    size_t nkv = (size_t)(r->kv_heads * r->hd), off = (size_t)(head / r->group * r->hd);
    const uint16_t *q = row(r, r->q, token) + head * r->hd;
    double *s = mem_alloc((size_t)n * sizeof *s), top = -1e300, sum = 0.0;
    for (int32_t p = 0; p < n; p++) {
        const float *k = r->k + (size_t)(first + p) * nkv + off;
        for (int d = 0; d < r->hd; d++)
            s[p] += (double)bf16_to_f32(q[d]) * (double)k[d];
        s[p] *= (double)r->scale;
        if (s[p] > top) top = s[p];
    }
    for (int d = 0; d < r->hd; d++)
        out[d] = 0.0;
    for (int32_t p = 0; p < n; p++) {
        double w = exp(s[p] - top);
        sum += w;
        for (int d = 0; d < r->hd; d++)
            out[d] += w * (double)r->v[(size_t)(first + p) * nkv + off + (size_t)d];
    }
    for (int d = 0; d < r->hd; d++)
        out[d] = out[d] / sum * (double)r->v_scale;
    mem_free(s);
}

/* The CPU backend on the same keys (BF16 only): its own pages, one head. */
static void cpu_row(const struct rig *r, int32_t token, int seq, int head, float *out)
{
    int32_t n = r->pos[token] + 1, first = r->first[seq], n_pages = (n + KV_ROWS - 1) / KV_ROWS;
    size_t nkv = (size_t)(r->kv_heads * r->hd), off = (size_t)(head / r->group * r->hd),
           tile = (size_t)(KV_ROWS * r->hd);
    uint16_t *k = mem_alloc((size_t)n_pages * tile * 2), *v = mem_alloc((size_t)n_pages * tile * 2);
    int32_t *pages = mem_alloc((size_t)n_pages * 4);
    float *q = mem_alloc((size_t)r->hd * 4);
    for (int32_t p = 0; p < n_pages; p++)
        pages[p] = p;
    for (int32_t p = 0; p < n; p++)
        for (int d = 0; d < r->hd; d++) {
            size_t from = (size_t)(first + p) * nkv + off + (size_t)d,
                   page = (size_t)(p / KV_ROWS) * tile;
            k[page + (size_t)((d / 2 * KV_ROWS + p % KV_ROWS) * 2 + d % 2)] =
                f32_to_bf16(r->k[from]);
            v[page + (size_t)(p % KV_ROWS * r->hd + d)] = f32_to_bf16(r->v[from]);
        }
    for (int d = 0; d < r->hd; d++)
        q[d] = bf16_to_f32(row(r, r->q, token)[head * r->hd + d]);
    struct attn a = {.q = q,
                     .out = out,
                     .n_heads = 1,
                     .head_dim = r->hd,
                     .k = (const uint8_t *)k,
                     .v = (const uint8_t *)v,
                     .page_stride = tile * 2,
                     .k_scale = 1.0f,
                     .v_scale = 1.0f,
                     .pages = pages,
                     .n_keys = n,
                     .first_chunk = KV_CHUNK,
                     .scale = r->scale};
    cpu_ops_best()->attention(&a);
    mem_free(k), mem_free(v), mem_free(pages), mem_free(q);
}

static void check_values(const struct rig *r, const uint16_t *out)
{
    double err = 0.0, norm = 0.0, cpu_err = 0.0;
    size_t n = 0, same = 0;
    for (int s = 0; s < SEQS; s++)
        for (int32_t p = lengths[s] - 1; p >= 0; p -= 97)
            for (int h = 0; h<r->heads; h += r->heads> 4 ? 5 : 1) {
                int32_t token = r->first[s] + p;
                double want[256];
                float cpu[256];
                exact_row(r, token, s, h, want);
                if (r->kv == KV_BF16) cpu_row(r, token, s, h, cpu);
                for (int d = 0; d < r->hd; d++) {
                    double got = (double)bf16_to_f32(row(r, out, token)[h * r->hd + d]);
                    err += (got - want[d]) * (got - want[d]);
                    norm += want[d] * want[d];
                    if (r->kv != KV_BF16) continue;
                    cpu_err += (got - (double)cpu[d]) * (got - (double)cpu[d]);
                    same += got == (double)cpu[d];
                    n++;
                }
            }
    printf("  against float64: %.5f", sqrt(err / norm));
    if (n)
        printf("; against the CPU: %.5f, %.2f %% of bits", sqrt(cpu_err / norm),
               100.0 * (double)same / (double)n);
    printf("\n");
    assert_true(sqrt(err / norm) < 0.004);
    assert_true(sqrt(cpu_err / norm) < 0.002);
}

/* Decode of tokens that share whole chunks: those are read once for many tokens, then each goes
 * on alone; with a few tokens their pairs are cut too. */
static void check_shared(struct rig *r, const uint16_t *prefill, uint16_t *other,
                         struct attn_block *blocks)
{
    if (!kernels_attn_shares(r->kernels) || gpu.few) return;
    int32_t most = kernels_attn_tokens(r->kernels, ATTN_PREFILL), last = SEQS - 1;
    static const int32_t begins[] = {530, 769, 1024}, counts[] = {200, 37, 1};
    for (size_t c = 0; c < 3; c++) {
        struct attn_block shared[200];
        int32_t n_shared = 0, prefix = begins[c] / ATTN_CHUNK, token = r->first[last] + begins[c];
        for (int32_t i = 0; i < counts[c]; i++)
            blocks[i] = (struct attn_block){token + i, 1, last,
                                            i % 5 == 4 ? 0 : prefix}; /* some do without */
        for (int32_t i = 0; i < counts[c]; i += most)
            shared[n_shared++] = (struct attn_block){
                token + i, counts[c] - i < most ? counts[c] - i : most, last, prefix};
        run_shared(r, ATTN_DECODE, blocks, counts[c], ATTN_CHUNK, shared, n_shared, other);
        assert_int_equal(differences(r, blocks, counts[c], prefill, other), 0);
    }
}

static void check(kv_type_t kv, int32_t hd, int32_t heads, int32_t kv_heads)
{
    struct rig r;
    rig_new(&r, kv, hd, heads, kv_heads);
    size_t words = (size_t)r.tokens * (size_t)(heads * hd);
    uint16_t *prefill = mem_alloc(words * 2), *other = mem_alloc(words * 2);
    struct attn_block *blocks = mem_alloc((size_t)r.tokens * 2 * sizeof *blocks);
    int32_t most = kernels_attn_tokens(r.kernels, ATTN_PREFILL), n = cut(&r, most, false, blocks);
    printf("head_dim %d, %d heads, %d KV heads, %s: %d tokens a prefill block\n", hd, heads,
           kv_heads, kv == KV_BF16 ? "bf16" : "e4m3", most);
    run(&r, ATTN_PREFILL, blocks, n, ATTN_CHUNK, prefill);
    check_values(&r, prefill);
    n = cut(&r, most, true, blocks);
    run(&r, ATTN_PREFILL, blocks, n, ATTN_CHUNK, other);
    assert_int_equal(differences(&r, blocks, n, prefill, other), 0);
    n = cut(&r, kernels_attn_tokens(r.kernels, ATTN_SHORT), true, blocks);
    run(&r, ATTN_SHORT, blocks, n, ATTN_CHUNK, other);
    assert_int_equal(differences(&r, blocks, n, prefill, other), 0);
    struct attn_block late = {r.first[SEQS] - 3, 3, SEQS - 1, 0}; /* one block: every pair is cut */
    run(&r, ATTN_SHORT, &late, 1, ATTN_CHUNK, other);
    assert_int_equal(differences(&r, &late, 1, prefill, other), 0);
    n = single(&r, 7, blocks);
    run(&r, ATTN_DECODE, blocks, n, ATTN_CHUNK, other);
    assert_int_equal(differences(&r, blocks, n, prefill, other), 0);
    for (int s = 0; s < SEQS; s += 3) { /* alone: cut over blocks of threads otherwise */
        struct attn_block one = {r.first[s + 1] - 1, 1, s, 0};
        run(&r, ATTN_DECODE, &one, 1, ATTN_CHUNK, other);
        assert_int_equal(differences(&r, &one, 1, prefill, other), 0);
    }
    check_shared(&r, prefill, other, blocks);
    /* A few at once: 2 to 3 blocks, every pair cut. */
    n = single(&r, 10000, blocks);
    run(&r, ATTN_DECODE, blocks, 3, ATTN_CHUNK, other);
    assert_int_equal(differences(&r, blocks, 3, prefill, other), 0);
    run(&r, ATTN_DECODE, blocks, n, 64, other); /* the deliberate fault */
    size_t noticed = differences(&r, blocks, n, prefill, other);
    printf("  chunks that begin elsewhere: %zu differences\n", noticed);
    assert_true(noticed > 0);
    mem_free(prefill), mem_free(other), mem_free(blocks);
    rig_free(&r);
}

/* A NaN in one key reaches every query that sees it, and no other. */
static void nan_key(void **state)
{
    (void)state;
    enum { SEQ = 9, AT = 290 };
    struct rig r;
    if (gpu.few) skip();
    rig_new(&r, KV_BF16, 128, 8, 1);
    size_t words = (size_t)r.tokens * (size_t)(r.heads * r.hd);
    uint16_t *out = mem_alloc(words * 2), nan = 0x7fc0;
    size_t tile = kv_tile_bytes(r.kv, r.hd);
    devptr_t page = r.dk + (size_t)r.tables[SEQ * TABLE + AT / KV_ROWS] * tile;
    queue_copy(gpu.q, page + tile_byte(r.kv, AT % KV_ROWS, 77), host_addr(&nan), 2);
    struct attn_block *blocks = mem_alloc((size_t)r.tokens * sizeof *blocks);
    for (int kind = 0; kind < ATTN_KINDS; kind++) {
        int32_t n = cut(&r, kernels_attn_tokens(r.kernels, (attn_kind_t)kind), false, blocks);
        run(&r, (attn_kind_t)kind, blocks, n, ATTN_CHUNK, out);
        for (int32_t t = 0; t < r.tokens; t++) {
            bool sees = t >= r.first[SEQ] + AT && t < r.first[SEQ + 1];
            for (int32_t j = 0; j < r.heads * r.hd; j++)
                assert_int_equal(isnan(bf16_to_f32(row(&r, out, t)[j])) != 0, sees);
        }
    }
    mem_free(out), mem_free(blocks);
    rig_free(&r);
}

static void qwen3(void **state)
{
    (void)state;
    if (gpu.few) skip();
    check(KV_BF16, 128, 32, 4);
}
static void qwen3_fp8(void **state)
{
    (void)state;
    if (gpu.few) skip();
    check(KV_E4M3, 128, 32, 4);
}
static void tiny(void **state)
{
    (void)state;
    check(KV_BF16, 128, 4, 2);
    check(KV_E4M3, 128, 4, 2);
}
static void shapes(void **state)
{
    (void)state;
    check(KV_BF16, 64, 6, 2);
    if (gpu.few) return;
    check(KV_BF16, 128, 16, 1);
    check(KV_BF16, 256, 3, 1);
    check(KV_E4M3, 64, 12, 1);
    check(KV_E4M3, 256, 2, 2);
}

int main(void)
{
    if (!gpu_open(&gpu)) return 0;
    if (gpu.few) lengths = few;
    const struct CMUnitTest tests[] = {cmocka_unit_test(qwen3), cmocka_unit_test(qwen3_fp8),
                                       cmocka_unit_test(tiny), cmocka_unit_test(shapes),
                                       cmocka_unit_test(nan_key)};
    int rc = cmocka_run_group_tests(tests, NULL, NULL);
    gpu_close(&gpu);
    return rc;
}
