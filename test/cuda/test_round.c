/* test_round.c - activations rounded on the GPU have format/act.c's bits, at odd widths and in
 * place. */
#include <stdio.h>

#if !__has_include("format/act.h")

int main(void)
{
    printf("skip: this tree has no format/act.h to compare with\n");
    return 0;
}

#else

#include "backend/cuda/kernels.h"
#include "cuda/gpu.h"
#include "format/act.h"
#include <math.h>

static struct gpu gpu;
static struct kernels *kernels;

enum { ROWS = 23 };

static const act_t act_of[ROUND_KINDS] = {ACT_FP8_BLOCK, ACT_MXFP8, ACT_NVFP4, ACT_NVFP4_PER_TOKEN};

/* Rows of every size: ordinary, with outliers, tiny, huge, zeros, halves of the codes' steps. */
static void fill(uint16_t *x, int32_t n)
{
    uint64_t seed = (uint64_t)n;
    for (int32_t r = 0; r < ROWS; r++)
        for (int32_t i = 0; i < n; i++) {
            float f = noise_f32(&seed) * ldexpf(1.0f, r % 8 == 2 ? -120 : r % 8 == 3 ? 100 : r % 4);
            if (r % 8 == 1 && noise_u32(&seed) % 40 == 0) f *= 50.0f;
            if (r % 8 == 4) f = 0.0f;
            if (r % 8 == 5) f = (float)(int)(f * 24.0f) * 0.25f;
            if (r % 8 == 6 && i / 16 % 2) f = 0.0f;
            x[r * n + i] = f32_to_bf16(f);
        }
}

static void check(round_t kind, int32_t n, bool in_place)
{
    size_t all = (size_t)(ROWS * n), ns = act_scales(act_of[kind], (size_t)n);
    uint16_t *x = mem_alloc(all * 2), *got = mem_alloc(all * 2);
    float *scale = mem_alloc(ROWS * ns * 4 + 4), *row = mem_alloc((size_t)n * 4),
          *out = mem_alloc((size_t)n * 4);
    float *want_scale = mem_alloc(ns * 4 + 4), input = 0.0123f;
    int32_t n_rows = ROWS - 1;
    fill(x, n);
    devptr_t dx = gpu_new(&gpu, x, all * 2), dout = in_place ? dx : gpu_new(&gpu, NULL, all * 2);
    devptr_t dscale = gpu_new(&gpu, NULL, ROWS * ns * 4 + 4), dinput = gpu_new(&gpu, &input, 4);
    devptr_t drows = gpu_new(&gpu, &n_rows, 4);
    struct round_args a = {.x = (const uint16_t *)dx,
                           .out = (uint16_t *)dout,
                           .scale = (float *)dscale,
                           .input_scale = (const float *)dinput,
                           .n_rows = (const int32_t *)drows,
                           .n = n,
                           .kind = (int32_t)kind};
    kernels_round(kernels, gpu.q, &a, ROWS, true);
    gpu_read(&gpu, got, dout, all * 2);
    gpu_read(&gpu, scale, dscale, ROWS * ns * 4 + 4);
    for (int32_t r = 0; r < n_rows; r++) {
        for (int32_t i = 0; i < n; i++)
            row[i] = bf16_to_f32(x[r * n + i]);
        act_row(act_of[kind], out, want_scale, row, (size_t)n, input);
        for (int32_t i = 0; i < n; i++)
            if (got[r * n + i] != f32_to_bf16(out[i]))
                fail_msg("%s, n %d, row %d, column %d: %g is %g, must be %g",
                         acts[act_of[kind]].name, n, r, i, (double)row[i],
                         (double)bf16_to_f32(got[r * n + i]), (double)out[i]);
        assert_memory_equal(scale + (size_t)r * ns, want_scale, ns * 4);
    }
    for (int32_t i = 0; i < n; i++)
        assert_int_equal(got[n_rows * n + i], in_place ? x[n_rows * n + i] : 0xAAAA);
    if (!in_place) gpu_free(&gpu, dout);
    gpu_free(&gpu, dx), gpu_free(&gpu, dscale), gpu_free(&gpu, dinput), gpu_free(&gpu, drows);
    mem_free(x), mem_free(got), mem_free(scale), mem_free(row), mem_free(out), mem_free(want_scale);
}

static void all_kinds(void **state)
{
    (void)state;
    static const int32_t sizes[] = {8, 24, 200, 768, 2048, 2056, 6144};
    for (round_t kind = 0; kind < ROUND_KINDS; kind++)
        for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
            check(kind, sizes[i], i % 2);
}

int main(void)
{
    if (!gpu_open(&gpu)) return 0;
    struct kernels_shape s = {
        .hidden = 256, .vocab = 1000, .n_heads = 8, .n_kv_heads = 2, .head_dim = 128};
    struct err e = {0};
    if (kernels_new(&kernels, gpu.d, &s, &e) != OK) {
        printf("%s\n", e.msg);
        return 1;
    }
    const struct CMUnitTest tests[] = {cmocka_unit_test(all_kinds)};
    int rc = cmocka_run_group_tests(tests, NULL, NULL);
    kernels_free(kernels);
    gpu_close(&gpu);
    return rc;
}

#endif
