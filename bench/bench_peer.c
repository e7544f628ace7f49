/*
 * Moult's side of bench/peer_llama.py: a model of Qwen3-30B-A3B's layers with random weights that runs
 * steps on command, so that two programs can be timed in turns.
 *
 *     build/bench/bench_peer LAYERS VOCAB FORMAT THREADS [cpu]   (cpu: seconds of the process)
 *     prefill N   N tokens of a new sequence in one step         -> seconds
 *     decode N    N steps of one token after the last prefill    -> seconds
 */
#include "backend/layout.h"
#include "machine.h"
#include "random_model.h"
#include <stdio.h>
#include <stdlib.h>

enum { EXPERTS = 128, PAGES = 256 };

static format_t format_of_slot(const struct slot_spec *s, format_t f)
{
    return strstr(s->name, "_proj.") ? f : FORMAT_BF16;
}

/* Rows of one random block of 16. */
static void put_matrix(const struct store *s, void *arena, size_t slot, uint8_t *room)
{
    const struct slot_spec *p = store_spec(s, slot);
    format_t f = p->shape.format;
    size_t rows = (size_t)p->shape.rows, cols = (size_t)p->shape.cols, data, scale;
    if (!format_bytes(f, rows, cols, &data, &scale)) abort();
    for (size_t r = 0, k; r < rows; r += k) {
        k = rows - r < 16 ? rows - r : 16;
        /* The router's rows must differ, or few experts would get all tokens. */
        if (f == FORMAT_BF16 && (r == 0 || rows == EXPERTS))
            random_bf16((uint16_t *)(void *)room, cols * 16, cols, slot * 131 + r);
        store_put(s, arena, slot, PART_DATA, r, k, room);
    }
    size_t n = layout_part_rows(f, PART_SCALE, rows);
    uint8_t *ones = mem_alloc(scale + 1);
    memset(ones, formats[f].scale == SCALE_E8M0 ? 120 : 0x38, scale); /* E4M3: 1 */
    for (size_t i = 0; formats[f].scale == SCALE_F32 && i < scale / 4; i++)
        ((float *)(void *)ones)[i] = 1e-4f;
    if (n) store_put(s, arena, slot, PART_SCALE, 0, n, ones);
    mem_free(ones);
    const float tensor = 0.01f;
    if (formats[f].tensor) store_put(s, arena, slot, PART_TENSOR, 0, 1, &tensor);
}

static void put_slot(const struct store *s, void *arena, size_t slot, uint8_t *room)
{
    const struct slot_spec *p = store_spec(s, slot);
    if (p->shape.kind == RESIDENT_MATRIX) {
        put_matrix(s, arena, slot, room);
        return;
    }
    size_t n = (size_t)(p->shape.rows * p->shape.cols);
    uint32_t *x = mem_alloc(n * 4);
    if (p->shape.kind == RESIDENT_F32)
        for (size_t i = 0; i < n; i++)
            x[i] = 0x3f800000;
    else if (p->n_dims == 1)
        for (size_t i = 0; i < n; i++)
            ((uint16_t *)(void *)x)[i] = 0x3f80;
    else
        random_bf16((uint16_t *)(void *)x, n, p->shape.cols, slot);
    store_put(s, arena, slot, PART_DATA, 0, (size_t)p->shape.rows, x);
    mem_free(x);
}

static err_t build(struct config *c, struct store **store, int layers, int vocab, format_t f,
                   struct err *e)
{
    struct slot_spec *specs = NULL;
    size_t n = 0;
    err_t rc = random_config(c, layers, EXPERTS, vocab, e);
    if (rc == OK) rc = model_specs(c, &specs, &n, e);
    for (size_t i = 0; i < n; i++)
        if (specs[i].shape.kind == RESIDENT_MATRIX)
            specs[i].shape.format = format_of_slot(&specs[i], f);
    if (rc == OK) rc = store_new(store, specs, n, memory_host, e);
    mem_free(specs);
    if (rc != OK) return rc;
    void *arena = store_arena_new(*store);
    if (arena == NULL) return err_set(e, ERR_NOMEM, "no memory for the weights");
    uint8_t *room = mem_alloc((size_t)4096 * 16 * 2);
    for (size_t i = 0; i < (size_t)4096 * 16 * 2; i++) {
        room[i] = (uint8_t)(mix(i) >> 20);
        if (f != FORMAT_BF16 && formats[f].elem == ELEM_E4M3 && (room[i] & 0x7f) == 0x7f)
            room[i] = 0;
    }
    uint8_t *plain = mem_alloc((size_t)4096 * 16 * 2);
    for (size_t i = 0; i < n; i++)
        put_slot(*store, arena, i,
                 store_spec(*store, i)->shape.format == FORMAT_BF16 ? plain : room);
    mem_free(room);
    mem_free(plain);
    store_swap(*store, &arena);
    return OK;
}

static double run(struct model *m, int first, int n, bool cpu)
{
    static int32_t ids[4096], pos[4096], seq[4096], pages[PAGES];
    struct sample_params greedy = {.top_p = 1, .repetition_penalty = 1};
    struct sample_output out;
    struct sample_input in = {.target = -1, .params = &greedy, .position = (uint64_t)(first + n)};
    struct step_row row = {n - 1, &in, &out};
    struct step_seq s = {pages, PAGES};
    for (int i = 0; i < PAGES; i++)
        pages[i] = i;
    for (int i = 0; i < n; i++)
        ids[i] = (int32_t)(mix((uint64_t)(first + i)) % 2000), pos[i] = first + i;
    struct step st = {.n_tokens = n,
                      .ids = ids,
                      .pos = pos,
                      .seq = seq,
                      .n_seqs = 1,
                      .seqs = &s,
                      .n_rows = 1,
                      .rows = &row};
    struct err e = {0};
    double t = machine_now(cpu);
    model_submit(m, &st);
    if (model_collect(m, &st, &e) != OK) abort();
    return machine_now(cpu) - t;
}

int main(int argc, char **argv)
{
    if (argc < 5 || argc > 6) {
        fprintf(stderr, "usage: bench_peer LAYERS VOCAB FORMAT THREADS [cpu]\n");
        return 2;
    }
    struct config c;
    struct store *store;
    struct model *m;
    struct err e = {0};
    format_t f = format_find(argv[3]);
    if (f == FORMAT_COUNT) {
        fprintf(stderr, "bench_peer: no format %s\n", argv[3]);
        return 2;
    }
    err_t rc =
        build(&c, &store, (int)strtol(argv[1], NULL, 10), (int)strtol(argv[2], NULL, 10), f, &e);
    struct pool *pool = pool_new((int)strtol(argv[4], NULL, 10));
    if (rc == OK) rc = model_new(&m, &c, store, pool, PAGES, KV_BF16, 2048, NULL, &e);
    if (rc != OK) {
        fprintf(stderr, "bench_peer: %s\n", e.msg);
        return 1;
    }
    printf("ready %s\n", model_isa(m));
    fflush(stdout);
    bool cpu = argc == 6 && strcmp(argv[5], "cpu") == 0;
    char word[16];
    int n, at = 0;
    while (scanf("%15s %d", word, &n) == 2 && n > 0 && n <= 2048) {
        double t = 0;
        if (strcmp(word, "prefill") == 0) {
            t = run(m, 0, n, cpu);
            at = n;
        } else {
            for (int i = 0; i < n && at < PAGES * KV_PAGE - 1; i++)
                t += run(m, at++, 1, cpu);
        }
        printf("%.9f\n", t);
        fflush(stdout);
    }
    model_free(m);
    pool_free(pool);
    store_free(store);
    return 0;
}
