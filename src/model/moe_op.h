/*
 * moe_op.h - the routed MoE operator: a layer's experts over tokens, for weights of any format.
 *
 *     moe_op_new(&op, &shape, ops, pool, max_tokens, e);
 *     moe_op_route(op, &route, logits, n, NULL);    // fused: route here, or
 *     moe_op_unpack(op, packed, n);                 // routed: ids and weights from anywhere, or
 *     moe_op_take(op, ids, weights, n);
 *     moe_op_run(op, &weights, x, n, y);            // y += sum over k of w_k * expert_k(x)
 *
 * Everything after the top k is one path, so fused and routed give the same bits.  For a token and
 * its k-th choice (i, w):
 *
 *     g, u  = x Wgate_i + bgate_i, x Wup_i + bup_i             f32
 *     h     = round(g / (1 + exp(-g)) * u)                     swiglu, or
 *             with alpha, beta, limit: g = min(g, limit), u = clamp(u, -limit, limit),
 *             round(g / (1 + exp(-alpha g)) * (u + beta))
 *     y_k   = round(h Wdown_i + bdown_i)
 *     y    += w_0 y_0, then FMAs in k order, then one addition
 *
 * With weigh_input (Llama 4; top_k 1): x = round(w x) first, and the sum takes y_0 as it is.
 *
 * Ids are global.  One outside [local_offset, local_offset + n_local), a negative one too, adds
 * nothing (another rank has it, or nobody); a repeated one counts each time.  A token without any
 * local expert leaves its row of y alone.
 *
 * With an activation format other than BF16 the rows that a GEMM reads, of x (w x) and of h, are
 * rounded by format/act.h wherever the matrix is quantized; a BF16 matrix reads them as they are.
 * ACT_NVFP4 takes one input scale for gate and up and one for down: the largest of the local
 * experts' NVFP4 matrices, as SGLang does on its trtllm path, or the one given.
 *
 * A token's result depends on its own row, choices and the weights, never on the others.
 * Threads: one caller at a time an operator.
 */
#ifndef MODEL_MOE_OP_H
#define MODEL_MOE_OP_H

#include "backend/backend.h"
#include "base/err.h"
#include "base/pool.h"
#include "format/act.h"
#include "model/route.h"

typedef enum { MOE_SWIGLU, MOE_SWIGLU_OAI, MOE_ACTIVATION_COUNT } moe_activation_t;
enum { MOE_GATE, MOE_UP, MOE_DOWN, MOE_MATRICES };

struct moe_shape {
    int32_t hidden, inner; /* both even, at most 2^20 */
    int32_t n_experts, top_k;
    int32_t local_offset, n_local; /* the experts whose weights are here */
    moe_activation_t activation;
    bool weigh_input;
    act_t act;
};

struct moe_weights {
    const struct matrix *experts;      /* [n_local][MOE_MATRICES]: gate and up [inner][hidden],
                                          down [hidden][inner] */
    const float *gate_bias, *up_bias;  /* [n_local][inner], or NULL */
    const float *down_bias;            /* [n_local][hidden], or NULL */
    const float *alpha, *beta, *limit; /* [n_local], or NULL: 1, 0, infinity; oai: 1.702, 1, 7 */
    /* ACT_NVFP4: scales of x and of h; 0: the largest of the experts' */
    float input_in, input_down;
};

struct moe_op;

err_t moe_op_new(struct moe_op **out, const struct moe_shape *s, const struct backend_ops *ops,
                 struct pool *pool, int32_t max_tokens, struct err *e) MUST_USE;
void moe_op_free(struct moe_op *op);

/* ACT_NVFP4: ERR_INPUT where a scale of `w` is missing that moe_op_run would need; others: OK.  To
 * be asked whenever weights change. */
err_t moe_op_check_inputs(const struct moe_op *op, const struct moe_weights *w,
                          struct err *e) MUST_USE;

/* The choices of tokens [0, n), n at most max_tokens.  `r` has the shape's n_experts and top_k;
 * `replay` [n][top_k], or NULL: ids to take instead of the top k, weighed by the method. */
void moe_op_route(struct moe_op *op, const struct route *r, const float *logits, int32_t n,
                  const int16_t *replay);
void moe_op_unpack(struct moe_op *op, const int32_t *packed, int32_t n);
void moe_op_take(struct moe_op *op, const int32_t *ids, const float *weights, int32_t n);
/* The choices as they stand. */
void moe_op_pack(const struct moe_op *op, int32_t *packed, int32_t n);
void moe_op_replay(const struct moe_op *op, int16_t *ids, int32_t n);
const int32_t *moe_op_ids(const struct moe_op *op);   /* [n][top_k] */
const float *moe_op_weights(const struct moe_op *op); /* [n][top_k] */

/* x [n][hidden], values that BF16 has; y [n][hidden] is added to. */
void moe_op_run(struct moe_op *op, const struct moe_weights *w, const float *x, int32_t n,
                float *y);

/* h [n][inner] = round(swiglu) of a dense MLP by the same arithmetic; the GEMMs say matrix and
 * input rows (their out, ldo and col0 do not matter). */
void moe_dense_gate_up(const struct backend_ops *ops, struct pool *pool, const struct gemm *gate,
                       const struct gemm *up, int32_t n, float *h);

#endif
