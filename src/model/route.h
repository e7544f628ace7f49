/*
 * route.h - which experts a token goes to, and with what weights.
 *
 * Methods (numbers are those of FlashInfer's RoutingMethodType), x the logits of one token:
 *
 *     default           p = softmax(x); the top k of p; weights p
 *     renormalize       the top k of x; weights softmax over the k
 *     deepseek-v3       s = sigmoid(x), b = s + bias; a group scores the sum of its two largest b,
 *                       the best topk_group groups stay; the top k of b; s * scaling / (sum +
 * 1e-20) llama4            the top 1 of x; weight sigmoid(x), applied to the expert's input
 *     renormalize-naive p = softmax(x); the top k of p; weights p / sum
 *     topk              the top k of x; weights x
 *     sigmoid-renorm    s = sigmoid(x); the top k of s; with `norm` s / max(sum, 1e-20), else s
 *     minimax2          as deepseek-v3 without groups
 *     sigmoid           s = sigmoid(x); the top k of s; weights s
 *     topk-sigmoid      the top k of x; weights sigmoid(x)
 *
 * Ties go to the lower index, NaN comes last; a chosen NaN stays one in the weight.  Everything is
 * f32, sums are in k order, and a weight is rounded once, at the end, to BF16.  exp is the
 * backend's.  A token depends on its own logits alone.
 *
 * Logits and bias are f32; BF16 ones widen exactly, and are compared as they are.
 *
 * Packed: id in the high 16 bits, the BF16 bits of the weight in the low ones, zero-extended.
 */
#ifndef MODEL_ROUTE_H
#define MODEL_ROUTE_H

#include "backend/backend.h"
#include "base/err.h"
#include <stdbool.h>
#include <stdint.h>

typedef enum {
    ROUTE_DEFAULT,
    ROUTE_RENORMALIZE,
    ROUTE_DEEPSEEK_V3,
    ROUTE_LLAMA4,
    ROUTE_RENORMALIZE_NAIVE,
    ROUTE_TOPK,
    ROUTE_SIGMOID_RENORM,
    ROUTE_MINIMAX2,
    ROUTE_SIGMOID,
    ROUTE_TOPK_SIGMOID,
    ROUTE_COUNT
} route_method_t;

enum { ROUTE_TOP_K_MAX = 64, ROUTE_EXPERTS_MAX = 1024 };

struct route {
    route_method_t method;
    int32_t n_experts, top_k;
    int32_t n_group, topk_group; /* deepseek-v3; else 0 or 1 */
    float scaling;               /* deepseek-v3, minimax2: times the weights; else 1 */
    bool norm;                   /* sigmoid-renorm */
    const float *bias;           /* [n_experts] or NULL; deepseek-v3, minimax2; borrowed */
};

/* What is compared, what the weights are, how they are normalised: for a device that routes by itself
 * (backend/cuda/moe.cu). */
typedef enum { KEY_LOGIT, KEY_SOFTMAX, KEY_SIGMOID, KEY_BIASED } route_key_t;
typedef enum { WEIGH_RAW, WEIGH_SOFTMAX_K, WEIGH_SOFTMAX, WEIGH_SIGMOID } route_weigh_t;
struct route_rule {
    route_key_t key;
    route_weigh_t weigh;
    bool divide, scales; /* by the sum; times scaling, with the guard added to the sum */
};
struct route_rule route_rule(const struct route *r);

const char *route_name(route_method_t m);
/* Is the weight applied to the expert's input, not to its output? */
bool route_weighs_input(route_method_t m);

/* ERR_INPUT naming the field, its value and what is allowed, by the limits that the kernels of
 * FlashInfer have: E a multiple of 4 and more than K; deepseek-v3: topk_group at most 4, K at most
 * 8 (22 from 385 experts on) and fewer than the experts of the groups kept; llama4: K 1; else K at
 * most 32. */
err_t route_check(const struct route *r, struct err *e) MUST_USE;

/* One token: x [n_experts] -> ids [top_k], weights [top_k].  `scratch` holds 2 * n_experts floats.
 * x is left alone. */
void route_token(const struct route *r, const struct backend_ops *ops, const float *x,
                 float *scratch, int32_t *ids, float *weights);
/* The weights that the method gives to ids chosen elsewhere (replay).  Ids outside [0, n_experts)
 * get 0 and take no part in a sum. */
void route_weigh(const struct route *r, const struct backend_ops *ops, const float *x,
                 float *scratch, const int32_t *ids, float *weights);

static inline int32_t route_pack(int32_t id, float weight)
{
    uint32_t u = (uint32_t)id << 16 | f32_to_bf16(weight);
    int32_t packed;
    memcpy(&packed, &u, sizeof packed);
    return packed;
}

static inline int32_t route_packed_id(int32_t packed)
{
    uint32_t u;
    memcpy(&u, &packed, sizeof u);
    return (int32_t)(u >> 16) - ((u >> 31) ? 65536 : 0);
}

static inline float route_packed_weight(int32_t packed)
{
    uint32_t u;
    memcpy(&u, &packed, sizeof u);
    return bf16_to_f32((uint16_t)u);
}

#endif
