/*
 * sample.c - see sample.h.
 *
 * Filters, as SGLang's: on p = softmax(logits / temperature), tokens in falling order of p (ties to
 * the lower id), a token stays while its rank < top_k, the sum of p before it <= top_p, and
 * p >= min_p * the largest p.  Nothing is renormalised between them.
 */
#include "model/sample.h"
#include "backend/cpu/cpu.h"
#include "base/mem.h"
#include <math.h>

struct row {
    float *x;
    int32_t n;
    float max;
    double sum; /* of exp(x - max); those are in scratch */
};

static bool all_finite(const float *x, int32_t n)
{
    bool ok = true;
    for (int32_t i = 0; i < n; i++)
        ok &= isfinite(x[i]) != 0;
    return ok;
}

static struct row measure(float *x, int32_t n, float *scratch)
{
    struct row r = {.x = x, .n = n, .max = x[0]};
    for (int32_t i = 1; i < n; i++)
        if (x[i] > r.max) r.max = x[i];
    if (!isfinite(r.max)) return r; /* everything is barred */
    r.sum = cpu_ops_best()->exp_sum(scratch, x, r.max, (size_t)n);
    return r;
}

static float logprob(const struct row *r, int32_t id)
{
    if (id < 0 || id >= r->n || !isfinite(r->x[id]) || !(r->sum > 0.0)) return SAMPLE_FLOOR;
    float lp = (float)((double)r->x[id] - (double)r->max - log(r->sum));
    return isfinite(lp) ? lp : SAMPLE_FLOOR;
}

static void fill_top(const struct row *r, struct sample_output *out, int32_t n_top)
{
    int32_t n = n_top < SAMPLE_MAX_TOP ? n_top : SAMPLE_MAX_TOP, have = 0;
    if (n > r->n) n = r->n;
    for (int32_t i = 0; n > 0 && i < r->n; i++) {
        if (have == n && !(r->x[i] > r->x[out->top_ids[n - 1]])) continue;
        int32_t at = have < n ? have++ : n - 1;
        for (; at > 0 && r->x[i] > r->x[out->top_ids[at - 1]]; at--)
            out->top_ids[at] = out->top_ids[at - 1];
        out->top_ids[at] = i;
    }
    out->n_top = have;
    for (int32_t i = 0; i < have; i++)
        out->top_logprobs[i] = logprob(r, out->top_ids[i]);
}

static void adjust(const struct sample_input *in, float *x, int32_t n, int32_t *counts)
{
    const struct sample_params *p = in->params;
    if (sample_has_penalty(p) && in->n_output > 0) {
        memset(counts, 0, (size_t)n * sizeof *counts);
        for (int32_t i = 0; i < in->n_output; i++)
            if (in->output_ids[i] >= 0 && in->output_ids[i] < n) counts[in->output_ids[i]]++;
        for (int32_t i = 0; i < n; i++) {
            if (counts[i] == 0) continue;
            x[i] -= p->frequency_penalty * (float)counts[i];
            x[i] -= p->presence_penalty;
            x[i] = x[i] > 0.0f ? x[i] / p->repetition_penalty : x[i] * p->repetition_penalty;
        }
    }
    for (int32_t i = 0; i < p->n_bias; i++)
        if (p->bias_ids[i] >= 0 && p->bias_ids[i] < n) x[p->bias_ids[i]] += p->bias[i];
    for (int32_t i = 0; i < in->n_barred; i++)
        if (in->barred[i] >= 0 && in->barred[i] < n) x[in->barred[i]] = -INFINITY;
}

static int32_t arg_max(const float *x, int32_t n)
{
    int32_t best = 0;
    for (int32_t i = 1; i < n; i++)
        if (x[i] > x[best]) best = i;
    return best;
}

/* The finaliser of splitmix64. */
static uint64_t mix(uint64_t z)
{
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static uint64_t noise_key(const struct sample_params *p, uint64_t position)
{
    uint64_t k = mix(p->seed + 0x9e3779b97f4a7c15u);
    k = mix(k ^ (p->sample_index + 0xd1b54a32d192ed03u));
    return mix(k ^ (position + 0x8cb92ba72f3d8dd7u));
}

/* The largest noise there is: u is at most 1 - 2^-33. */
#define NOISE_MAX 22.88f

static float gumbel(uint64_t key, int32_t id)
{
    uint64_t h = mix(key + ((uint64_t)id + 1) * 0x9e3779b97f4a7c15u);
    double u = ((double)(h >> 32) + 0.5) * 0x1p-32;
    return (float)-log(-log(u));
}

struct draw {
    uint64_t key;
    int32_t best;
    float score;
};

static void consider(struct draw *d, const float *x, int32_t id)
{
    if (x[id] + NOISE_MAX < d->score || x[id] == -INFINITY) return;
    float s = x[id] + gumbel(d->key, id);
    if (d->best < 0 || s > d->score || (s == d->score && id < d->best)) {
        d->best = id;
        d->score = s;
    }
}

static bool before(const float *x, int32_t a, int32_t b)
{
    return x[a] > x[b] || (x[a] == x[b] && a < b);
}

static void sift(const float *x, int32_t *heap, int32_t n, int32_t at)
{
    int32_t id = heap[at];
    for (int32_t child; (child = 2 * at + 1) < n; at = child) {
        if (child + 1 < n && before(x, heap[child + 1], heap[child])) child++;
        if (!before(x, heap[child], id)) break;
        heap[at] = heap[child];
    }
    heap[at] = id;
}

/* In falling order of probability until a filter ends it; a heap sorts no more than is needed.  What
 * was passed lies behind the heap, the first one last; returns how many. */
static int32_t draw_sorted(struct draw *d, const struct row *r, const struct sample_params *p,
                           const float *e, int32_t *heap)
{
    int32_t n = r->n, k = p->top_k > 0 && p->top_k < n ? p->top_k : n;
    double passed = 0.0;
    for (int32_t i = 0; i < n; i++)
        heap[i] = i;
    for (int32_t i = n / 2; i-- > 0;)
        sift(r->x, heap, n, i);
    int32_t rank = 0;
    for (; rank < k; rank++) {
        int32_t id = heap[0];
        if (rank > 0 && (passed / r->sum > (double)p->top_p || e[id] < p->min_p)) break;
        consider(d, r->x, id);
        passed += (double)e[id];
        heap[0] = heap[--n];
        heap[n] = id;
        if (n > 0) sift(r->x, heap, n, 0);
    }
    return rank;
}

/* *n_kept: with want_kept, how many ids at the end of scratch_ids the filters left (0: the drawn one). */
static int32_t draw(const struct sample_input *in, const struct row *r, const float *e,
                    int32_t *scratch_ids, int32_t *n_kept)
{
    const struct sample_params *p = in->params;
    struct draw d = {.key = noise_key(p, in->position), .best = -1, .score = -INFINITY};
    if (p->top_k == 1) return arg_max(r->x, r->n);
    if ((p->top_k > 0 && p->top_k < r->n) || p->top_p < 1.0f || in->want_kept) {
        *n_kept = draw_sorted(&d, r, p, e, scratch_ids);
        return d.best < 0 ? 0 : d.best;
    }
    consider(&d, r->x, arg_max(r->x, r->n)); /* a good first bound: most need no noise at all */
    for (int32_t i = 0; i < r->n; i++)
        if (e[i] >= p->min_p) consider(&d, r->x, i);
    return d.best < 0 ? 0 : d.best;
}

/* The ids at the end of scratch_ids, and the drawn one's logprob among them. */
static void keep(struct sample_output *out, const struct row *r, const int32_t *scratch_ids,
                 int32_t n_kept)
{
    double sum = 0.0;
    const int32_t *from = n_kept ? scratch_ids + r->n - 1 : &out->id;
    int32_t n = n_kept ? n_kept : 1;
    out->kept = mem_try_array((size_t)n, sizeof *out->kept);
    out->no_memory |= !out->kept;
    if (!out->kept) return;
    out->n_kept = n;
    for (int32_t i = 0; i < n; i++) {
        out->kept[i] = from[-i];
        sum += exp((double)r->x[from[-i]] - (double)r->x[out->id]);
    }
    float lp = (float)-log(sum);
    out->logprob = isfinite(lp) ? lp : SAMPLE_FLOOR;
}

static void fill_of(struct sample_output *out, const struct row *r, const struct sample_input *in)
{
    if (in->n_of <= 0) return;
    out->of = mem_try_array((size_t)in->n_of, sizeof *out->of);
    out->no_memory |= !out->of;
    for (int32_t i = 0; out->of && i < in->n_of; i++)
        out->of[i] = logprob(r, in->of[i]);
}

void sample_row(const struct sample_input *in, struct sample_output *out, float *logits,
                int32_t vocab, float *scratch, int32_t *scratch_ids)
{
    bool scored = in->target >= 0;
    out->id = 0;
    out->logprob = SAMPLE_FLOOR;
    out->n_top = out->n_kept = 0;
    out->of = NULL;
    out->kept = NULL;
    out->no_memory = false;
    out->finite = all_finite(logits, vocab);
    if (!out->finite) return;
    if (!scored) {
        float t = in->params->temperature;
        adjust(in, logits, vocab, scratch_ids);
        for (int32_t i = 0; t > 0.0f && i < vocab; i++)
            logits[i] /= t;
    }
    struct row r = {.x = logits, .n = vocab};
    bool greedy = !scored && !(in->params->temperature > 0.0f);
    r = measure(logits, vocab, scratch);
    int32_t n_kept = 0;
    if (scored)
        out->id = in->target;
    else if (greedy || !(r.sum > 0.0))
        out->id = arg_max(logits, vocab);
    else
        out->id = draw(in, &r, scratch, scratch_ids, &n_kept);
    out->logprob = logprob(&r, out->id);
    fill_top(&r, out, in->n_top);
    fill_of(out, &r, in);
    if (!scored && in->want_kept) keep(out, &r, scratch_ids, n_kept);
}
