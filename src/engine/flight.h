/*
 * flight.h - a step from its layout until it is collected: the batch, who is in it, what comes of
 * it.
 *
 *     flight_new(&f, options, e);
 *     flight_reserve(&f, sched); flight_begin(&f, experts);
 *     flight_add(&f, q);                         // of each sequence with a plan
 *     model_submit(m, &f.st); ...; model_collect(m, &f.st, e);
 *     for (s ...) f.places[s]                    // its rows and tokens lie one after the other
 *
 * The engine has two: the next step is laid out and submitted while the last one computes.  By
 * flight_add a sequence moves on (`computed`, `ahead`), so it can be planned again before its token
 * is known: the input id is then given as the row that draws it.
 *
 * A sequence that ends while a step is in flight leaves it (flight_leave): what the step computes
 * of it, one token too many, is dropped.  Its pages go back at once: whatever is done with them
 * comes after that step (model.h).
 */
#ifndef ENGINE_FLIGHT_H
#define ENGINE_FLIGHT_H

#include "engine/engine.h"
#include "engine/profile.h"
#include "engine/sched.h"

struct place {
    struct seq *q; /* NULL: it has left */
    int32_t n_tokens, n_rows;
};

struct flight {
    struct step st;
    struct place *places; /* [max_running]: the first st.n_seqs */
    /* [max_step_tokens] */
    int32_t *ids, *pos, *seq_of;
    const int16_t **forced;
    int16_t *experts; /* [max_step_tokens][layers][top_k]; NULL: the model does not tell */
    struct step_row *rows;
    struct sample_input *in;
    struct sample_output *out;
    int32_t *row_pos;      /* prompt position that the row scores; -1: it samples */
    struct step_seq *seqs; /* [max_running] */
    int32_t *barred;       /* of all rows; grows */
    int32_t n_barred, cap_barred;
    int32_t decodes; /* sequences past their prompt */
    struct profile_record record;
    const struct config *c;
};

err_t flight_new(struct flight *f, const struct engine_options *o, struct err *e) MUST_USE;
void flight_free(struct flight *f);
/* Room for the barred ids of all that run, before any is added; false: out of memory. */
bool flight_reserve(struct flight *f, const struct sched *s);
void flight_begin(struct flight *f, bool experts);
void flight_add(struct flight *f, struct seq *q);
void flight_leave(struct seq *q);
/* What the rows' outputs own. */
void flight_free_rows(struct flight *f);

#endif
