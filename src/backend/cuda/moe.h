/*
 * moe.h - the kernels of the routed MoE operator (include/moult_moe.h) beside the GEMMs, the plan
 * and the rounding: their arguments.
 *
 *     moe_choose    logits to packed choices by any method of model/route.h: a warp a token
 *     moe_take      packed choices from packed ones, or from ids and weights: a thread a choice
 *     moe_rows      rows of x to BF16, times a weight where there is one: a block a token
 *     moe_activate  rows of h from f32 gate and up, with biases and limits: a block a row
 *     moe_finish    expert rows from f32, with a bias: a block a row
 *     moe_combine   the sum over choices in order, as backend.h's combine: a block a token
 *
 * Arithmetic is the CPU's operation by operation (numerics.cuh).  Rows [0, *n_rows) are in order of
 * expert: those of e are [first[e], first[e + 1]).
 */
#ifndef BACKEND_CUDA_MOE_H
#define BACKEND_CUDA_MOE_H

#include <stdint.h>

#define MOE_THREADS        256
#define MOE_CHOOSE_WARPS   4
#define MOE_CHOOSE_EXPERTS 1024
#define MOE_CHOOSE_TOP_K   32

/* What is compared, and what the weights are: route.c's table. */
typedef enum { MOE_KEY_LOGIT, MOE_KEY_SOFTMAX, MOE_KEY_SIGMOID } moe_key_t;
typedef enum {
    MOE_WEIGH_RAW,
    MOE_WEIGH_SOFTMAX_K,
    MOE_WEIGH_SOFTMAX,
    MOE_WEIGH_SIGMOID
} moe_weigh_t;

/* An array of f32 or of bf16. */
struct moe_floats {
    const void *at;
    int32_t bf16, unused;
};

/* Where choices go; each may be NULL. */
struct moe_choices {
    uint32_t *packed; /* for the plan: ids outside [0, n_experts) are -1 */
    int32_t *packed_out;
    int16_t *ids_out;
};

struct moe_choose_args {
    struct moe_floats logits; /* [tokens][n_experts] */
    struct moe_floats bias;   /* [n_experts], added to the keys; NULL: none */
    const int16_t *replay;    /* [tokens][top_k]: ids to take; NULL: choose */
    struct moe_choices to;    /* [tokens][top_k] */
    int32_t n_tokens, n_experts, top_k, n_group, topk_group;
    int32_t key, weigh;     /* moe_key_t, moe_weigh_t */
    int32_t divide, scales; /* by the sum; times `scaling`, with the guard added to the sum */
    float scaling;
};

struct moe_take_args {
    const int32_t *packed; /* [n]; NULL: ids and weights */
    const int32_t *ids;
    struct moe_floats weights;
    struct moe_choices to;
    int32_t n, n_experts;
};

struct moe_rows_args {
    struct moe_floats x;    /* [tokens][n] */
    const uint32_t *packed; /* [tokens]: bf16 weights in the low half; NULL: none */
    uint16_t *out;          /* [tokens][n] */
    int32_t n;
};

struct moe_activate_args {
    const float *gate, *up;            /* [rows][n] */
    const float *gate_bias, *up_bias;  /* [experts][n]; NULL: none */
    const float *alpha, *beta, *limit; /* [experts]; NULL: the three numbers below */
    float alpha_all, beta_all, limit_all;
    const int32_t *first; /* [n_experts + 1] */
    uint16_t *out;        /* [rows][n] */
    int32_t n, n_experts;
};

struct moe_finish_args {
    const float *x;    /* [rows][n] */
    const float *bias; /* [experts][n] */
    const int32_t *first;
    uint16_t *out; /* [rows][n] */
    int32_t n, n_experts;
};

struct moe_combine_args {
    const uint16_t *rows;   /* [rows][n] */
    const int32_t *row_of;  /* [tokens][top_k]; -1: none */
    const uint32_t *packed; /* [tokens][top_k] */
    void *out;              /* [tokens][n] */
    int32_t n, top_k;
    int32_t unweighed; /* the weights were applied to x */
    int32_t bf16;      /* out is */
};

#endif
