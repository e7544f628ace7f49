#include "text/tokenizer.h"

#include "base/file.h"
#include "base/mem.h"
#include "text/added.h"
#include "text/bpe.h"
#include "text/detok.h"
#include "text/nfc.h"
#include "text/pretok.h"
#include "text/utf8.h"
#include "text/vocab.h"

#include <string.h>

#define FILE_MAX ((size_t)512 << 20) /* the largest published ones have some 30 MB */

struct tokenizer {
    struct vocab vocab;
    struct bpe bpe;
    struct added *added;
    struct pretok *pretok;
    bool nfc;
};

bool ids_push(struct ids *l, int32_t id)
{
    if (l->n == l->cap) {
        size_t cap = l->cap ? l->cap * 2 : 64;
        int32_t *v = mem_retry(l->v, l->cap * sizeof *v, cap * sizeof *v);
        if (!v) return false;
        l->v = v;
        l->cap = cap;
    }
    l->v[l->n++] = id;
    return true;
}

void ids_release(struct ids *l)
{
    mem_free(l->v);
    memset(l, 0, sizeof *l);
}

static err_t parse_normalizer(bool *nfc, const json_t *o, int depth, struct err *e)
{
    if (!o || json_is_null(o)) return OK;
    const char *type = json_string_value(json_object_get(o, "type"));
    if (!type) return err_set(e, ERR_INPUT, "normalizer: type must be a string");
    if (strcmp(type, "NFC") == 0) {
        *nfc = true;
        return OK;
    }
    if (strcmp(type, "Sequence") != 0)
        return err_set(e, ERR_UNSUPPORTED,
                       "normalizer type \"%.60s\" is not supported (null, NFC, Sequence)", type);
    const json_t *list = json_object_get(o, "normalizers");
    if (!json_is_array(list) || depth == 8)
        return err_set(e, ERR_INPUT,
                       "normalizer Sequence: normalizers must be an array, nested at "
                       "most 8 deep");
    err_t rc = OK;
    for (size_t i = 0; i < json_array_size(list) && rc == OK; i++)
        rc = parse_normalizer(nfc, json_array_get(list, i), depth + 1, e);
    return rc;
}

static err_t check_decoder(const json_t *o, struct err *e)
{
    const char *type = json_string_value(json_object_get(o, "type"));
    const json_t *list = json_object_get(o, "decoders");
    if (type && strcmp(type, "Sequence") == 0 && json_array_size(list) == 1) {
        o = json_array_get(list, 0);
        type = json_string_value(json_object_get(o, "type"));
    }
    if (type && strcmp(type, "ByteLevel") == 0) return OK;
    return err_set(e, ERR_UNSUPPORTED, "decoder type \"%.60s\" is not supported (only ByteLevel)",
                   type ? type : "null");
}

static err_t parse_root(struct tokenizer *t, const json_t *root, struct err *e)
{
    if (!json_is_object(root)) return err_set(e, ERR_INPUT, "must be a JSON object");
    err_t rc = parse_normalizer(&t->nfc, json_object_get(root, "normalizer"), 0, e);
    if (rc == OK) rc = check_decoder(json_object_get(root, "decoder"), e);
    if (rc == OK) rc = pretok_parse(&t->pretok, json_object_get(root, "pre_tokenizer"), e);
    if (rc == OK) rc = bpe_parse(&t->bpe, &t->vocab, json_object_get(root, "model"), e);
    if (rc == OK)
        rc = added_parse(&t->added, &t->vocab, json_object_get(root, "added_tokens"), t->nfc, e);
    return rc;
}

err_t tokenizer_parse(struct tokenizer **out, const char *json, size_t n, struct err *e)
{
    json_error_t je;
    json_t *root = json_loadb(json, n, JSON_ALLOW_NUL, &je);
    if (!root) return err_set(e, ERR_INPUT, "tokenizer.json line %d: %s", je.line, je.text);
    struct tokenizer *t = mem_alloc(sizeof *t);
    err_t rc = parse_root(t, root, e);
    json_decref(root);
    if (rc != OK) {
        tokenizer_free(t);
        return err_wrap(e, rc, "tokenizer.json");
    }
    *out = t;
    return OK;
}

err_t tokenizer_load(struct tokenizer **out, const char *path, struct err *e)
{
    struct buf b = {0};
    err_t rc = file_read(&b, path, FILE_MAX, e);
    if (rc == OK) {
        rc = tokenizer_parse(out, b.data, b.len, e);
        if (rc != OK) rc = err_wrap(e, rc, "%s", path);
    }
    buf_release(&b);
    return rc;
}

void tokenizer_free(struct tokenizer *t)
{
    if (!t) return;
    added_free(t->added);
    pretok_free(t->pretok);
    bpe_release(&t->bpe);
    vocab_release(&t->vocab);
    mem_free(t);
}

struct encoding {
    const struct tokenizer *t;
    struct ids *out;
};

static err_t nomem(struct err *e)
{
    return err_set(e, ERR_NOMEM, "tokenizing: out of memory");
}

static err_t put_piece(void *ctx, const char *piece, size_t n, struct err *e)
{
    struct encoding *c = ctx;
    return bpe_encode(&c->t->bpe, c->out, piece, n) ? OK : nomem(e);
}

/* The normalized text between added tokens. */
static err_t put_normalized(void *ctx, int32_t id, const char *text, size_t n, struct err *e)
{
    struct encoding *c = ctx;
    if (id >= 0) return ids_push(c->out, id) ? OK : nomem(e);
    return pretok_run(c->t->pretok, text, n, put_piece, c, e);
}

/* The raw text between added tokens of the first pass. */
static err_t put_raw(void *ctx, int32_t id, const char *text, size_t n, struct err *e)
{
    struct encoding *c = ctx;
    if (id >= 0) return ids_push(c->out, id) ? OK : nomem(e);
    if (!c->t->nfc || nfc_is_trivial(text, n))
        return added_split(c->t->added, true, text, n, put_normalized, c, e);
    struct buf b = {0};
    err_t rc = nfc_put(&b, text, n)
                   ? added_split(c->t->added, true, b.data, b.len, put_normalized, c, e)
                   : nomem(e);
    buf_release(&b);
    return rc;
}

err_t tokenizer_encode(const struct tokenizer *t, struct ids *out, const char *text, size_t n,
                       struct err *e)
{
    size_t good = utf8_valid(text, n);
    if (good < n) return err_set(e, ERR_INPUT, "text: not valid UTF-8 at byte %zu", good);
    struct encoding c = {t, out};
    size_t before = out->n;
    err_t rc = added_split(t->added, false, text, n, put_raw, &c, e);
    if (rc != OK) out->n = before;
    return rc;
}

bool tokenizer_decode(const struct tokenizer *t, struct buf *out, const int32_t *ids, size_t n,
                      bool skip_special)
{
    struct detok d;
    detok_init(&d, t, skip_special);
    for (size_t i = 0; i < n; i++)
        if (!detok_push(&d, ids[i], out)) return false;
    return detok_end(&d, out);
}

int32_t tokenizer_vocab_size(const struct tokenizer *t)
{
    return t->vocab.n;
}

int32_t tokenizer_id(const struct tokenizer *t, const char *content)
{
    return vocab_find(&t->vocab, content, strlen(content));
}

bool tokenizer_is_special(const struct tokenizer *t, int32_t id)
{
    const struct token *k = vocab_token(&t->vocab, id);
    return k && k->special;
}

const char *tokenizer_bytes(const struct tokenizer *t, int32_t id, size_t *n)
{
    const struct token *k = vocab_token(&t->vocab, id);
    if (!k) return NULL;
    *n = k->added ? k->content_len : k->bytes_len;
    return t->vocab.arena.data + (k->added ? k->content : k->bytes);
}

const char *tokenizer_decoded(const struct tokenizer *t, int32_t id, size_t *n)
{
    const struct token *k = vocab_token(&t->vocab, id);
    if (!k) return NULL;
    *n = k->bytes_len;
    return t->vocab.arena.data + k->bytes;
}
