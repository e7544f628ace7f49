/*
 * record.h - what a bench measured, for programs: one JSON object a line, appended to the file of --json.
 *
 *     struct record r;
 *     record_open(&r, path, "moe");                       // path NULL: nothing is written
 *     record_begin(&r);
 *     record_text(&r, "format", "nvfp4"), record_num(&r, "batch", 64), record_num(&r, "ms", 13.1);
 *     record_end(&r);                                     // {"bench":"moe","format":"nvfp4","batch":64,"ms":13.1}
 *
 * bench/gpu joins the lines of a run into one document (bench/README.md has its schema).
 */
#ifndef BENCH_RECORD_H
#define BENCH_RECORD_H

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

struct record {
    FILE *f;
    const char *bench;
};

static inline void record_open(struct record *r, const char *path, const char *bench)
{
    *r = (struct record){.bench = bench};
    if (path && !(r->f = fopen(path, "a")))
        fprintf(stderr, "%s: cannot be written\n", path), exit(1);
}

static inline void record_begin(const struct record *r)
{
    if (r->f) fprintf(r->f, "{\"bench\":\"%s\"", r->bench);
}

/* The text must need no escapes. */
static inline void record_text(const struct record *r, const char *key, const char *text)
{
    if (r->f) fprintf(r->f, ",\"%s\":\"%s\"", key, text);
}

static inline void record_num(const struct record *r, const char *key, double x)
{
    if (!r->f) return;
    if (isfinite(x))
        fprintf(r->f, ",\"%s\":%.8g", key, x);
    else
        fprintf(r->f, ",\"%s\":null", key);
}

static inline void record_end(const struct record *r)
{
    if (!r->f) return;
    fprintf(r->f, "}\n");
    fflush(r->f);
}

static inline void record_close(struct record *r)
{
    if (r->f) fclose(r->f);
    r->f = NULL;
}

#endif
