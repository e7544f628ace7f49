/*
 * Bits do not depend on the batch: two layers of Qwen3-30B-A3B's shape with random weights, contexts
 * past two KV chunks.  The same sequence runs whole, cut into pieces of 17 and 64 tokens, and beside
 * others; every sampled id and scored logprob must be equal bit for bit on each instruction set.
 * Last, the attention is made to depend on how the prompt is cut (model_break_invariance), and the same comparison
 * must then fail: otherwise it would prove nothing.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "backend/backend.h"
#include "base/mem.h"
#include "device.h"
#include "model/model.h"
#include "model/tensors.h"
#include "random_model.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1
#else
#define SANITIZED 0
#endif

#define LEN   544 /* tokens of the sequence: past two chunks of 256 */
#define PAGES 64  /* of a sequence */

struct rig {
    struct config c;
    struct test_device t;
    struct store *store;
    struct pool *pool;
};

static int setup(void **state)
{
    struct rig *g = mem_alloc(sizeof *g);
    struct err e = {0};
    test_device_open(&g->t);
    if (random_model(&g->c, &g->store, g->t.memory, 2, 128, 2048, &e) != OK) fail_msg("%s", e.msg);
    g->pool = pool_new(2);
    *state = g;
    return 0;
}

static int teardown(void **state)
{
    struct rig *g = *state;
    pool_free(g->pool);
    store_free(g->store);
    test_device_close(&g->t);
    mem_free(g);
    return 0;
}

/* What one run of the sequence gives: a score for every 16th token, and a sampled token at the end. */
#define SCORES (LEN / 16)
struct result {
    float score[SCORES], logprob;
    int32_t id;
    int n_steps;
};

static int32_t token_at(int seq, int pos)
{
    return (int32_t)(mix((uint64_t)seq * 1000003 + (uint64_t)pos) % 2048);
}

/* Run sequence 0 in pieces of `piece` tokens, each step also holding the next tokens of `others` more
 * sequences, which come first in the batch. */
static void run(struct model *m, int len, int piece, int others, int other_piece,
                struct result *res)
{
    static int32_t ids[4096], pos[4096], seq[4096], tables[8][PAGES];
    static struct sample_output out[SCORES + 1];
    static struct sample_input in[SCORES + 1];
    static struct step_row rows[SCORES + 1];
    struct sample_params sp = {.temperature = 1, .top_p = 1, .repetition_penalty = 1, .seed = 42};
    struct step_seq seqs[8];
    for (int s = 0; s <= others; s++) {
        for (int i = 0; i < PAGES; i++) {
            tables[s][i] = s * PAGES + (s % 2 ? PAGES - 1 - i : i);
            model_kv_clear(m, tables[s][i]);
        }
        seqs[s] = (struct step_seq){tables[s], PAGES};
    }
    int done = 0, other_done = 0;
    for (res->n_steps = 0; done < len; res->n_steps++) {
        int n = 0, n_rows = 0;
        for (int s = 1; s <= others; s++)
            for (int i = 0; i < other_piece && other_done + i < PAGES * KV_PAGE; i++, n++)
                ids[n] = token_at(s, other_done + i), pos[n] = other_done + i, seq[n] = s;
        other_done += other_piece;
        int here = len - done < piece ? len - done : piece;
        for (int i = 0; i < here; i++, n++) {
            int p = done + i;
            ids[n] = token_at(0, p), pos[n] = p, seq[n] = 0;
            if (p % 16 != 15) continue;
            in[n_rows] = (struct sample_input){
                .target = p == LEN - 1 ? -1 : token_at(0, p + 1), .params = &sp, .position = LEN};
            rows[n_rows] = (struct step_row){n, &in[n_rows], &out[n_rows]};
            n_rows++;
        }
        struct step st = {n, ids, pos, seq, others + 1, seqs, n_rows, rows, NULL, NULL};
        model_submit(m, &st);
        struct err collect_e;
        assert_int_equal(model_collect(m, &st, &collect_e), OK);
        for (int i = 0; i < n_rows; i++) {
            assert_true(out[i].finite);
            int p = pos[rows[i].token];
            res->score[p / 16] = out[i].logprob;
            if (p == LEN - 1) res->id = out[i].id, res->logprob = out[i].logprob;
        }
        done += here;
    }
}

static bool same(const struct result *a, const struct result *b, int len)
{
    if (len < LEN) return memcmp(a->score, b->score, sizeof a->score[0] * (size_t)(len / 16)) == 0;
    return a->id == b->id && memcmp(&a->logprob, &b->logprob, 4) == 0 &&
           memcmp(a->score, b->score, sizeof a->score) == 0;
}

static void bits_do_not_depend_on_the_batch(void **state)
{
    struct rig *g = *state;
    struct err e = {0};
    enum { PORTABLE = 3, N_ISAS };
    static const char *const host[N_ISAS] = {"neon", "avx512", "avx2", [PORTABLE] = "portable"};
    static const char *const gpu[] = {NULL, "kernel by kernel"};
    const char *const *isas = g->t.d ? gpu : host;
    struct result first = {0}, r;
    bool have = false;
    for (int i = 0; i < (g->t.d ? 2 : N_ISAS); i++) {
        struct model *m;
        if (test_model_new(&g->t, &m, &g->c, g->store, g->pool, 8 * PAGES, KV_BF16, 2048, isas[i],
                           &e) != OK) {
            printf("skip %s: %s\n", isas[i], e.msg);
            continue;
        }
        /* Without FMA hardware the portable path takes seconds a token: its first ones tie it to the others. */
        int len = i == PORTABLE ? 16 : LEN, piece = i == PORTABLE ? 11 : 64;
        run(m, len, len, 0, 0, &r);
        assert_int_equal(r.n_steps, 1);
        if (!have) first = r, have = true;
        assert_true(same(&first, &r, len));
        run(m, len, piece, i == PORTABLE ? 0 : 7, 5, &r);
        assert_int_equal(r.n_steps, (len + piece - 1) / piece);
        assert_true(same(&first, &r, len));
        if (i != PORTABLE) {
            run(m, len, 17, 1, 5, &r);
            assert_int_equal(r.n_steps, (len + 16) / 17);
            assert_true(same(&first, &r, len));
        }
        model_free(m);
    }
    assert_true(have);
}

#define FP8_LEN 320 /* past a chunk */

static double distance(const struct result *a, const struct result *b)
{
    double sum = 0.0;
    for (int i = 0; i < FP8_LEN / 16; i++)
        sum += fabs((double)a->score[i] - (double)b->score[i]);
    return sum / (FP8_LEN / 16);
}

static struct model *fp8_model(struct rig *g, int pages, kv_type_t kv)
{
    struct err e = {0};
    struct model *m;
    if (test_model_new(&g->t, &m, &g->c, g->store, g->pool, pages, kv, 2048, NULL, &e) != OK)
        fail_msg("%s", e.msg);
    return m;
}

/* K and V in E4M3: the same promises, and results near those of BF16, with the checkpoint's scales or
 * without; scores of a wrongly scaled cache would be far off. */
static void fp8_kv(void **state)
{
    struct rig *g = *state;
    struct model *m;
    struct result bf16, whole, cut, scaled;
    assert_int_equal(model_kv_page_bytes(&g->c, KV_E4M3) * 2, model_kv_page_bytes(&g->c, KV_BF16));
    m = fp8_model(g, PAGES, KV_BF16);
    run(m, FP8_LEN, FP8_LEN, 0, 0, &bf16);
    model_free(m);
    m = fp8_model(g, 8 * PAGES, KV_E4M3);
    run(m, FP8_LEN, FP8_LEN, 0, 0, &whole);
    run(m, FP8_LEN, 64, 7, 5, &cut);
    assert_true(same(&whole, &cut, FP8_LEN));
    for (int layer = 0; layer < g->c.n_layers; layer++) {
        struct layer_slots l;
        tensors_layer(&l, &g->c, layer);
        const float scale[2] = {0.037f, 0.0041f};
        g->t.memory.ops->put(g->t.memory.ctx, (void *)(uintptr_t)store_ptr(g->store, l.kv_scale),
                             &store_spec(g->store, l.kv_scale)->shape, PART_DATA, 0, 1, scale);
    }
    store_flush(g->store);
    model_free(m);
    m = fp8_model(g, 8 * PAGES, KV_E4M3); /* a model on a GPU reads the scales once an epoch */
    run(m, FP8_LEN, FP8_LEN, 0, 0, &scaled);
    model_free(m);
    double a = distance(&bf16, &whole), b = distance(&bf16, &scaled);
    print_message("mean |difference| of scores from a BF16 cache: scale 1 %.4f, scaled %.4f\n", a,
                  b);
    assert_true(a > 0.0 && b > 0.0 && a != b);
    assert_true(a < 0.1 && b < 0.1);
}

/* Sequences that share pages (two whole chunks and a part of the third, as a prefix hit leaves them) and go on
 * differently, some of them past the third: a step of all of them, in which a kernel may read what is shared once,
 * gives each what it gets alone.  They are too many for the kernels of few tokens. */
static void shared_prefix(void **state)
{
    enum { N = 12, SHARED = 2 * KV_CHUNK + 13 * KV_PAGE, OWN = 8, FIRST = SHARED / KV_PAGE };
    struct rig *g = *state;
    struct model *m = fp8_model(g, FIRST + N * OWN, KV_BF16);
    struct sample_params sp = {.top_p = 1, .repetition_penalty = 1};
    static int32_t ids[SHARED], pos[SHARED], seq[SHARED], tables[N][FIRST + OWN];
    struct step_seq seqs[N];
    struct sample_input in[N];
    struct sample_output together[N], alone[N];
    struct step_row rows[N];
    for (int s = 0; s < N; s++) {
        for (int i = 0; i < FIRST + OWN; i++)
            tables[s][i] = i < FIRST ? i : FIRST + s * OWN + i - FIRST;
        seqs[s] = (struct step_seq){tables[s], FIRST + OWN};
    }
    struct step st = {SHARED, ids, pos, seq, N, seqs, 0, NULL, NULL, NULL};
    for (int i = 0; i < SHARED; i++)
        ids[i] = token_at(0, i), pos[i] = i;
    model_submit(m, &st);
    assert_int_equal(model_collect(m, &st, NULL), OK);
    for (int s = 0; s < N; s++) { /* each one's own tokens */
        st.n_tokens = 20 + 3 * s;
        for (int i = 0; i < st.n_tokens; i++)
            ids[i] = token_at(s + 1, i), pos[i] = SHARED + i, seq[i] = s;
        model_submit(m, &st);
        assert_int_equal(model_collect(m, &st, NULL), OK);
    }
    st = (struct step){N, ids, pos, seq, N, seqs, N, rows, NULL, NULL};
    for (int s = 0; s < N; s++) {
        ids[s] = token_at(s + 1, 500), pos[s] = SHARED + 20 + 3 * s, seq[s] = s;
        in[s] = (struct sample_input){.target = -1, .params = &sp, .position = 1};
        rows[s] = (struct step_row){s, &in[s], &together[s]};
    }
    model_submit(m, &st);
    assert_int_equal(model_collect(m, &st, NULL), OK);
    for (int s = 0; s < N; s++) {
        struct step_row row = {0, &in[s], &alone[s]};
        struct step one = {1, ids + s, pos + s, seq + s, N, seqs, 1, &row, NULL, NULL};
        model_submit(m, &one);
        assert_int_equal(model_collect(m, &one, NULL), OK);
        assert_int_equal(alone[s].id, together[s].id);
        assert_memory_equal(&alone[s].logprob, &together[s].logprob, sizeof(float));
    }
    model_free(m);
}

static void a_batch_dependent_split_is_noticed(void **state)
{
    struct rig *g = *state;
    struct err e = {0};
    struct model *m;
    struct result whole, cut;
    assert_int_equal(
        test_model_new(&g->t, &m, &g->c, g->store, g->pool, PAGES, KV_BF16, 2048, NULL, &e), OK);
    model_break_invariance(m);
    run(m, LEN, LEN, 0, 0, &whole);
    run(m, LEN, 64, 0, 0, &cut);
    assert_false(same(&whole, &cut, LEN));
    model_free(m);
}

int main(void)
{
    if (SANITIZED) { /* minutes there; test_kernels and test_engine cover the code */
        printf("skip test_invariance: a sanitizer build is too slow for these shapes\n");
        return 0;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bits_do_not_depend_on_the_batch),
        cmocka_unit_test(fp8_kv),
        cmocka_unit_test(shared_prefix),
        cmocka_unit_test(a_batch_dependent_split_is_noticed),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
