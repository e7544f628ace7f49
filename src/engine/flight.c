#include "engine/flight.h"

#include "base/mem.h"
#include "engine/constrain.h"
#include "engine/output.h"

static size_t experts_row(const struct config *c)
{
    return (size_t)c->n_layers * (size_t)c->top_k;
}

err_t flight_new(struct flight *f, const struct engine_options *o, struct err *e)
{
    size_t n = (size_t)o->max_step_tokens, r = (size_t)o->max_running;
    bool tells = (model_can(o->model) & MODEL_EXPERTS) != 0;
    f->c = o->config;
    f->ids = mem_try_array(n, sizeof(*f->ids));
    f->pos = mem_try_array(n, sizeof(*f->pos));
    f->seq_of = mem_try_array(n, sizeof(*f->seq_of));
    f->rows = mem_try_array(n, sizeof(*f->rows));
    f->in = mem_try_array(n, sizeof(*f->in));
    f->out = mem_try_array(n, sizeof(*f->out));
    if (tells) f->experts = mem_try_array(n, experts_row(f->c) * sizeof(*f->experts));
    f->forced = mem_try_array(n, sizeof(*f->forced));
    f->row_pos = mem_try_array(n, sizeof(*f->row_pos));
    f->seqs = mem_try_array(r, sizeof(*f->seqs));
    f->places = mem_try_array(r, sizeof(*f->places));
    f->cap_barred = 64;
    f->barred = mem_try_array(64, sizeof(*f->barred));
    if (!f->barred || !f->ids || !f->pos || !f->seq_of || !f->rows || !f->in || !f->out ||
        !f->row_pos || !f->seqs || !f->places || !f->forced || (tells && !f->experts))
        return err_set(e, ERR_NOMEM, "no memory for steps of %zu tokens", n);
    return OK;
}

void flight_free(struct flight *f)
{
    mem_free(f->ids);
    mem_free(f->pos);
    mem_free(f->seq_of);
    mem_free(f->rows);
    mem_free(f->in);
    mem_free(f->out);
    mem_free(f->experts);
    mem_free(f->forced);
    mem_free(f->row_pos);
    mem_free(f->seqs);
    mem_free(f->places);
    mem_free(f->barred);
}

bool flight_reserve(struct flight *f, const struct sched *s)
{
    int64_t want = 0;
    for (int32_t i = 0; i < s->n_running; i++)
        want += f->c->n_eos + s->running[i]->r->n_stop_ids +
                (s->running[i]->mask ? f->c->vocab_size : 0);
    if (want <= f->cap_barred) return true;
    mem_free(f->barred);
    f->cap_barred = 0;
    f->barred = mem_try_array((size_t)want * 2, sizeof(int32_t));
    if (f->barred) f->cap_barred = (int32_t)(want * 2);
    return f->barred != NULL;
}

void flight_begin(struct flight *f, bool experts)
{
    f->st = (struct step){.ids = f->ids,
                          .pos = f->pos,
                          .seq = f->seq_of,
                          .seqs = f->seqs,
                          .rows = f->rows,
                          .experts = experts ? f->experts : NULL};
    f->n_barred = f->decodes = 0;
}

static void add_row(struct flight *f, int32_t token, struct sample_input in, int32_t score_pos)
{
    int32_t i = f->st.n_rows++;
    f->in[i] = in;
    f->out[i].of = NULL;
    f->out[i].kept = NULL;
    f->out[i].no_memory = false;
    f->rows[i] = (struct step_row){token, &f->in[i], &f->out[i]};
    f->row_pos[i] = score_pos;
}

/* The row that draws the next id.  With an id ahead the host does not know the last one: no part of
 * the row may depend on it (step.c, may_follow). */
static void add_draw(struct flight *f, struct seq *q, int32_t token)
{
    const struct request *r = q->r;
    struct sample_input in = {.target = -1,
                              .n_top = r->want_logprobs ? r->n_top : 0,
                              .n_of = r->n_of,
                              .of = r->of,
                              .want_kept = r->want_kept,
                              .params = &r->sp,
                              .output_ids = r->output_ids,
                              .n_output = r->n_output,
                              .position = (uint64_t)(q->n_ids + q->ahead),
                              .barred = f->barred + f->n_barred};
    in.n_barred = output_barred(q, f->c, f->barred + f->n_barred);
    in.n_barred += constrain_barred(q, f->c, f->barred + f->n_barred + in.n_barred);
    f->n_barred += in.n_barred;
    q->row = f->st.n_rows;
    add_row(f, token, in, -1);
    q->ahead++;
}

void flight_add(struct flight *f, struct seq *q)
{
    struct request *r = q->r;
    struct step *st = &f->st;
    int32_t s = st->n_seqs++, rows = st->n_rows, n_ids = q->n_ids + q->ahead;
    f->seqs[s] = (struct step_seq){q->pages, q->n_pages};
    f->decodes += q->computed >= q->n_prompt;
    for (int32_t i = 0; i < q->plan; i++) {
        int32_t p = q->computed + i, t = st->n_tokens++;
        f->ids[t] = p < q->n_ids ? q->ids[p] : ~q->row;
        f->pos[t] = p;
        f->seq_of[t] = s;
        f->forced[t] = p < r->n_forced ? r->forced + (size_t)p * experts_row(f->c) : NULL;
        if (f->forced[t]) st->forced = f->forced;
        if (p + 1 < q->n_prompt && p + 1 >= q->next_score)
            add_row(f, t,
                    (struct sample_input){
                        .target = q->ids[p + 1], .n_top = r->n_top, .n_of = r->n_of, .of = r->of},
                    p + 1);
        else if (p + 1 == n_ids && q->max_new > 0)
            add_draw(f, q, t);
    }
    q->computed += q->plan;
    q->flight = f;
    q->place = s;
    f->places[s] = (struct place){q, q->plan, st->n_rows - rows};
}

void flight_leave(struct seq *q)
{
    struct flight *f = q->flight;
    if (f && q->place < f->st.n_seqs && f->places[q->place].q == q) f->places[q->place].q = NULL;
}

void flight_free_rows(struct flight *f)
{
    for (int32_t i = 0; i < f->st.n_rows; i++) {
        mem_free(f->out[i].of);
        mem_free(f->out[i].kept);
    }
}
