#include "server/sampling.h"
#include "base/mem.h"
#include <errno.h>
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

/* Real-valued fields: name, range, whether the lower bound is excluded, place. */
static const struct real_row {
    const char *name;
    double lo, hi;
    bool open_lo;
    size_t offset;
} reals[] = {
    {"temperature", 0, (double)FLT_MAX, false, offsetof(struct sample_params, temperature)},
    {"top_p", 0, 1, true, offsetof(struct sample_params, top_p)},
    {"min_p", 0, 1, false, offsetof(struct sample_params, min_p)},
    {"frequency_penalty", -2, 2, false, offsetof(struct sample_params, frequency_penalty)},
    {"presence_penalty", -2, 2, false, offsetof(struct sample_params, presence_penalty)},
    {"repetition_penalty", 0, 2, true, offsetof(struct sample_params, repetition_penalty)},
};
#define N_REALS (sizeof reals / sizeof reals[0])

static const char *const others[] = {
    "max_new_tokens",
    "min_new_tokens",
    "top_k",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "no_stop_trim",
    "n",
    "logit_bias",
    "sampling_seed",
    "custom_params",
    "stream_interval",
    "stop_regex",
    "json_schema", /* constraint.c */
    "regex",
};
/* Known to clients, change the result, not served. */
static const char *const refused[] = {"ebnf", "structural_tag", "lora_path",
                                      "custom_logit_processor"};
#define COUNT(a) (sizeof(a) / sizeof(a)[0])

static size_t distance(const char *a, const char *b)
{
    size_t row[48], n = strlen(b);
    if (strlen(a) > 40 || n > 40) return 99;
    for (size_t j = 0; j <= n; j++)
        row[j] = j;
    for (size_t i = 1; a[i - 1]; i++) {
        size_t diag = row[0];
        row[0] = i;
        for (size_t j = 1; j <= n; j++) {
            size_t best = diag + (a[i - 1] != b[j - 1]);
            diag = row[j];
            if (row[j] + 1 < best) best = row[j] + 1;
            if (row[j - 1] + 1 < best) best = row[j - 1] + 1;
            row[j] = best;
        }
    }
    return row[n];
}

static err_t check_keys(const json_t *o, struct err *e)
{
    const char *key;
    json_t *v;
    json_object_foreach((json_t *)(uintptr_t)o, key, v)
    {
        (void)v;
        const char *near = NULL;
        size_t best = 100;
        for (size_t i = 0; i < N_REALS + COUNT(others) + COUNT(refused); i++) {
            const char *c = i < N_REALS                   ? reals[i].name
                            : i < N_REALS + COUNT(others) ? others[i - N_REALS]
                                                          : refused[i - N_REALS - COUNT(others)];
            size_t d = distance(key, c);
            if (d < best) best = d, near = c;
        }
        if (best)
            return err_set(e, ERR_INPUT,
                           "sampling_params: unknown key \"%.100s\"; nearest is \"%s\"", key,
                           near ? near : "temperature");
    }
    return OK;
}

static err_t read_stops(const json_t *o, struct request *r, struct err *e)
{
    const json_t *v = json_field(o, "stop");
    if (!v) return OK;
    if (!json_is_string(v) && !json_is_array(v))
        return json_bad(e, "stop", v, "a string or a list of strings");
    size_t n = json_is_array(v) ? json_array_size(v) : 1;
    if (n > SAMPLING_MAX_STOPS)
        return err_set(e, ERR_INPUT, "stop: %zu strings, at most %d are allowed", n,
                       SAMPLING_MAX_STOPS);
    r->stops = mem_try_array(n + 1, sizeof *r->stops);
    r->stop_bytes = mem_try_array(n + 1, sizeof *r->stop_bytes);
    if (!r->stops || !r->stop_bytes) return err_set(e, ERR_NOMEM, "stop: out of memory");
    for (size_t i = 0; i < n; i++) {
        const json_t *s = json_is_array(v) ? json_array_get(v, i) : v;
        if (!json_is_string(s) || !json_string_length(s))
            return json_bad(e, "stop", s, "a string that is not empty");
        r->stops[i] = mem_dup_n(json_string_value(s), json_string_length(s));
        if (!r->stops[i]) return err_set(e, ERR_NOMEM, "stop: out of memory");
        r->stop_bytes[i] = json_string_length(s);
        r->n_stops = (int32_t)i + 1;
    }
    return OK;
}

static err_t add_regex(struct request *r, const json_t *v, struct err *e)
{
    int32_t at = r->n_stops + r->n_regexes;
    if (!json_is_string(v)) return json_bad(e, "stop_regex", v, "a string or a list of strings");
    err_t rc =
        stop_regex_new(&r->regexes[r->n_regexes], json_string_value(v), json_string_length(v), e);
    if (rc) return rc;
    r->n_regexes++;
    r->stop_bytes[at] = json_string_length(v);
    r->stops[at] = mem_dup_n(json_string_value(v), json_string_length(v));
    return r->stops[at] ? OK : err_set(e, ERR_NOMEM, "stop_regex: out of memory");
}

/* After the stop strings, whose lists grow by the patterns. */
static err_t read_regexes(const json_t *o, struct request *r, struct err *e)
{
    const json_t *v = json_field(o, "stop_regex");
    size_t n = json_is_array(v) ? json_array_size(v) : v != NULL, all = (size_t)r->n_stops + n;
    err_t rc = OK;
    if (!n) return OK;
    if (n > SAMPLING_MAX_REGEXES)
        return err_set(e, ERR_INPUT, "stop_regex: %zu patterns, at most %d are allowed", n,
                       SAMPLING_MAX_REGEXES);
    char **stops = mem_try_array(all, sizeof *stops);
    size_t *bytes = mem_try_array(all, sizeof *bytes);
    r->regexes = mem_try_array(n, sizeof *r->regexes);
    if (!stops || !bytes || !r->regexes) {
        mem_free(stops);
        mem_free(bytes);
        return err_set(e, ERR_NOMEM, "stop_regex: out of memory");
    }
    for (int32_t i = 0; i < r->n_stops; i++)
        stops[i] = r->stops[i], bytes[i] = r->stop_bytes[i];
    mem_free(r->stops);
    mem_free(r->stop_bytes);
    r->stops = stops;
    r->stop_bytes = bytes;
    for (size_t i = 0; !rc && i < n; i++)
        rc = add_regex(r, json_is_array(v) ? json_array_get(v, i) : v, e);
    return rc;
}

static err_t read_stop_ids(const json_t *o, const struct config *cfg, struct request *r,
                           struct err *e)
{
    const json_t *v = json_field(o, "stop_token_ids");
    if (!v) return OK;
    if (!json_is_array(v)) return json_bad(e, "stop_token_ids", v, "a list of token ids");
    json_t *kept = json_array(); /* nulls inside are dropped, as SGLang does */
    for (size_t i = 0; i < json_array_size(v); i++)
        if (!json_is_null(json_array_get(v, i))) json_array_append(kept, json_array_get(v, i));
    err_t rc = json_ids(kept, "stop_token_ids", cfg->vocab_size, &r->stop_ids, &r->n_stop_ids, e);
    json_decref(kept);
    return rc;
}

static err_t read_bias(const json_t *o, const struct config *cfg, struct request *r, struct err *e)
{
    const json_t *v = json_field(o, "logit_bias");
    if (!v) return OK;
    if (!json_is_object(v)) return json_bad(e, "logit_bias", v, "an object {\"token id\": number}");
    size_t n = json_object_size(v);
    if (!n) return OK;
    if (n > (size_t)cfg->vocab_size)
        return err_set(e, ERR_INPUT, "logit_bias: %zu entries, at most %d are allowed", n,
                       cfg->vocab_size);
    r->bias_ids = mem_try_array(n, sizeof *r->bias_ids);
    r->bias = mem_try_array(n, sizeof *r->bias);
    if (!r->bias_ids || !r->bias) return err_set(e, ERR_NOMEM, "logit_bias: out of memory");
    const char *key;
    json_t *b;
    int32_t i = 0;
    json_object_foreach((json_t *)(uintptr_t)v, key, b)
    {
        char *end = NULL;
        errno = 0;
        long id = strtol(key, &end, 10);
        if (*key < '0' || *key > '9' || *end || errno || id >= cfg->vocab_size)
            return err_set(e, ERR_INPUT,
                           "logit_bias: token id \"%.60s\" is not allowed; must be an integer "
                           "in 0..%d",
                           key, cfg->vocab_size - 1);
        double x = json_number_value(b);
        if (!json_is_number(b) || !(fabs(x) <= 1e30))
            return json_bad(e, "logit_bias", b, "a finite number (at most 1e30 in size)");
        r->bias_ids[i] = (int32_t)id;
        r->bias[i++] = (float)x;
    }
    r->sp.n_bias = i;
    r->sp.bias_ids = r->bias_ids;
    r->sp.bias = r->bias;
    return OK;
}

static void model_defaults(const struct config *c, struct sample_params *sp)
{
    if (isfinite(c->gen_temperature) && c->gen_temperature >= 0)
        sp->temperature = c->gen_temperature;
    if (c->gen_top_p > 0 && c->gen_top_p <= 1) sp->top_p = c->gen_top_p;
    if (c->gen_min_p >= 0 && c->gen_min_p <= 1) sp->min_p = c->gen_min_p;
    if (c->gen_repetition_penalty > 0 && c->gen_repetition_penalty <= 2)
        sp->repetition_penalty = c->gen_repetition_penalty;
    if (c->gen_top_k > 0) sp->top_k = c->gen_top_k;
}

static err_t read_numbers(const json_t *o, struct sample_params *sp, struct err *e)
{
    err_t rc;
    for (size_t i = 0; i < N_REALS; i++) {
        float *to = (float *)(void *)((char *)sp + reals[i].offset);
        double d = (double)*to;
        if ((rc = json_get_real(o, reals[i].name, reals[i].lo, reals[i].hi, reals[i].open_lo, &d,
                                e)))
            return rc;
        *to = (float)d;
    }
    if (sp->top_p <= 0) sp->top_p = FLT_MIN; /* a tiny value that a float cannot hold */
    if (sp->repetition_penalty <= 0) sp->repetition_penalty = FLT_MIN;
    if (sp->temperature < 1e-6f) sp->temperature = 0;
    int64_t k = sp->top_k;
    if ((rc = json_get_int(o, "top_k", -1, INT32_MAX, &k, e))) return rc;
    if (k == 0 && json_field(o, "top_k"))
        return err_set(e, ERR_INPUT, "top_k: 0 is not allowed; must be -1 (all) or at least 1");
    sp->top_k = k <= 0 ? 0 : (int32_t)k;
    return OK;
}

static err_t read_lengths(const json_t *o, enum sampling_api api, struct request *r, struct err *e)
{
    err_t rc;
    int64_t max = api == SAMPLING_NATIVE       ? 128
                  : api == SAMPLING_COMPLETION ? 16
                                               : INT32_MAX,
            min = 0;
    if (api == SAMPLING_NATIVE) {
        if (json_is_null(json_object_get(o, "max_new_tokens"))) max = INT32_MAX;
        if ((rc = json_get_int(o, "max_new_tokens", 0, INT32_MAX, &max, e))) return rc;
        if ((rc = json_get_int(o, "min_new_tokens", 0, INT32_MAX, &min, e))) return rc;
    } else {
        if ((rc = json_get_int(o, "max_tokens", 1, INT32_MAX, &max, e))) return rc;
        if (api == SAMPLING_CHAT &&
            (rc = json_get_int(o, "max_completion_tokens", 1, INT32_MAX, &max, e)))
            return rc;
        if ((rc = json_get_int(o, "min_tokens", 0, INT32_MAX, &min, e))) return rc;
    }
    if (min > max)
        return err_set(e, ERR_INPUT,
                       "%s: %lld is not allowed; must be in 0..%lld (the largest length)",
                       api == SAMPLING_NATIVE ? "min_new_tokens" : "min_tokens", (long long)min,
                       (long long)max);
    r->max_new_tokens = (int32_t)max;
    r->min_new_tokens = (int32_t)min;
    return OK;
}

/* What the draw was made from can be told only where something was left out. */
static err_t read_custom(const json_t *o, struct request *r, struct err *e)
{
    const struct sample_params *p = &r->sp;
    const json_t *v = json_field(o, "custom_params");
    bool greedy = !(p->temperature > 0), filters = p->top_k > 0 || p->top_p < 1 || p->min_p > 0;
    if (v && !json_is_object(v)) return json_bad(e, "custom_params", v, "an object");
    err_t rc = json_get_bool(v, "return_top_p_token_ids", &r->want_kept, e);
    if (rc || !r->want_kept || greedy || filters) return rc;
    return err_set(
        e, ERR_INPUT,
        "custom_params.return_top_p_token_ids: every token of the vocabulary would be kept; "
        "set top_p below 1 (or top_k, min_p)");
}

err_t sampling_parse(const json_t *o, enum sampling_api api, const struct config *cfg,
                     struct request *r, int *n, struct err *e)
{
    err_t rc;
    r->sp = (struct sample_params){.temperature = 1, .top_p = 1, .repetition_penalty = 1};
    r->skip_special = true;
    if (api == SAMPLING_CHAT) model_defaults(cfg, &r->sp);
    if (o && !json_is_object(o)) return json_bad(e, "sampling_params", o, "an object");
    if (api == SAMPLING_NATIVE && (rc = check_keys(o, e))) return rc;
    for (size_t i = 0; i < COUNT(refused); i++) {
        const json_t *f = json_field(o, refused[i]);
        const char *type = json_string_value(json_object_get(f, "type"));
        if (f && !(type && !strcmp(type, "text")))
            return err_set(e, ERR_INPUT, "%s: not supported by this server", refused[i]);
    }
    int64_t samples = 1, seed = -1, interval = r->stream_interval > 0 ? r->stream_interval : 1;
    const char *seed_name = api == SAMPLING_NATIVE ? "sampling_seed" : "seed";
    if ((rc = read_numbers(o, &r->sp, e)) || (rc = read_lengths(o, api, r, e)) ||
        (rc = read_stops(o, r, e)) || (rc = read_regexes(o, r, e)) ||
        (rc = read_stop_ids(o, cfg, r, e)) || (rc = read_bias(o, cfg, r, e)) ||
        (rc = read_custom(o, r, e)) ||
        (rc = json_get_int(o, "stream_interval", 1, INT32_MAX, &interval, e)) ||
        (rc = json_get_bool(o, "ignore_eos", &r->ignore_eos, e)) ||
        (rc = json_get_bool(o, "skip_special_tokens", &r->skip_special, e)) ||
        (rc = json_get_bool(o, "no_stop_trim", &r->no_stop_trim, e)) ||
        (rc = json_get_int(o, "n", 1, SAMPLING_MAX_N, &samples, e)) ||
        (rc = json_get_int(o, seed_name, 0, INT64_MAX, &seed, e)))
        return rc;
    r->stream_interval = (int32_t)interval;
    if (seed >= 0) {
        r->sp.seed = (uint64_t)seed;
    } else {
        if (getrandom(&r->sp.seed, sizeof r->sp.seed, 0) != (ssize_t)sizeof r->sp.seed)
            return err_set(e, ERR_SYSTEM, "getrandom failed");
        r->sp.seed &= INT64_MAX;
    }
    *n = (int)samples;
    return OK;
}
