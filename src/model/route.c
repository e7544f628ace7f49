#include "model/route.h"
#include <math.h>

/* What is compared, what the weights are, how they are normalised. */
static const struct method {
    const char *name;
    route_key_t key;
    route_weigh_t weigh;
    bool sum, scale; /* divide by the sum; times scaling, with the guard added to the sum */
    bool groups, bias, input;
} methods[ROUTE_COUNT] = {
    [ROUTE_DEFAULT] = {"default", KEY_SOFTMAX, WEIGH_SOFTMAX, 0, 0, 0, 0, 0},
    [ROUTE_RENORMALIZE] = {"renormalize", KEY_LOGIT, WEIGH_SOFTMAX_K, 0, 0, 0, 0, 0},
    [ROUTE_DEEPSEEK_V3] = {"deepseek-v3", KEY_BIASED, WEIGH_SIGMOID, 1, 1, 1, 1, 0},
    [ROUTE_LLAMA4] = {"llama4", KEY_LOGIT, WEIGH_SIGMOID, 0, 0, 0, 0, 1},
    [ROUTE_RENORMALIZE_NAIVE] = {"renormalize-naive", KEY_SOFTMAX, WEIGH_SOFTMAX, 1, 0, 0, 0, 0},
    [ROUTE_TOPK] = {"topk", KEY_LOGIT, WEIGH_RAW, 0, 0, 0, 0, 0},
    [ROUTE_SIGMOID_RENORM] = {"sigmoid-renorm", KEY_SIGMOID, WEIGH_SIGMOID, 1, 0, 0, 0, 0},
    [ROUTE_MINIMAX2] = {"minimax2", KEY_BIASED, WEIGH_SIGMOID, 1, 1, 0, 1, 0},
    [ROUTE_SIGMOID] = {"sigmoid", KEY_SIGMOID, WEIGH_SIGMOID, 0, 0, 0, 0, 0},
    [ROUTE_TOPK_SIGMOID] = {"topk-sigmoid", KEY_LOGIT, WEIGH_SIGMOID, 0, 0, 0, 0, 0},
};

static bool divides(const struct route *r)
{
    return methods[r->method].sum && (r->method != ROUTE_SIGMOID_RENORM || r->norm);
}

struct route_rule route_rule(const struct route *r)
{
    const struct method *m = &methods[r->method];
    return (struct route_rule){m->key, m->weigh, divides(r), m->scale};
}

const char *route_name(route_method_t m)
{
    return methods[m].name;
}

bool route_weighs_input(route_method_t m)
{
    return methods[m].input;
}

static err_t check_groups(const struct route *r, struct err *e)
{
    int32_t ne = r->n_experts, k_max = ne <= 384 ? 8 : 22;
    if (r->n_group <= 1) {
        if (r->topk_group > 1)
            return err_set(e, ERR_INPUT, "topk_group: %d; allowed: at most n_group (%d)",
                           r->topk_group, r->n_group);
    } else if (ne % r->n_group) {
        return err_set(e, ERR_INPUT, "n_group: %d does not divide num_experts %d", r->n_group, ne);
    } else if (r->topk_group < 1 || r->topk_group > 4 || r->topk_group > r->n_group) {
        return err_set(e, ERR_INPUT, "topk_group: %d; allowed: 1 to 4 and at most n_group (%d)",
                       r->topk_group, r->n_group);
    } else if (r->top_k >= r->topk_group * (ne / r->n_group)) {
        return err_set(e, ERR_INPUT, "top_k: %d; allowed: fewer than the %d experts of %d groups",
                       r->top_k, r->topk_group * (ne / r->n_group), r->topk_group);
    }
    if (r->top_k > k_max)
        return err_set(e, ERR_INPUT, "top_k: %d; allowed with deepseek-v3 and %d experts: 1 to %d",
                       r->top_k, ne, k_max);
    return OK;
}

err_t route_check(const struct route *r, struct err *e)
{
    if ((int)r->method < 0 || r->method >= ROUTE_COUNT)
        return err_set(e, ERR_INPUT, "routing_method: %d; allowed: 0 to %d", (int)r->method,
                       ROUTE_COUNT - 1);
    const struct method *m = &methods[r->method];
    if (r->n_experts < 4 || r->n_experts > ROUTE_EXPERTS_MAX || r->n_experts % 4)
        return err_set(e, ERR_INPUT, "num_experts: %d; allowed: multiples of 4 up to %d",
                       r->n_experts, ROUTE_EXPERTS_MAX);
    if (r->top_k < 1 || r->top_k >= r->n_experts)
        return err_set(e, ERR_INPUT, "top_k: %d; allowed: at least 1, fewer than num_experts (%d)",
                       r->top_k, r->n_experts);
    if (m->input && r->top_k != 1)
        return err_set(e, ERR_INPUT, "top_k: %d; allowed with %s: 1", r->top_k, m->name);
    if (r->bias && !m->bias) return err_set(e, ERR_INPUT, "routing_bias: %s has none", m->name);
    if (!isfinite(r->scaling) || (r->scaling != 1.0f && !m->scale))
        return err_set(e, ERR_INPUT, "routed_scaling_factor: %g; allowed with %s: %s",
                       (double)r->scaling, m->name, m->scale ? "finite numbers" : "1");
    if (m->groups) return check_groups(r, e);
    if (r->n_group > 1 || r->topk_group > 1)
        return err_set(e, ERR_INPUT, "n_group %d, topk_group %d: only deepseek-v3 has groups",
                       r->n_group, r->topk_group);
    if (r->top_k > 32)
        return err_set(e, ERR_INPUT, "top_k: %d; allowed with %s: 1 to 32", r->top_k, m->name);
    return OK;
}

static float max_of(const float *x, int32_t n)
{
    float max = x[0];
    for (int32_t i = 1; i < n; i++)
        if (x[i] > max) max = x[i];
    return max;
}

/* s = softmax before its division, whose divisor is returned. */
static float exp_all(const struct backend_ops *ops, float *s, const float *x, int32_t n)
{
    return (float)ops->exp_sum(s, x, max_of(x, n), (size_t)n);
}

static void sigmoid_all(const struct backend_ops *ops, float *s, const float *x, int32_t n)
{
    for (int32_t i = 0; i < n; i++)
        s[i] = -x[i];
    (void)ops->exp_sum(s, s, 0.0f, (size_t)n);
    for (int32_t i = 0; i < n; i++)
        s[i] = 1.0f / (1.0f + s[i]);
}

/* NaN below everything. */
static bool better(float a, float b)
{
    return a > b || (isnan(b) && !isnan(a));
}

static bool taken(const int32_t *ids, int32_t n, int32_t id)
{
    for (int32_t i = 0; i < n; i++)
        if (ids[i] == id) return true;
    return false;
}

static void select_top(const float *key, int32_t n, int32_t k, int32_t *ids)
{
    for (int32_t j = 0; j < k; j++) {
        int32_t best = -1;
        for (int32_t i = 0; i < n; i++)
            if ((best < 0 || better(key[i], key[best])) && !taken(ids, j, i)) best = i;
        ids[j] = best;
    }
}

/* The sum of the two largest of a group. */
static float group_score(const float *key, int32_t n)
{
    int32_t two[2];
    select_top(key, n, n < 2 ? n : 2, two);
    return n < 2 ? key[two[0]] : key[two[0]] + key[two[1]];
}

/* Experts outside the best groups drop to -inf. */
static void keep_groups(const struct route *r, float *key, float *score)
{
    int32_t kept[4], size = r->n_experts / r->n_group;
    for (int32_t g = 0; g < r->n_group; g++)
        score[g] = group_score(key + g * size, size);
    select_top(score, r->n_group, r->topk_group, kept);
    for (int32_t i = 0; i < r->n_experts; i++)
        if (!taken(kept, r->topk_group, i / size)) key[i] = -INFINITY;
}

/* What the method compares, in s [2 * n_experts] or x itself. */
static const float *keys(const struct route *r, const struct backend_ops *ops, const float *x,
                         float *s)
{
    const struct method *m = &methods[r->method];
    int32_t n = r->n_experts;
    if (m->key == KEY_LOGIT) return x;
    if (m->key == KEY_SOFTMAX) {
        (void)exp_all(ops, s, x, n); /* the divisor is common */
        return s;
    }
    sigmoid_all(ops, s, x, n);
    if (m->key == KEY_BIASED && r->bias)
        for (int32_t i = 0; i < n; i++)
            s[i] += r->bias[i];
    if (m->groups && r->n_group > 1) keep_groups(r, s, s + n);
    return s;
}

static void weigh_softmax(const struct route *r, const struct backend_ops *ops, const float *x,
                          float *s, const int32_t *ids, float *w)
{
    float sum = exp_all(ops, s, x, r->n_experts);
    for (int32_t j = 0; j < r->top_k; j++)
        w[j] = ids[j] < 0 ? 0.0f : s[ids[j]] / sum;
}

static void weigh_softmax_k(const struct route *r, const struct backend_ops *ops, const float *x,
                            const int32_t *ids, float *w)
{
    int32_t n = 0;
    float part[ROUTE_TOP_K_MAX];
    for (int32_t j = 0; j < r->top_k; j++)
        if (ids[j] >= 0) part[n++] = x[ids[j]];
    if (n == 0) return;
    float sum = exp_all(ops, part, part, n);
    n = 0;
    for (int32_t j = 0; j < r->top_k; j++)
        if (ids[j] >= 0) w[j] = part[n++] / sum;
}

static void weigh_each(const struct route *r, const struct backend_ops *ops, const float *x,
                       const int32_t *ids, float *w)
{
    float part[ROUTE_TOP_K_MAX];
    for (int32_t j = 0; j < r->top_k; j++)
        part[j] = ids[j] < 0 ? 0.0f : x[ids[j]];
    if (methods[r->method].weigh == WEIGH_SIGMOID) sigmoid_all(ops, part, part, r->top_k);
    for (int32_t j = 0; j < r->top_k; j++)
        w[j] = ids[j] < 0 ? 0.0f : part[j];
}

/* Divide by the sum in k order, scale, round. */
static void finish(const struct route *r, float *w)
{
    const struct method *m = &methods[r->method];
    float sum = 0.0f;
    for (int32_t j = 0; j < r->top_k; j++)
        sum += w[j];
    bool divide = divides(r);
    if (m->scale)
        sum += 1e-20f;
    else if (sum < 1e-20f)
        sum = 1e-20f;
    for (int32_t j = 0; j < r->top_k; j++) {
        if (m->scale) w[j] *= r->scaling;
        w[j] = act_round(divide ? w[j] / sum : w[j]);
    }
}

/* Ids outside the experts are negative here. */
static void weigh(const struct route *r, const struct backend_ops *ops, const float *x,
                  float *scratch, const int32_t *ids, float *w)
{
    for (int32_t j = 0; j < r->top_k; j++)
        w[j] = 0.0f;
    switch (methods[r->method].weigh) {
    case WEIGH_SOFTMAX: weigh_softmax(r, ops, x, scratch, ids, w); break;
    case WEIGH_SOFTMAX_K: weigh_softmax_k(r, ops, x, ids, w); break;
    case WEIGH_RAW:
    case WEIGH_SIGMOID: weigh_each(r, ops, x, ids, w); break;
    }
    finish(r, w);
}

void route_weigh(const struct route *r, const struct backend_ops *ops, const float *x,
                 float *scratch, const int32_t *ids, float *weights)
{
    int32_t known[ROUTE_TOP_K_MAX];
    for (int32_t j = 0; j < r->top_k; j++)
        known[j] = ids[j] >= 0 && ids[j] < r->n_experts ? ids[j] : -1;
    weigh(r, ops, x, scratch, known, weights);
}

void route_token(const struct route *r, const struct backend_ops *ops, const float *x,
                 float *scratch, int32_t *ids, float *weights)
{
    select_top(keys(r, ops, x, scratch), r->n_experts, r->top_k, ids);
    weigh(r, ops, x, scratch, ids, weights);
}
