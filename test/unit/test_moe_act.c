/*
 * test_moe_act.c - the MoE operator with rounded activations, against float64 arithmetic on inputs
 * that act_ref.h rounds by the public definitions, in float64.
 *
 * One code that falls to the other side of a tie, because f32 and float64 differ before it, moves a
 * result more than BF16 rounding does.  So two bounds hold: each element within 2^-3 of the sum of
 * absolute products, and the mean square error at most an eighth of that against inputs that were
 * not rounded, or rounded to another format.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "act_ref.h"
#include "moe_rig.h"
#include <stdio.h>

enum { N = 9, K = 2, HIDDEN = 160, INNER = 96, EXPERTS = 8 };

static struct pool *pool;

static int setup(void **state)
{
    (void)state;
    pool = pool_new(2);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    pool_free(pool);
    return 0;
}

static struct moe_op *op_new(act_t act)
{
    struct moe_shape s = {.hidden = HIDDEN,
                          .inner = INNER,
                          .n_experts = EXPERTS,
                          .top_k = K,
                          .n_local = EXPERTS,
                          .act = act};
    struct moe_op *op;
    struct err e = {0};
    if (moe_op_new(&op, &s, cpu_ops_best(), pool, N, &e) != OK) fail_msg("%s", e.msg);
    return op;
}

struct choice {
    int32_t ids[N * K];
    float w[N * K], *x;
};

static void choose(struct choice *c)
{
    for (int i = 0; i < N * K; i++) {
        c->ids[i] = (i % 2 * 3 + i / 2 * 7 + 3) % EXPERTS;
        c->w[i] = act_round((float)rig_uniform());
    }
    c->x = rig_rows(N, HIDDEN, 1.0f);
}

static void run(float *y, act_t act, const struct moe_weights *w, const struct choice *c, int t0,
                int n)
{
    struct moe_op *op = op_new(act);
    struct err e = {0};
    if (moe_op_check_inputs(op, w, &e) != OK) fail_msg("%s", e.msg);
    moe_op_take(op, c->ids + t0 * K, c->w + t0 * K, n);
    memset(y, 0, (size_t)n * HIDDEN * 4);
    moe_op_run(op, w, c->x + t0 * HIDDEN, n, y);
    moe_op_free(op);
}

/* Mean square error against the definition; `max`: the largest error in parts of the size. */
static double error(const struct moe_rig *g, const struct moe_weights *w, const struct choice *c,
                    rig_round *round, const float *y, double *max)
{
    static double expect[N * HIDDEN], size[N * HIDDEN];
    struct moe_shape s = {.n_local = EXPERTS, .top_k = K};
    double sum = 0;
    rig_define(g, w, &s, c->ids, c->w, c->x, N, round, expect, size);
    *max = 0;
    for (int i = 0; i < N * HIDDEN; i++) {
        double d = (double)y[i] - expect[i];
        sum += d * d;
        *max = fmax(*max, fabs(d) / size[i]);
    }
    return sum / (N * HIDDEN);
}

static void formats_and_acts(void **state)
{
    (void)state;
    for (int f = FORMAT_BF16 + 1; f < FORMAT_COUNT; f++) {
        struct moe_rig g;
        struct choice c;
        rig_new(&g, (format_t)f, HIDDEN, INNER, EXPERTS);
        struct moe_weights w = {.experts = g.matrix};
        choose(&c);
        for (int a = ACT_BF16 + 1; a < ACT_COUNT; a++) {
            static float y[N * HIDDEN], one[HIDDEN];
            double max, other;
            if (a == ACT_NVFP4 && f != FORMAT_NVFP4) continue;
            run(y, (act_t)a, &w, &c, 0, N);
            double mse = error(&g, &w, &c, act_ref[a], y, &max);
            assert_true(max <= 0x1p-3);
            for (int b = ACT_BF16; b < ACT_COUNT; b++) {
                if (b == a || (b == ACT_NVFP4) != (a == ACT_NVFP4)) continue;
                if (!(mse * 8.0 <= error(&g, &w, &c, act_ref[b], y, &other)))
                    fail_msg(
                        "%s, %s: mean square error %g against its own definition, %g against %s",
                        formats[f].name, acts[a].name, mse,
                        error(&g, &w, &c, act_ref[b], y, &other), acts[b].name);
            }
            for (int t = 0; t < N; t += 4) { /* a row alone has the bits that it has among others */
                run(one, (act_t)a, &w, &c, t, 1);
                assert_memory_equal(one, y + t * HIDDEN, sizeof one);
            }
        }
        mem_free(c.x);
        rig_free(&g);
    }
}

/* BF16 matrices read what they always read, also beside quantized ones. */
static void bf16_stays(void **state)
{
    (void)state;
    struct moe_rig g, q;
    struct choice c;
    static float plain[N * HIDDEN], y[N * HIDDEN];
    rig_new(&g, FORMAT_BF16, HIDDEN, INNER, EXPERTS);
    rig_new(&q, FORMAT_MXFP8, HIDDEN, INNER, EXPERTS);
    choose(&c);
    struct moe_weights w = {.experts = g.matrix};
    run(plain, ACT_BF16, &w, &c, 0, N);
    for (int a = ACT_BF16 + 1; a < ACT_COUNT; a++) {
        run(y, (act_t)a, &w, &c, 0, N);
        assert_memory_equal(plain, y, sizeof y);
    }
    /* Expert 3 is quantized: tokens without it keep their bits, those with it change. */
    for (int i = 0; i < MOE_MATRICES; i++)
        g.matrix[3 * MOE_MATRICES + i] = q.matrix[3 * MOE_MATRICES + i];
    run(plain, ACT_BF16, &w, &c, 0, N);
    run(y, ACT_NVFP4_PER_TOKEN, &w, &c, 0, N);
    int with = 0;
    for (int t = 0; t < N; t++) {
        bool has = c.ids[t * K] == 3 || c.ids[t * K + 1] == 3;
        bool same = memcmp(plain + t * HIDDEN, y + t * HIDDEN, HIDDEN * 4) == 0;
        assert_int_equal(same, !has);
        with += has;
    }
    assert_in_range(with, 1, N - 1);
    mem_free(c.x);
    rig_free(&g);
    rig_free(&q);
}

static void set_input(struct moe_rig *g, int expert, int which, float input)
{
    int i = expert * MOE_MATRICES + which;
    layout_put(g->resident[i], g->format, g->canon[i].rows, g->canon[i].cols, PART_INPUT, 0, 1,
               &input);
}

/* NVFP4: the largest scale of all experts' gate and up, and of all down, NaN left out; or the one
 * given; none at all is refused with the way out. */
static void static_scales(void **state)
{
    (void)state;
    struct moe_rig g;
    struct choice c;
    static float y[N * HIDDEN], given[N * HIDDEN], other[N * HIDDEN];
    rig_new(&g, FORMAT_NVFP4, HIDDEN, INNER, EXPERTS);
    choose(&c);
    for (int e = 0; e < EXPERTS; e++)
        for (int i = 0; i < MOE_MATRICES; i++)
            set_input(&g, e, i, 0.0004f + 0.0001f * (float)e);
    set_input(&g, 2, MOE_UP, 0.0016f);
    set_input(&g, 7, MOE_DOWN, NAN);
    set_input(&g, 6, MOE_GATE, NAN);
    set_input(&g, 5, MOE_GATE, INFINITY);
    struct moe_weights w = {.experts = g.matrix}, v = w;
    v.input_in = 0.0016f;
    v.input_down = 0.0004f + 0.0001f * 6.0f;
    run(y, ACT_NVFP4, &w, &c, 0, N);
    run(given, ACT_NVFP4, &v, &c, 0, N);
    assert_memory_equal(y, given, sizeof y);
    v.input_down = 0.0009f;
    run(other, ACT_NVFP4, &v, &c, 0, N);
    assert_memory_not_equal(y, other, sizeof y);
    for (int i = 0; i < EXPERTS * MOE_MATRICES; i++)
        if (i % MOE_MATRICES == MOE_DOWN) set_input(&g, i / MOE_MATRICES, MOE_DOWN, NAN);
    struct moe_op *op = op_new(ACT_NVFP4);
    struct err e = {0};
    assert_int_equal(moe_op_check_inputs(op, &w, &e), ERR_INPUT);
    assert_non_null(strstr(e.msg, "down_proj"));
    assert_non_null(strstr(e.msg, "nvfp4-per-token"));
    moe_op_free(op);
    mem_free(c.x);
    rig_free(&g);
    /* Scales of other formats mean something else. */
    rig_new(&g, FORMAT_FP8_TENSOR, 32, 32, EXPERTS);
    w.experts = g.matrix;
    op = op_new(ACT_NVFP4);
    assert_int_equal(moe_op_check_inputs(op, &w, &e), ERR_INPUT);
    moe_op_free(op);
    op = op_new(ACT_NVFP4_PER_TOKEN);
    assert_int_equal(moe_op_check_inputs(op, &w, &e), OK);
    moe_op_free(op);
    rig_free(&g);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(formats_and_acts),
                                       cmocka_unit_test(bf16_stays),
                                       cmocka_unit_test(static_scales)};
    return cmocka_run_group_tests(tests, setup, teardown);
}
