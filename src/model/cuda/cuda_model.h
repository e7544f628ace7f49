/*
 * cuda_model.h - a model on the GPU: its state, and the parts of a step.
 *
 *     host                                   device (one queue, in order)
 *     cuda_step.c   lay the step out    ->   copies of ids, positions, tables, rows
 *     cuda_forward.c launch the layers  ->   norm, q/k/v, rope, attention, o, norm, router, plan,
 *                                            experts, ... ; head, sampling        (or one graph)
 *     cuda_step.c   collect             <-   results of the rows
 *
 * A step whose tokens are one of each sequence (decode) runs from a graph: captured once for a
 * number of tokens and of KV chunks, both rounded up, then launched with one call.  Padding tokens
 * have sequence -1: they write no KV, go to no expert, and nobody reads their rows.  A graph holds
 * addresses only of memory that never moves.
 *
 * Bits do not depend on the path (graph or not, padded or not): every kernel gives a row the same
 * bits in any company.
 *
 * Owner: the engine thread.  Errors of the device come out of collect; the model is lost then.
 */
#ifndef MODEL_CUDA_CUDA_MODEL_H
#define MODEL_CUDA_CUDA_MODEL_H

#include "backend/cuda/gemm.h"
#include "backend/cuda/kernels.h"
#include "backend/cuda/weights.h"
#include "model/ops.h"
#include "model/tensors.h"

enum {
    CUDA_ROWS = 256,          /* rows of logits at once */
    CUDA_GRAPHS = 128,        /* kept; beyond that steps are launched kernel by kernel */
    CUDA_GRAPH_TOKENS = 2048, /* largest decode step that gets a graph */
    ATTN_PREFIX = ATTN_KINDS, /* blocks of the prefixes that decoding sequences share */
    ATTN_LISTS
};

/* Tables of gemm_weight in device memory, one layer's. */
struct layer_weights {
    struct layer_slots slots;
    const struct gemm_weight *q, *k, *v, *o, *router, *gate, *up, *down;
    float k_scale, v_scale; /* 1 with a BF16 cache */
    bool one_qkv;           /* q, k and v lie one behind the other, as one matrix */
    format_t q_format, k_format, v_format, o_format, router_format, gate_format, up_format,
        down_format;
};

/* What is copied to the device for a step; host and device twins have one shape. */
struct step_arrays {
    int32_t *ids, *pos, *seq;              /* [cap] */
    struct attn_block *blocks[ATTN_LISTS]; /* [cap] */
    int32_t *tables;                       /* [cap_seqs * table pages] */
    int32_t *pick;                         /* [cap]: token of a row */
    struct sample_spec *specs;             /* [cap] */
    int32_t *extra;                        /* output ids, biases, barred ids of all rows */
};

struct graph_entry {
    int32_t n_tokens, n_chunks,
        n_prefix; /* n_prefix: blocks of shared prefixes, padding included */
    struct graph *graph;
};

struct cuda_model {
    struct model base;
    struct config c;
    struct store *store;
    struct device *d;
    struct queue *q;
    struct gemm_kernels gemm;
    struct kernels *kernels;
    char name[128];
    int32_t n_pages, cap, cap_seqs;
    int32_t max_pages; /* of one table */
    int32_t ld_logits; /* vocab, in whole 16 bytes of BF16 */
    kv_type_t kv_type;
    uint64_t epoch; /* of the K and V scales */
    bool graphs_off, broken;
    bool plain; /* kernels wait for the whole of the one before: no programmatic launches */

    struct layer_weights *layers;
    struct gemm_weight *table;
    const struct gemm_weight *head;
    const uint16_t *embed, *norm;
    format_t head_format;

    struct region *kv;
    size_t kv_layer, kv_half; /* bytes of a layer, and of its K (V likewise) */
    int32_t *clear;           /* [n_pages] pages to be zeroed before the next step */
    int32_t n_clear;

    devptr_t work; /* all buffers below, one allocation */
    float *x, *qkv, *y, *router, *logits, *cos, *sin, *partial;
    float *state, *state_ml; /* attention over shared prefixes, [cap][n_heads][head_dim and 2] */
    uint16_t *a, *att_q, *att_o, *h, *expert_out;
    bool tells;       /* experts are kept and copied back */
    uint32_t *packed; /* [tokens][top_k]; [n_layers] times that, one behind the other, if it tells */
    uint32_t *arrived, *ticket, *counts;
    int32_t *offsets, *token_of, *row_of, *lowered;
    struct attn_span *spans[ATTN_LISTS];
    int32_t *few_pages; /* attn_args.pages */
    struct sample_state *states;
    uint64_t *order;
    struct sample_result *results; /* [cap] */
    struct step_arrays dev, host;  /* host: pinned */
    void *host_block;
    struct sample_result *host_results; /* pinned, [cap] */
    uint32_t *host_packed;              /* pinned, as packed, if it tells */
    int32_t n_packed;                   /* tokens of a layer in it */
    size_t cap_extra;
    int32_t *clear_dev;
    struct kernel clear_kernel;

    struct graph_entry graphs[CUDA_GRAPHS];
    int32_t n_graphs;
    err_t failed; /* of submit: reported by collect */
    struct err error;
};

/* One step, or the slice of it that fits `cap`. */
struct cuda_slice {
    struct cuda_model *m;
    int32_t n;                    /* tokens, padding included */
    int32_t n_blocks[ATTN_LISTS]; /* of attention */
    int32_t n_rows;
    int32_t table_ld, max_chunks, first_chunk;
};

/* cuda_forward.c: everything between the copies, queued.  The final norm's rows are those of
 * host.pick. */
void cuda_forward(const struct cuda_slice *s);
/* Final norm, logits [n_rows][vocab] in m->logits and, where asked, the samples of rows [row0, row0
 * + n). */
void cuda_head(const struct cuda_slice *s, int32_t row0, int32_t n, bool sample);

/* cuda_model.c: after a commit, the scales of K and V, which graphs hold.  Not with a BF16 cache.
 */
void cuda_read_scales(struct cuda_model *m);

/* cuda_step.c */
void cuda_kv_clear(struct model *m, int32_t page);
void cuda_submit(struct model *m, const struct step *st);
err_t cuda_collect(struct model *m, const struct step *st, struct err *e);
err_t cuda_logits(struct model *m, const struct step *st, const int32_t *tokens, int32_t n,
                  float *logits, struct err *e);

#endif
