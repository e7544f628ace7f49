/*
 * moe_api.h - inside of libmoult's handle (include/moult_moe.h).
 */
#ifndef MODEL_MOE_API_H
#define MODEL_MOE_API_H

#include "base/pool.h"
#include "format/format.h"
#include "model/moe_op.h"
#include <moult_moe.h>

/* One set of weights; replaced as a whole. */
struct moe_set {
    struct matrix *matrices; /* [n_local][MOE_MATRICES] */
    void **owned;            /* [n_local][MOE_MATRICES], or NULL: resident bytes are the caller's */
    float *gate_bias, *up_bias, *down_bias, *alpha, *beta, *limit; /* or NULL */
    struct moe_weights view;
};

struct moe_gpu;

struct moult_moe {
    struct moe_gpu *gpu; /* NULL: on the CPU */
    struct moe_shape shape;
    struct route route;
    const struct backend_ops *ops;
    struct pool *pool;
    struct moe_op *op;
    struct moe_set *set; /* NULL before the first weights; on a GPU see gpu_ready */
    bool gpu_ready;
    int32_t max_tokens;
    float *x, *y;   /* [max_tokens][hidden] */
    float *logits;  /* [max_tokens][n_experts] */
    float *bias;    /* [n_experts] */
    float *weights; /* [max_tokens][top_k] */
};

/* Copies min(own, *from's size) bytes over zeros; ERR_INPUT for a size below `least`, or one beyond
 * ours whose further bytes are not zero. */
err_t api_read(void *own, size_t own_size, size_t least, const void *from, struct err *e) MUST_USE;
/* Is `device` that of the handle, and `stream` one of it? */
err_t api_device(const struct moult_moe *m, int32_t device, const void *stream,
                 struct err *e) MUST_USE;
/* Hands the result to the caller. */
int32_t api_return(moult_error *out, err_t rc, const struct err *e);

void api_set_free(const struct moult_moe *m, struct moe_set *s);

/* moe_api_weights.c: one expert's matrix, canonical. */
struct api_source {
    struct format_parts p;
    float input;
    void *gathered[2]; /* data, scale; of interleaved rows */
};
/* Where expert x's matrix `which` lies in host arrays.  ERR_NOMEM while gathering.  To be released. */
err_t api_find(struct api_source *s, const struct moult_moe *m, const moult_moe_weights *w,
               int32_t x, int which, struct err *e) MUST_USE;
void api_release(struct api_source *s);
err_t api_check_matrices(const moult_matrices *m, const char *name, struct err *e) MUST_USE;
err_t api_check_values(const struct format_parts *p, struct err *e) MUST_USE;
err_t api_check_arrangement(const struct moult_moe *m, const moult_moe_weights *w,
                            struct err *e) MUST_USE;
/* Biases and what follows, from host arrays. */
err_t api_copy_vectors(const struct moult_moe *m, const moult_moe_weights *w, struct moe_set *s,
                       struct err *e) MUST_USE;

/* moe_api_cuda.c: what a handle on a GPU does instead. */
err_t gpu_create(struct moult_moe *m, const moult_moe_config *c, struct err *e) MUST_USE;
err_t gpu_work_bytes(size_t *out, const struct moult_moe *m, struct err *e) MUST_USE;
void gpu_destroy(struct moult_moe *m);
err_t gpu_set_weights(struct moult_moe *m, const moult_moe_weights *w, struct err *e) MUST_USE;
err_t gpu_run(struct moult_moe *m, const moult_moe_call *c, struct err *e) MUST_USE;

#endif
