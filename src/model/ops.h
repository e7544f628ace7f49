/*
 * ops.h - what a kind of model does for model.h: the CPU's (cpu_model.c) or the GPU's (cuda/).
 *
 * Either one's struct begins with a struct model, whose table leads to it.
 */
#ifndef MODEL_OPS_H
#define MODEL_OPS_H

#include "model/model.h"

struct model {
    const struct model_ops *ops;
};

struct model_ops {
    void (*free)(struct model *m);
    const char *(*isa)(const struct model *m);
    unsigned (*can)(const struct model *m);
    err_t (*set_numerics)(struct model *m, act_t act, bool routed, struct err *e);
    err_t (*check_update)(const struct model *m, const struct update *u, struct err *e);
    void (*kv_clear)(struct model *m, int32_t page);
    err_t (*kv_release)(struct model *m, struct err *e);
    err_t (*kv_resume)(struct model *m, struct err *e);
    void (*submit)(struct model *m, const struct step *st);
    err_t (*collect)(struct model *m, const struct step *st, struct err *e);
    err_t (*logits)(struct model *m, const struct step *st, const int32_t *tokens, int32_t n,
                    float *logits, struct err *e);
    void (*break_invariance)(struct model *m);
};

/* check_update for any kind of model: OK unless `act` takes the checkpoint's input scales and matrices
 * that read the same rows (numerics.c) have none. */
err_t numerics_check_inputs(const struct config *c, const struct store *s, const struct update *u,
                            act_t act, struct err *e) MUST_USE;

#endif
