#include "text/added.h"

#include "base/mem.h"
#include "text/nfc.h"
#include "text/regex.h"
#include "text/utf8.h"

#include <string.h>

/* Rust's \w: PCRE2's own is smaller. */
#define WORD "[\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}\\x{200C}\\x{200D}]"

struct item {
    int32_t id;
    bool single_word, lstrip, rstrip, normalized, special;
};

/* Children of a node are a list by first/next; node 0 is the root, so 0 also ends a list. */
struct trie_node {
    uint32_t first, next;
    int32_t item; /* -1: no pattern ends here */
    unsigned char byte;
};

struct trie {
    struct trie_node *v;
    uint32_t n, cap;
    uint32_t root[256]; /* the root's children by byte; 0 none */
};

struct added {
    struct item *item;
    int32_t n;
    struct trie trie[2]; /* raw, normalized */
    struct regex *word;  /* only with a single_word token */
};

static uint32_t trie_node(struct trie *t, unsigned char byte)
{
    if (t->n == t->cap) {
        uint32_t cap = t->cap ? t->cap * 2 : 256;
        struct trie_node *v = mem_retry(t->v, t->cap * sizeof *v, cap * sizeof *v);
        if (!v) return 0;
        t->v = v;
        t->cap = cap;
    }
    t->v[t->n] = (struct trie_node){.item = -1, .byte = byte};
    return t->n++;
}

static uint32_t trie_child(const struct trie *t, uint32_t node, unsigned char byte)
{
    if (node == 0) return t->root[byte];
    uint32_t c = t->v[node].first;
    while (c != 0 && t->v[c].byte != byte)
        c = t->v[c].next;
    return c;
}

static bool trie_put(struct trie *t, const char *p, size_t n, int32_t item)
{
    if (t->n == 0) { /* the root: node 0 */
        trie_node(t, 0);
        if (t->n == 0) return false;
    }
    uint32_t at = 0;
    for (size_t i = 0; i < n; i++) {
        unsigned char byte = (unsigned char)p[i];
        uint32_t c = trie_child(t, at, byte);
        if (c == 0) {
            c = trie_node(t, byte);
            if (c == 0) return false;
            if (at == 0) {
                t->root[byte] = c;
            } else {
                t->v[c].next = t->v[at].first;
                t->v[at].first = c;
            }
        }
        at = c;
    }
    if (at != 0 && t->v[at].item < 0) t->v[at].item = item; /* the first of equal patterns */
    return true;
}

/* The first match at or after `from`: leftmost, longest.  -1: none. */
static int32_t trie_find(const struct trie *t, const char *p, size_t n, size_t from, size_t *start,
                         size_t *end)
{
    if (t->n == 0) return -1;
    for (size_t i = from; i < n; i++) {
        int32_t best = -1;
        uint32_t at = t->root[(unsigned char)p[i]];
        for (size_t k = i + 1; at != 0; k++) {
            if (t->v[at].item >= 0) {
                best = t->v[at].item;
                *start = i;
                *end = k;
            }
            at = k < n ? trie_child(t, at, (unsigned char)p[k]) : 0;
        }
        if (best >= 0) return best;
    }
    return -1;
}

static err_t read_flag(const json_t *o, const char *name, bool otherwise, bool *out, struct err *e)
{
    const json_t *v = json_object_get(o, name);
    if (v && !json_is_boolean(v))
        return err_set(e, ERR_INPUT, "added_tokens: %s must be a boolean", name);
    *out = v ? json_is_true(v) : otherwise;
    return OK;
}

/* HF does not take the file's id: the model's, if it has the content, else the next free one. */
static int64_t next_id(int32_t model_count, int64_t highest)
{
    return highest >= model_count && model_count > 0 ? highest + 1
           : highest >= 0 && model_count == 0        ? highest + 1
                                                     : model_count;
}

static err_t read_item(struct added *a, struct vocab *v, const json_t *o, int32_t model_count,
                       int64_t *highest, struct err *e)
{
    const json_t *text = json_object_get(o, "content"), *id = json_object_get(o, "id");
    struct item it = {0};
    if (!json_is_string(text) || !json_is_integer(id) || json_integer_value(id) < 0 ||
        json_integer_value(id) >= VOCAB_MAX_ID)
        return err_set(e, ERR_INPUT, "added_tokens: needs content (string) and id (0..%d)",
                       VOCAB_MAX_ID - 1);
    const char *s = json_string_value(text);
    size_t n = json_string_length(text);
    err_t rc = read_flag(o, "special", false, &it.special, e);
    if (rc == OK) rc = read_flag(o, "single_word", false, &it.single_word, e);
    if (rc == OK) rc = read_flag(o, "lstrip", false, &it.lstrip, e);
    if (rc == OK) rc = read_flag(o, "rstrip", false, &it.rstrip, e);
    if (rc == OK) rc = read_flag(o, "normalized", !it.special, &it.normalized, e);
    if (rc != OK || n == 0) return rc;
    it.id = vocab_find(v, s, n);
    if (it.id >= 0 && v->token[it.id].added) return OK; /* the first of equal contents counts */
    if (it.id < 0) {
        int64_t fresh = next_id(model_count, *highest);
        rc = vocab_put(v, fresh, s, n, e);
        if (rc != OK) return err_wrap(e, rc, "added_tokens");
        it.id = (int32_t)fresh;
    }
    if (it.id > *highest) *highest = it.id;
    v->token[it.id].added = true;
    v->token[it.id].special = it.special;
    a->item[a->n++] = it;
    return OK;
}

/* A normalized token is matched, and decoded, as its normalized content. */
static bool put_pattern(struct added *a, struct vocab *v, int32_t i, bool nfc)
{
    const struct item *it = &a->item[i];
    const char *s = v->arena.data + v->token[it->id].content;
    size_t n = v->token[it->id].content_len;
    if (!it->normalized || !nfc) return trie_put(&a->trie[it->normalized], s, n, i);
    struct buf b = {0};
    bool ok = nfc_put(&b, s, n) && trie_put(&a->trie[1], b.data, b.len, i);
    if (ok && (b.len != n || memcmp(b.data, s, n) != 0))
        ok = vocab_decode_as(v, it->id, b.data, b.len);
    buf_release(&b);
    return ok;
}

static err_t build(struct added *a, struct vocab *v, bool nfc, struct err *e)
{
    bool ok = true, words = false;
    /* Special tokens go first: of two that normalize alike, the special one wins. */
    for (int special = 1; special >= 0; special--)
        for (int32_t i = 0; ok && i < a->n; i++)
            if (a->item[i].special == (bool)special) ok = put_pattern(a, v, i, nfc);
    if (!ok) return err_set(e, ERR_NOMEM, "added_tokens: out of memory");
    for (int32_t i = 0; i < a->n; i++)
        words |= a->item[i].single_word;
    return words ? regex_compile(&a->word, WORD, strlen(WORD), e) : OK;
}

err_t added_parse(struct added **out, struct vocab *vocab, const json_t *list, bool nfc,
                  struct err *e)
{
    if (list && !json_is_null(list) && !json_is_array(list))
        return err_set(e, ERR_INPUT, "added_tokens must be an array");
    struct added *a = mem_alloc(sizeof *a);
    size_t n = json_array_size(list);
    int32_t model_count = vocab->count;
    int64_t highest = -1;
    err_t rc = OK;
    a->item = mem_try_array(n + 1, sizeof *a->item);
    if (!a->item) rc = err_set(e, ERR_NOMEM, "added_tokens: out of memory");
    for (size_t i = 0; i < n && rc == OK; i++)
        rc = read_item(a, vocab, json_array_get(list, i), model_count, &highest, e);
    if (rc == OK) rc = build(a, vocab, nfc, e);
    if (rc != OK) {
        added_free(a);
        return rc;
    }
    *out = a;
    return OK;
}

void added_free(struct added *a)
{
    if (!a) return;
    mem_free(a->item);
    mem_free(a->trie[0].v);
    mem_free(a->trie[1].v);
    regex_free(a->word);
    mem_free(a);
}

/* White_Space, which is also Rust's \s. */
static bool is_space(uint32_t c)
{
    return (c >= 9 && c <= 13) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
           (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F ||
           c == 0x205F || c == 0x3000;
}

static size_t char_before(const char *p, size_t at)
{
    do
        at--;
    while (((unsigned char)p[at] & 0xC0) == 0x80);
    return at;
}

static size_t skip_space(const char *p, size_t n, size_t at)
{
    int bytes;
    while (at < n && is_space(utf8_get(p + at, &bytes)))
        at += (size_t)bytes;
    return at;
}

static size_t skip_space_back(const char *p, size_t at, size_t floor)
{
    int bytes;
    while (at > floor) {
        size_t b = char_before(p, at);
        if (b < floor || !is_space(utf8_get(p + b, &bytes))) break;
        at = b;
    }
    return at;
}

/* Whether the character at `at` is part of a word. */
static err_t is_word(const struct added *a, struct regex_run *run, const char *p, size_t at,
                     bool *word, struct err *e)
{
    size_t s, end;
    int bytes;
    utf8_get(p + at, &bytes);
    return regex_match(a->word, run, p + at, (size_t)bytes, 0, word, &s, &end, e);
}

static err_t stands_alone(const struct added *a, struct regex_run *run, const char *p, size_t n,
                          size_t start, size_t end, bool *alone, struct err *e)
{
    bool before = false, after = false;
    err_t rc = OK;
    if (start > 0) rc = is_word(a, run, p, char_before(p, start), &before, e);
    if (rc == OK && end < n) rc = is_word(a, run, p, end, &after, e);
    *alone = !before && !after;
    return rc;
}

static err_t split(const struct added *a, struct regex_run *run, const struct trie *t,
                   const char *text, size_t n, added_sink *put, void *ctx, struct err *e)
{
    size_t done = 0, from = 0, start = 0, end = 0;
    int32_t i;
    while ((i = trie_find(t, text, n, from, &start, &end)) >= 0) {
        const struct item *it = &a->item[i];
        from = end; /* the search goes on here, whatever the flags do to the match */
        err_t rc = OK;
        if (it->single_word) {
            bool alone;
            rc = stands_alone(a, run, text, n, start, end, &alone, e);
            if (rc != OK) return rc;
            if (!alone) continue;
        }
        if (it->lstrip && start > done) start = skip_space_back(text, start, done);
        if (it->rstrip) end = skip_space(text, n, end);
        if (done < start) rc = put(ctx, -1, text + done, start - done, e);
        if (rc == OK) rc = put(ctx, it->id, text + start, end - start, e);
        if (rc != OK) return rc;
        done = end;
    }
    return done < n ? put(ctx, -1, text + done, n - done, e) : OK;
}

err_t added_split(const struct added *a, bool normalized, const char *text, size_t n,
                  added_sink *put, void *ctx, struct err *e)
{
    struct regex_run *run = NULL;
    if (a->word && !(run = regex_run_new(a->word)))
        return err_set(e, ERR_NOMEM, "tokenizing: out of memory");
    err_t rc = split(a, run, &a->trie[normalized], text, n, put, ctx, e);
    regex_run_free(run);
    return rc;
}
