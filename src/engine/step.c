/* step.c - the step loop's turn: admit, plan, submit the next step, collect the last one, hand out
 * what came of it. */
#include "engine/internal.h"

#include "base/clock.h"
#include "base/log.h"
#include "engine/constrain.h"
#include <stdio.h>
#include <unistd.h>

/* Returns false if the sequence ended. */
static bool take_row(struct engine *e, struct seq *q, const struct sample_output *o,
                     int32_t score_pos)
{
    char text[256];
    if (!o->finite) {
        pthread_mutex_lock(&e->lock);
        snprintf(text, sizeof(text), "the model gave non-finite logits under weight version %s",
                 e->weight_version);
        pthread_mutex_unlock(&e->lock);
        engine_finish(e, q, FINISH_ABORT, 500, text);
        return false;
    }
    if (o->no_memory) {
        engine_finish(e, q, FINISH_ABORT, 503, "out of memory");
        return false;
    }
    if (score_pos >= 0) {
        if (output_score(q, score_pos, o)) return true;
        engine_finish(e, q, FINISH_ABORT, 503, "out of memory");
        return false;
    }
    pthread_mutex_lock(&q->r->lock);
    if (q->r->n_output == 0) q->r->t_first = clock_ns();
    pthread_mutex_unlock(&q->r->lock);
    finish_t f = FINISH_ABORT; /* without memory */
    if (output_version(q, store_epoch(e->o.store) + e->labels, e->weight_version))
        f = output_token(q, o, e->o.config);
    q->drew = true;
    q->ahead--;
    e->output_tokens++;
    e->window_tokens++;
    if (f == FINISH_NONE) return true;
    snprintf(text, sizeof(text), "%s", q->stop_error[0] ? q->stop_error : "out of memory");
    engine_finish(e, q, f, f != FINISH_ABORT ? 0 : q->stop_error[0] ? 400 : 503, text);
    return false;
}

/* Experts of a sequence's tokens in the step, of which `token` is the first: beside their K and V,
 * and counted. */
static void keep_experts(struct engine *e, const struct flight *f, const struct seq *q,
                         int32_t token, int32_t n)
{
    size_t row = (size_t)e->o.config->n_layers * (size_t)e->o.config->top_k;
    if (!f->st.experts) return;
    bool count = expert_load_wanted(&e->load);
    for (int32_t t = token; t < token + n; t++) {
        const int16_t *ids = f->st.experts + (size_t)t * row;
        if (e->routing) routing_put(e->routing, q->pages, f->pos[t], ids);
        if (count) expert_load_count(&e->load, e->o.config, ids);
    }
}

/* One sequence's part of a collected step, from its first token and row on. */
static void hand_to(struct engine *e, const struct flight *f, const struct place *p, int32_t token,
                    int32_t row)
{
    struct seq *q = p->q;
    int32_t before = q->r->n_output;
    bool first = q->ready < q->n_prompt, finite = true, alive = true;
    keep_experts(e, f, q, token, p->n_tokens);
    q->ready += p->n_tokens;
    e->prompt_tokens += first ? p->n_tokens : 0;
    if (first) {
        pthread_mutex_lock(&q->r->lock);
        if (before == 0) q->r->n_chunks++;
        if (q->ready >= q->n_prompt && q->r->logprob_start >= 0 && q->next_score >= q->n_prompt)
            q->r->prompt_done = true; /* nothing to score; else output_score sets it */
        pthread_mutex_unlock(&q->r->lock);
    }
    for (int32_t i = row; i < row + p->n_rows; i++)
        finite = finite && f->out[i].finite;
    if (first && finite) sched_share(&e->s, q);
    for (int32_t i = row; i < row + p->n_rows && alive; i++)
        alive = take_row(e, q, &f->out[i], f->row_pos[i]);
    if (!alive) return;
    if (q->max_new == 0 && q->ready >= q->n_prompt)
        engine_finish(e, q, FINISH_LENGTH, 0, NULL);
    else if (q->r->n_output > before && q->r->notify)
        q->r->notify(q->r->ctx);
}

static void hand_out(struct engine *e, const struct flight *f)
{
    for (int32_t s = 0, token = 0, row = 0; s < f->st.n_seqs; s++) {
        struct place p = f->places[s];
        if (p.q) hand_to(e, f, &p, token, row);
        token += p.n_tokens;
        row += p.n_rows;
    }
}

/* Ends the step's requests.  Without a device nothing can go on: all are answered, the process
 * ends. */
static void step_failed(struct engine *e, const struct flight *f, err_t rc, const struct err *why)
{
    log_line(LOG_ERROR, "a step failed: %s", why->msg);
    for (int32_t i = 0; i < f->st.n_seqs; i++)
        if (f->places[i].q)
            engine_finish(e, f->places[i].q, FINISH_ABORT, rc == ERR_NOMEM ? 503 : 500, why->msg);
    if (rc == ERR_NOMEM) return;
    engine_abort_where(e, NULL, NULL);
    usleep(200 * 1000); /* the server's time to send the answers */
    _exit(70);
}

/* Wait for a step and hand out what came of it; another may be in flight behind it. */
static void land(struct engine *e, struct flight *f)
{
    struct err err = {0};
    int64_t drawn = e->output_tokens;
    err_t rc = model_collect(e->o.model, &f->st, &err);
    atomic_store(&e->step_began, e->flying ? clock_ns() : 0);
    if (rc == OK)
        hand_out(e, f);
    else
        step_failed(e, f, rc, &err);
    flight_free_rows(f);
    if (f->record.begin < e->landed) f->record.begin = e->landed; /* before that it waited */
    f->record.end = e->landed = clock_ns();
    f->record.output_tokens = (int32_t)(e->output_tokens - drawn);
    f->record.prompt_tokens = f->st.n_tokens - f->decodes;
    profile_step(&e->profile, &f->record);
}

void step_drain(struct engine *e)
{
    struct flight *f = e->flying;
    e->flying = NULL;
    if (f) land(e, f);
}

/* Submit it, and collect the one before. */
static void take_off(struct engine *e, struct flight *next)
{
    struct flight *last = e->flying;
    next->record = (struct profile_record){.begin = clock_ns(),
                                           .running = e->s.n_running,
                                           .waiting = e->s.n_waiting,
                                           .pages_free = pages_available(e->s.pages)};
    if (!last) atomic_store(&e->step_began, next->record.begin);
    model_submit(e->o.model, &next->st);
    e->flying = next;
    if (last)
        land(e, last);
    else if (!e->overlap)
        step_drain(e);
}

/*
 * Whether a step may be made behind the one in flight.  It is the host that makes a row's list of
 * barred ids and counts the output for penalties, so a request that has a grammar, or a penalty,
 * and whose next id is being drawn makes the next step wait for it.  All else that an id decides
 * (stops, text, logprobs) is looked at a step later.
 */
static bool may_follow(const struct engine *e)
{
    if (!e->flying) return true;
    for (int32_t i = 0; i < e->s.n_running; i++) {
        const struct seq *q = e->s.running[i];
        if (q->ahead > 0 && seq_todo(q) > 0 && (q->r->grammar || sample_has_penalty(&q->r->sp)))
            return false;
    }
    return e->s.n_running > 0;
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

/* Masks of those that may draw a token in this step; who has none ends. */
static void constrain_all(struct engine *e)
{
    for (int32_t i = e->s.n_running - 1; i >= 0; i--) {
        struct seq *q = e->s.running[i];
        struct err err = {0};
        if (constrain_step(q, e->o.config, &err) != OK)
            engine_finish(e, q, FINISH_ABORT, err_http(err.code), err.msg);
    }
}

/* Tests: one is retracted at every n-th step. */
static bool retract_now(const struct engine *e)
{
    return e->o.retract_every > 0 && (e->steps + 1) % e->o.retract_every == 0;
}

bool step_run(struct engine *e)
{
    struct sched *s = &e->s;
    struct flight *f = e->flying == &e->flights[0] ? &e->flights[1] : &e->flights[0];
    if (retract_now(e) || !may_follow(e)) step_drain(e);
    if (!admit(e)) return false;
    if (s->n_running == 0) return true;
    if (retract_now(e)) {
        sched_retract(s, sched_youngest(s));
        (void)admit(e);
        if (s->n_running == 0) return true;
    }
    constrain_all(e);
    if (s->n_running == 0) return true;
    if (!flight_reserve(f, s)) {
        engine_finish(e, sched_youngest(s), FINISH_ABORT, 503, "out of memory");
        return true;
    }
    int32_t planned = sched_plan(s, !e->flying);
    end_without_memory(e);
    if (planned <= 0) { /* the next turn plans again, and may retract */
        step_drain(e);
        return true;
    }
    flight_begin(f, e->routing || expert_load_wanted(&e->load));
    for (int32_t i = 0; i < s->n_running; i++)
        if (s->running[i]->plan > 0) flight_add(f, s->running[i]);
    e->steps++;
    take_off(e, f);
    return true;
}
