#include "text/bpe.h"

#include "base/mem.h"

#include <string.h>

/* Options that change ids and are not implemented must have their neutral value. */
static err_t check_options(const json_t *model, struct err *e)
{
    const char *type = json_string_value(json_object_get(model, "type"));
    if (json_object_get(model, "type") && (!type || strcmp(type, "BPE") != 0))
        return err_set(e, ERR_UNSUPPORTED, "model type \"%.60s\" is not supported (only \"BPE\")",
                       type ? type : "?");
    static const char *const names[] = {"unk_token", "continuing_subword_prefix",
                                        "end_of_word_suffix"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const json_t *v = json_object_get(model, names[i]);
        if (!v || json_is_null(v) || (i > 0 && json_string_length(v) == 0 && json_is_string(v)))
            continue;
        return err_set(e, ERR_UNSUPPORTED, "model: %s is not supported (only null)", names[i]);
    }
    const json_t *dropout = json_object_get(model, "dropout");
    if (dropout && !json_is_null(dropout) &&
        !(json_is_number(dropout) && json_number_value(dropout) <= 0))
        return err_set(e, ERR_UNSUPPORTED, "model: dropout is not supported (only null)");
    if (json_is_true(json_object_get(model, "byte_fallback")))
        return err_set(e, ERR_UNSUPPORTED, "model: byte_fallback true is not supported");
    return OK;
}

static err_t parse_vocab(struct vocab *v, const json_t *model, struct err *e)
{
    json_t *o = json_object_get(model, "vocab");
    if (!json_is_object(o)) return err_set(e, ERR_INPUT, "model: vocab must be an object");
    const char *key;
    json_t *id;
    json_object_foreach(o, key, id)
    {
        if (!json_is_integer(id))
            return err_set(e, ERR_INPUT, "model: vocab \"%.80s\": the id must be an integer", key);
        err_t rc = vocab_put(v, json_integer_value(id), key, strlen(key), e);
        if (rc != OK) return err_wrap(e, rc, "model: vocab");
    }
    return OK;
}

/* The two sides of a merge, from "a b" or ["a", "b"]. */
static bool merge_sides(const json_t *m, const char *s[2], size_t n[2])
{
    if (json_is_array(m) && json_array_size(m) == 2) {
        for (size_t k = 0; k < 2; k++) {
            const json_t *v = json_array_get(m, k);
            if (!json_is_string(v)) return false;
            s[k] = json_string_value(v);
            n[k] = json_string_length(v);
        }
        return true;
    }
    if (!json_is_string(m)) return false;
    const char *t = json_string_value(m), *end = t + json_string_length(m);
    const char *space = memchr(t, ' ', (size_t)(end - t));
    if (!space || memchr(space + 1, ' ', (size_t)(end - space - 1))) return false;
    s[0] = t;
    n[0] = (size_t)(space - t);
    s[1] = space + 1;
    n[1] = (size_t)(end - space - 1);
    return true;
}

static err_t put_merge(struct bpe *b, const json_t *m, uint32_t rank, struct buf *joined,
                       struct err *e)
{
    const char *s[2];
    size_t n[2];
    if (!merge_sides(m, s, n))
        return err_set(e, ERR_INPUT, "model: merge %u must be \"a b\" or [\"a\", \"b\"]", rank);
    buf_clear(joined);
    if (!buf_put(joined, s[0], n[0]) || !buf_put(joined, s[1], n[1]))
        return err_set(e, ERR_NOMEM, "model: merges: out of memory");
    int32_t left = vocab_find(b->vocab, s[0], n[0]), right = vocab_find(b->vocab, s[1], n[1]);
    int32_t id = vocab_find(b->vocab, joined->data, joined->len);
    if (left < 0 || right < 0 || id < 0)
        return err_set(e, ERR_INPUT,
                       "model: merge %u (\"%.60s\" \"%.60s\") has a token that is not "
                       "in the vocabulary",
                       rank, s[0], s[1]);
    uint64_t pair = (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
    size_t at = (size_t)((pair * 0x9E3779B97F4A7C15u) >> b->shift);
    while (b->merge[at].pair != UINT64_MAX && b->merge[at].pair != pair)
        at = (at + 1) & b->mask;
    b->merge[at] = (struct merge_slot){pair, rank, id}; /* the last of equal pairs counts */
    return OK;
}

static err_t parse_merges(struct bpe *b, const json_t *model, struct err *e)
{
    const json_t *list = json_object_get(model, "merges");
    if (!json_is_array(list)) return err_set(e, ERR_INPUT, "model: merges must be an array");
    size_t n = json_array_size(list), cap = 16;
    if (n >= UINT32_MAX / 4) return err_set(e, ERR_INPUT, "model: too many merges");
    int bits = 4;
    while (cap < n * 2 + 2) {
        cap *= 2;
        bits++;
    }
    b->merge = mem_try_array(cap, sizeof *b->merge);
    if (!b->merge) return err_set(e, ERR_NOMEM, "model: merges: out of memory");
    b->mask = cap - 1;
    b->shift = 64 - bits;
    for (size_t i = 0; i < cap; i++)
        b->merge[i].pair = UINT64_MAX;
    struct buf joined = {0};
    err_t rc = OK;
    uint32_t rank = 0;
    for (size_t i = 0; i < n && rc == OK; i++) {
        const json_t *m = json_array_get(list, i);
        const char *line = json_string_value(m);
        if (line && strncmp(line, "#version", 8) == 0) continue;
        rc = put_merge(b, m, rank++, &joined, e);
    }
    buf_release(&joined);
    return rc;
}

static void find_bytes(struct bpe *b)
{
    for (int i = 0; i < 256; i++)
        b->byte_id[i] = -1;
    for (int32_t id = 0; id < b->vocab->n; id++) {
        const struct token *t = vocab_token(b->vocab, id);
        if (t && t->mapped && t->bytes_len == 1)
            b->byte_id[(unsigned char)b->vocab->arena.data[t->bytes]] = id;
    }
}

/* Put the tokens that a whole piece of the same bytes becomes into the table of whole pieces. */
static err_t index_whole(struct bpe *b, bool ignore_merges, struct err *e)
{
    struct vocab *v = b->vocab;
    struct ids ids = {0};
    bool ok = true;
    bool *whole = mem_try_array((size_t)v->n + 1, sizeof *whole);
    if (!whole) return err_set(e, ERR_NOMEM, "vocabulary: out of memory");
    for (int32_t id = 0; ok && id < v->n; id++) {
        const struct token *t = vocab_token(v, id);
        if (!t || !t->mapped || t->bytes_len == 0) continue;
        ids.n = 0;
        if (!ignore_merges) ok = bpe_encode(b, &ids, v->arena.data + t->bytes, t->bytes_len);
        whole[id] = ignore_merges || (ids.n == 1 && ids.v[0] == id);
    }
    for (int32_t id = 0; ok && id < v->n; id++)
        if (whole[id]) ok = vocab_index_bytes(v, id);
    mem_free(whole);
    ids_release(&ids);
    return ok ? OK : err_set(e, ERR_NOMEM, "vocabulary: out of memory");
}

err_t bpe_parse(struct bpe *b, struct vocab *vocab, const json_t *model, struct err *e)
{
    memset(b, 0, sizeof *b);
    b->vocab = vocab;
    if (!json_is_object(model)) return err_set(e, ERR_INPUT, "model must be an object");
    err_t rc = check_options(model, e);
    if (rc == OK) rc = parse_vocab(vocab, model, e);
    if (rc == OK) rc = parse_merges(b, model, e);
    if (rc != OK) return rc;
    find_bytes(b);
    return index_whole(b, json_is_true(json_object_get(model, "ignore_merges")), e);
}

void bpe_release(struct bpe *b)
{
    mem_free(b->merge);
    memset(b, 0, sizeof *b);
}
