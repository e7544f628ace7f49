/*
 * moe_api.h - inside of libmoult's handle (include/moult_moe.h).
 */
#ifndef MODEL_MOE_API_H
#define MODEL_MOE_API_H

#include "base/pool.h"
#include "model/moe_op.h"
#include <moult_moe.h>

/* One set of weights; replaced as a whole. */
struct moe_set {
    struct matrix *matrices; /* [n_local][MOE_MATRICES] */
    void **owned;            /* [n_local][MOE_MATRICES], or NULL: resident bytes are the caller's */
    float *gate_bias, *up_bias, *down_bias, *alpha, *beta, *limit; /* or NULL */
    struct moe_weights view;
};

struct moult_moe {
    struct moe_shape shape;
    struct route route;
    const struct backend_ops *ops;
    struct pool *pool;
    struct moe_op *op;
    struct moe_set *set; /* NULL before the first weights */
    int32_t max_tokens;
    float *x, *y;   /* [max_tokens][hidden] */
    float *logits;  /* [max_tokens][n_experts] */
    float *bias;    /* [n_experts] */
    float *weights; /* [max_tokens][top_k] */
};

/* Copies min(own, *from's size) bytes over zeros; ERR_INPUT for a size below `least`, or one beyond
 * ours whose further bytes are not zero. */
err_t api_read(void *own, size_t own_size, size_t least, const void *from, struct err *e) MUST_USE;
err_t api_device(int32_t device, const void *stream, struct err *e) MUST_USE;
/* Hands the result to the caller. */
int32_t api_return(moult_error *out, err_t rc, const struct err *e);

void api_set_free(const struct moult_moe *m, struct moe_set *s);

#endif
