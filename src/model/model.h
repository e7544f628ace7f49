/*
 * model.h - a model that runs steps.
 *
 * A step is a flat batch of tokens of several sequences.  The engine submits one and collects it;
 * on the CPU submit does the work, on a GPU it only queues it.
 *
 *     struct step st = {...};            // the caller keeps its arrays until it is collected
 *     model_submit(m, &st);              // what they point to (tables, inputs) is read here alone
 *     model_collect(m, &st, e);          // rows[i].out and experts are filled
 *
 * Two steps may be in flight: the next one may be submitted before the last one is collected, and
 * read ids that the last one draws (struct step, ids).  They run, and are collected, in the order
 * of their submission.  Pages are cleared in that order too, so a page that a step in flight uses
 * may be given to another sequence.
 *
 * What a token's results depend on: its own sequence's ids and positions, the weights, and for a
 * sampled row its spec and seed.  Nothing else: not the other tokens of the step, nor how the
 * sequence was cut into steps (test/unit/test_invariance.c).
 *
 * Numerics: DESIGN.md 4.  With -DMOULT_REFERENCE_F32 (make REF=1) every rounding to BF16 is left
 * out, KV included; that build exists for tests against float32 references.
 *
 * Sequences: before the step runs, the tokens' K and V are written to the pages of their sequence's
 * table: token at position p lies in page table[p / KV_PAGE], row p % KV_PAGE.  A token attends to
 * positions 0..p of its sequence; those before the step's own must be there already.
 */
#ifndef MODEL_MODEL_H
#define MODEL_MODEL_H

#include "backend/kv.h"
#include "base/err.h"
#include "base/pool.h"
#include "format/act.h"
#include "model/config.h"
#include "model/sample.h"
#include "weight/update.h"

#define KV_PAGE 16 /* tokens a page */

struct model;

struct step_seq {
    const int32_t *pages; /* block table: page ids, borrowed */
    int32_t n_pages;
};

/* A row asks for something computed from the logits after one token of the step. */
struct step_row {
    int32_t token;                 /* index into the step's tokens */
    const struct sample_input *in; /* what to do with the logits; see sample.h */
    struct sample_output *out;     /* filled at collect */
};

struct step {
    int32_t n_tokens;
    /* [n_tokens]; tokens of one sequence are in position order.  An id below 0: what row ~id of the
     * step submitted before this one draws. */
    const int32_t *ids, *pos, *seq;
    int32_t n_seqs;
    const struct step_seq *seqs;
    int32_t n_rows;
    const struct step_row *rows;
    /* Experts, [n_layers][top_k] a token; a dense layer has zeros. */
    int16_t *experts;             /* [n_tokens]: those that were chosen; NULL: not asked for */
    const int16_t *const *forced; /* [n_tokens]: those to take, weighed by the router's logits;
                                     NULL, or NULL of a token: the router chooses */
};

/* The slots of the model for the store; caller frees *specs with mem_free. */
err_t model_specs(const struct config *c, struct slot_spec **specs, size_t *n,
                  struct err *e) MUST_USE;

/* `store` must hold weights before the first submit; borrowed, as is `pool`.  `kv`: how K and V are
 * kept (backend/kv.h); E4M3 takes the scales of the checkpoint.  `isa`: NULL for the best of this
 * machine, or "portable", "avx2", "avx512", "neon" (ERR_UNSUPPORTED if the machine lacks it). */
err_t model_new(struct model **out, const struct config *c, struct store *s, struct pool *pool,
                int32_t n_kv_pages, kv_type_t kv, int32_t max_step_tokens, const char *isa,
                struct err *e) MUST_USE;
void model_free(struct model *m);
/* How the layers compute; a new model has {ACT_BF16, false}.  `act`: what the inputs of quantized
 * matrices are rounded to (format/act.h; BF16 matrices always read BF16).  `routed`: the experts'
 * ids and weights go through the packed form of the routed operator: the same bits.  ERR_INPUT if
 * ACT_NVFP4 lacks an input scale. */
err_t model_set_numerics(struct model *m, act_t act, bool routed, struct err *e) MUST_USE;
/* The same of a prepared update (NULL: of the resident weights): ERR_INPUT if committing it would
 * leave a scale missing.  Any thread. */
err_t model_check_update(const struct model *m, const struct update *u, struct err *e) MUST_USE;
/* What engines of the formats' native devices round activations to, by the most frequent format of
 * the quantized matrices: a name of format/act.h, or one that is not offered. */
const char *model_recipe(const struct store *s);
const char *model_isa(const struct model *m);
/* What a model of this kind does beyond tokens and logprobs. */
enum model_can {
    MODEL_EXPERTS = 1, /* fills step.experts */
    MODEL_FORCED = 2,  /* takes step.forced */
    MODEL_OF = 4,      /* sample_input.of */
    MODEL_KEPT = 8,    /* sample_input.want_kept */
    MODEL_ASYNC = 16,  /* computes a step beside its caller: submit returns at once */
};
unsigned model_can(const struct model *m);

size_t model_kv_page_bytes(const struct config *c, kv_type_t kv); /* K and V of all layers */
/* Zero a page before a new owner writes it (determinism: nothing of a former owner is read). */
void model_kv_clear(struct model *m, int32_t page);

/* The pages' memory back to the system, and memory for them again, of undefined content.  No step is in flight and
 * nobody has a page; none may be taken in between. */
err_t model_kv_release(struct model *m, struct err *e) MUST_USE;
err_t model_kv_resume(struct model *m, struct err *e) MUST_USE;

void model_submit(struct model *m, const struct step *st);
/* Of the oldest step in flight.  ERR_NOMEM: it failed, the model goes on; what a step after it read of its rows is
 * undefined.  Otherwise the device is lost, for good. */
err_t model_collect(struct model *m, const struct step *st, struct err *e) MUST_USE;

/* For tests: let attention's KV chunks start at the step's first token of a sequence instead of at
 * absolute positions, so that a test of invariance can show that it would notice. */
void model_break_invariance(struct model *m);

/* For tests: logits [n][vocab] f32 of the given step tokens, with the same arithmetic. */
err_t model_logits(struct model *m, const struct step *st, const int32_t *tokens, int32_t n,
                   float *logits, struct err *e) MUST_USE;

#endif
