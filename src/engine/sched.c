#include "engine/sched.h"

#include "base/clock.h"
#include "base/mem.h"
#include <string.h>

#define LOOK_AHEAD \
    32 /* waiting requests passed over per step because a prefix of theirs is coming */

static int32_t pages_for(const struct sched *s, int64_t tokens)
{
    return (int32_t)((tokens + s->page_tokens - 1) / s->page_tokens);
}

int64_t sched_room(const struct sched *s, int32_t n_prompt)
{
    int64_t tokens = (int64_t)pages_total(s->pages) * s->page_tokens;
    if (n_prompt > tokens) return -1;
    return tokens - n_prompt + 1; /* the last token drawn needs no KV */
}

static bool before(const struct seq *a, const struct seq *b)
{
    if (a->r->priority != b->r->priority) return a->r->priority > b->r->priority;
    return a->arrival < b->arrival;
}

void sched_queue(struct sched *s, struct seq *q)
{
    struct seq *next = NULL;
    if (s->tail && before(q, s->tail))
        for (next = s->head; before(next, q);)
            next = next->next;
    q->next = next;
    q->prev = next ? next->prev : s->tail;
    if (q->prev)
        q->prev->next = q;
    else
        s->head = q;
    if (next)
        next->prev = q;
    else
        s->tail = q;
    q->queued = true;
    s->n_waiting++;
    s->n_retracted += q->admitted;
    s->waiting_tokens += q->n_ids;
}

void sched_unqueue(struct sched *s, struct seq *q)
{
    if (q->prev)
        q->prev->next = q->next;
    else
        s->head = q->next;
    if (q->next)
        q->next->prev = q->prev;
    else
        s->tail = q->prev;
    q->prev = q->next = NULL;
    q->queued = false;
    s->n_waiting--;
    s->n_retracted -= q->admitted;
    s->waiting_tokens -= q->n_ids;
}

static bool reserve_pages(struct seq *q, int32_t n)
{
    if (n <= q->cap_pages) return true;
    int32_t cap = n + n / 2 + 4;
    int32_t *p = mem_retry(q->pages, (size_t)q->cap_pages * sizeof(*p), (size_t)cap * sizeof(*p));
    if (!p) return false;
    q->pages = p;
    q->cap_pages = cap;
    return true;
}

static bool same_key(const struct request *a, const struct request *b)
{
    return !a->extra_key == !b->extra_key &&
           (!a->extra_key || strcmp(a->extra_key, b->extra_key) == 0);
}

/* Given experts make KV that no other request may have. */
static bool uses_cache(const struct sched *s, const struct seq *q)
{
    return !s->no_cache && !q->mixed && q->r->n_forced == 0;
}

/* Tokens a hit may cover: one is always computed, and so is all that scoring needs. */
static int32_t hit_limit(const struct seq *q)
{
    int32_t limit = q->n_ids - 1;
    if (q->next_score < q->n_prompt && q->next_score - 1 < limit) limit = q->next_score - 1;
    return limit;
}

/* A running prefill is about to compute more of q's prefix than the tree has. */
static bool prefix_coming(const struct sched *s, const struct seq *q, int32_t hit_tokens)
{
    int32_t limit = hit_limit(q);
    for (int32_t i = 0; i < s->n_running; i++) {
        const struct seq *p = s->running[i];
        int32_t end = limit < p->n_ids ? limit : p->n_ids;
        if (!uses_cache(s, p) || p->ready >= p->n_ids - 1 || end < hit_tokens + s->page_tokens ||
            p->ready >= end || !same_key(p->r, q->r))
            continue;
        if (memcmp(p->ids, q->ids, (size_t)(hit_tokens + s->page_tokens) * sizeof(int32_t)) == 0)
            return true;
    }
    return false;
}

/* Pages the running prefills still want, and one for each running sequence to grow into. */
static int64_t pages_promised(const struct sched *s)
{
    int64_t n = 0;
    for (int32_t i = 0; i < s->n_running; i++)
        n += pages_for(s, s->running[i]->n_ids + s->running[i]->ahead) - s->running[i]->n_pages + 1;
    return n;
}

static int64_t prefill_pending(const struct sched *s)
{
    int64_t n = 0;
    for (int32_t i = 0; i < s->n_running; i++)
        n += seq_todo(s->running[i]);
    return n;
}

typedef enum { ADMITTED, LATER, FULL } admit_t;

static admit_t admit_one(struct sched *s, struct seq *q, uint64_t epoch)
{
    int32_t limit = hit_limit(q), n_hit = 0;
    struct radix_node *node = NULL;
    if (!reserve_pages(q, pages_for(s, q->n_ids) + 1)) return FULL;
    if (uses_cache(s, q)) {
        node = radix_match(s->tree, epoch, q->r->extra_key, q->ids, limit, q->pages, &n_hit);
        if (prefix_coming(s, q, n_hit * s->page_tokens)) return LATER;
    }
    radix_lock(s->tree, node);
    int64_t room = (int64_t)pages_available(s->pages) + radix_evictable(s->tree);
    int64_t need = (int64_t)pages_for(s, q->n_ids) - n_hit + 1 + pages_promised(s);
    if (s->n_running > 0 && need > room) {
        radix_unlock(s->tree, node);
        return FULL;
    }
    for (int32_t i = 0; i < n_hit; i++)
        pages_ref(s->pages, q->pages[i]);
    q->n_pages = q->in_tree = n_hit;
    q->node = node;
    q->computed = q->ready = n_hit * s->page_tokens;
    q->epoch = epoch;
    q->mixed = q->drew = false;
    sched_unqueue(s, q);
    s->running[s->n_running++] = q;
    if (!q->admitted) {
        q->admitted = true;
        q->r->t_admit = clock_ns();
        s->cached_tokens += q->computed;
        pthread_mutex_lock(&q->r->lock);
        q->r->cached_tokens = q->computed;
        pthread_mutex_unlock(&q->r->lock);
    }
    return ADMITTED;
}

struct seq *sched_first(const struct sched *s)
{
    struct seq *q = s->head;
    while (q && s->draining && !q->admitted)
        q = q->next;
    return q;
}

void sched_admit(struct sched *s, uint64_t epoch)
{
    int passed = 0;
    struct seq *next;
    int64_t pending = prefill_pending(s);
    for (struct seq *q = s->head; q && passed < LOOK_AHEAD; q = next) {
        next = q->next;
        if (s->draining && !q->admitted) continue;
        if (s->n_running >= s->max_running || pending >= s->max_step) return;
        admit_t a = admit_one(s, q, epoch);
        if (a == FULL) return;
        if (a == LATER)
            passed++;
        else
            pending += q->n_ids - q->computed;
    }
}

struct seq *sched_youngest(const struct sched *s)
{
    struct seq *y = NULL;
    for (int32_t i = 0; i < s->n_running; i++)
        if (!y || before(y, s->running[i])) y = s->running[i];
    return y;
}

void sched_share(struct sched *s, struct seq *q)
{
    int32_t full = q->ready / s->page_tokens, done;
    if (!uses_cache(s, q) || full <= q->in_tree) return;
    struct radix_node *n =
        radix_insert(s->tree, q->epoch, q->r->extra_key, q->ids, full, q->pages, &done);
    if (!n || done < q->in_tree) return;
    radix_lock(s->tree, n);
    radix_unlock(s->tree, q->node);
    q->node = n;
    q->in_tree = done;
}

void sched_release(struct sched *s, struct seq *q)
{
    for (int32_t i = 0; i < s->n_running; i++) {
        if (s->running[i] != q) continue;
        memmove(s->running + i, s->running + i + 1,
                (size_t)(s->n_running - i - 1) * sizeof(*s->running));
        s->n_running--;
        break;
    }
    for (int32_t i = 0; i < q->n_pages; i++)
        pages_unref(s->pages, q->pages[i]);
    radix_unlock(s->tree, q->node);
    q->node = NULL;
    q->n_pages = q->in_tree = q->computed = q->ready = q->ahead = q->plan = 0;
}

void sched_retract(struct sched *s, struct seq *q)
{
    sched_share(s, q);
    sched_release(s, q);
    pthread_mutex_lock(&q->r->lock);
    q->r->num_retractions++;
    pthread_mutex_unlock(&q->r->lock);
    s->retractions++;
    sched_queue(s, q);
}

void sched_retract_all(struct sched *s)
{
    while (s->n_running > 0)
        sched_retract(s, s->running[s->n_running - 1]);
}

void sched_keep_all(struct sched *s)
{
    for (int32_t i = s->n_running - 1; i >= 0; i--) {
        struct seq *q = s->running[i];
        if (!q->drew) {
            sched_retract(s, q);
            continue;
        }
        radix_unlock(s->tree, q->node);
        q->node = NULL;
        q->in_tree = 0;
        q->mixed = true;
    }
}

static int32_t take_page(struct sched *s)
{
    int32_t page = pages_take(s->pages);
    while (page < 0 && radix_evict(s->tree))
        page = pages_take(s->pages);
    return page;
}

typedef enum { PAGES_OK, PAGES_RETRACTED, PAGES_NONE, PAGES_NO_MEMORY } pages_t;

/* Pages for the next n tokens of q, retracting the youngest while there are none. */
static pages_t ensure_pages(struct sched *s, struct seq *q, int32_t n, bool may_retract)
{
    int32_t want = pages_for(s, (int64_t)q->computed + n);
    if (!reserve_pages(q, want)) return PAGES_NO_MEMORY; /* retraction would free none of it */
    while (q->n_pages < want) {
        int32_t page = take_page(s);
        if (page >= 0) {
            q->pages[q->n_pages++] = page;
            continue;
        }
        if (!may_retract) return PAGES_NONE;
        struct seq *victim = sched_youngest(s);
        sched_retract(s, victim);
        if (victim == q) return PAGES_RETRACTED;
    }
    return PAGES_OK;
}

/* Plans of those that want one token (`decode`), or more; `left` tokens at most.  Returns what is left of them, or
 * -1 as sched_plan. */
static int32_t plan_pass(struct sched *s, int32_t left, bool decode, bool may_retract)
{
    for (int32_t i = 0; i < s->n_running && left > 0; i++) {
        struct seq *q = s->running[i];
        int32_t n = seq_todo(q);
        if (n == 0 || (n == 1) != decode || q->plan || q->no_memory) continue;
        if (n > s->chunk) n = s->chunk;
        if (n > left) n = left;
        pages_t got = ensure_pages(s, q, n, may_retract);
        if (got == PAGES_NONE) return -1;
        if (got == PAGES_NO_MEMORY) {
            q->no_memory = true;
            continue;
        }
        if (got == PAGES_RETRACTED) {
            i = -1; /* the array moved; planned ones are passed over */
            continue;
        }
        q->plan = n;
        left -= n; /* a planned victim's tokens are not given out again in this step */
        while (i >= 0 && (i >= s->n_running || s->running[i] != q))
            i--;
    }
    return left;
}

int32_t sched_plan(struct sched *s, bool may_retract)
{
    int32_t total = 0;
    for (int32_t i = 0; i < s->n_running; i++)
        s->running[i]->plan = 0;
    int32_t left = plan_pass(s, s->max_step, true, may_retract);
    if (left >= 0) left = plan_pass(s, left, false, may_retract);
    if (left < 0) return -1;
    for (int32_t i = 0; i < s->n_running; i++)
        total += s->running[i]->plan;
    return total;
}

err_t sched_check(const struct sched *s, struct err *e)
{
    int32_t *refs = mem_try_array((size_t)pages_total(s->pages), sizeof(int32_t));
    if (!refs) return err_set(e, ERR_NOMEM, "no memory for the page check");
    for (int32_t i = 0; i < s->n_running; i++)
        for (int32_t k = 0; k < s->running[i]->n_pages; k++)
            refs[s->running[i]->pages[k]]++;
    err_t rc = radix_check(s->tree, refs, e);
    if (rc == OK) rc = pages_check(s->pages, refs, e);
    mem_free(refs);
    return rc;
}
