/*
 * kernels.h - attention and the small kernels: their arguments, their launchers.
 *
 *     struct kernels *k;
 *     if (kernels_new(&k, d, &shape, e) != OK) ...     // finds every kernel; names what is missing
 *     kernels_norm(k, q, NORM_ADD, &args, rows);       // queued; failures come from queue_sync
 *
 * Pointers in the structs are device addresses.  A launcher queues work and never fails by itself;
 * its argument rules are CHECKed.  All kernels may be launched programmatically (they wait for
 * their predecessor before they read anything a step produces), and none depends on how many rows
 * it is given: a row's results have the same bits in any batch.
 *
 * Bits against the CPU (DESIGN.md 4): norm, rope, swiglu, combine, route and the sampler's
 * logsumexp are the CPU's operations in the CPU's order, so equal inputs give equal outputs.
 * Attention shares the exp, the chunk's maximum, the row sum's lanes and the fold; its products run
 * on the tensor core and differ from the CPU's FMA chains.  The sampler's double logarithms are
 * CUDA's.
 */
#ifndef BACKEND_CUDA_KERNELS_H
#define BACKEND_CUDA_KERNELS_H

#include <stdbool.h>
#include <stddef.h>
#include "backend/cuda/gemm.h"
#include "backend/kv.h"
#include <stdint.h>

/* --- residual stream: x from one of four sources, then its RMSNorm ---------------------------- */

#define NORM_MAX 8192 /* columns; a multiple of 8 */

typedef enum {
    NORM_PLAIN,   /* x as it is */
    NORM_EMBED,   /* x = embed[ids[i]] */
    NORM_ADD,     /* x += y */
    NORM_COMBINE, /* x += sum over j in order of weight[j] * expert row[j], as backend.h's combine */
    NORM_SOURCES
} norm_source_t;

struct norm_args {
    float *x;               /* [rows][n] residual stream; written unless PLAIN */
    const float *y;         /* ADD: [rows][n] */
    const int32_t *ids;     /* EMBED: [rows]; outside the vocabulary: zeros */
    const uint16_t *embed;  /* EMBED: [vocab][n] bf16 */
    const uint16_t *expert; /* COMBINE: [expert rows][n] bf16 */
    const int32_t *row_of;  /* COMBINE: [rows][top_k], -1: contributes nothing */
    const uint32_t *packed; /* COMBINE: [rows][top_k], the bf16 weight in the low half */
    const uint16_t *w;      /* [n] bf16 norm weight */
    uint16_t *out;          /* [rows][n] bf16 = round(x / rms(x) * w); NULL: no norm */
    const int32_t *pick;    /* PLAIN: output row i is x row pick[i]; NULL: i */
    int32_t n, vocab, top_k;
    float eps;
};

/* --- q/k norm, rotation, KV write ------------------------------------------------------------- */

/*
 * KV pages as kernels read them.  One layer's K (V likewise): [page][kv head][tile], a tile holding
 * KV_ROWS keys of one head, in blocks of 64 elements a row:
 *
 *     tile = [head_dim / 64][KV_ROWS][64 elements]
 *
 * with the 16-byte pieces of a row in swizzled order, so that ldmatrix and wgmma read copies of it
 * without bank conflicts: piece c of row r lies at c ^ (r % 8) (BF16: 128-byte rows, the 128 B
 * swizzle of the tensor copy engine) or c ^ (r / 2 % 4) (E4M3: 64-byte rows, its 64 B swizzle).
 */
#define KV_ROWS 16

static inline size_t kv_tile_bytes(kv_type_t type, int32_t head_dim)
{
    return (size_t)KV_ROWS * (size_t)head_dim * (type == KV_BF16 ? 2 : 1);
}

struct rope_args {
    const float *qkv; /* [tokens][ld]: q heads, then k heads, then v heads */
    int64_t ld;
    const uint16_t *q_norm, *k_norm; /* [head_dim] bf16 */
    const float *cos, *sin;          /* [positions][head_dim / 2] */
    const int32_t *pos;              /* [tokens] */
    const int32_t *seq;    /* [tokens]: row of `tables`; < 0: a padding token, writes nothing */
    const int32_t *tables; /* [sequences][table_ld] page ids */
    int64_t table_ld;
    uint16_t *q; /* [tokens][n_heads * head_dim] bf16 */
    void *k, *v; /* one layer's pages */
    int32_t n_heads, n_kv_heads;
    float eps;
    float k_scale, v_scale; /* E4M3: what is stored is k / k_scale, v / v_scale, saturating */
};

/* --- SwiGLU apart from a GEMM ----------------------------------------------------------------- */

struct swiglu_args {
    const float *gate, *up; /* [rows][ld] */
    int64_t ld;
    uint16_t *out;         /* [rows][n] bf16 */
    const int32_t *n_rows; /* on the device; NULL: all rows of the launch */
    int32_t n;             /* a multiple of 4 */
};

/* --- activations rounded as other devices' low-precision GEMMs round them: format/act.h, same
 * bits - */

typedef enum {
    ROUND_FP8_BLOCK,       /* a scale each 128 columns */
    ROUND_MXFP8,           /* no scale */
    ROUND_NVFP4,           /* one scale a row: the checkpoint's */
    ROUND_NVFP4_PER_TOKEN, /* one scale a row */
    ROUND_KINDS
} round_t;

struct round_args {
    const uint16_t *x;        /* [rows][n] bf16, finite */
    uint16_t *out;            /* [rows][n] bf16; may be x */
    float *scale;             /* [rows][ceil(n / 128)] or [rows] */
    const float *input_scale; /* NVFP4: [1], positive */
    const int32_t *n_rows;    /* on the device; NULL: all rows of the launch */
    int32_t n;                /* a multiple of 8 */
    int32_t kind;             /* round_t */
};

/* --- paged attention -------------------------------------------------------------------------- */

/*
 * Keys come in chunks of ATTN_CHUNK at absolute positions.  For each query head and chunk:
 *
 *     s[key] = (k16 steps over head_dim in order on the tensor core) * scale
 *     m = max s;  P = bf16(exp(s - m));  l = sum of P by lanes (key % 16);
 *     O = k16 steps over the chunk's keys in order on the tensor core, from zero
 *
 * and chunks are folded left to right by position.  Decode, prefill, any cut of a prompt and any
 * split over blocks of threads give the same bits.
 */
#define ATTN_CHUNK     256
#define ATTN_GROUP_MAX 16 /* query heads a KV head */

/* Shared memory of attn_columns.cuh's kernels for nt * 8 query columns (a column: one head of
 * one token). */
#define ATTN_STAGES_MAX 24
#define ATTN_PER_SM(head_dim, nt) \
    ((nt) <= 2 && (head_dim) <= 128 ? 2 : 1) /* blocks a multiprocessor */
#define ATTN_SMEM_MAX(head_dim, nt)      (233472 / ATTN_PER_SM(head_dim, nt) - 1024)
#define ATTN_STAGE_BYTES(type, head_dim) (4 * KV_ROWS * (head_dim) * ((type) == KV_BF16 ? 2 : 1))
#define ATTN_FIXED_BYTES(head_dim, nt) \
    ((head_dim) / 16 * (nt)*256 + 16 * (nt)*256 + (nt)*320 + ATTN_STAGES_MAX * 16)
#define ATTN_FIT(type, head_dim, nt)                                  \
    ((ATTN_SMEM_MAX(head_dim, nt) - ATTN_FIXED_BYTES(head_dim, nt)) / \
     ATTN_STAGE_BYTES(type, head_dim))
#define ATTN_STAGES(type, head_dim, nt)                                            \
    (ATTN_FIT(type, head_dim, nt) < ATTN_STAGES_MAX ? ATTN_FIT(type, head_dim, nt) \
                                                    : ATTN_STAGES_MAX)
#define ATTN_SMEM(type, head_dim, nt)                                     \
    (ATTN_STAGES(type, head_dim, nt) * ATTN_STAGE_BYTES(type, head_dim) + \
     ATTN_FIXED_BYTES(head_dim, nt))

/* Of attn_prefill.cu's: head_dim 128, 128 columns. */
#define ATTN_PREFILL_COLUMNS 128
#define ATTN_PREFILL_SMEM    (6 * 32768 + 2 * 16384 + 7 * 16)

/* Tokens [token, token + n) of the step: neighbours in position of sequence `seq`, at most
 * kernels_attn_tokens() of them; n == 0: nothing (padding). */
struct attn_block {
    int32_t token, n, seq;
    int32_t prefix; /* leading chunks, whole and seen whole, that kernels_attn_prefix has done */
};

/* Made on the device by attn_plan, once a step, for all layers. */
struct attn_span {
    int32_t first; /* items before this block: an item is one chunk of one KV head */
    int32_t token, n, seq, n_keys, prefix;
};

struct attn_plan_args {
    const struct attn_block *blocks; /* [n_blocks] */
    const int32_t *pos;              /* [tokens] */
    struct attn_span *spans; /* [n_blocks + 1]; the last: the total, items of a run in `token` */
    int32_t n_blocks, n_kv_heads;
    int32_t n_runs;      /* these two are filled in by the launcher */
    int32_t of_prefix;   /* a block's keys are its first `prefix` chunks */
    int32_t first_chunk; /* keys of the first chunk: ATTN_CHUNK, but for tests of invariance */
};

struct attn_args {
    const uint16_t *q; /* [tokens][n_heads * head_dim] bf16 */
    uint16_t *out;     /* the same shape */
    const void *k, *v; /* one layer's pages */
    const int32_t *tables;
    int64_t table_ld;
    const struct attn_span *spans;
    float *partial;    /* workspace, kernels_attn_bytes() */
    uint32_t *arrived; /* [n_blocks * n_kv_heads] zeros; zeros again afterwards */
    float *state;      /* shared prefixes: O so far [tokens][n_heads][head_dim]; NULL: none is */
    float *state_ml;   /* m and l so far [tokens][n_heads][2] */
    int32_t n_blocks, n_kv_heads, group;
    int32_t max_chunks; /* of any block: ceil of its keys / ATTN_CHUNK, or more */
    int32_t first_chunk;
    float scale;   /* of the scores; for E4M3 times k_scale */
    float v_scale; /* E4M3: of the output */
};

/*
 * A decode step of few tokens: what kernels_rope and kernels_attn (ATTN_DECODE) leave in the pages
 * and in `out`, the same bits, by one kernel.  It reads pos, seq, tables and the keys before each
 * token's own before its predecessor has ended: they must be complete when that one starts.
 */
#define ATTN_FEW_THREADS 256
#define ATTN_FEW_DIM     128 /* head_dim */
#define ATTN_FEW_GROUP   8   /* query heads a KV head, at most */
#define ATTN_FEW_CHUNKS  8   /* of a token, at most */
#define ATTN_FEW_SMEM(type, chunks)                                           \
    (2 * ATTN_CHUNK * ATTN_FEW_DIM * ((type) == KV_BF16 ? 2 : 1) + 24 * 256 + \
     (chunks)*8 * ATTN_FEW_DIM * 4)

struct attn_few_args {
    struct rope_args rope; /* without q */
    uint16_t *out;         /* [tokens][n_heads * head_dim] bf16; nothing for a padding token */
    float scale;           /* as in attn_args */
};

/* --- routing ---------------------------------------------------------------------------------- */

#define ROUTE_EXPERTS_MAX 512
#define ROUTE_TOP_K_MAX   64
#define ROUTE_TOKENS_MAX  (1 << 20)
#define ROUTE_FEW         16 /* tokens that one block routes */

/*
 * Softmax of the router's logits, the top k (ties to the lower index), weights rounded once to
 * BF16; then the plan: rows of this slice's experts in order of expert, then token, then k.  An id
 * outside [first, first + n_local) has no row here.
 */
struct route_args {
    const float *logits; /* [tokens][n_experts]; NULL: `packed` comes from elsewhere */
    const int32_t *seq;  /* [tokens]: < 0: a padding token, goes to no expert; NULL: none is */
    uint32_t *packed;    /* [tokens][top_k]: id << 16 | bf16 weight; a signed id */
    int32_t *offsets; /* [n_local + 1]: rows of expert first + e are [offsets[e], offsets[e + 1]) */
    int32_t *token_of; /* [tokens * top_k]: the token of a row */
    int32_t *row_of;   /* [tokens][top_k]: -1: none */
    uint32_t *ticket;  /* one zero; zero again afterwards */
    int32_t n_tokens, n_experts, top_k, first, n_local;
    int32_t normalise;    /* weights of a token add to 1 */
    int32_t set_words;    /* these two are filled in by the launcher: tokens / 32 with room, */
    int32_t block_tokens; /* and tokens of a block */
};

/*
 * Of few tokens NORM_ADD, the router and the plan in one kernel: the bits of kernels_norm,
 * gemm_launch and kernels_route.
 */
#define NORM_ROUTE_TOKENS  8
#define NORM_ROUTE_EXPERTS 128
#define NORM_ROUTE_HIDDEN  2048
#define NORM_ROUTE_THREADS 256

struct norm_route_args {
    struct norm_args norm;            /* as for NORM_ADD, with `out` */
    struct route_args route;          /* without logits */
    const struct gemm_weight *router; /* BF16, [n_experts][n] */
    int32_t segment, n_segments;      /* filled in by the launcher */
};

/* --- sampling: sample.h on the device --------------------------------------------------------- */

#define SAMPLE_TOP_MAX   128
#define SAMPLE_PART      4096 /* logits whose sum has lanes of its own */
#define SAMPLE_CLUSTER   8    /* blocks a row */
#define SAMPLE_ORDER     1024
#define SAMPLE_VOCAB_MAX (1 << 18)

struct sample_spec {
    int32_t target; /* >= 0: score this id; -1: sample */
    int32_t n_top;
    float temperature, top_p, min_p;
    int32_t top_k;
    float frequency_penalty, presence_penalty, repetition_penalty;
    uint32_t sample_index;
    uint64_t seed, position;
    const int32_t *output_ids; /* of the counts for penalties */
    const int32_t *bias_ids;   /* distinct */
    const float *bias;         /* finite */
    const int32_t *barred;
    int32_t n_output, n_bias, n_barred, unused;
};

struct sample_result {
    int32_t id;
    float logprob;
    int32_t finite, n_top;
    int32_t top_ids[SAMPLE_TOP_MAX];
    float top_logprobs[SAMPLE_TOP_MAX];
};

/* A row between its kernels. */
struct sample_state {
    double sum;   /* of exp(x - max) */
    uint64_t end; /* the keys below it are `order`'s */
    float max;
    int32_t arg; /* its first place */
    int32_t finite, n_order;
};

struct sample_args {
    float *logits; /* [rows][ld], penalised and biased in place; ld a multiple of 4, 16-byte rows */
    int64_t ld;
    const struct sample_spec *specs; /* [rows] */
    struct sample_result *out;       /* [rows] */
    int32_t *next_ids;           /* [rows]: out[i].id again, for the next step; NULL: not wanted */
    struct sample_state *states; /* [rows] */
    uint64_t *order;             /* [rows][SAMPLE_ORDER] first tokens, where a row wants them */
    int32_t *lowered;            /* [rows][2] */
    uint32_t *counts;            /* [rows][vocab] zeros; zeros again afterwards */
    int32_t vocab;
};

/* --- launchers -------------------------------------------------------------------------------- */

#ifndef __CUDACC__
#include "backend/cuda/device.h"

struct kernels;

struct kernels_shape {
    int32_t hidden, vocab, n_heads, n_kv_heads, head_dim;
    int32_t n_experts, top_k; /* 0, 0: a dense model */
    kv_type_t kv;
};

/* ERR_UNSUPPORTED names the field that no kernel takes, its value and what is allowed. */
err_t kernels_check(const struct kernels_shape *s, struct err *e) MUST_USE;
/* The same, and finds the kernels. */
err_t kernels_new(struct kernels **out, struct device *d, const struct kernels_shape *s,
                  struct err *e) MUST_USE;
void kernels_free(struct kernels *k); /* NULL is fine */

/* `programmatic`: see struct launch. */
void kernels_norm(const struct kernels *k, struct queue *q, norm_source_t source,
                  const struct norm_args *a, int32_t rows, bool programmatic);
void kernels_rope(const struct kernels *k, struct queue *q, const struct rope_args *a,
                  int32_t tokens, bool programmatic);
void kernels_swiglu(const struct kernels *k, struct queue *q, const struct swiglu_args *a,
                    int32_t rows, bool programmatic);
void kernels_round(const struct kernels *k, struct queue *q, const struct round_args *a,
                   int32_t rows, bool programmatic);
/* With logits NULL only the plan is made. */
void kernels_route(const struct kernels *k, struct queue *q, const struct route_args *a,
                   bool programmatic);
/* Whether there is such a kernel for this shape and so many tokens. */
bool kernels_norm_routes(const struct kernels *k, int32_t tokens);
void kernels_norm_route(const struct kernels *k, struct queue *q, const struct norm_route_args *a,
                        bool programmatic);

/* Which kernel runs a step's blocks.  All give the same bits:
 *   ATTN_DECODE   a token a block
 *   ATTN_SHORT    a few tokens a block; long contexts are shared out over the whole GPU
 *   ATTN_PREFILL  more tokens a block, fastest when there are at least as many pairs of block
 *                 and KV head as multiprocessors */
typedef enum { ATTN_DECODE, ATTN_SHORT, ATTN_PREFILL, ATTN_KINDS } attn_kind_t;
int32_t kernels_attn_tokens(const struct kernels *k, attn_kind_t kind); /* most tokens of a block */
size_t kernels_attn_bytes(const struct kernels *k, attn_kind_t kind,
                          int32_t max_chunks); /* of `partial` */
/* The most of all kinds, before there are kernels. */
size_t kernels_attn_bytes_of(const struct device *d, const struct kernels_shape *s,
                             int32_t max_chunks);
/* The plan is for kernels of this kind. */
void kernels_attn_plan(const struct kernels *k, struct queue *q, attn_kind_t kind,
                       const struct attn_plan_args *a, bool programmatic);
void kernels_attn(const struct kernels *k, struct queue *q, attn_kind_t kind,
                  const struct attn_args *a, bool programmatic);

/* Whether there is such a kernel for so many tokens, each of at most max_chunks whole or begun
 * chunks, and the chip has room for all its blocks at once. */
bool kernels_attn_is_few(const struct kernels *k, int32_t tokens, int32_t max_chunks);
void kernels_attn_few(const struct kernels *k, struct queue *q, const struct attn_few_args *a,
                      int32_t tokens, int32_t max_chunks, bool programmatic);

/*
 * Decode of sequences that share their first pages: the chunks that lie wholly in the shared part
 * are read once for up to kernels_attn_tokens(ATTN_PREFILL) sequences, whose tokens must be
 * neighbours in the step.  Blocks here: those tokens, any of their sequences, and `prefix`; then
 * each token's own ATTN_DECODE block with the same `prefix`, which goes on from `state`.  Same bits
 * as without.  For ATTN_PREFILL blocks `prefix` must be 0.
 */
bool kernels_attn_shares(const struct kernels *k); /* whether there is a kernel for this shape */
void kernels_attn_prefix_plan(const struct kernels *k, struct queue *q,
                              const struct attn_plan_args *a, bool programmatic);
void kernels_attn_prefix(const struct kernels *k, struct queue *q, const struct attn_args *a,
                         bool programmatic);

/* Three kernels. */
void kernels_sample(const struct kernels *k, struct queue *q, const struct sample_args *a,
                    int32_t rows, bool programmatic);
#endif

#endif
