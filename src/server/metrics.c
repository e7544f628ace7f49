#include "server/metrics.h"
#include <stddef.h>
#include <string.h>

enum type { GAUGE, COUNTER };
enum kind { I32, I64, U64, REAL, FLAG };

struct row {
    const char *name, *help;
    enum type type;
    enum kind kind;
    size_t at; /* in struct engine_stats */
    double times;
};

#define ST(f) offsetof(struct engine_stats, f)

static const struct row rows[] = {
    {"num_running_reqs", "Requests that run.", GAUGE, I32, ST(running), 1},
    {"num_queue_reqs", "Requests that wait.", GAUGE, I32, ST(waiting), 1},
    {"num_queue_tokens", "Tokens of the requests that wait.", GAUGE, I64, ST(waiting_tokens), 1},
    {"max_total_num_tokens", "Tokens that the KV pool holds.", GAUGE, I32, ST(pages_total), KV_PAGE},
    {"num_free_tokens", "Tokens of unused KV pages.", GAUGE, I32, ST(pages_free), KV_PAGE},
    {"num_cached_tokens", "Tokens of KV that the prefix cache alone holds.", GAUGE, I32, ST(pages_cached), KV_PAGE},
    {"gen_throughput", "Output tokens a second over the last seconds.", GAUGE, REAL, ST(gen_throughput), 1},
    {"weight_epoch", "Generation of the weights: commits since the start, from 1.", GAUGE, U64, ST(epoch), 1},
    {"num_paused_reqs", "Requests that a pause holds.", GAUGE, I32, ST(held), 1},
    {"num_retracted_reqs", "Requests that wait after they have run.", GAUGE, I32, ST(retracted), 1},
    {"weight_updates_total", "Updates committed.", COUNTER, I64, ST(updates), 1},
    {"no_weights", "1 when there are no valid weights.", GAUGE, FLAG, ST(no_weights), 1},
    {"updating", "1 while a weight update is open.", GAUGE, FLAG, ST(updating), 1},
    {"heartbeat_age_seconds", "Seconds since a step ended, 0 when idle.", GAUGE, REAL, ST(heartbeat_age_s), 1},
    {"prompt_tokens_total", "Prompt tokens of requests that ran, cached ones too.", COUNTER, I64, ST(prompt_tokens), 1},
    {"cached_tokens_total", "Prompt tokens that the prefix cache had.", COUNTER, I64, ST(cached_tokens), 1},
    {"generation_tokens_total", "Output tokens.", COUNTER, I64, ST(output_tokens), 1},
    {"num_requests_total", "Requests that ended by themselves.", COUNTER, I64, ST(finished), 1},
    {"num_aborted_requests_total", "Requests that were aborted.", COUNTER, I64, ST(aborted), 1},
    {"num_retractions_total", "Times that a running request lost its KV to wait again.", COUNTER, I64, ST(retractions), 1},
    {"num_steps_total", "Steps of the engine.", COUNTER, I64, ST(steps), 1},
};

static const struct {
    const char *name, *help;
    size_t at; /* in struct metrics */
} histograms[] = {
    {"time_to_first_token_seconds", "From arrival to the first output token.", offsetof(struct metrics, first_token)},
    {"inter_token_latency_seconds", "Mean gap between a request's output tokens, counted once for each gap.",
     offsetof(struct metrics, inter_token)},
    {"e2e_request_latency_seconds", "From arrival to the end.", offsetof(struct metrics, whole)},
    {"queue_time_seconds", "From arrival to admission.", offsetof(struct metrics, queue)},
};

/* Seconds: 1-2-5 a decade from a millisecond on, where tokens and requests of all sizes fall. */
static const double bounds[METRICS_BUCKETS] = {0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1,
                                               2,     5,     10,    20,   50,   100,  200, 500, 1000, 2000};

static void observe(struct histogram *h, double seconds, uint64_t times)
{
    size_t i = 0;
    if (!(seconds >= 0)) seconds = 0;
    while (i < METRICS_BUCKETS && seconds > bounds[i]) i++;
    atomic_fetch_add(&h->count[i], times);
    atomic_fetch_add(&h->sum_ns, (uint64_t)(seconds * 1e9) * times);
}

void metrics_finished(struct metrics *m, const struct request *r)
{
    observe(&m->whole, (double)(r->t_end - r->t_submit) * 1e-9, 1);
    if (r->t_admit) observe(&m->queue, (double)(r->t_admit - r->t_submit) * 1e-9, 1);
    if (!r->t_first) return;
    observe(&m->first_token, (double)(r->t_first - r->t_submit) * 1e-9, 1);
    if (r->n_output > 1)
        observe(&m->inter_token, (double)(r->t_end - r->t_first) * 1e-9 / (r->n_output - 1),
                (uint64_t)(r->n_output - 1));
}

/* A label's value: backslash, quote and newline are escaped. */
static void put_label(struct buf *b, const char *v)
{
    for (; *v; v++) {
        if (*v == '\\' || *v == '"') buf_putc(b, '\\');
        if (*v == '\n') buf_puts(b, "\\n");
        else buf_putc(b, *v);
    }
}

static void put_head(struct buf *b, const char *prefix, const char *name, const char *help, const char *type)
{
    buf_printf(b, "# HELP %s%s %s\n# TYPE %s%s %s\n", prefix, name, help, prefix, name, type);
}

static void put_name(struct buf *b, const char *prefix, const char *name, const char *part, const char *model)
{
    buf_printf(b, "%s%s%s{model_name=\"", prefix, name, part);
    put_label(b, model);
    buf_puts(b, "\"");
}

static double value(const struct row *r, const struct engine_stats *st)
{
    const char *p = (const char *)st + r->at;
    switch (r->kind) {
    case I32: return *(const int32_t *)(const void *)p * r->times;
    case I64: return (double)*(const int64_t *)(const void *)p * r->times;
    case U64: return (double)*(const uint64_t *)(const void *)p * r->times;
    case REAL: return *(const double *)(const void *)p * r->times;
    case FLAG: return *(const bool *)(const void *)p;
    }
    return 0;
}

static void put_histogram(struct buf *b, const struct histogram *h, const char *prefix, const char *name,
                          const char *model)
{
    uint64_t sum = 0;
    for (size_t i = 0; i <= METRICS_BUCKETS; i++) {
        sum += atomic_load(&h->count[i]);
        put_name(b, prefix, name, "_bucket", model);
        if (i < METRICS_BUCKETS) buf_printf(b, ",le=\"%g\"} %llu\n", bounds[i], (unsigned long long)sum);
        else buf_printf(b, ",le=\"+Inf\"} %llu\n", (unsigned long long)sum);
    }
    put_name(b, prefix, name, "_sum", model);
    buf_printf(b, "} %.9g\n", (double)atomic_load(&h->sum_ns) * 1e-9);
    put_name(b, prefix, name, "_count", model);
    buf_printf(b, "} %llu\n", (unsigned long long)sum);
}

static void put_value(struct buf *b, const char *prefix, const char *name, const char *help, enum type type, double v,
                      const char *model)
{
    put_head(b, prefix, name, help, type == GAUGE ? "gauge" : "counter");
    put_name(b, prefix, name, "", model);
    buf_printf(b, "} %.15g\n", v);
}

void metrics_put(struct buf *out, const struct metrics *m, const struct engine_stats *st, const char *prefix,
                 const char *model)
{
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        put_value(out, prefix, rows[i].name, rows[i].help, rows[i].type, value(&rows[i], st), model);
    int32_t used = st->pages_total - st->pages_free - st->pages_cached;
    put_value(out, prefix, "num_used_tokens", "Tokens of KV that requests hold.", GAUGE, (double)used * KV_PAGE, model);
    put_value(out, prefix, "token_usage", "Part of the KV pool that requests hold.", GAUGE,
              st->pages_total ? (double)used / st->pages_total : 0, model);
    put_value(out, prefix, "cache_hit_rate", "Part of all prompt tokens that the prefix cache had.", GAUGE,
              st->prompt_tokens ? (double)st->cached_tokens / (double)st->prompt_tokens : 0, model);
    for (size_t i = 0; i < sizeof histograms / sizeof histograms[0]; i++) {
        put_head(out, prefix, histograms[i].name, histograms[i].help, "histogram");
        put_histogram(out, (const struct histogram *)(const void *)((const char *)m + histograms[i].at), prefix,
                      histograms[i].name, model);
    }
}
