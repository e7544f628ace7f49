/* Stop strings across token borders (case C43) and end tokens (case C47), without a model. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include "base/file.h"
#include "base/mem.h"
#include "engine/output.h"
#include <stdio.h>
#include <string.h>

#define TOKENIZER "models/tiny-moe/tokenizer.json"

/* Feed ids until the request ends; checks that nothing sent is withdrawn. */
static void feed_ids(struct seq *q, struct request *r, const struct config *c, const int32_t *ids,
                     int32_t n)
{
    char sent[256] = "";
    size_t n_sent = 0;
    finish_t f = FINISH_NONE;
    for (int32_t i = 0; i < n && f == FINISH_NONE; i++) {
        struct sample_output o = {.id = ids[i], .logprob = -1.0f, .finite = true};
        f = output_token(q, &o, c);
        assert_true(r->text_sent >= n_sent && r->text_sent <= r->text.len);
        if (n_sent) assert_memory_equal(sent, r->text.data, n_sent);
        n_sent = r->text_sent;
        if (n_sent) memcpy(sent, r->text.data, n_sent);
    }
    output_end(q);
    assert_true(r->text.len >= n_sent);
    if (n_sent) assert_memory_equal(sent, r->text.data, n_sent);
    assert_int_equal(r->text_sent, r->text.len);
}

static void set_stops(struct request *r, const char *a, const char *b)
{
    r->n_stops = b ? 2 : 1;
    r->stops = mem_alloc(2 * sizeof(char *));
    r->stop_bytes = mem_alloc(2 * sizeof(size_t));
    r->stops[0] = mem_dup(a);
    r->stop_bytes[0] = strlen(a);
    if (!b) return;
    r->stops[1] = mem_dup(b);
    r->stop_bytes[1] = strlen(b);
}

static void test_stop_strings(void **state)
{
    (void)state;
    if (!file_exists(TOKENIZER)) {
        print_message("no %s: skipped\n", TOKENIZER);
        skip();
    }
    static const char *const pieces[] = {"ABC", "DEF", "G", "HI", "J", "K"};
    static const struct {
        const char *a, *b, *text;
        int matched;
    } rows[] = {{"DEFGHIJ", NULL, "ABC", 0},      {"FG", NULL, "ABCDE", 0},
                {"JK", NULL, "ABCDEFGHI", 0},     {"XX", "HI", "ABCDEFG", 1},
                {"JKL", NULL, "ABCDEFGHIJK", -1}, {"FGH", "EFGH", "ABCD", 1}};
    struct err e = {0};
    struct tokenizer *t = NULL;
    struct ids ids = {0};
    struct config c = {0};
    assert_int_equal(tokenizer_load(&t, TOKENIZER, &e), OK);
    for (size_t i = 0; i < sizeof(pieces) / sizeof(*pieces); i++)
        assert_int_equal(tokenizer_encode(t, &ids, pieces[i], strlen(pieces[i]), &e), OK);
    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        struct request *r = request_new();
        struct seq q = {.r = r, .max_new = (int32_t)ids.n};
        set_stops(r, rows[i].a, rows[i].b);
        assert_true(output_init(&q, t));
        feed_ids(&q, r, &c, ids.v, (int32_t)ids.n);
        assert_string_equal(r->text.data, rows[i].text);
        assert_int_equal(r->matched_stop, rows[i].matched);
        assert_int_equal(r->finish, rows[i].matched < 0 ? FINISH_LENGTH : FINISH_STOP_STRING);
        output_release(&q);
        mem_free(q.ids);
        request_unref(r);
    }
    ids_release(&ids);
    tokenizer_free(t);
}

static void test_end_tokens(void **state)
{
    (void)state;
    static const int32_t ids[] = {10, 11, 106, 12, 2, 13, 1, 14};
    static const struct {
        int32_t min, explicit_id, n, matched;
        bool ignore;
    } rows[] = {{0, -1, 3, 106, false},
                {0, -1, 8, -1, true},
                {4, -1, 5, 2, false},
                {8, -1, 8, -1, false},
                {0, 106, 3, 106, true}};
    struct config c = {.eos = {1, 106, 2}, .n_eos = 3};
    for (size_t i = 0; i < sizeof(rows) / sizeof(*rows); i++) {
        struct request *r = request_new();
        struct seq q = {.r = r, .max_new = 8};
        int32_t barred[8];
        r->min_new_tokens = rows[i].min;
        r->ignore_eos = rows[i].ignore;
        if (rows[i].explicit_id >= 0) {
            r->stop_ids = mem_alloc(sizeof(int32_t));
            r->stop_ids[0] = rows[i].explicit_id;
            r->n_stop_ids = 1;
        }
        assert_true(output_init(&q, NULL));
        assert_int_equal(output_barred(&q, &c, barred), rows[i].min ? 3 : 0);
        feed_ids(&q, r, &c, ids, 8);
        assert_int_equal(r->n_output, rows[i].n);
        assert_int_equal(r->matched_id, rows[i].matched);
        output_release(&q);
        mem_free(q.ids);
        request_unref(r);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_stop_strings),
                                       cmocka_unit_test(test_end_tokens)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
