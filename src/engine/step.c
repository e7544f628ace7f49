/* step.c - one step: plan, lay out the batch, run it, hand out what came of it. */
#include "engine/internal.h"

#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include <stdio.h>
#include <unistd.h>

err_t step_buffers(struct engine *e, struct err *err)
{
    size_t n = (size_t)e->o.max_step_tokens, r = (size_t)e->o.max_running;
    e->ids = mem_try_array(n, sizeof(*e->ids));
    e->pos = mem_try_array(n, sizeof(*e->pos));
    e->seq_of = mem_try_array(n, sizeof(*e->seq_of));
    e->rows = mem_try_array(n, sizeof(*e->rows));
    e->in = mem_try_array(n, sizeof(*e->in));
    e->out = mem_try_array(n, sizeof(*e->out));
    e->row_pos = mem_try_array(n, sizeof(*e->row_pos));
    e->seqs = mem_try_array(r, sizeof(*e->seqs));
    e->planned = mem_try_array(r, sizeof(*e->planned));
    e->cap_barred = 64;
    e->barred = mem_try_array(64, sizeof(*e->barred));
    if (!e->barred || !e->ids || !e->pos || !e->seq_of || !e->rows || !e->in || !e->out ||
        !e->row_pos || !e->seqs || !e->planned)
        return err_set(err, ERR_NOMEM, "no memory for steps of %zu tokens", n);
    return OK;
}

void step_release(struct engine *e)
{
    mem_free(e->ids);
    mem_free(e->pos);
    mem_free(e->seq_of);
    mem_free(e->rows);
    mem_free(e->in);
    mem_free(e->out);
    mem_free(e->row_pos);
    mem_free(e->seqs);
    mem_free(e->planned);
    mem_free(e->barred);
}

/* Room for the barred lists of all planned sequences, before any pointer into it is taken. */
static bool reserve_barred(struct engine *e)
{
    int64_t want = 0;
    for (int32_t i = 0; i < e->s.n_running; i++)
        want += e->o.config->n_eos + e->s.running[i]->r->n_stop_ids;
    if (want <= e->cap_barred) return true;
    mem_free(e->barred);
    e->cap_barred = 0;
    e->barred = mem_try_array((size_t)want * 2, sizeof(int32_t));
    if (e->barred) e->cap_barred = (int32_t)(want * 2);
    return e->barred != NULL;
}

static void add_row(struct engine *e, struct step *st, int32_t token, struct sample_input in,
                    int32_t score_pos)
{
    int32_t i = st->n_rows++;
    e->in[i] = in;
    e->rows[i] = (struct step_row){token, &e->in[i], &e->out[i]};
    e->row_pos[i] = score_pos;
}

static void lay_out(struct engine *e, struct step *st, struct seq *q, int32_t *n_barred)
{
    struct request *r = q->r;
    int32_t s = st->n_seqs++;
    e->planned[s] = q;
    e->seqs[s] = (struct step_seq){q->pages, q->n_pages};
    for (int32_t i = 0; i < q->plan; i++) {
        int32_t p = q->computed + i, t = st->n_tokens++;
        e->ids[t] = q->ids[p];
        e->pos[t] = p;
        e->seq_of[t] = s;
        if (p + 1 < q->n_prompt && p + 1 >= q->next_score) {
            add_row(e, st, t, (struct sample_input){.target = q->ids[p + 1], .n_top = r->n_top},
                    p + 1);
        } else if (p + 1 == q->n_ids && q->max_new > 0) {
            struct sample_input in = {.target = -1,
                                      .n_top = r->want_logprobs ? r->n_top : 0,
                                      .params = &r->sp,
                                      .output_ids = r->output_ids,
                                      .n_output = r->n_output,
                                      .position = (uint64_t)q->n_ids,
                                      .barred = e->barred + *n_barred};
            in.n_barred = output_barred(q, e->o.config, e->barred + *n_barred);
            *n_barred += in.n_barred;
            add_row(e, st, t, in, -1);
        }
    }
}

/* Returns false if the sequence ended. */
static bool take_row(struct engine *e, struct seq *q, int32_t row)
{
    const struct sample_output *o = &e->out[row];
    char text[256];
    if (!o->finite) {
        pthread_mutex_lock(&e->lock);
        snprintf(text, sizeof(text), "the model gave non-finite logits under weight version %s",
                 e->weight_version);
        pthread_mutex_unlock(&e->lock);
        engine_finish(e, q, FINISH_ABORT, 500, text);
        return false;
    }
    if (e->row_pos[row] >= 0) {
        if (output_score(q, e->row_pos[row], o)) return true;
        engine_finish(e, q, FINISH_ABORT, 503, "out of memory");
        return false;
    }
    pthread_mutex_lock(&q->r->lock);
    if (q->r->n_output == 0) q->r->t_first = clock_ns();
    pthread_mutex_unlock(&q->r->lock);
    finish_t f = FINISH_ABORT; /* without memory */
    if (output_version(q, store_epoch(e->o.store) + e->labels, e->weight_version)) f = output_token(q, o, e->o.config);
    q->drew = true;
    e->output_tokens++;
    e->window_tokens++;
    if (f == FINISH_NONE) return true;
    engine_finish(e, q, f, f == FINISH_ABORT ? 503 : 0, "out of memory");
    return false;
}

static void hand_out(struct engine *e, const struct step *st)
{
    int32_t row = 0;
    for (int32_t s = 0; s < st->n_seqs; s++) {
        struct seq *q = e->planned[s];
        int32_t before = q->r->n_output;
        bool first = q->computed < q->n_prompt;
        q->computed += q->plan;
        e->prompt_tokens += first ? q->plan : 0;
        if (first) {
            pthread_mutex_lock(&q->r->lock);
            if (before == 0) q->r->n_chunks++;
            if (q->computed >= q->n_prompt && q->r->logprob_start >= 0 &&
                q->next_score >= q->n_prompt)
                q->r->prompt_done = true; /* nothing to score; else output_score sets it */
            pthread_mutex_unlock(&q->r->lock);
        }
        bool finite = true, alive = true;
        int32_t end = row;
        for (; end < st->n_rows && e->seq_of[e->rows[end].token] == s; end++)
            finite = finite && e->out[end].finite;
        if (first && finite) sched_share(&e->s, q);
        for (; row < end && alive; row++)
            alive = take_row(e, q, row);
        row = end;
        if (!alive) continue;
        if (q->max_new == 0 && q->computed >= q->n_prompt)
            engine_finish(e, q, FINISH_LENGTH, 0, NULL);
        else if (q->r->n_output > before && q->r->notify)
            q->r->notify(q->r->ctx);
    }
}

/* Ends the step's requests.  Without a device nothing can go on: all are answered, the process
 * ends. */
static void step_failed(struct engine *e, const struct step *st, err_t rc, const struct err *why)
{
    log_line(LOG_ERROR, "a step failed: %s", why->msg);
    for (int32_t i = 0; i < st->n_seqs; i++)
        engine_finish(e, e->planned[i], FINISH_ABORT, rc == ERR_NOMEM ? 503 : 500, why->msg);
    if (rc == ERR_NOMEM) return;
    engine_abort_where(e, NULL, NULL);
    usleep(200 * 1000); /* the server's time to send the answers */
    _exit(70);
}

/* Alone in an empty pool every sequence is admitted, unless memory for its page table is missing.
 */
static bool admit(struct engine *e)
{
    struct sched *s = &e->s;
    s->draining = e->commit != NULL;
    sched_admit(s, store_epoch(e->o.store));
    if (s->n_running > 0) return true;
    struct seq *q = sched_first(s);
    if (q) engine_finish(e, q, FINISH_ABORT, 503, "out of memory");
    return q != NULL;
}

static void end_without_memory(struct engine *e)
{
    for (int32_t i = e->s.n_running - 1; i >= 0; i--)
        if (e->s.running[i]->no_memory)
            engine_finish(e, e->s.running[i], FINISH_ABORT, 503, "out of memory");
}

bool step_run(struct engine *e)
{
    struct sched *s = &e->s;
    if (!admit(e)) return false;
    if (s->n_running == 0) return true;
    if (e->o.retract_every > 0 && (e->steps + 1) % e->o.retract_every == 0) {
        sched_retract(s, sched_youngest(s));
        (void)admit(e);
        if (s->n_running == 0) return true;
    }
    if (!reserve_barred(e)) {
        engine_finish(e, sched_youngest(s), FINISH_ABORT, 503, "out of memory");
        return true;
    }
    struct step st = {
        .ids = e->ids, .pos = e->pos, .seq = e->seq_of, .seqs = e->seqs, .rows = e->rows};
    int32_t n_barred = 0;
    e->steps++;
    int32_t planned = sched_plan(s);
    end_without_memory(e);
    if (planned == 0) return true;
    for (int32_t i = 0; i < s->n_running; i++)
        if (s->running[i]->plan > 0) lay_out(e, &st, s->running[i], &n_barred);
    atomic_store(&e->step_began, clock_ns());
    model_submit(e->o.model, &st);
    struct err err = {0};
    err_t rc = model_collect(e->o.model, &st, &err);
    atomic_store(&e->step_began, 0);
    if (rc == OK)
        hand_out(e, &st);
    else
        step_failed(e, &st, rc, &err);
    return true;
}
