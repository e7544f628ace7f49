/*
 * cuda_model.h - a model on the GPU: its state, and the parts of a step.
 *
 *     host                                   device (one queue, in order)
 *     cuda_step.c   lay the step out
 *     cuda_flight.c upload              ->   copies of ids, positions, tables, rows
 *     cuda_forward.c launch the layers  ->   norm, q/k/v, rope, attention, o, norm, router, plan,
 *                                            experts, ... ; head, sampling        (or one graph)
 *     cuda_flight.c download            <-   results of the rows
 *
 * Two steps may be queued: each has pinned memory of its own and an event behind its results, while
 * the device's buffers are shared, since the steps run one after the other.  What one draws stays
 * on the device (`drawn`) for the next one's ids.
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

#include "backend/cuda/clear.h"
#include "backend/cuda/gemm.h"
#include "backend/cuda/inputs.h"
#include "backend/cuda/kernels.h"
#include "backend/cuda/step_io.h"
#include "backend/cuda/weights.h"
#include "model/ops.h"
#include "model/tensors.h"

enum {
    CUDA_ROWS = 256,          /* rows of logits at once */
    CUDA_FLIGHTS = 2,         /* steps in flight */
    CUDA_GRAPHS = 128,        /* kept; beyond that steps are launched kernel by kernel */
    CUDA_GRAPH_TOKENS = 2048, /* largest decode step that gets a graph */
    ATTN_PREFIX = ATTN_KINDS, /* blocks of the prefixes that decoding sequences share */
    ATTN_LISTS
};

/* Tables of gemm_weight in device memory, one layer's. */
struct layer_weights {
    struct layer_slots slots;
    const struct gemm_weight *q, *k, *v, *o, *router, *gate, *up, *down; /* v behind k behind q */
    float k_scale, v_scale;                                              /* 1 with a BF16 cache */
    bool one_qkv; /* q, k and v have one format: one launch */
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

/* What a step has for itself until it is collected; pinned. */
struct cuda_flight {
    void *block; /* all but the extras */
    struct step_arrays host;
    int32_t *extra; /* their twin on the device */
    size_t cap_extra;
    struct sample_result *results; /* [cap] */
    uint32_t *packed;              /* as cuda_model.packed, if it tells */
    int32_t n_packed;              /* tokens of a layer in it */
    int32_t *clear;                /* [n_pages] pages to be zeroed before the step */
    int32_t n_clear;
    struct event *done;
    bool no_memory; /* nothing of it was queued */
};

/* Matrices that read the same rows, and so share an input scale where `act` takes the checkpoint's:
 * those of a layer, from layer * CUDA_INPUTS, and the head behind all layers. */
enum cuda_input {
    CUDA_IN_QKV,
    CUDA_IN_O,
    CUDA_IN_ROUTER,
    CUDA_IN_UP,
    CUDA_IN_DOWN,
    CUDA_INPUTS,
};

struct input_groups {
    struct kernel kernel;
    devptr_t block; /* the three arrays of `args`; 0: `act` takes no scales */
    struct inputs_args args;
    int32_t n;
    uint64_t epoch; /* that args.out is of */
};

/* Rows as they are, and rounded as matrices that are not BF16 read them. */
struct cuda_rows {
    const uint16_t *plain, *rounded; /* rounded NULL: read `plain` */
    const float *scale;
};

struct graph_entry {
    /* n_prefix: blocks of shared prefixes, padding included */
    int32_t n_tokens, n_chunks, n_prefix;
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
    int32_t positions; /* that may occur */
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

    devptr_t work; /* all buffers below, one allocation */
    float *x, *qkv, *y, *router, *logits, *cos, *sin, *partial;
    float *act_scale;        /* of the rows that were rounded last */
    float *state, *state_ml; /* attention over shared prefixes, [cap][n_heads][head_dim and 2] */
    uint16_t *a, *att_q, *att_o, *h, *expert_out;
    bool tells; /* experts are kept and copied back */
    /* [tokens][top_k]; [n_layers] times that, one behind the other, if it tells */
    uint32_t *packed;
    uint32_t *arrived, *ticket, *counts;
    int32_t *offsets, *token_of, *row_of, *lowered;
    struct attn_span *spans[ATTN_LISTS];
    struct sample_state *states;
    uint64_t *order;
    struct sample_result *results; /* [cap] */
    int32_t *drawn;                /* [cap]: ids of the last step's rows */
    struct step_arrays dev;        /* but for the extras */
    int32_t *clear_dev;
    struct kernel clear_kernel, upload_kernel, download_kernel;
    struct cuda_flight flights[CUDA_FLIGHTS];
    uint32_t n_submitted, n_collected;
    act_t act;
    struct input_groups groups;

    struct graph_entry graphs[CUDA_GRAPHS];
    int32_t n_graphs;
    err_t failed; /* the device is lost: reported by collect */
    struct err error;
};

/* One step, or the slice of it that fits `cap`. */
struct cuda_slice {
    struct cuda_model *m;
    struct cuda_flight *f;
    int32_t n;                    /* tokens, padding included */
    int32_t n_blocks[ATTN_LISTS]; /* of attention */
    int32_t n_rows;
    int32_t table_ld, max_chunks, first_chunk;
    bool few; /* attention by kernels_attn_few */
};

/* cuda_forward.c: everything between the copies, queued.  The final norm's rows are those of
 * dev.pick. */
void cuda_forward(const struct cuda_slice *s);
/* For bench/: the experts of a layer alone, from m->a on to x and its norm in m->a again; without `routed`
 * they are those that the tokens had before. */
void cuda_moe(const struct cuda_slice *s, int32_t layer, bool routed);
/* Final norm, logits [n_rows][vocab] in m->logits and, where asked, the samples of rows [row0, row0
 * + n). */
void cuda_head(const struct cuda_slice *s, int32_t row0, int32_t n, bool sample);

/* cuda_check.c */
struct kernels_shape cuda_shape(const struct config *c, kv_type_t kv);

/* cuda_act.c: what set_numerics and check_update of the table do. */
err_t cuda_set_numerics(struct model *base, act_t act, bool routed, struct err *e) MUST_USE;
err_t cuda_check_update(const struct model *base, const struct update *u, struct err *e) MUST_USE;
/* After a commit: the groups' input scales. */
void cuda_read_inputs(struct cuda_model *m);
/* `rows` rows for matrices one of which has format `f`: with x, out (which may be x), n and n_rows
 * of `a`, rounded into `out` if such a matrix does not read them as they are. */
struct cuda_rows cuda_round(const struct cuda_slice *s, int32_t group, format_t f,
                            struct round_args a, int32_t rows);
/* The rows that a matrix of format `f` reads of them. */
void cuda_reads(struct gemm_args *g, const struct cuda_rows *r, format_t f);

/* cuda_model.c */
void cuda_drop_graphs(struct cuda_model *m);
/* cuda_model.c: after a commit, the scales of K and V, which graphs hold.  Not with a BF16 cache.
 */
void cuda_read_scales(struct cuda_model *m);

/* cuda_flight.c */
err_t cuda_flights_new(struct cuda_model *m, struct err *e) MUST_USE;
void cuda_flights_free(struct cuda_model *m);
/* That of the step to be submitted. */
struct cuda_flight *cuda_next(struct cuda_model *m);
/* Room for `words` of output ids, biases and barred ids; false: no memory. */
bool cuda_reserve_extra(struct cuda_model *m, struct cuda_flight *f, size_t words);
/* The slice's arrays, and the flight's pages cleared. */
void cuda_upload(const struct cuda_slice *s, int32_t n_seqs, size_t extra);
void cuda_clear_pages(struct cuda_model *m, struct cuda_flight *f); /* that alone */
void cuda_download(const struct cuda_slice *s, bool experts);
/* The outputs of rows whose tokens are [t0, t0 + n), once they are back. */
void cuda_hand_over(const struct cuda_model *m, const struct cuda_flight *f, const struct step *st,
                    int32_t t0, int32_t n);

/* cuda_step.c */
void cuda_kv_clear(struct model *m, int32_t page);
void cuda_submit(struct model *m, const struct step *st);
err_t cuda_collect(struct model *m, const struct step *st, struct err *e);
err_t cuda_logits(struct model *m, const struct step *st, const int32_t *tokens, int32_t n,
                  float *logits, struct err *e);

#endif
