#include "engine/output.h"

#include "base/mem.h"
#include <stdio.h>
#include <string.h>

/* failure[i]: length of the longest proper border of the first i + 1 bytes. */
static void failure_links(int32_t *failure, const char *s, size_t n)
{
    failure[0] = 0;
    int32_t k = 0;
    for (size_t i = 1; i < n; i++) {
        while (k > 0 && s[i] != s[k])
            k = failure[k - 1];
        if (s[i] == s[k]) k++;
        failure[i] = k;
    }
}

bool output_init(struct seq *q, const struct tokenizer *tok)
{
    struct request *r = q->r;
    detok_init(&r->detok, tok, r->skip_special);
    if (!tok || r->n_stops <= 0) return true;
    size_t total = 0;
    for (int32_t i = 0; i < r->n_stops; i++)
        if (!add_size(&total, total, r->stop_bytes[i]) || total > INT32_MAX) return false;
    q->fail = mem_try_array(total, sizeof(int32_t));
    q->fail_at = mem_try_array((size_t)r->n_stops, sizeof(int32_t));
    q->stop_state = mem_try_array((size_t)r->n_stops, sizeof(int32_t));
    if (!q->fail || !q->fail_at || !q->stop_state) return false;
    int32_t at = 0;
    for (int32_t i = 0; i < r->n_stops; i++) {
        q->fail_at[i] = at;
        failure_links(q->fail + at, r->stops[i], r->stop_bytes[i]);
        at += (int32_t)r->stop_bytes[i];
    }
    return true;
}

void output_release(struct seq *q)
{
    mem_free(q->fail);
    mem_free(q->fail_at);
    mem_free(q->stop_state);
}

/* Feed one byte to automaton i; true if it completes the stop. */
static bool feed(struct seq *q, int32_t i, char c)
{
    const char *s = q->r->stops[i];
    const int32_t *fail = q->fail + q->fail_at[i];
    int32_t k = q->stop_state[i];
    while (k > 0 && s[k] != c)
        k = fail[k - 1];
    if (s[k] == c) k++;
    q->stop_state[i] = k;
    return (size_t)k == q->r->stop_bytes[i];
}

/* Run the automata over the new text.  Returns the stop that matched, or -1; *end is where it ends.
 */
static int32_t scan_stops(struct seq *q, size_t *end)
{
    struct request *r = q->r;
    for (; q->fed < r->text.len; q->fed++) {
        int32_t hit = -1;
        for (int32_t i = 0; i < r->n_stops; i++)
            if (feed(q, i, r->text.data[q->fed]) &&
                (hit < 0 || r->stop_bytes[i] > r->stop_bytes[hit]))
                hit = i;
        if (hit >= 0) {
            *end = q->fed + 1;
            return hit;
        }
    }
    return -1;
}

static size_t held_back(const struct seq *q)
{
    int32_t most = 0;
    for (int32_t i = 0; q->stop_state && i < q->r->n_stops; i++)
        if (q->stop_state[i] > most) most = q->stop_state[i];
    return (size_t)most;
}

/* Patterns over the text so far.  Returns the one that was found, the first in the text, or -1; *at is
 * where it begins. */
static int32_t scan_patterns(struct seq *q, size_t *at)
{
    struct request *r = q->r;
    int32_t hit = -1;
    size_t begin, first = r->text.len;
    const char *text = r->text.data ? r->text.data : "";
    if (r->text.len == q->searched) return -1;
    q->searched = r->text.len;
    for (int32_t i = 0; i < r->n_regexes; i++) {
        struct err e = {0};
        stop_regex_t got = stop_regex_search(r->regexes[i], text, r->text.len, &begin, &e);
        if (got == STOP_REGEX_FAILED) {
            snprintf(q->stop_error, sizeof(q->stop_error), "%.150s", e.msg);
            return -1;
        }
        if (got == STOP_REGEX_FOUND && (hit < 0 || begin < *at)) {
            hit = i;
            *at = begin;
        }
        if (begin < first) first = begin;
    }
    q->pattern_at = first;
    return hit;
}

static bool grow(void **p, int32_t n, size_t elem)
{
    bool full = n == 0 || (n >= 16 && (n & (n - 1)) == 0);
    if (!full) return true;
    size_t cap = n == 0 ? 16 : (size_t)n * 2;
    void *q = mem_retry(*p, (size_t)n * elem, cap * elem);
    if (!q) return false;
    *p = q;
    return true;
}

static bool top_fill(struct top_row *t, const struct sample_output *o)
{
    *t = (struct top_row){0};
    if (o->n_top <= 0) return true;
    size_t n = (size_t)o->n_top;
    int32_t *ids = mem_try_array(n, sizeof(int32_t));
    float *lp = mem_try_array(n, sizeof(float));
    if (!ids || !lp) {
        mem_free(ids);
        mem_free(lp);
        return false;
    }
    memcpy(ids, o->top_ids, n * sizeof(int32_t));
    memcpy(lp, o->top_logprobs, n * sizeof(float));
    *t = (struct top_row){o->n_top, ids, lp};
    return true;
}

static bool append_kept(struct request *r, const struct sample_output *o)
{
    int32_t end;
    if (!buf_put(&r->kept, o->kept, (size_t)o->n_kept * sizeof(*o->kept))) return false;
    if (r->kept.len / sizeof(*o->kept) > INT32_MAX) return false;
    end = (int32_t)(r->kept.len / sizeof(*o->kept));
    return buf_put(&r->kept_ends, &end, sizeof(end));
}

/* What is optional at each position. */
static bool append_extras(struct request *r, const struct sample_output *o)
{
    size_t n_of = (size_t)r->n_of;
    if (r->n_top > 0) {
        if (!grow((void **)&r->output_top, r->n_output, sizeof(struct top_row)) ||
            !top_fill(&r->output_top[r->n_output], o))
            return false;
    }
    if (n_of > 0) {
        if (!grow((void **)&r->output_of, r->n_output, n_of * sizeof(float))) return false;
        memcpy(r->output_of + (size_t)r->n_output * n_of, o->of, n_of * sizeof(float));
    }
    return !r->want_kept || append_kept(r, o);
}

static bool append_id(struct seq *q, const struct sample_output *o)
{
    struct request *r = q->r;
    if (q->n_ids == q->cap_ids) {
        int32_t cap = q->cap_ids + q->cap_ids / 2 + 64;
        int32_t *p = mem_retry(q->ids, (size_t)q->cap_ids * sizeof(*p), (size_t)cap * sizeof(*p));
        if (!p) return false;
        q->ids = p;
        q->cap_ids = cap;
    }
    if (!grow((void **)&r->output_ids, r->n_output, sizeof(int32_t)) ||
        !grow((void **)&r->output_logprobs, r->n_output, sizeof(float)))
        return false;
    if (!append_extras(r, o)) return false;
    q->ids[q->n_ids++] = o->id;
    r->output_ids[r->n_output] = o->id;
    r->output_logprobs[r->n_output++] = o->logprob;
    if (r->n_spans > 0) r->spans[r->n_spans - 1].n++;
    return true;
}

bool output_version(struct seq *q, uint64_t id, const char *version)
{
    struct request *r = q->r;
    int32_t n = r->n_spans; /* only this thread writes it */
    bool ok = true;
    pthread_mutex_lock(&r->lock);
    if (n == 0 || r->spans[n - 1].id != id) {
        struct version_span *p =
            mem_retry(r->spans, (size_t)n * sizeof(*p), (size_t)(n + 1) * sizeof(*p));
        if ((ok = p != NULL)) {
            p[n] = (struct version_span){.id = id};
            snprintf(p[n].version, sizeof(p[n].version), "%s", version);
            r->spans = p;
            r->n_spans++;
        }
    }
    pthread_mutex_unlock(&r->lock);
    return ok;
}

static bool holds(const int32_t *ids, int32_t n, int32_t id)
{
    for (int32_t i = 0; i < n; i++)
        if (ids[i] == id) return true;
    return false;
}

static finish_t append_text(struct seq *q, int32_t id, bool stop_id)
{
    struct request *r = q->r;
    size_t end;
    if (!r->detok.tok || (stop_id && !r->no_stop_trim)) return FINISH_NONE;
    if (!detok_push(&r->detok, id, &r->text)) return FINISH_ABORT;
    int32_t hit = q->stop_state ? scan_stops(q, &end) : -1;
    if (hit >= 0) {
        end -= r->stop_bytes[hit];
    } else if (r->n_regexes > 0) {
        hit = scan_patterns(q, &end);
        if (q->stop_error[0]) return FINISH_ABORT;
        if (hit >= 0) hit += r->n_stops;
    }
    if (hit >= 0) {
        r->matched_stop = hit;
        if (!r->no_stop_trim && end < r->text.len) {
            r->text.len = end;
            r->text.data[end] = '\0';
        }
        return FINISH_STOP_STRING;
    }
    end = r->text.len - held_back(q);
    if (r->n_regexes > 0 && q->pattern_at < end) end = q->pattern_at;
    if (end > r->text_sent) r->text_sent = end;
    return FINISH_NONE;
}

finish_t output_token(struct seq *q, const struct sample_output *o, const struct config *c)
{
    struct request *r = q->r;
    pthread_mutex_lock(&r->lock);
    finish_t f = append_id(q, o) ? FINISH_NONE : FINISH_ABORT;
    if (f == FINISH_NONE) {
        bool stop =
            r->n_output > r->min_new_tokens && (holds(r->stop_ids, r->n_stop_ids, o->id) ||
                                                (!r->ignore_eos && holds(c->eos, c->n_eos, o->id)));
        f = append_text(q, o->id, stop);
        if (f == FINISH_NONE && stop) {
            f = FINISH_STOP_ID;
            r->matched_id = o->id;
        }
        if (f == FINISH_NONE && r->n_output >= q->max_new) f = FINISH_LENGTH;
    }
    r->finish = f;
    pthread_mutex_unlock(&r->lock);
    return f;
}

bool output_score(struct seq *q, int32_t p, const struct sample_output *o)
{
    struct request *r = q->r;
    int32_t i = p - r->logprob_start;
    pthread_mutex_lock(&r->lock);
    r->prompt_logprobs[i] = o->logprob;
    bool ok = !r->prompt_top || top_fill(&r->prompt_top[i], o);
    if (r->prompt_of)
        memcpy(r->prompt_of + (size_t)i * (size_t)r->n_of, o->of, (size_t)r->n_of * sizeof(float));
    if (ok && p + 1 == q->n_prompt) r->prompt_done = true;
    pthread_mutex_unlock(&r->lock);
    q->next_score = p + 1;
    return ok;
}

void output_rescore(struct seq *q)
{
    struct request *r = q->r;
    if (r->logprob_start < 0 || r->prompt_done) return;
    pthread_mutex_lock(&r->lock);
    for (int32_t i = 0; r->prompt_top && i < q->next_score - r->logprob_start; i++) {
        mem_free(r->prompt_top[i].ids);
        mem_free(r->prompt_top[i].logprobs);
        r->prompt_top[i] = (struct top_row){0};
    }
    q->next_score = r->logprob_start + 1;
    pthread_mutex_unlock(&r->lock);
}

void output_end(struct seq *q)
{
    struct request *r = q->r;
    if (r->detok.tok && r->finish != FINISH_STOP_STRING) (void)detok_end(&r->detok, &r->text);
    r->text_sent = r->text.len;
}

int32_t output_barred(const struct seq *q, const struct config *c, int32_t *to)
{
    const struct request *r = q->r;
    int32_t n = 0;
    if (r->n_output + q->ahead >= r->min_new_tokens) return 0;
    for (int32_t i = 0; !r->ignore_eos && i < c->n_eos; i++)
        to[n++] = c->eos[i];
    for (int32_t i = 0; i < r->n_stop_ids; i++)
        to[n++] = r->stop_ids[i];
    return n;
}
