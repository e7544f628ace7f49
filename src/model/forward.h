/*
 * forward.h - what the files of the forward share: the model's state and its buffers.
 *
 * A step runs in slices of at most `slice` tokens, each through the whole model, so buffers are
 * bounded whatever the step's size.  Tokens of a sequence come in position order: a slice finds the
 * K and V of those before it written.
 */
#ifndef MODEL_FORWARD_H
#define MODEL_FORWARD_H

#include "backend/cpu/cpu.h"
#include "model/model.h"
#include "model/tensors.h"

struct model {
    struct config c;
    struct store *store;
    struct pool *pool;
    const struct backend_ops *ops;
    int32_t n_pages, slice;
    bool broken;                 /* model_break_invariance */
    int32_t n_angles;            /* positions in the tables */
    float *cos, *sin;            /* [n_angles][head_dim / 2] */
    kv_t *kv;                    /* [layer][K, V][page][kv head][KV_PAGE * head_dim] */
    float *x;                    /* residual stream, [slice][hidden] */
    float *a;                    /* normed GEMM input, [slice][hidden] */
    float *q, *o;                /* [slice][n_heads * head_dim] */
    float *k, *v;                /* [slice][n_kv_heads * head_dim] */
    float *y;                    /* a GEMM's output to be added to x, [slice][hidden] */
    float *router;               /* [slice][n_experts] */
    int32_t *topk_id, *topk_row; /* [slice][top_k]: the expert, and its row in h and ey */
    float *topk_w;               /* [slice][top_k] */
    int32_t *first;          /* [n_experts + 1]: rows of expert e are [first[e], first[e + 1]) */
    int32_t *active;         /* [n_experts]: those with rows */
    int32_t *src;            /* [slice * top_k]: the token of a row */
    float *h;                /* [slice * top_k][moe_intermediate], or dense [slice][intermediate] */
    float *ey;               /* [slice * top_k][hidden] */
    float *logits, *scratch; /* [ROW_CHUNK][vocab] */
    int32_t *scratch_ids;    /* [ROW_CHUNK][vocab] */
};

/* Tokens [t0, t0 + n) of a step. */
struct slice {
    struct model *m;
    const struct step *st;
    int32_t t0, n, layer;
    struct layer_slots slots;
};

static inline kv_t *model_kv(const struct model *m, int layer, int is_v, int32_t page)
{
    size_t head = (size_t)KV_PAGE * (size_t)m->c.head_dim;
    size_t index = ((size_t)layer * 2 + (size_t)is_v) * (size_t)m->n_pages + (size_t)page;
    return m->kv + index * (size_t)m->c.n_kv_heads * head;
}

/* out[rows][w->rows] = a[rows][w->cols] times the matrix of a slot. */
void forward_gemm(struct model *m, float *out, const float *a, int32_t rows, size_t slot);
/* m->a = the norm of m->x by the weights of a slot. */
void forward_norm(struct slice *s, size_t slot);
void forward_attention(struct slice *s); /* adds to m->x */
void forward_moe(struct slice *s);       /* adds to m->x */
void forward_dense(struct slice *s);     /* adds to m->x */
void forward_add(struct slice *s);       /* m->x += m->y */

#endif
