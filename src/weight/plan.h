/*
 * plan.h - a checkpoint held against the slots of a model, before a byte of weights is read.
 *
 *     struct plan p;
 *     if (plan_open(&p, dir, specs, n, e) != OK) ...   // opens, finds, validates
 *     if (plan_formats(&p, specs, e) != OK) ...        // start: slots take the checkpoint's formats
 *     if (plan_encode(&p, specs, FORMAT_NVFP4, accept, e) != OK) ...   // or of --quantization
 *     if (plan_check(&p, specs, e) != OK) ...          // update: formats are as resident
 *     plan_close(&p);
 *     if (plan_open_part(&p, files, n_files, specs, n, e) != OK) ...   // instead of plan_open
 *
 * plan_open refuses, by name: a tensor that is missing, unknown, of a wrong shape or dtype, without
 * its scale; more experts than the model's; a module whose storage contradicts the quantization
 * config (quant_config.h).
 */
#ifndef WEIGHT_PLAN_H
#define WEIGHT_PLAN_H

#include "weight/quant_config.h"
#include "weight/spelling.h"
#include "weight/store.h"

struct planned {
    bool found;            /* false: an earlier slot has this name, or it is optional and absent */
    struct spelled weight; /* matrices and plain slots */
    struct source kv[2];   /* f32 slots */
};

struct plan {
    struct checkpoint checkpoint;
    struct quant_config *config; /* NULL: nothing is said */
    size_t n;
    struct planned *slots;
    uint64_t bytes; /* of all parts, as stored */
};

err_t plan_open(struct plan *p, const char *dir, const struct slot_spec *specs, size_t n,
                struct err *e) MUST_USE;
/* Part of a checkpoint: the tensors of files in memory (borrowed), whatever slots they fill; the
 * others are not `found`.  Refused too: no tensor at all, and part of a run of slots that are encoded
 * with one amax (store.h), since the rest of it is not there to be encoded anew. */
err_t plan_open_part(struct plan *p, const struct st_file *files, size_t n_files,
                     const struct slot_spec *specs, size_t n, struct err *e) MUST_USE;
void plan_close(struct plan *p);

/* Sets shape.format of every matrix.  ERR_UNSUPPORTED: quantized where only BF16 can be. */
err_t plan_formats(const struct plan *p, struct slot_spec *specs, struct err *e) MUST_USE;
/* After plan_formats: every `linear` slot will be encoded to `format`, if the checkpoint is BF16 all
 * through.  A quantized one is ERR_INPUT if it has a format outside `accept` (bits 1 << format_t);
 * nothing is encoded then. */
err_t plan_encode(const struct plan *p, struct slot_spec *specs, format_t format, unsigned accept,
                  struct err *e) MUST_USE;
/* ERR_STATE with the first module whose format is neither the slot's nor to be encoded:
 * "model.layers.0.self_attn.q_proj: fp8-block -> bf16".  A checkpoint that is quantized anywhere is
 * taken as it is. */
err_t plan_check(const struct plan *p, const struct slot_spec *specs, struct err *e) MUST_USE;

/* ERR_INPUT with the names of slots that are not in `have` ("missing tensors: a, b and 3 more"). */
err_t plan_missing(const struct slot_spec *specs, size_t n, const bool *have,
                   struct err *e) MUST_USE;

#endif
