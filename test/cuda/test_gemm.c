/* test_gemm.c - the grouped GEMM against the integer model of the tensor core, bit for bit. */
#include "backend/oracle.h"
#include "cuda/matrices.h"

static struct gpu gpu;
static struct gemm_kernels gemm;

struct problem {
    format_t format;
    uint32_t n, k;
    int n_groups;
    const int32_t *sizes; /* rows of each group; with parts, of all */
    const int32_t *parts; /* [n_groups] rows of the matrices that read the same x; n: their sum */
    int32_t n_x;          /* rows of x; > 0: gathered */
    gemm_out_t kind;
    data_kind_t data;
};

struct setup {
    struct problem p;
    int32_t rows, ldx, ldo;
    uint16_t *x;
    int32_t *src, *first;
    struct test_matrix *w, *up;
    float *base; /* ADD: what was there; else poison */
    devptr_t dx, dsrc, dfirst, dw, dup, dout;
    size_t out_bytes;
    bool prefetch; /* weights may be read before the kernel before has ended */
};

static bool grouped(const struct problem *p)
{
    return p->n_groups > 1 && !p->parts;
}

static bool is_f32(gemm_out_t kind)
{
    return kind == GEMM_F32 || kind == GEMM_ADD;
}

static devptr_t weights_table(const struct test_matrix *m, int n)
{
    struct gemm_weight t[32];
    for (int i = 0; i < n; i++)
        t[i] = matrix_weight(&m[i]);
    return gpu_new(&gpu, t, (size_t)n * sizeof *t);
}

static void setup_rows(struct setup *s, uint64_t *seed)
{
    const struct problem *p = &s->p;
    s->first = mem_alloc(((size_t)p->n_groups + 1) * 4);
    for (int g = 0; g < p->n_groups; g++)
        s->first[g + 1] = s->first[g] + (p->parts && g ? 0 : p->sizes[g]);
    s->rows = s->first[p->n_groups];
    int32_t n_x = p->n_x ? p->n_x : s->rows;
    s->ldx = (int32_t)(p->k + 7) / 8 * 8 + 8;
    s->ldo = (int32_t)(p->n + 7) / 8 * 8 + 8;
    s->x = mem_alloc((size_t)n_x * (size_t)s->ldx * 2 + 16);
    s->src = mem_alloc((size_t)s->rows * 4 + 4);
    for (int32_t r = 0; r < n_x; r++)
        for (int32_t k = 0; k < s->ldx; k++) { /* past k: NaN, must not be read into the sums */
            float v = noise_f32(seed) * (k % 97 == 5 ? 30.0f : 1.0f);
            if (p->data == DATA_WIDE) v *= exp2f(noise_f32(seed) * 12.0f);
            if (p->data == DATA_TINY) v *= 0x1p100f;
            if (p->data == DATA_CANCEL) v = k % 2 ? noise_f32(seed) : -v;
            s->x[(size_t)r * (size_t)s->ldx + (size_t)k] =
                k < (int32_t)p->k ? f32_to_bf16(v) : 0x7fc0;
        }
    for (int32_t r = 0; r < s->rows; r++)
        s->src[r] = p->n_x ? (int32_t)(noise_u32(seed) % (uint32_t)n_x) : r;
    s->dx = gpu_new(&gpu, s->x, (size_t)n_x * (size_t)s->ldx * 2 + 16);
    s->dsrc = gpu_new(&gpu, s->src, (size_t)s->rows * 4 + 4);
    s->dfirst = gpu_new(&gpu, s->first, ((size_t)p->n_groups + 1) * 4);
}

static struct setup setup_new(struct problem p)
{
    struct setup s = {.p = p};
    uint64_t seed =
        p.n * 31u + p.k * 7u + (uint64_t)p.n_groups + (uint64_t)p.format * 101u + (uint64_t)p.data;
    setup_rows(&s, &seed);
    s.w = mem_alloc((size_t)p.n_groups * sizeof *s.w);
    s.up = mem_alloc((size_t)p.n_groups * sizeof *s.up);
    for (int g = 0; g < p.n_groups; g++) {
        s.w[g] = matrix_new(p.format, p.parts ? (size_t)p.parts[g] : p.n, p.k, p.data, &seed);
        matrix_upload(&gpu, &s.w[g]);
        if (p.kind != GEMM_SWIGLU) continue;
        s.up[g] = matrix_new(p.format, p.n, p.k, p.data, &seed);
        matrix_upload(&gpu, &s.up[g]);
    }
    s.dw = weights_table(s.w, p.n_groups);
    s.dup = p.kind == GEMM_SWIGLU ? weights_table(s.up, p.n_groups) : 0;
    s.out_bytes = (size_t)s.rows * (size_t)s.ldo * (is_f32(p.kind) ? 4 : 2);
    s.base = mem_alloc(s.out_bytes + 4);
    for (size_t i = 0; i < s.out_bytes / 4; i++)
        s.base[i] = noise_f32(&seed);
    s.dout = gpu_new(&gpu, s.base, s.out_bytes + 4);
    return s;
}

static void setup_free(struct setup *s)
{
    const devptr_t all[] = {s->dx, s->dsrc, s->dfirst, s->dw, s->dup, s->dout};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        gpu_free(&gpu, all[i]);
    for (int g = 0; g < s->p.n_groups; g++) {
        matrix_free(&gpu, &s->w[g]);
        if (s->p.kind == GEMM_SWIGLU) matrix_free(&gpu, &s->up[g]);
    }
    mem_free(s->w);
    mem_free(s->up);
    mem_free(s->x);
    mem_free(s->src);
    mem_free(s->first);
    mem_free(s->base);
}

/* By kernel `size`; < 0: as gemm_launch chooses.  Returns the whole output buffer, NULL: no such
 * kernel; caller frees. */
static void *run(struct setup *s, int size)
{
    struct gemm_args a = {.x = (const void *)(uintptr_t)s->dx,
                          .src = s->p.n_x ? (const int32_t *)(uintptr_t)s->dsrc : NULL,
                          .first = grouped(&s->p) ? (const int32_t *)(uintptr_t)s->dfirst : NULL,
                          .w = (const struct gemm_weight *)(uintptr_t)s->dw,
                          .up = (const struct gemm_weight *)(uintptr_t)s->dup,
                          .out = (void *)(uintptr_t)s->dout,
                          .ldx = s->ldx,
                          .ldo = s->ldo,
                          .k = (int32_t)s->p.k,
                          .n = (int32_t)s->p.n,
                          .n_groups = s->p.n_groups,
                          .n_rows = s->rows,
                          .out_kind = (int32_t)s->p.kind,
                          .prefetch = s->prefetch};
    for (int g = 0; s->p.parts && g < s->p.n_groups; g++)
        a.part[g + 1] = a.part[g] + s->p.parts[g];
    if (size >= 0 && !gemm_takes(&gemm, s->p.format, &a, size)) return NULL;
    void *out = mem_alloc(s->out_bytes + 4);
    queue_copy(gpu.q, s->dout, host_addr(s->base), s->out_bytes);
    if (size < 0)
        gemm_launch(&gemm, gpu.q, s->p.format, &a, s->rows, false);
    else
        gemm_launch_size(&gemm, gpu.q, s->p.format, &a, size, false);
    gpu_read(&gpu, out, s->dout, s->out_bytes);
    return out;
}

static float silu_times(float g, float u)
{
    return (float)((double)g / (1.0 + exp(-(double)g)) * (double)u);
}

/* Every output word against the oracle; what lies between n and ldo is untouched. */
static void compare(const struct setup *s, const void *out)
{
    const struct problem *p = &s->p;
    bool whole = grouped(p) || p->kind == GEMM_SWIGLU;
    size_t segment = whole ? p->k : (size_t)gemm_segment((int32_t)p->n, (int32_t)p->k), col = 0;
    struct oracle_bf16 *w = mem_alloc(p->k * sizeof *w), *u = mem_alloc(p->k * sizeof *u);
    struct oracle_bf16 *x = mem_alloc((size_t)s->rows * p->k * sizeof *x + 64);
    size_t off = 0, bad = 0;
    for (int32_t r = 0; r < s->rows; r++)
        for (uint32_t k = 0; k < p->k; k++)
            x[(size_t)r * p->k + k] = oracle_split(s->x[(size_t)s->src[r] * (size_t)s->ldx + k]);
    for (int g = 0; g < p->n_groups; col += p->parts ? (size_t)p->parts[g] : 0, g++)
        for (uint32_t n = 0; n < s->w[g].parts.rows; n++) {
            oracle_weights(w, &s->w[g].parts, n);
            if (p->kind == GEMM_SWIGLU) oracle_weights(u, &s->up[g].parts, n);
            int32_t from = p->parts ? 0 : s->first[g], to = p->parts ? s->rows : s->first[g + 1];
            for (int32_t r = from; r < to; r++) {
                const struct oracle_bf16 *xr = x + (size_t)r * p->k;
                size_t at = (size_t)r * (size_t)s->ldo + col + n;
                float v = oracle_gemm(&s->w[g].parts, n, w, xr, segment), got;
                if (is_f32(p->kind)) {
                    got = ((const float *)out)[at];
                    if (p->kind == GEMM_ADD) v = s->base[at] + v;
                    bad += memcmp(&v, &got, 4) != 0;
                } else if (p->kind == GEMM_BF16) {
                    bad += f32_to_bf16(v) != ((const uint16_t *)out)[at];
                } else { /* the chip's exp: the same but for rare last bits of bf16 */
                    v = silu_times(v, oracle_gemm(&s->up[g].parts, n, u, xr, segment));
                    got = bf16_to_f32(((const uint16_t *)out)[at]);
                    off += fabsf(v) > 0x1p-100f && f32_to_bf16(v) != ((const uint16_t *)out)[at];
                    bad += !(fabsf(got - v) <= 0x1p-7f * fabsf(v) + 0x1p-100f);
                }
            }
        }
    for (int32_t r = 0; r < s->rows; r++)
        for (int32_t n = (int32_t)p->n; n < s->ldo; n++) {
            size_t at = (size_t)r * (size_t)s->ldo + (size_t)n;
            bad += is_f32(p->kind) ? memcmp((const float *)out + at, s->base + at, 4) != 0
                                   : ((const uint16_t *)out)[at] != ((const uint16_t *)s->base)[at];
        }
    if (bad)
        fail_msg("%s n %u k %u rows %d kind %d data %d: %zu of %zu words differ",
                 formats[p->format].name, p->n, p->k, s->rows, (int)p->kind, (int)p->data, bad,
                 (size_t)s->rows * p->n);
    assert_true(off <= 2 + (size_t)s->rows * p->n / 200);
    mem_free(w);
    mem_free(u);
    mem_free(x);
}

/* Every size of tile. */
static void check(struct problem p)
{
    struct setup s = setup_new(p);
    void *chosen = run(&s, -1);
    compare(&s, chosen);
    for (int i = 0; i < 2 * GEMM_KERNELS_MAX; i++) {
        int size = i / 2;
        s.prefetch = i % 2;
        void *other = run(&s, size);
        if (!other) continue;
        if (memcmp(chosen, other, s.out_bytes) != 0) {
            print_message("kernel %d\n", size);
            compare(&s, other);
        }
        assert_memory_equal(chosen, other, s.out_bytes);
        mem_free(other);
    }
    mem_free(chosen);
    setup_free(&s);
}

static void dense_shapes(void **state)
{
    (void)state;
    static const uint32_t shapes[][2] = {{128, 64}, {200, 96}, {72, 200}, {320, 136}, {1, 24}};
    static const int32_t rows[] = {1, 8, 9, 23, 64, 65, 130};
    for (int f = 0; f < FORMAT_COUNT; f++)
        for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
            for (size_t r = 0; r < sizeof rows / sizeof *rows; r++)
                check((struct problem){.format = (format_t)f,
                                       .n = shapes[i][0],
                                       .k = shapes[i][1],
                                       .n_groups = 1,
                                       .sizes = &rows[r],
                                       .kind = (gemm_out_t)((i + r) % 4)});
}

static void long_k(void **state)
{
    (void)state;
    static const int32_t rows[] = {3, 37};
    for (int f = 0; f < FORMAT_COUNT; f++)
        for (size_t r = 0; r < 2; r++)
            check((struct problem){.format = (format_t)f,
                                   .n = 136,
                                   .k = 2880,
                                   .n_groups = 1,
                                   .sizes = &rows[r],
                                   .kind = r ? GEMM_F32 : GEMM_ADD});
}

/* Two segments, the second shorter. */
static void segments(void **state)
{
    (void)state;
    static const int32_t rows[] = {5, 70, 1, 4, 300};
    for (int f = 0; f < FORMAT_COUNT; f++)
        for (size_t r = 0; r < 10; r++) {
            struct problem p = {.format = (format_t)f, .n = 264, .k = 4168, .n_groups = 1};
            assert_true(gemm_segment(264, 4168) < 4168);
            p.sizes = &rows[r / 2];
            p.kind = r % 2 ? GEMM_F32 : GEMM_BF16;
            check(p);
        }
}

/* q, k and v: matrices that read the same rows. */
static void parts(void **state)
{
    (void)state;
    static const int32_t few[] = {128, 64, 64}, odd[] = {200, 24, 72, 1}, rows[] = {1, 7, 40, 131};
    for (int f = 0; f < FORMAT_COUNT; f++)
        for (size_t r = 0; r < 4; r++) {
            struct problem p = {.format = (format_t)f, .kind = GEMM_F32, .sizes = &rows[r]};
            p.parts = few, p.n_groups = 3, p.n = 256, p.k = 320, check(p);
            p.parts = odd, p.n_groups = 4, p.n = 297, p.k = 200, check(p);
        }
}

static void adversarial(void **state)
{
    (void)state;
    static const int32_t rows[] = {29};
    for (int f = 0; f < FORMAT_COUNT; f++)
        for (int d = gpu.few ? DATA_KINDS - 1 : 1; d < DATA_KINDS; d++)
            check((struct problem){.format = (format_t)f,
                                   .n = 128,
                                   .k = gpu.few ? 200 : 512,
                                   .n_groups = 1,
                                   .sizes = rows,
                                   .kind = GEMM_F32,
                                   .data = (data_kind_t)d});
}

/* Empty groups, one row, many; gathered rows. */
static void groups(void **state)
{
    (void)state;
    static const int32_t uneven[] = {0, 1, 17, 0, 150, 8, 0}, one[] = {0, 0, 90, 0},
                         none[] = {0, 0, 0};
    static const int32_t many[31] = {2, 0, 3, 1, 1, 1, 9, 40, 1, 0, 0, 0, 0, 0, 0, 0,
                                     0, 0, 5, 5, 5, 5, 1, 2,  3, 4, 5, 6, 7, 8, 0};
    for (int f = 0; f < FORMAT_COUNT; f++)
        for (int kind = 0; kind < 4; kind++) {
            struct problem p = {
                .format = (format_t)f, .n = 192, .k = 256, .n_x = 40, .kind = (gemm_out_t)kind};
            if (gpu.few) {
                p.n_x = 10, p.sizes = many, p.n_groups = 9, p.n = 72, p.k = 96;
                if (kind == (int)GEMM_SWIGLU) check(p);
                continue;
            }
            p.sizes = uneven, p.n_groups = 7, check(p);
            p.sizes = one, p.n_groups = 4, check(p);
            p.sizes = none, p.n_groups = 3, check(p);
            p.sizes = many, p.n_groups = 31, p.n = 72, check(p);
        }
}

/* The rows of a large batch have the bits they have alone, in the real shapes. */
static void batch_does_not_show(void **state)
{
    (void)state;
    static const format_t some[] = {FORMAT_BF16, FORMAT_NVFP4, FORMAT_FP8_BLOCK};
    static const int32_t sizes[] = {300, 5, 64, 129, 1, 0, 33, 700};
    for (size_t i = 0; i < 3; i++)
        for (int second = 0; second < 2; second++) {
            struct problem p = {.format = some[i],
                                .n = second ? 2048 : 768,
                                .k = second ? 768 : 2048,
                                .n_groups = 8,
                                .sizes = sizes,
                                .n_x = second ? 0 : 200,
                                .kind = second ? GEMM_BF16 : GEMM_SWIGLU};
            struct setup s = setup_new(p);
            uint16_t *all = run(&s, -1), *one;
            for (int size = 0; size < GEMM_KERNELS_MAX; size++) {
                uint16_t *other = run(&s, size);
                if (!other) continue;
                assert_memory_equal(all, other, s.out_bytes);
                mem_free(other);
            }
            int32_t first[9], row = s.first[3] + 77; /* row 77 of group 3 alone */
            for (int g = 0; g <= 8; g++)
                first[g] = g <= 3 ? row : row + 1;
            queue_copy(gpu.q, s.dfirst, host_addr(first), sizeof first);
            one = run(&s, 0);
            assert_memory_equal(one + (size_t)row * (size_t)s.ldo,
                                all + (size_t)row * (size_t)s.ldo, p.n * 2);
            mem_free(all);
            mem_free(one);
            setup_free(&s);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(dense_shapes),       cmocka_unit_test(long_k),
        cmocka_unit_test(segments),           cmocka_unit_test(parts),
        cmocka_unit_test(adversarial),        cmocka_unit_test(groups),
        cmocka_unit_test(batch_does_not_show)};
    const struct CMUnitTest few[] = {cmocka_unit_test(adversarial), cmocka_unit_test(groups)};
    if (!gpu_open(&gpu)) return 0;
    struct err e = {0};
    if (repack_open(&matrix_repack, gpu.d, &e) != OK ||
        gemm_open(&gemm, gpu.d, (1u << FORMAT_COUNT) - 1, &e) != OK) {
        printf("%s\n", e.msg);
        return 1;
    }
    int failed = gpu.few ? cmocka_run_group_tests(few, NULL, NULL)
                         : cmocka_run_group_tests(tests, NULL, NULL);
    gpu_close(&gpu);
    return failed;
}
