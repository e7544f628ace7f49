/* grammartool TOKENIZER.json: a JSON list of cases on standard input, a list of answers on standard
 * output.
 *
 * A case: {"regex": P} | {"schema": S} | {"object": true} with "texts" to be matched, "samples"
 * texts to be drawn at random from the masks (at most "max" tokens each; null: it did not end),
 * "seed".  An answer: {"error": text} or
 * {"match": [[whole, prefix], ...], "samples": [...], "us": microseconds of a mask, "first_us": of
 * the slowest}. "check": every mask is compared with matching text + token for each token of the
 * vocabulary. */
#include "base/mem.h"
#include "text/grammar.h"
#include <stdio.h>
#include <string.h>
#include <time.h>

struct tool {
    struct token_trie *trie;
    struct tokenizer *tok;
    int32_t vocab;
    uint64_t seed;
    uint32_t *bits;
    int64_t ns, worst, n_masks;
    bool check;
};

/* Of this thread: other work on the machine does not show. */
static int64_t cpu_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static uint64_t draw(struct tool *t)
{
    t->seed = t->seed * 6364136223846793005u + 1442695040888963407u;
    return t->seed >> 33;
}

static bool has(const struct tool *t, int32_t id)
{
    return t->bits[id >> 5] >> (id & 31) & 1;
}

/* Often one of the bytes that end things, else any token that may come. */
static int32_t choose(struct tool *t)
{
    static const char closers[] = "\"}],:<";
    int32_t n = 0, pick = -1;
    if (draw(t) % 100 < 45)
        for (const char *c = closers; *c; c++) {
            char one[2] = {*c, 0};
            int32_t id = tokenizer_id(t->tok, one);
            if (id >= 0 && has(t, id) && draw(t) % (uint64_t)++n == 0) pick = id;
        }
    if (pick >= 0) return pick;
    for (int32_t id = 0; id < t->vocab; id++)
        n += has(t, id);
    if (!n) return -1;
    int32_t k = (int32_t)(draw(t) % (uint64_t)n);
    for (int32_t id = 0; id < t->vocab; id++)
        if (has(t, id) && k-- == 0) return id;
    return -1;
}

/* The mask against the definition: text + token is a beginning. */
static void verify(struct tool *t, struct grammar *g, const struct buf *text)
{
    struct buf b = {0};
    for (int32_t id = 0; id < t->vocab; id++) {
        size_t n = 0;
        bool whole, prefix = false;
        const char *p = tokenizer_decoded(t->tok, id, &n);
        if (p && n && n <= TRIE_MAX_BYTES && !tokenizer_is_special(t->tok, id)) {
            buf_clear(&b);
            buf_put(&b, text->data, text->len);
            buf_put(&b, p, n);
            CHECK(grammar_match(g, b.data, b.len, &whole, &prefix, NULL) == OK);
        }
        CHECK(prefix == has(t, id));
    }
    buf_release(&b);
}

static json_t *sample(struct tool *t, struct grammar *g, int64_t max)
{
    struct grammar_run run = {0};
    struct ids ids = {0};
    struct buf text = {0};
    bool whole = false, done = false;
    buf_puts(&text, "");
    while (!done && (int64_t)ids.n < max) {
        int64_t t0 = cpu_ns();
        CHECK(grammar_mask(g, &run, ids.v, (int32_t)ids.n, t->bits, t->vocab, &whole, NULL) == OK);
        int64_t dt = cpu_ns() - t0;
        t->ns += dt;
        t->n_masks++;
        if (dt > t->worst) t->worst = dt;
        if (t->check) verify(t, g, &text);
        int32_t id = whole && draw(t) % 3 == 0 ? -1 : choose(t);
        done = id < 0;
        if (id < 0) break;
        size_t n = 0;
        const char *p = tokenizer_decoded(t->tok, id, &n);
        CHECK(ids_push(&ids, id) && buf_put(&text, p, n));
    }
    ids_release(&ids);
    json_t *r = done && whole ? json_stringn(text.data, text.len) : json_null();
    if (done && !whole) r = json_pack("{s:s%}", "dead", text.data, text.len);
    buf_release(&text);
    return r ? r : json_string("not UTF-8");
}

static json_t *run(struct tool *t, const json_t *c)
{
    struct err e = {0};
    struct grammar *g = NULL;
    const json_t *p = json_object_get(c, "regex"), *texts = json_object_get(c, "texts");
    struct grammar_spec s = {.pattern = json_string_value(p),
                             .n_pattern = json_string_length(p),
                             .schema = json_object_get(c, "schema"),
                             .any_object = json_is_true(json_object_get(c, "object")),
                             .until = json_string_value(json_object_get(c, "until"))};
    if (grammar_compile(&g, t->trie, &s, &e)) return json_pack("{s:s}", "error", e.msg);
    json_t *match = json_array(), *samples = json_array();
    for (size_t i = 0; i < json_array_size(texts); i++) {
        const json_t *x = json_array_get(texts, i);
        bool whole = false, prefix = false;
        CHECK(grammar_match(g, json_string_value(x), json_string_length(x), &whole, &prefix, &e) ==
              OK);
        json_array_append_new(match, json_pack("[b,b]", whole, prefix));
    }
    t->ns = t->worst = t->n_masks = 0;
    t->seed = (uint64_t)json_integer_value(json_object_get(c, "seed"));
    t->check = json_is_true(json_object_get(c, "check"));
    for (int64_t i = 0; i < json_integer_value(json_object_get(c, "samples")); i++)
        json_array_append_new(samples, sample(t, g, json_integer_value(json_object_get(c, "max"))));
    grammar_unref(g);
    return json_pack("{s:o,s:o,s:f,s:f,s:I}", "match", match, "samples", samples, "us",
                     t->n_masks ? (double)t->ns / 1e3 / (double)t->n_masks : 0.0, "first_us",
                     (double)t->worst / 1e3, "masks", (json_int_t)t->n_masks);
}

int main(int argc, char **argv)
{
    struct err e = {0};
    struct tool t = {0};
    if (argc != 2 || tokenizer_load(&t.tok, argv[1], &e) || token_trie_new(&t.trie, t.tok, &e)) {
        fprintf(stderr, "usage: grammartool TOKENIZER.json < CASES.json\n%s\n", e.msg);
        return 2;
    }
    t.vocab = tokenizer_vocab_size(t.tok);
    t.bits = mem_try_array((size_t)t.vocab / 32 + 1, sizeof *t.bits);
    CHECK(t.bits);
    json_t *in = json_loadf(stdin, JSON_ALLOW_NUL, NULL), *out = json_array();
    for (size_t i = 0; i < json_array_size(in); i++)
        json_array_append_new(out, run(&t, json_array_get(in, i)));
    json_dumpf(out, stdout, JSON_COMPACT);
    json_decref(in);
    json_decref(out);
    mem_free(t.bits);
    token_trie_unref(t.trie);
    tokenizer_free(t.tok);
    return 0;
}
