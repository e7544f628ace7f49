/*
 * Any bytes as a regular expression (first byte even) or as a JSON schema (odd).  What compiles is followed along
 * a text that its own masks draw: each mask agrees with matching text + token, a fresh run gives the same
 * mask, and a whole text of a schema is JSON.
 */
#include "base/mem.h"
#include "text/grammar.h"
#include "tiny_tokenizer.h"
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

enum { VOCAB = 267, WORDS = (VOCAB + 31) / 32, STEPS = 24 };

static bool bit(const uint32_t *m, int32_t id)
{
    return m[id >> 5] >> (id & 31) & 1;
}

static int32_t choose(const uint32_t *mask, uint32_t *seed)
{
    int32_t start = (int32_t)((*seed = *seed * 1664525u + 1013904223u) >> 8) % VOCAB;
    for (int32_t i = 0; i < VOCAB; i++)
        if (bit(mask, (start + i) % VOCAB)) return (start + i) % VOCAB;
    return -1;
}

static void check_mask(struct grammar *g, const struct tokenizer *t, struct buf *text,
                       const uint32_t *mask, uint32_t seed)
{
    size_t len = text->len;
    for (int k = 0; k < 6; k++) {
        int32_t id = (int32_t)((seed = seed * 1664525u + 1013904223u) >> 8) % VOCAB;
        size_t n = 0;
        bool whole, prefix = false;
        const char *p = tokenizer_decoded(t, id, &n);
        if (!p || !n || tokenizer_is_special(t, id)) continue;
        buf_put(text, p, n);
        if (grammar_match(g, text->data, text->len, &whole, &prefix, NULL) == OK)
            CHECK(prefix == bit(mask, id));
        text->len = len;
    }
}

static void follow(struct grammar *g, const struct tokenizer *t, bool json, uint32_t seed)
{
    struct grammar_run run = {0};
    struct buf text = {0};
    int32_t ids[STEPS];
    buf_puts(&text, "");
    for (int32_t i = 0; i <= STEPS; i++) {
        uint32_t mask[WORDS], again[WORDS];
        struct grammar_run fresh = {0};
        bool whole, w, prefix;
        err_t rc = grammar_mask(g, &run, ids, i, mask, VOCAB, &whole, NULL);
        CHECK(rc == OK || rc == ERR_TOOBIG);
        if (rc) break;
        if (grammar_mask(g, &fresh, ids, i, again, VOCAB, &w, NULL) == OK)
            CHECK(w == whole && !memcmp(mask, again, sizeof mask));
        if (grammar_match(g, text.data, text.len, &w, &prefix, NULL) == OK)
            CHECK(prefix && w == whole);
        check_mask(g, t, &text, mask, seed);
        if (whole && json) {
            json_t *v = json_loadb(text.data, text.len, JSON_DECODE_ANY | JSON_ALLOW_NUL, NULL);
            CHECK(v);
            json_decref(v);
        }
        int32_t id = i < STEPS ? choose(mask, &seed) : -1;
        if (id < 0) break;
        size_t n = 0;
        const char *p = tokenizer_decoded(t, id, &n);
        buf_put(&text, p, n);
        ids[i] = id;
    }
    buf_release(&text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    static struct tokenizer *tok;
    static struct token_trie *trie;
    struct grammar *g = NULL;
    struct err e = {0};
    if (!trie) {
        tok = tiny_tokenizer(0);
        CHECK(token_trie_new(&trie, tok, &e) == OK);
    }
    if (n < 2) return 0;
    bool json = data[0] & 1;
    json_t *schema = json ? json_loadb((const char *)data + 1, n - 1, JSON_DECODE_ANY, NULL) : NULL;
    struct grammar_spec spec = {
        .pattern = json ? NULL : (const char *)data + 1, .n_pattern = n - 1, .schema = schema};
    if (data[0] & 2) spec.until = "</t>";
    if ((!json || schema) && grammar_compile(&g, trie, &spec, &e) == OK)
        follow(g, tok, json && !spec.until, data[0] * 77u + data[n - 1]);
    grammar_unref(g);
    json_decref(schema);
    return 0;
}
