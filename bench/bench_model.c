/*
 * Steps of a model on this machine's CPU: prefill, decode at batch 1, 16 and 64, beside the memory
 * bandwidth measured in the same run.
 *
 *     make bench                               # tiny model and 30B-A3B layer shapes
 *     build/bench/bench_model [DIR | random]   # one of them
 *
 * Bytes a decode step must read: the dense weights once and each expert that some token chose once; the
 * expert part is the expected number of distinct experts, E (1 - (1 - k/E)^batch).
 */
#include "base/clock.h"
#include "base/clock.h"
#include "machine.h"
#include "random_model.h"

#define CONTEXT 256 /* tokens each sequence holds before the timed steps */
#define BATCH   64

static double step_bytes(const struct config *c, int batch)
{
    double h = c->hidden_size, q = (double)c->n_heads * c->head_dim,
           kv = (double)c->n_kv_heads * c->head_dim;
    double hit = 1 - pow(1 - (double)c->top_k / c->n_experts, batch);
    double layer = h * (2 * q + 2 * kv) + h * c->n_experts +
                   3 * h * c->moe_intermediate_size * c->n_experts * hit;
    return 2 * (layer * c->n_layers + h * c->vocab_size);
}

static double timed_step(struct model *m, int n_seqs, int first, int per_seq)
{
    static int32_t ids[BATCH * CONTEXT], pos[BATCH * CONTEXT], seq[BATCH * CONTEXT],
        tables[BATCH][64];
    static struct sample_output out[BATCH];
    static struct sample_input in[BATCH];
    static struct step_row rows[BATCH];
    static struct step_seq seqs[BATCH];
    struct sample_params greedy = {.top_p = 1, .repetition_penalty = 1};
    int n = 0;
    for (int s = 0; s < n_seqs; s++) {
        for (int i = 0; i < 32; i++)
            tables[s][i] = s * 32 + i;
        seqs[s] = (struct step_seq){tables[s], 32};
        for (int i = 0; i < per_seq; i++, n++)
            ids[n] = (int32_t)(mix((uint64_t)(s * 1000 + first + i)) % 2000), pos[n] = first + i,
            seq[n] = s;
        in[s] = (struct sample_input){
            .target = -1, .params = &greedy, .position = (uint64_t)(first + per_seq)};
        rows[s] = (struct step_row){n - 1, &in[s], &out[s]};
    }
    struct step st = {.n_tokens = n,
                      .ids = ids,
                      .pos = pos,
                      .seq = seq,
                      .n_seqs = n_seqs,
                      .seqs = seqs,
                      .n_rows = n_seqs,
                      .rows = rows};
    double t = clock_s();
    model_submit(m, &st);
    CHECK(model_collect(m, &st, NULL) == OK);
    return clock_s() - t;
}

int main(int argc, char **argv)
{
    struct err e = {0};
    struct config c;
    struct store *store = NULL;
    struct update *u = NULL;
    struct model *m = NULL;
    const char *what = argc > 1 ? argv[1] : "random";
    err_t rc;
    if (strcmp(what, "random") == 0) {
        rc = random_model(&c, &store, memory_host, 2, 128, 2048, &e);
    } else {
        struct slot_spec *specs = NULL;
        size_t n = 0;
        rc = config_load(&c, what, &e);
        if (rc == OK) rc = model_specs(&c, &specs, &n, &e);
        if (rc == OK) rc = store_new(&store, specs, n, memory_host, &e);
        if (rc == OK) rc = update_begin(&u, store, &e);
        if (rc == OK) rc = update_stage_dir(u, what, 2, NULL, &e);
        if (rc == OK) rc = update_prepare(u, &e);
        if (rc == OK) update_commit(u);
        if (u) update_free(u);
        mem_free(specs);
    }
    struct pool *pool = pool_new(pool_cpus());
    if (rc == OK) rc = model_new(&m, &c, store, pool, BATCH * 32, KV_BF16, 2048, NULL, &e);
    if (rc != OK) {
        fprintf(stderr, "bench_model: %s\n", e.msg);
        return 1;
    }
    double bandwidth = machine_bandwidth(pool, 2, false);
    printf("%s, %d layers, %s, %d threads, memory read %.1f GB/s\n", what, c.n_layers, model_isa(m),
           pool_threads(pool), bandwidth / 1e9);
    double best = 1e9;
    for (int r = 0; r < 3; r++) {
        double t = timed_step(m, 8, 0, CONTEXT);
        best = t < best ? t : best;
    }
    printf("prefill   8 x %d tokens   %9.1f tok/s\n", CONTEXT, 8 * CONTEXT / best);
    static const int batches[] = {1, 16, 64};
    for (int b = 0; b < 3; b++) {
        best = 1e9;
        for (int r = 0; r < 12; r++) {
            double t = timed_step(m, batches[b], CONTEXT + r, 1);
            best = t < best ? t : best;
        }
        double bytes = step_bytes(&c, batches[b]);
        printf("decode    batch %-2d        %9.1f tok/s  %7.2f ms/step  %5.1f GB/s of weights, "
               "%3.0f%% of the read\n",
               batches[b], batches[b] / best, best * 1e3, bytes / best / 1e9,
               100 * bytes / best / bandwidth);
    }
    model_free(m);
    store_free(store);
    pool_free(pool);
    return 0;
}
