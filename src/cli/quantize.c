/* quantize.c - `moult quantize`: a checkpoint in another format, or in another tool's spelling. */
#include "base/clock.h"
#include "base/file.h"
#include "base/mem.h"
#include "base/newdir.h"
#include "base/pool.h"
#include "cli/commands.h"
#include "cli/quantize_folder.h"
#include "cli/quantize_run.h"
#include <math.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct args {
    struct quantize_request request;
    int64_t threads;
    double shard_gb;
};

#define AT(f) offsetof(struct args, f)
static const struct opt quantize_opts[] = {
    {"format", NULL, OPT_HONOURED, OPT_STRING, AT(request.format), NULL, 0, 0, NULL,
     "bf16, fp8-block, fp8-tensor, fp8-channel, mxfp8, nvfp4 or mxfp4", NULL},
    {"spelling", NULL, OPT_HONOURED, OPT_CHOICE, AT(request.spelling), NULL, 0, 0,
     "modelopt|miles|compressed-tensors|hf", "names and config of that tool [by format]", NULL},
    {"rule", NULL, OPT_HONOURED, OPT_STRING, AT(request.rule), NULL, 0, 0, NULL,
     "how values are rounded: docs/formats.md [by format and spelling]", NULL},
    {"exclude", NULL, OPT_HONOURED, OPT_STRINGS, AT(request.exclude), NULL, 0, 0, NULL,
     "leave these modules in BF16: a name, '*' for any run, or re:REGEX; may be repeated", NULL},
    {"bf16-first-n", NULL, OPT_HONOURED, OPT_INT, AT(request.bf16_first_n), "0", 0, 1 << 20, NULL,
     "leave the first N layers in BF16", NULL},
    {"bf16-last-n", NULL, OPT_HONOURED, OPT_INT, AT(request.bf16_last_n), "0", 0, 1 << 20, NULL,
     "leave the last N layers in BF16", NULL},
    {"experts-only", NULL, OPT_HONOURED, OPT_FLAG, AT(request.experts_only), NULL, 0, 0, NULL,
     "quantize experts alone", NULL},
    {"lm-head", NULL, OPT_HONOURED, OPT_FLAG, AT(request.lm_head), NULL, 0, 0, NULL,
     "quantize the head too", NULL},
    {"requantize", NULL, OPT_HONOURED, OPT_FLAG, AT(request.requantize), NULL, 0, 0, NULL,
     "SRC may be quantized itself; a weight in the wanted format keeps its codes", NULL},
    {"threads", NULL, OPT_HONOURED, OPT_INT, AT(threads), NULL, 1, 1024, NULL, "[CPUs it may use]",
     NULL},
    {"max-shard-gb", NULL, OPT_HONOURED, OPT_REAL, AT(shard_gb), "5", 1e-6, 1e6, NULL,
     "largest weight file, in 10^9 bytes", NULL},
};
const struct opt_command quantize_command = {
    "quantize",
    "usage: moult quantize SRC DST --format F [flags]\n\n"
    "Writes the model of SRC (a folder, or org/name in the local Hub cache) to the new folder "
    "DST.\n"
    "Norms, embeddings and routers stay in BF16.\n",
    quantize_opts, sizeof quantize_opts / sizeof quantize_opts[0]};

static atomic_bool interrupted;

static void on_signal(int signal)
{
    (void)signal;
    atomic_store(&interrupted, true);
}

static void catch_signals(void)
{
    struct sigaction a = {.sa_handler = on_signal};
    sigemptyset(&a.sa_mask);
    sigaction(SIGINT, &a, NULL);
    sigaction(SIGTERM, &a, NULL);
    sigaction(SIGHUP, &a, NULL);
}

static bool stop(void *ctx)
{
    (void)ctx;
    return atomic_load(&interrupted);
}

/* ---- progress ---- */

struct bar {
    double last, start; /* seconds */
    bool drawn;
};

static void draw(void *ctx, uint64_t done, uint64_t total)
{
    struct bar *b = ctx;
    double now = clock_s();
    if (now - b->last < 0.1 && done < total) return;
    b->last = now;
    b->drawn = true;
    double part = total ? (double)done / (double)total : 1.0,
           rate = (double)done / (now - b->start);
    int filled = (int)(part * 40);
    fprintf(stderr, "\r[%.*s%.*s] %3.0f%%  %.2f / %.2f GB  %.2f GB/s ", filled,
            "########################################", 40 - filled,
            "                                        ", floor(part * 100), (double)done * 1e-9,
            (double)total * 1e-9, rate * 1e-9);
}

/* ---- the folder ---- */

static err_t write_weights(struct newdir *d, const struct quantize_plan *p, const struct args *a,
                           struct bar *bar, uint64_t *bytes, struct err *e)
{
    struct st_writer *w = NULL;
    err_t rc = st_writer_open(&w, d->temp, p->outs, p->n_outs, (uint64_t)(a->shard_gb * 1e9), e);
    if (rc != OK) return rc;
    struct pool *pool = pool_new(a->threads ? (int)a->threads : pool_cpus());
    struct quantize_progress progress = {isatty(2) ? draw : NULL, stop, bar};
    rc = quantize_run(p, w, pool, &progress, e);
    if (bar->drawn) fputc('\n', stderr);
    if (rc == OK) rc = st_writer_finish(w, e);
    *bytes = st_writer_bytes(w);
    pool_free(pool);
    st_writer_free(w);
    return rc;
}

static err_t quantize(const struct quantize_plan *p, const struct args *a, const char *dst,
                      struct err *e)
{
    struct newdir d = {0};
    struct bar bar = {.start = clock_s()};
    uint64_t bytes = 0;
    err_t rc = newdir_begin(&d, dst, e);
    if (rc != OK) return rc;
    rc = write_weights(&d, p, a, &bar, &bytes, e);
    if (rc == OK) rc = quantize_write_configs(&d, p, e);
    if (rc == OK) rc = quantize_copy_companions(&d, p->dir, e);
    if (rc == OK && stop(NULL)) rc = err_set(e, ERR_STATE, "interrupted");
    if (rc == OK) rc = newdir_commit(&d, e);
    newdir_abort(&d);
    if (rc != OK) return rc;
    printf("%s: %zu of %zu weights in %s (%s, rule %s), %.3f GB from %.3f GB in %.1f s\n", dst,
           p->n_quantized, p->n_weights, formats[p->format].name, p->spell->spelling, p->rule->name,
           (double)bytes * 1e-9, (double)p->src_bytes * 1e-9, clock_s() - bar.start);
    return OK;
}

int cmd_quantize(int argc, char **argv)
{
    struct args a = {0};
    struct err e = {0};
    struct quantize_plan p;
    const char *dst = argc > 1 ? argv[1] : NULL;
    int words = 0; /* SRC and DST come first */
    while (words < argc && words < 2 && argv[words][0] != '-')
        words++;
    options_t o = options_parse(&quantize_command, argc - words, argv + words, &a, NULL, &e);
    if (o == OPTIONS_HELP) {
        struct buf help = {0};
        options_help(&quantize_command, &help);
        fputs(help.data ? help.data : "", stdout);
        buf_release(&help);
        return 0;
    }
    if (o == OPTIONS_RUN && words < 2)
        (void)err_set(&e, ERR_INPUT,
                      "two folders are needed first: moult quantize SRC DST --format F");
    if (e.code != OK) {
        fprintf(stderr, "moult quantize: %s\n", e.msg);
        return 2;
    }
    a.request.src = argv[0];
    catch_signals();
    err_t rc = quantize_plan_make(&p, &a.request, &e);
    if (rc == OK) {
        rc = quantize(&p, &a, dst, &e);
        quantize_plan_free(&p);
    }
    if (rc != OK) fprintf(stderr, "moult quantize: %s\n", e.msg);
    return rc == OK ? 0 : 1;
}
