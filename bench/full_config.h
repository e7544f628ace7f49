/*
 * full_config.h - the configuration of Qwen3-30B-A3B's shape, with as many layers as asked for.
 */
#ifndef BENCH_FULL_CONFIG_H
#define BENCH_FULL_CONFIG_H

#include "model/config.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static inline void must(err_t rc, const struct err *e)
{
    if (rc == OK) return;
    fprintf(stderr, "%s\n", e->msg);
    exit(1);
}

static inline void shape(struct config *c, int layers)
{
    struct err e = {0};
    char json[1024];
    snprintf(
        json, sizeof json,
        "{\"model_type\":\"qwen3_moe\",\"vocab_size\":151936,\"hidden_size\":2048,"
        "\"intermediate_size\":6144,\"moe_intermediate_size\":768,\"num_hidden_layers\":%d,"
        "\"num_attention_heads\":32,\"num_key_value_heads\":4,\"head_dim\":128,\"num_experts\":128,"
        "\"num_experts_per_tok\":8,\"norm_topk_prob\":true,\"rms_norm_eps\":1e-6,"
        "\"rope_theta\":1000000.0,\"max_position_embeddings\":40960,\"tie_word_embeddings\":false,"
        "\"eos_token_id\":151645}",
        layers);
    must(config_parse(c, json, strlen(json), &e), &e);
}

#endif
