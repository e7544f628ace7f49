/*
 * gsm_load.h - the gsm8k-shaped load: every prompt of a file through the engine at once.
 *
 * File: int32 count, then for each prompt its length and ids.  Output lengths are drawn from a seed (mean about
 * 140, at most 512), greedy, end tokens ignored; so the work is the same whatever the weights are.
 */
#ifndef BENCH_GSM_LOAD_H
#define BENCH_GSM_LOAD_H

#include "base/clock.h"
#include "base/mem.h"
#include "engine/engine.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

struct gsm_load {
    int32_t count;
    struct request **r;
    double prompts; /* tokens */
};

struct gsm_result {
    double seconds, outputs, cached;
    long long steps, retractions;
};

static int32_t gsm_length(uint64_t i)
{
    uint64_t z = (i + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 31) * 0xbf58476d1ce4e5b9u;
    double u = ((double)((z ^ z >> 29) >> 11) + 0.5) * 0x1p-53;
    double n = 60 - 80 * log(u);
    return n > 512 ? 512 : (int32_t)n;
}

static void gsm_read(struct gsm_load *l, const char *path)
{
    FILE *f = fopen(path, "rb");
    int32_t n;
    *l = (struct gsm_load){0};
    if (!f || fread(&l->count, 4, 1, f) != 1)
        fprintf(stderr, "%s: cannot be read\n", path), exit(1);
    l->r = mem_alloc((size_t)l->count * sizeof *l->r);
    for (int32_t i = 0; i < l->count; i++) {
        struct request *r = l->r[i] = request_new();
        if (fread(&n, 4, 1, f) != 1) exit(1);
        r->prompt = mem_alloc((size_t)n * 4);
        if (fread(r->prompt, 4, (size_t)n, f) != (size_t)n) exit(1);
        snprintf(r->rid, sizeof r->rid, "r%d", i);
        r->n_prompt = n;
        r->max_new_tokens = gsm_length((uint64_t)i);
        r->ignore_eos = true;
        l->prompts += n;
    }
    fclose(f);
}

/* Once: the requests are used up. */
static void gsm_run(struct gsm_result *out, struct gsm_load *l, const struct engine_options *o)
{
    struct err e = {0};
    struct engine *en;
    struct engine_stats s;
    if (engine_new(&en, o, &e) != OK) fprintf(stderr, "%s\n", e.msg), exit(1);
    *out = (struct gsm_result){0};
    double t = clock_s();
    for (int32_t i = 0; i < l->count; i++)
        if (engine_submit(en, l->r[i], &e) != OK) fprintf(stderr, "%s\n", e.msg), exit(1);
    for (int32_t i = 0; i < l->count; i++) {
        struct request *r = l->r[i];
        for (bool done = false; !done; usleep(200)) {
            pthread_mutex_lock(&r->lock);
            done = r->done;
            pthread_mutex_unlock(&r->lock);
        }
        if (r->finish != FINISH_LENGTH) fprintf(stderr, "r%d: %s\n", i, r->finish_message), exit(1);
        out->outputs += r->n_output;
        out->cached += r->cached_tokens;
    }
    out->seconds = clock_s() - t;
    engine_stat(en, &s);
    out->steps = (long long)s.steps;
    out->retractions = (long long)s.retractions;
    engine_stop(en, 0);
    for (int32_t i = 0; i < l->count; i++)
        request_unref(l->r[i]);
    mem_free(l->r);
}

#endif
