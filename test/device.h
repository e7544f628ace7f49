/*
 * device.h - lets a test of the model run on a GPU too: MOULT_TEST_DEVICE=cuda.
 *
 *     struct test_device t;
 *     test_device_open(&t);                    // the host unless the variable says otherwise
 *     store_new(&store, specs, n, t.memory, &e);
 *     test_device_stage(&t, store);            // MOULT_TEST_STAGING=host: updates wait there
 *     test_model_new(&t, &model, &config, store, pool, pages, KV_BF16, tokens, isa, &e);
 */
#ifndef TEST_DEVICE_H
#define TEST_DEVICE_H

#include "backend/cuda/device.h"
#include "model/cuda/cuda.h"
#include "model/model.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct test_device {
    struct memory memory;
    struct device *d; /* NULL: the host */
    struct weights *w;
};

static inline bool test_on_gpu(void)
{
    const char *name = getenv("MOULT_TEST_DEVICE");
    return name && strcmp(name, "cuda") == 0;
}

/* Opening one takes a while, and some programs have hundreds of stores: one for all of them, for good. */
static struct device *test_gpu;

static inline void test_device_open(struct test_device *t)
{
    struct err e = {0};
    *t = (struct test_device){.memory = memory_host};
    if (!test_on_gpu()) return;
    err_t rc = test_gpu ? OK : device_open(&test_gpu, 0, 0, &e);
    t->d = test_gpu;
    if (rc != OK || weights_new(&t->w, t->d, &e) != OK) {
        fprintf(stderr, "%s\n", e.msg);
        exit(1);
    }
    t->memory = weights_memory(t->w);
}

/* Before its second generation. */
static inline void test_device_stage(struct test_device *t, const struct store *s)
{
    struct err e = {0};
    const char *where = getenv("MOULT_TEST_STAGING");
    if (!t->d || !where || strcmp(where, "host") != 0) return;
    if (weights_stage_on_host(t->w, store_bytes(s), &e) == OK) return;
    fprintf(stderr, "%s\n", e.msg);
    exit(1);
}

static inline void test_device_close(struct test_device *t)
{
    if (t->d) weights_free(t->w);
}

/* On a GPU `isa` NULL runs decode steps from graphs; any name runs them kernel by kernel. */
static inline err_t test_model_new(struct test_device *t, struct model **out,
                                   const struct config *c, struct store *s, struct pool *pool,
                                   int32_t pages, kv_type_t kv, int32_t tokens, const char *isa,
                                   struct err *e)
{
    if (!t->d) return model_new(out, c, s, pool, pages, kv, tokens, isa, e);
    struct cuda_options o = {.n_kv_pages = pages,
                             .max_step_tokens = tokens,
                             .max_seqs = 256,
                             .kv = kv,
                             .experts = true,
                             .no_graphs = isa != NULL};
    return cuda_model_new(out, c, s, t->d, &o, e);
}

#endif
