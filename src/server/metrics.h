/*
 * metrics.h - GET /metrics: counters, gauges and histograms in Prometheus' text format 0.0.4.
 *
 *     metrics_finished(&s->metrics, r);       // once for every request that ended, any thread
 *     metrics_put(&out, &s->metrics, &stats, engine_update_totals(e), load_s, "moult_", "my-model");
 *
 * One name a row, in metrics.c's tables: numbers that the engine publishes (struct engine_stats) and
 * histograms that are counted here.  A prefix "sglang:" gives the names of SGLang's dashboards, which
 * the rows bear (sglang:num_running_reqs, sglang:time_to_first_token_seconds, ...).
 * Counting is atomic and takes no lock; a scrape may see a request in one histogram and not yet in another.
 */
#ifndef SERVER_METRICS_H
#define SERVER_METRICS_H

#include "base/histogram.h"
#include "engine/updates.h"

struct metrics {
    struct histogram first_token, inter_token, whole, queue;
};

/* r is done.  A request that never ran counts in `whole` alone. */
void metrics_finished(struct metrics *m, const struct request *r);
/* load_s: what reading the weights took at the start; model: the value of the label model_name, any text. */
void metrics_put(struct buf *out, const struct metrics *m, const struct engine_stats *st,
                 const struct update_totals *updates, double load_s, const char *prefix,
                 const char *model);

#endif
