/*
 * bench_cuda_stage.c - how fast a checkpoint comes into device memory, and which leg holds it up.
 *
 *     build/bench/bench_cuda_stage FOLDER [--threads 4,8,16] [--json FILE]
 *
 * For each number of loader threads: an update that is staged in place, so that its files are read, checked and summed
 * and nothing more; one that is staged on the device; and its commit.  The files should be in the page cache; the first
 * loading, which is printed too, brings them there.
 */
#include "backend/cuda/weights.h"
#include "base/clock.h"
#include "base/mem.h"
#include "model/config.h"
#include "model/model.h"
#include "record.h"
#include "weight/plan.h"
#include "weight/update.h"
#include <getopt.h>
#include <string.h>

struct rig {
    const char *folder;
    struct store *store;
    double gb;
};

static void must(err_t rc, const struct err *e)
{
    if (rc == OK) return;
    fprintf(stderr, "bench_cuda_stage: %s\n", e->msg);
    exit(1);
}

static void open_store(struct rig *g, struct weights *w)
{
    struct err e = {0};
    struct config c;
    struct slot_spec *specs;
    struct plan p;
    size_t n;
    must(config_load(&c, g->folder, &e), &e);
    must(model_specs(&c, &specs, &n, &e), &e);
    must(plan_open(&p, g->folder, specs, n, &e), &e);
    must(plan_formats(&p, specs, &e), &e);
    plan_close(&p);
    must(store_new(&g->store, specs, n, weights_memory(w), &e), &e);
    g->gb = (double)store_bytes(g->store) * 1e-9;
    mem_free(specs);
}

/* Seconds to stage; in place: to read and check. */
static double stage(struct rig *g, int threads, bool in_place, double *commit_ms)
{
    struct err e = {0};
    struct update *u;
    double t = clock_s();
    must(in_place ? update_begin_in_place(&u, g->store, &e) : update_begin(&u, g->store, &e), &e);
    must(update_stage_dir(u, g->folder, threads, NULL, &e), &e);
    must(update_prepare(u, &e), &e);
    double staged = clock_s() - t;
    t = clock_s();
    if (!in_place) update_commit(u);
    *commit_ms = (clock_s() - t) * 1e3;
    update_free(u);
    return staged;
}

int main(int argc, char **argv)
{
    static const struct option options[] = {
        {"json", 1, NULL, 'j'}, {"threads", 1, NULL, 't'}, {NULL, 0, NULL, 0}};
    char all[] = "4,8,16", *list = all, *rest;
    const char *json = NULL;
    struct err e = {0};
    struct device *d;
    struct weights *w;
    struct rig g = {0};
    struct record r;
    double commit;
    for (int c; (c = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        if (c == 'j')
            json = optarg;
        else if (c == 't')
            list = optarg;
        else
            return 2;
    }
    if (argc - optind != 1)
        fprintf(stderr, "bench_cuda_stage FOLDER [--threads 4,8,16] [--json FILE]\n"), exit(2);
    g.folder = argv[optind];
    record_open(&r, json, "stage");
    double t = clock_s();
    must(device_open(&d, 0, 0, &e), &e);
    double opened = clock_s() - t;
    must(weights_new(&w, d, &e), &e);
    double made = clock_s() - t - opened;
    open_store(&g, w);
    double planned = clock_s() - t - opened - made, first = stage(&g, 8, false, &commit);
    printf("%s: %.2f GB; device opened in %.2f s, buffers %.2f s, headers %.2f s, first loading "
           "%.2f s\n",
           device_about(d)->name, g.gb, opened, made, planned, first);
    for (char *p = strtok_r(list, ",", &rest); p; p = strtok_r(NULL, ",", &rest)) {
        int n = atoi(p);
        double read = stage(&g, n, true, &commit), staged = stage(&g, n, false, &commit);
        printf("%2d threads: read and checked in %.3f s, %.1f GB/s; staged in %.3f s, %.1f GB/s; "
               "committed in %.2f ms\n",
               n, read, g.gb / read, staged, g.gb / staged, commit);
        fflush(stdout);
        record_begin(&r);
        record_text(&r, "what", "staging"), record_num(&r, "gb", g.gb),
            record_num(&r, "threads", n);
        record_num(&r, "read_s", read), record_num(&r, "stage_s", staged),
            record_num(&r, "commit_ms", commit);
        record_end(&r);
    }
    store_free(g.store);
    weights_free(w);
    device_close(d);
    record_close(&r);
    return 0;
}
