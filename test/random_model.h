/*
 * random_model.h - a model of Qwen3-30B-A3B's layer shapes with random weights, for tests and
 * benches.
 *
 * Weights are sums of two uniforms scaled by 1.7 / sqrt(columns), so that activations keep their
 * size through the layers; they depend on nothing but the slot's index.
 */
#ifndef TEST_RANDOM_MODEL_H
#define TEST_RANDOM_MODEL_H

#include "base/mem.h"
#include "model/model.h"
#include "weight/update.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

static inline uint64_t mix(uint64_t x)
{
    x ^= x >> 33;
    x *= 0xff51afd7ed558ccdULL;
    x ^= x >> 33;
    x *= 0xc4ceb9fe1a85ec53ULL;
    return x ^ x >> 33;
}

static inline void random_bf16(uint16_t *w, uint64_t n, uint64_t cols, uint64_t seed)
{
    float scale = 1.7f / sqrtf((float)cols);
    for (uint64_t i = 0; i < n; i++) {
        uint64_t r = mix(seed * 0x9e3779b97f4a7c15ULL + i);
        float f = (((float)(r & 0xffff) + (float)(r >> 48)) / 65536.0f - 1.0f) * scale;
        uint32_t bits;
        memcpy(&bits, &f, 4);
        w[i] = (uint16_t)(bits >> 16); /* truncation is as good as rounding here */
    }
}

static inline err_t random_config(struct config *c, int n_layers, int n_experts, int vocab,
                                  struct err *e)
{
    char json[1024];
    snprintf(json, sizeof json,
             "{\"model_type\":\"qwen3_moe\",\"architectures\":[\"Qwen3MoeForCausalLM\"],\"vocab_"
             "size\":%d,"
             "\"hidden_size\":2048,\"intermediate_size\":6144,\"moe_intermediate_size\":768,"
             "\"num_hidden_layers\":%d,\"num_attention_heads\":32,\"num_key_value_heads\":4,\"head_"
             "dim\":128,"
             "\"num_experts\":%d,\"num_experts_per_tok\":8,\"norm_topk_prob\":true,\"rms_norm_"
             "eps\":1e-6,"
             "\"rope_theta\":1000000.0,\"max_position_embeddings\":4096,\"hidden_act\":\"silu\","
             "\"decoder_sparse_step\":1,\"mlp_only_layers\":[],\"tie_word_embeddings\":false,"
             "\"eos_token_id\":1}",
             vocab, n_layers, n_experts);
    return config_parse(c, json, strlen(json), e);
}

/* The store holds the weights on success; the caller frees it. */
static inline err_t random_model(struct config *c, struct store **store, struct memory memory,
                                 int n_layers, int n_experts, int vocab, struct err *e)
{
    struct slot_spec *specs = NULL;
    struct update *u = NULL;
    size_t n;
    err_t rc = random_config(c, n_layers, n_experts, vocab, e);
    if (rc == OK) rc = model_specs(c, &specs, &n, e);
    if (rc == OK) rc = store_new(store, specs, n, memory, e);
    if (rc == OK) rc = update_begin(&u, *store, e);
    for (size_t i = 0; rc == OK && i < n; i++) {
        size_t len = (size_t)(specs[i].shape.rows * specs[i].shape.cols);
        uint16_t *w = mem_alloc(len * 2);
        if (specs[i].n_dims == 1)
            for (uint64_t j = 0; j < specs[i].shape.cols; j++)
                w[j] = 0x3f80; /* norms: 1.0 */
        else
            random_bf16(w, len, specs[i].shape.cols, i + 1);
        rc = update_stage(u, specs[i].name, w, specs[i].shape.rows, specs[i].shape.cols, e);
        mem_free(w);
    }
    if (rc == OK) rc = update_prepare(u, e);
    if (rc == OK) update_commit(u);
    if (u) update_free(u);
    mem_free(specs);
    return rc;
}

#endif
