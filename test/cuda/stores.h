/* stores.h - stores of random weights in a GPU's memory, for tests. */
#ifndef TEST_CUDA_STORES_H
#define TEST_CUDA_STORES_H

#include "backend/cuda/weights.h"
#include "base/clock.h"
#include "cuda/gpu.h"
#include "model/model.h"
#include "weight/dummy.h"

struct gpu_store {
    struct config c;
    struct slot_spec *specs;
    size_t n;
    struct weights *w; /* NULL: in the host's memory */
    struct store *s;
};

static inline void config_of(struct config *c, int layers, int hidden, int inner, int experts,
                             int vocab)
{
    char json[1024];
    snprintf(
        json, sizeof json,
        "{\"model_type\":\"qwen3_moe\",\"vocab_size\":%d,\"hidden_size\":%d,"
        "\"intermediate_size\":512,\"moe_intermediate_size\":%d,\"num_hidden_layers\":%d,"
        "\"num_attention_heads\":8,\"num_key_value_heads\":2,\"head_dim\":128,\"num_experts\":%d,"
        "\"num_experts_per_tok\":4,\"norm_topk_prob\":true,\"rms_norm_eps\":1e-6,"
        "\"rope_theta\":10000,\"max_position_embeddings\":4096,\"tie_word_embeddings\":false}",
        vocab, hidden, inner, layers, experts);
    MUST(config_parse(c, json, strlen(json), &must_e));
}

/* No weights yet.  d NULL: in the host's memory. */
static inline struct gpu_store store_make(struct device *d, const struct config *c, format_t f,
                                          enum staging_mode staging)
{
    struct gpu_store g = {.c = *c};
    MUST(model_specs(&g.c, &g.specs, &g.n, &must_e));
    for (size_t i = 0; i < g.n; i++)
        if (g.specs[i].linear) g.specs[i].shape.format = f;
    if (d) MUST(weights_new(&g.w, d, &must_e));
    MUST(store_new(&g.s, g.specs, g.n, d ? weights_memory(g.w) : memory_host, &must_e));
    if (d && staging == STAGING_HOST) MUST(weights_stage_on_host(g.w, store_bytes(g.s), &must_e));
    return g;
}

static inline struct update *stage_random(struct gpu_store *g, uint64_t seed)
{
    struct update *u = NULL;
    MUST(update_begin(&u, g->s, &must_e));
    MUST(dummy_stage(u, seed, 8, NULL, &must_e));
    MUST(update_prepare(u, &must_e));
    return u;
}

/* Seconds of the commit. */
static inline double update_random(struct gpu_store *g, uint64_t seed)
{
    struct update *u = stage_random(g, seed);
    double t = clock_s();
    update_commit(u);
    t = clock_s() - t;
    update_free(u);
    MUST(store_check(g->s, &must_e));
    return t;
}

static inline void store_drop(struct gpu_store *g)
{
    store_free(g->s);
    weights_free(g->w);
    mem_free(g->specs);
}

#endif
