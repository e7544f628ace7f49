/*
 * test_moe_api.c - include/moult_moe.h from C: what NULL, wrong sizes and failing allocations do,
 * and that a failure leaves handle and outputs as they were.  test/python/test_moult.py has the
 * arithmetic.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "moe_rig.h"
#include <moult_moe.h>
#include <stdio.h>

enum { HIDDEN = 64, INNER = 48, EXPERTS = 8, K = 2, TOKENS = 5 };

static const moult_moe_config config = {.size = sizeof(moult_moe_config),
                                        .hidden_size = HIDDEN,
                                        .intermediate_size = INNER,
                                        .num_experts = EXPERTS,
                                        .top_k = K,
                                        .routing_method = MOULT_ROUTE_RENORMALIZE,
                                        .max_tokens = 2,
                                        .num_threads = 2};

/* All experts' bytes of one matrix behind each other. */
struct stacked {
    uint8_t *data, *scale;
    float tensor[EXPERTS];
};

static struct stacked stack(const struct moe_rig *g, int which)
{
    struct stacked s;
    size_t data, scale;
    const struct canon *c = &g->canon[which];
    assert_true(format_bytes(g->format, c->rows, c->cols, &data, &scale));
    s.data = mem_alloc(data * EXPERTS);
    s.scale = mem_alloc(scale * EXPERTS + 1);
    for (int e = 0; e < EXPERTS; e++) {
        c = &g->canon[e * MOE_MATRICES + which];
        memcpy(s.data + (size_t)e * data, c->data, data);
        memcpy(s.scale + (size_t)e * scale, c->scale, scale);
        s.tensor[e] = c->tensor;
    }
    return s;
}

struct rig {
    struct moe_rig g;
    struct stacked s[MOE_MATRICES];
    moult_moe_weights w;
    float x[TOKENS * HIDDEN], logits[TOKENS * EXPERTS];
};

static void rig_open(struct rig *r, format_t f)
{
    rig_new(&r->g, f, HIDDEN, INNER, EXPERTS);
    r->w = (moult_moe_weights){.size = sizeof r->w,
                               .gate_bias = r->g.bias[0],
                               .up_bias = r->g.bias[1],
                               .down_bias = r->g.bias[2]};
    moult_matrices *m[MOE_MATRICES] = {&r->w.gate, &r->w.up, &r->w.down};
    for (int i = 0; i < MOE_MATRICES; i++) {
        r->s[i] = stack(&r->g, i);
        *m[i] = (moult_matrices){.format = (int32_t)f, .data = r->s[i].data};
        if (f != FORMAT_BF16) m[i]->scale = r->s[i].scale;
        if (formats[f].tensor) m[i]->tensor_scale = r->s[i].tensor;
    }
    for (int i = 0; i < TOKENS * HIDDEN; i++)
        r->x[i] = rig_normal();
    for (int i = 0; i < TOKENS * EXPERTS; i++)
        r->logits[i] = rig_normal();
}

static void rig_close(struct rig *r)
{
    for (int i = 0; i < MOE_MATRICES; i++) {
        mem_free(r->s[i].data);
        mem_free(r->s[i].scale);
    }
    rig_free(&r->g);
}

static moult_moe_call call_of(const struct rig *r, float *y)
{
    return (moult_moe_call){.size = sizeof(moult_moe_call),
                            .num_tokens = TOKENS,
                            .input = r->x,
                            .output = y,
                            .logits = r->logits};
}

static void run(moult_moe *moe, const struct rig *r, float *y)
{
    moult_error err;
    moult_moe_call c = call_of(r, y);
    if (moult_moe_run(moe, &c, &err)) fail_msg("%s", err.message);
}

static void meets_the_operator(void **state)
{
    (void)state;
    for (int f = 0; f < FORMAT_COUNT; f++) {
        static struct rig r;
        float y[TOKENS * HIDDEN], x[TOKENS * HIDDEN], expect[TOKENS * HIDDEN] = {0};
        moult_moe *moe;
        moult_error err;
        rig_open(&r, (format_t)f);
        if (moult_moe_create(&moe, &config, &err) || moult_moe_set_weights(moe, &r.w, &err))
            fail_msg("%s", err.message);
        run(moe, &r, y); /* in slices of two tokens */
        struct pool *pool = pool_new(1);
        struct moe_op *op;
        struct moe_shape s = {
            .hidden = HIDDEN, .inner = INNER, .n_experts = EXPERTS, .top_k = K, .n_local = EXPERTS};
        struct route route = {
            .method = ROUTE_RENORMALIZE, .n_experts = EXPERTS, .top_k = K, .scaling = 1};
        struct moe_weights w = {.experts = r.g.matrix,
                                .gate_bias = r.g.bias[0],
                                .up_bias = r.g.bias[1],
                                .down_bias = r.g.bias[2]};
        for (int i = 0; i < TOKENS * HIDDEN; i++)
            x[i] = act_round(r.x[i]);
        assert_int_equal(moe_op_new(&op, &s, cpu_ops_best(), pool, TOKENS, NULL), OK);
        moe_op_route(op, &route, r.logits, TOKENS, NULL);
        moe_op_run(op, &w, x, TOKENS, expect);
        assert_memory_equal(y, expect, sizeof y);
        moe_op_free(op);
        pool_free(pool);
        moult_moe_destroy(moe);
        rig_close(&r);
    }
}

static void nulls_and_sizes(void **state)
{
    (void)state;
    static struct rig r;
    float y[TOKENS * HIDDEN] = {7};
    moult_moe *moe = NULL;
    moult_error err = {0};
    rig_open(&r, FORMAT_BF16);
    assert_int_equal(moult_moe_create(NULL, &config, &err), MOULT_ERR_INPUT);
    assert_int_equal(moult_moe_create(&moe, NULL, &err), MOULT_ERR_INPUT);
    moult_moe_config c = config;
    c.size = 4;
    assert_int_equal(moult_moe_create(&moe, &c, NULL), MOULT_ERR_INPUT);
    assert_null(moe);
    c.size = offsetof(moult_moe_config, num_threads); /* an older header: the rest is 0 */
    assert_int_equal(moult_moe_create(&moe, &c, &err), MOULT_OK);
    assert_int_equal(moult_moe_set_weights(NULL, &r.w, &err), MOULT_ERR_INPUT);
    assert_int_equal(moult_moe_set_weights(moe, NULL, &err), MOULT_ERR_INPUT);
    moult_moe_weights w = r.w;
    w.stream = &w;
    assert_int_equal(moult_moe_set_weights(moe, &w, &err), MOULT_ERR_INPUT);
    assert_non_null(strstr(err.message, "stream"));
    w.stream = NULL;
    w.device = MOULT_DEVICE_CUDA;
    assert_int_equal(moult_moe_set_weights(moe, &w, &err), MOULT_ERR_UNSUPPORTED);
    w.device = 0;
    w.down.data = NULL;
    assert_int_equal(moult_moe_set_weights(moe, &w, &err), MOULT_ERR_INPUT);
    assert_non_null(strstr(err.message, "down.data"));
    moult_moe_call call = call_of(&r, y);
    assert_int_equal(moult_moe_run(moe, &call, &err), MOULT_ERR_STATE);
    assert_int_equal(moult_moe_set_weights(moe, &r.w, &err), MOULT_OK);
    assert_int_equal(moult_moe_run(NULL, &call, &err), MOULT_ERR_INPUT);
    assert_int_equal(moult_moe_run(moe, NULL, &err), MOULT_ERR_INPUT);
    call.stream = &call;
    assert_int_equal(moult_moe_run(moe, &call, &err), MOULT_ERR_INPUT);
    call.stream = NULL;
    call.output = NULL;
    assert_int_equal(moult_moe_run(moe, &call, &err), MOULT_ERR_INPUT);
    call.output = y;
    call.logits_dtype = 2;
    assert_int_equal(moult_moe_run(moe, &call, &err), MOULT_ERR_INPUT);
    assert_true(y[0] == 7.0f);
    moult_moe_destroy(moe);
    moult_moe_destroy(NULL);
    rig_close(&r);
}

/* Every allocation fails once; what was there stays. */
static void no_memory(void **state)
{
    (void)state;
    static struct rig r;
    float y[TOKENS * HIDDEN], again[TOKENS * HIDDEN];
    moult_moe *moe = NULL;
    moult_error err;
    rig_open(&r, FORMAT_NVFP4);
    int32_t rc = MOULT_ERR_NOMEM;
    for (long n = 1; rc != MOULT_OK && n < 100; n++) {
        mem_fault_at(n);
        rc = moult_moe_create(&moe, &config, &err);
        mem_fault_at(0);
        if (rc != MOULT_OK) assert_int_equal(rc, MOULT_ERR_NOMEM);
    }
    assert_non_null(moe);
    assert_int_equal(moult_moe_set_weights(moe, &r.w, &err), MOULT_OK);
    run(moe, &r, y);
    rc = MOULT_ERR_NOMEM;
    int failures = 0;
    for (long n = 1; rc != MOULT_OK && n < 200; n++, failures++) {
        mem_fault_at(n);
        rc = moult_moe_set_weights(moe, &r.w, &err);
        mem_fault_at(0);
        if (rc != MOULT_OK) assert_int_equal(rc, MOULT_ERR_NOMEM);
        run(moe, &r, again);
        assert_memory_equal(y, again, sizeof y);
    }
    assert_true(failures > EXPERTS * MOE_MATRICES);
    moult_moe_destroy(moe);
    rig_close(&r);
}

/* Where there is no GPU a handle there says so; what needs none is answered. */
static void gpu_or_a_reason(void **state)
{
    (void)state;
    moult_moe *moe = NULL;
    moult_error err = {0};
    moult_moe_config c = config;
    size_t bytes = 1;
    assert_int_equal(moult_moe_workspace_bytes(&bytes, &c, &err), MOULT_OK);
    assert_int_equal(bytes, 0);
    assert_int_equal(moult_moe_workspace_bytes(NULL, &c, &err), MOULT_ERR_INPUT);
    c.device = 2;
    assert_int_equal(moult_moe_create(&moe, &c, &err), MOULT_ERR_INPUT);
    assert_non_null(strstr(err.message, "device"));
    c.device = MOULT_DEVICE_CUDA;
    int32_t rc = moult_moe_create(&moe, &c, &err);
    if (rc != MOULT_OK) {
        assert_int_equal(rc, MOULT_ERR_UNSUPPORTED);
        assert_true(strstr(err.message, "CUDA") || strstr(err.message, "GPU"));
        assert_null(moe);
    }
    moult_moe_destroy(moe);
    assert_int_equal(moult_moe_create(&moe, &config, &err), MOULT_OK);
    assert_int_not_equal(moult_gpu_pack(moe, &c, NULL, 1, 1, NULL, &err), MOULT_OK);
    assert_int_not_equal(moult_gpu_pack(NULL, &c, NULL, 1, 1, NULL, &err), MOULT_OK);
    assert_int_not_equal(moult_gpu_resident(NULL, moe, 0, 0, &err), MOULT_OK);
    moult_moe_destroy(moe);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(meets_the_operator), cmocka_unit_test(nulls_and_sizes),
        cmocka_unit_test(no_memory), cmocka_unit_test(gpu_or_a_reason)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
