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
    {"max_total_num_tokens", "Tokens that the KV pool holds.", GAUGE, I32, ST(pages_total),
     KV_PAGE},
    {"num_free_tokens", "Tokens of unused KV pages.", GAUGE, I32, ST(pages_free), KV_PAGE},
    {"num_cached_tokens", "Tokens of KV that the prefix cache alone holds.", GAUGE, I32,
     ST(pages_cached), KV_PAGE},
    {"gen_throughput", "Output tokens a second over the last seconds.", GAUGE, REAL,
     ST(gen_throughput), 1},
    {"weight_epoch", "Generation of the weights: commits since the start, from 1.", GAUGE, U64,
     ST(epoch), 1},
    {"num_paused_reqs", "Requests that a pause holds.", GAUGE, I32, ST(held), 1},
    {"num_retracted_reqs", "Requests that wait after they have run.", GAUGE, I32, ST(retracted), 1},
    {"weight_updates_total", "Updates committed.", COUNTER, I64, ST(updates), 1},
    {"no_weights", "1 when there are no valid weights.", GAUGE, FLAG, ST(no_weights), 1},
    {"updating", "1 while a weight update is open.", GAUGE, FLAG, ST(updating), 1},
    {"heartbeat_age_seconds", "Seconds since a step ended, 0 when idle.", GAUGE, REAL,
     ST(heartbeat_age_s), 1},
    {"prompt_tokens_total", "Prompt tokens of requests that ran, cached ones too.", COUNTER, I64,
     ST(prompt_tokens), 1},
    {"cached_tokens_total", "Prompt tokens that the prefix cache had.", COUNTER, I64,
     ST(cached_tokens), 1},
    {"generation_tokens_total", "Output tokens.", COUNTER, I64, ST(output_tokens), 1},
    {"num_requests_total", "Requests that ended by themselves.", COUNTER, I64, ST(finished), 1},
    {"num_aborted_requests_total", "Requests that were aborted.", COUNTER, I64, ST(aborted), 1},
    {"num_retractions_total", "Times that a running request lost its KV to wait again.", COUNTER,
     I64, ST(retractions), 1},
    {"num_steps_total", "Steps of the engine.", COUNTER, I64, ST(steps), 1},
};

struct times {
    const char *name, *help;
    size_t at; /* in the struct that the table is of */
};

static const struct times request_times[] = {
    {"time_to_first_token_seconds", "From arrival to the first output token.",
     offsetof(struct metrics, first_token)},
    {"inter_token_latency_seconds",
     "Mean gap between a request's output tokens, counted once for each gap.",
     offsetof(struct metrics, inter_token)},
    {"e2e_request_latency_seconds", "From arrival to the end.", offsetof(struct metrics, whole)},
    {"queue_time_seconds", "From arrival to admission.", offsetof(struct metrics, queue)},
};

static const struct times update_times[] = {
    {"weight_update_stage_seconds", "From an update's beginning until it was staged.",
     offsetof(struct update_totals, stage)},
    {"weight_update_drain_seconds", "What a commit waited for running requests.",
     offsetof(struct update_totals, drain)},
    {"weight_update_swap_seconds", "What a commit stopped serving for.",
     offsetof(struct update_totals, swap)},
};

/* SGLang's name, by where the weights came from. */
static const char load[] = "weight_load_duration_seconds";
static const char *const sources[] = {",source=\"tensor\"", ",source=\"disk\""};

void metrics_finished(struct metrics *m, const struct request *r)
{
    histogram_add(&m->whole, (double)(r->t_end - r->t_submit) * 1e-9, 1);
    if (r->t_admit) histogram_add(&m->queue, (double)(r->t_admit - r->t_submit) * 1e-9, 1);
    if (!r->t_first) return;
    histogram_add(&m->first_token, (double)(r->t_first - r->t_submit) * 1e-9, 1);
    if (r->n_output > 1)
        histogram_add(&m->inter_token, (double)(r->t_end - r->t_first) * 1e-9 / (r->n_output - 1),
                      (uint64_t)(r->n_output - 1));
}

/* A label's value: backslash, quote and newline are escaped. */
static void put_label(struct buf *b, const char *v)
{
    for (; *v; v++) {
        if (*v == '\\' || *v == '"') buf_putc(b, '\\');
        if (*v == '\n')
            buf_puts(b, "\\n");
        else
            buf_putc(b, *v);
    }
}

static void put_head(struct buf *b, const char *prefix, const char *name, const char *help,
                     const char *type)
{
    buf_printf(b, "# HELP %s%s %s\n# TYPE %s%s %s\n", prefix, name, help, prefix, name, type);
}

static void put_name(struct buf *b, const char *prefix, const char *name, const char *part,
                     const char *model)
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

/* labels: besides the model's, "" or ,name="value" ... */
static void put_histogram(struct buf *b, const struct histogram *h, const char *prefix,
                          const char *name, const char *model, const char *labels)
{
    uint64_t sum = 0;
    for (size_t i = 0; i <= HISTOGRAM_BOUNDS; i++) {
        sum += atomic_load(&h->count[i]);
        put_name(b, prefix, name, "_bucket", model);
        if (i < HISTOGRAM_BOUNDS)
            buf_printf(b, "%s,le=\"%g\"} %llu\n", labels, histogram_bound(i),
                       (unsigned long long)sum);
        else
            buf_printf(b, "%s,le=\"+Inf\"} %llu\n", labels, (unsigned long long)sum);
    }
    put_name(b, prefix, name, "_sum", model);
    buf_printf(b, "%s} %.9g\n", labels, (double)atomic_load(&h->sum_ns) * 1e-9);
    put_name(b, prefix, name, "_count", model);
    buf_printf(b, "%s} %llu\n", labels, (unsigned long long)sum);
}

/* The histograms that a table names of a struct. */
static void put_times(struct buf *b, const struct times *rows_of, size_t n, const void *of,
                      const char *prefix, const char *model)
{
    for (size_t i = 0; i < n; i++) {
        put_head(b, prefix, rows_of[i].name, rows_of[i].help, "histogram");
        put_histogram(b, (const struct histogram *)(const void *)((const char *)of + rows_of[i].at),
                      prefix, rows_of[i].name, model, "");
    }
}

static void put_updates(struct buf *b, const struct update_totals *t, const char *prefix,
                        const char *model)
{
    static const char ended[] = "weight_updates_ended_total";
    put_head(b, prefix, ended, "Updates that ended, by how.", "counter");
    for (size_t i = 0; i < UPDATE_OUTCOMES; i++) {
        put_name(b, prefix, ended, "", model);
        buf_printf(b, ",outcome=\"%s\"} %llu\n", update_outcomes[i],
                   (unsigned long long)atomic_load(&t->ended[i]));
    }
    put_times(b, update_times, sizeof update_times / sizeof update_times[0], t, prefix, model);
    put_head(b, prefix, load, "Stage, drain and swap of an update that was committed.",
             "histogram");
    for (size_t i = 0; i < 2; i++)
        put_histogram(b, &t->whole[i], prefix, load, model, sources[i]);
}

static void put_value(struct buf *b, const char *prefix, const char *name, const char *help,
                      enum type type, double v, const char *model)
{
    put_head(b, prefix, name, help, type == GAUGE ? "gauge" : "counter");
    put_name(b, prefix, name, "", model);
    buf_printf(b, "} %.15g\n", v);
}

void metrics_put(struct buf *out, const struct metrics *m, const struct engine_stats *st,
                 const struct update_totals *updates, double load_s, const char *prefix,
                 const char *model)
{
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        put_value(out, prefix, rows[i].name, rows[i].help, rows[i].type, value(&rows[i], st),
                  model);
    int32_t used = st->pages_total - st->pages_free - st->pages_cached;
    put_value(out, prefix, "engine_load_weights_time",
              "Seconds that reading the weights took at the start.", GAUGE, load_s, model);
    put_value(out, prefix, "page_size", "Tokens of a KV page.", GAUGE, KV_PAGE, model);
    put_value(out, prefix, "num_used_tokens", "Tokens of KV that requests hold.", GAUGE,
              (double)used * KV_PAGE, model);
    put_value(out, prefix, "token_usage", "Part of the KV pool that requests hold.", GAUGE,
              st->pages_total ? (double)used / st->pages_total : 0, model);
    put_value(out, prefix, "cache_hit_rate", "Part of all prompt tokens that the prefix cache had.",
              GAUGE, st->prompt_tokens ? (double)st->cached_tokens / (double)st->prompt_tokens : 0,
              model);
    put_times(out, request_times, sizeof request_times / sizeof request_times[0], m, prefix, model);
    put_updates(out, updates, prefix, model);
}
