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
#include "model/moe_op.h"
#include "model/ops.h"
#include "model/tensors.h"

enum { ROW_CHUNK = 32 }; /* rows that the head multiplies at once */

struct cpu_model {
    struct model base;
    struct config c;
    struct store *store;
    struct pool *pool;
    const struct backend_ops *ops;
    int32_t n_pages, slice;
    bool broken;      /* model_break_invariance */
    int32_t n_angles; /* positions in the tables */
    float *cos, *sin; /* [n_angles][head_dim / 2] */
    kv_type_t kv_type;
    uint8_t *kv;   /* [layer][K, V][page][kv head], a page of backend/kv.h each */
    float *x;      /* residual stream, [slice][hidden] */
    float *a;      /* normed GEMM input, [slice][hidden] */
    float *q, *o;  /* [slice][n_heads * head_dim] */
    float *k, *v;  /* [slice][n_kv_heads * head_dim] */
    float *y;      /* a GEMM's output to be added to x, [slice][hidden] */
    float *router; /* [slice][n_experts] */
    struct moe_op *moe;
    bool routed;              /* choices go through the packed form */
    int32_t *packed;          /* [slice][top_k] */
    float *h;                 /* dense, [slice][intermediate] */
    act_t act;                /* what quantized matrices read */
    float *act_a, *act_scale; /* rounded GEMM input, [slice or ROW_CHUNK][widest], and its scales */
    struct fixed *fixed;      /* what 4-bit matrices read, [slice or ROW_CHUNK][blocks of widest] */
    float *logits, *scratch;  /* [ROW_CHUNK][vocab] */
    int32_t *scratch_ids;     /* [ROW_CHUNK][vocab] */
    int32_t *drawn;           /* [cap_drawn]: ids of the last step's first n_drawn rows */
    int32_t n_drawn, cap_drawn;
};

/* Tokens [t0, t0 + n) of a step. */
struct slice {
    struct cpu_model *m;
    const struct step *st;
    int32_t t0, n, layer;
    struct layer_slots slots;
};

/* Bytes of a head's page of K or V. */
static inline size_t model_kv_head_bytes(const struct cpu_model *m)
{
    return (size_t)KV_PAGE * (size_t)m->c.head_dim * kv_elem_bytes(m->kv_type);
}

static inline uint8_t *model_kv(const struct cpu_model *m, int layer, int is_v, int32_t page)
{
    size_t index = ((size_t)layer * 2 + (size_t)is_v) * (size_t)m->n_pages + (size_t)page;
    return m->kv + index * (size_t)m->c.n_kv_heads * model_kv_head_bytes(m);
}

/* Rows that several matrices read; rounded once (into m->act_a, densely) if one of them is
 * quantized and the activation format is not BF16, and put into fixed point (m->fixed, densely) if
 * one has 4-bit elements.  ACT_NVFP4 takes the largest input scale of the slots. */
struct inputs {
    const float *a; /* row i at a + (idx ? idx[i] : i) * cols */
    const int32_t *idx;
    size_t cols;
};
struct inputs forward_inputs(struct cpu_model *m, const float *a, const int32_t *idx, int32_t rows,
                             size_t cols, const size_t *slots, int n_slots);
size_t forward_widest(const struct config *c); /* columns of the widest */
/* The GEMM of a slot over them, without `out`. */
struct gemm forward_reads(const struct cpu_model *m, const struct inputs *in, size_t slot);
/* out[rows][w->rows] = the inputs times the matrix of a slot. */
void forward_multiply(struct cpu_model *m, float *out, const struct inputs *in, int32_t rows,
                      size_t slot);
/* Both for one matrix: a [rows][w->cols]. */
void forward_gemm(struct cpu_model *m, float *out, const float *a, int32_t rows, size_t slot);
/* m->a = the norm of m->x by the weights of a slot. */
void forward_norm(struct slice *s, size_t slot);
void forward_attention(struct slice *s); /* adds to m->x */
void forward_moe(struct slice *s);       /* adds to m->x */
void forward_dense(struct slice *s);     /* adds to m->x */
void forward_add(struct slice *s);       /* m->x += m->y */

err_t forward_moe_new(struct cpu_model *m, act_t act, struct err *e) MUST_USE;

/* numerics.c, for the table of cpu_model.c. */
err_t cpu_set_numerics(struct model *base, act_t act, bool routed, struct err *e) MUST_USE;
err_t cpu_check_update(const struct model *base, const struct update *u, struct err *e) MUST_USE;

#endif
