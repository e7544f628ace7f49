/*
 * config.h - what config.json says of a model, or why it is refused.
 *
 * Only what is implemented is accepted (model_type qwen3_moe).  A field that changes the forward
 * and that we do not implement (a rope type other than default, sliding window in use,
 * attention_bias, hidden_act other than silu, a missing size) is ERR_UNSUPPORTED or ERR_INPUT with
 * its name and value; it is never defaulted away.  Field names follow transformers' Qwen3MoeConfig;
 * rope_theta may stand in `rope_parameters` (transformers 5).  quantization_config is read elsewhere
 * (weight/quant_config.h): it says nothing that the tensors do not.
 */
#ifndef MODEL_CONFIG_H
#define MODEL_CONFIG_H

#include "base/err.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define CONFIG_MAX_LAYERS 256
#define CONFIG_MAX_EOS    16

struct config {
    char model_type[32], architecture[64];
    int32_t vocab_size, hidden_size, intermediate_size, moe_intermediate_size;
    int32_t n_layers, n_heads, n_kv_heads, head_dim;
    int32_t n_experts, top_k; /* num_experts, num_experts_per_tok */
    int32_t max_positions;
    float rms_norm_eps, rope_theta;
    bool norm_topk_prob, tie_word_embeddings;
    /* layer has a dense MLP (mlp_only_layers, decoder_sparse_step) */
    bool dense[CONFIG_MAX_LAYERS];
    int32_t eos[CONFIG_MAX_EOS]; /* union of config.json and generation_config.json */
    int n_eos;
    /* generation_config.json; NaN or -1 where absent */
    float gen_temperature, gen_top_p, gen_min_p, gen_repetition_penalty;
    int32_t gen_top_k;
    bool gen_do_sample; /* true where absent */
};

err_t config_load(struct config *c, const char *dir, struct err *e) MUST_USE;
err_t config_parse(struct config *c, const char *json, size_t n, struct err *e) MUST_USE;
/* As if generation_config.json said nothing of sampling. */
void config_no_defaults(struct config *c);
/* ERR_STATE naming the first field that changes the forward and differs ("rope_theta: 1e6 -> 5e5").
 */
err_t config_same_forward(const struct config *resident, const struct config *next,
                          struct err *e) MUST_USE;

#endif
