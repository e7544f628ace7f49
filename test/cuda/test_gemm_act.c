/*
 * test_gemm_act.c - the GEMM over rounded rows: their scales against the integer model of the
 * tensor core, bit for bit, in every kernel and kind of output.
 */
#include "cuda/matrices.h"
#include "backend/oracle.h"

static struct gpu gpu;
static struct gemm_kernels gemm;

enum { GROUPS = 3, N_X = 40, ROWS_MAX = 160 };

struct problem {
    format_t format;
    bool chains; /* a scale each 128 of k */
    uint32_t n, k;
    int32_t first[GROUPS + 1], src[ROWS_MAX];
    uint16_t *x;  /* [N_X][k] */
    float *scale; /* [N_X][scales] */
    size_t scales;
    struct test_matrix w[GROUPS], up[GROUPS];
    float *want[2]; /* [rows][n]: v of w and of up */
};

/* gemm.h's v of one output. */
static float expect(const struct problem *p, const struct test_matrix *m, uint32_t n,
                    const struct oracle_bf16 *w, const struct oracle_bf16 *x, const float *scale)
{
    if (!p->chains) return oracle_gemm(&m->parts, n, w, x, p->k) * scale[0];
    const float *ws = (const float *)m->parts.scale + n / 128 * p->scales;
    float total = 0.0f;
    for (size_t k = 0; k < p->k; k += 128)
        total = fmaf(oracle_chain(w + k, x + k, p->k - k < 128 ? p->k - k : 128),
                     scale[k / 128] * ws[k / 128], total);
    return total;
}

static void expect_all(struct problem *p)
{
    struct oracle_bf16 *w = mem_alloc(p->k * sizeof *w), *x = mem_alloc(N_X * p->k * sizeof *x);
    for (size_t i = 0; i < N_X * p->k; i++)
        x[i] = oracle_split(p->x[i]);
    for (int half = 0; half < 2; half++) {
        p->want[half] = mem_alloc((size_t)p->first[GROUPS] * p->n * sizeof(float));
        for (int g = 0; g < GROUPS; g++)
            for (uint32_t n = 0; n < p->n; n++) {
                const struct test_matrix *m = half ? &p->up[g] : &p->w[g];
                oracle_weights(w, &m->parts, n);
                for (int32_t r = p->first[g]; r < p->first[g + 1]; r++)
                    p->want[half][(size_t)r * p->n + n] =
                        expect(p, m, n, w, x + (size_t)p->src[r] * p->k,
                               p->scale + (size_t)p->src[r] * p->scales);
            }
    }
    mem_free(w);
    mem_free(x);
}

static struct problem problem_new(format_t f, bool chains, uint32_t n, uint32_t k,
                                  const int32_t sizes[GROUPS])
{
    struct problem p = {.format = f, .chains = chains, .n = n, .k = k};
    uint64_t seed = n * 31u + k * 7u + (uint64_t)f + chains;
    p.scales = chains ? (k + 127) / 128 : 1;
    p.x = mem_alloc((size_t)N_X * k * 2);
    p.scale = mem_alloc(N_X * p.scales * sizeof(float));
    for (size_t i = 0; i < (size_t)N_X * k; i++)
        p.x[i] = f32_to_bf16(noise_f32(&seed));
    for (size_t i = 0; i < N_X * p.scales; i++)
        p.scale[i] = fabsf(noise_f32(&seed)) * 0.1f + 0.001f;
    for (int g = 0; g < GROUPS; g++) {
        p.first[g + 1] = p.first[g] + sizes[g];
        p.w[g] = matrix_new(f, n, k, DATA_NORMAL, &seed);
        p.up[g] = matrix_new(f, n, k, DATA_NORMAL, &seed);
        matrix_upload(&gpu, &p.w[g]);
        matrix_upload(&gpu, &p.up[g]);
    }
    for (int32_t r = 0; r < p.first[GROUPS]; r++)
        p.src[r] = (int32_t)(noise_u32(&seed) % N_X);
    expect_all(&p);
    return p;
}

static void problem_free(struct problem *p)
{
    for (int g = 0; g < GROUPS; g++) {
        matrix_free(&gpu, &p->w[g]);
        matrix_free(&gpu, &p->up[g]);
    }
    mem_free(p->x), mem_free(p->scale), mem_free(p->want[0]), mem_free(p->want[1]);
}

static float silu_times(float g, float u)
{
    return (float)((double)g / (1.0 + exp(-(double)g)) * (double)u);
}

static void compare(const struct problem *p, const void *out, gemm_out_t kind, int size)
{
    size_t bad = 0, n = (size_t)p->first[GROUPS] * p->n;
    for (size_t i = 0; i < n; i++) {
        float v = p->want[0][i], got = kind == GEMM_F32 ? ((const float *)out)[i]
                                                        : bf16_to_f32(((const uint16_t *)out)[i]);
        if (kind == GEMM_BF16) v = bf16_to_f32(f32_to_bf16(v));
        if (kind != GEMM_SWIGLU) {
            bad += memcmp(&v, &got, 4) != 0;
            continue;
        }
        v = silu_times(v, p->want[1][i]);
        bad += !(fabsf(got - v) <= 0x1p-7f * fabsf(v) + 0x1p-100f);
    }
    if (bad)
        fail_msg("%s%s n %u k %u kind %d kernel %d: %zu of %zu differ", formats[p->format].name,
                 p->chains ? " by chains" : "", p->n, p->k, (int)kind, size, bad, n);
}

static void run(struct problem *p, gemm_out_t kind)
{
    struct gemm_weight w[GROUPS], up[GROUPS];
    size_t rows = (size_t)p->first[GROUPS], bytes = rows * p->n * (kind == GEMM_F32 ? 4 : 2);
    for (int g = 0; g < GROUPS; g++) {
        w[g] = matrix_weight(&p->w[g]);
        up[g] = matrix_weight(&p->up[g]);
    }
    devptr_t dx = gpu_new(&gpu, p->x, (size_t)N_X * p->k * 2), dout = gpu_new(&gpu, NULL, bytes),
             ds = gpu_new(&gpu, p->scale, N_X * p->scales * 4), dw = gpu_new(&gpu, w, sizeof w),
             dup = gpu_new(&gpu, up, sizeof up), dsrc = gpu_new(&gpu, p->src, sizeof p->src),
             dfirst = gpu_new(&gpu, p->first, sizeof p->first);
    struct gemm_args a = {.x = (const void *)(uintptr_t)dx,
                          .src = (const int32_t *)(uintptr_t)dsrc,
                          .first = (const int32_t *)(uintptr_t)dfirst,
                          .w = (const struct gemm_weight *)(uintptr_t)dw,
                          .up = (const struct gemm_weight *)(uintptr_t)dup,
                          .x_scale = (const float *)(uintptr_t)ds,
                          .out = (void *)(uintptr_t)dout,
                          .ldx = (int32_t)p->k,
                          .ldo = (int32_t)p->n,
                          .k = (int32_t)p->k,
                          .n = (int32_t)p->n,
                          .n_groups = GROUPS,
                          .out_kind = (int32_t)kind};
    void *out = mem_alloc(bytes);
    for (int size = -1; size < GEMM_KERNELS_MAX; size++) {
        if (size >= 0 && !gemm.scaled[p->format][size].fn) continue;
        queue_fill(gpu.q, dout, 0xAA, bytes);
        if (size < 0)
            gemm_launch(&gemm, gpu.q, p->format, &a, (int64_t)rows, false);
        else
            gemm_launch_size(&gemm, gpu.q, p->format, &a, size, false);
        gpu_read(&gpu, out, dout, bytes);
        compare(p, out, kind, size);
    }
    mem_free(out);
    const devptr_t all[] = {dx, dout, ds, dw, dup, dsrc, dfirst};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        gpu_free(&gpu, all[i]);
}

static void check(format_t f, bool chains)
{
    static const uint32_t shapes[][2] = {{128, 64}, {200, 96}, {72, 200}, {320, 392}};
    static const int32_t sizes[][GROUPS] = {{1, 0, 0}, {5, 0, 9}, {20, 1, 33}, {0, 131, 17}};
    for (size_t i = 0; i < 4; i++)
        for (size_t j = 0; j < 4; j++) {
            struct problem p = problem_new(f, chains, shapes[i][0], shapes[i][1], sizes[j]);
            run(&p, GEMM_F32);
            run(&p, GEMM_BF16);
            run(&p, GEMM_SWIGLU);
            problem_free(&p);
        }
}

static void a_scale_a_row(void **state)
{
    (void)state;
    check(FORMAT_NVFP4, false);
}

static void a_scale_a_chain(void **state)
{
    (void)state;
    check(FORMAT_FP8_BLOCK, true);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(a_scale_a_row),
                                       cmocka_unit_test(a_scale_a_chain)};
    if (!gpu_open(&gpu)) return 0;
    struct err e = {0};
    if (repack_open(&matrix_repack, gpu.d, &e) != OK ||
        gemm_open(&gemm, gpu.d, (1u << FORMAT_COUNT) - 1, &e) != OK) {
        printf("%s\n", e.msg);
        return 1;
    }
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    gpu_close(&gpu);
    return failed;
}
