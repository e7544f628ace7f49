#include "text/vocab.h"

#include "base/mem.h"
#include "text/utf8.h"

#include <string.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

/* GPT-2's alphabet: printable Latin-1 stands for itself, the other 68 bytes, in order, for U+0100
 * and up. */
int byte_level_byte(uint32_t c)
{
    if ((c >= 0x21 && c <= 0x7E) || (c >= 0xA1 && c <= 0xAC) || (c >= 0xAE && c <= 0xFF))
        return (int)c;
    if (c < 0x100 || c > 0x143) return -1;
    int k = (int)c - 0x100;
    if (k <= 0x20) return k;
    if (k <= 0x42) return 0x7F + (k - 0x21);
    return 0xAD;
}

static const char *content_of(const struct vocab *v, int32_t id, size_t *n)
{
    *n = v->token[id].content_len;
    return v->arena.data + v->token[id].content;
}

static const char *bytes_of(const struct vocab *v, int32_t id, size_t *n)
{
    *n = v->token[id].bytes_len;
    return v->arena.data + v->token[id].bytes;
}

typedef const char *key_fn(const struct vocab *v, int32_t id, size_t *n);

/* The slot of the string, or the empty one where it belongs. */
static inline size_t probe(const struct vocab *v, const struct string_map *m, key_fn *key,
                           const char *p, size_t n)
{
    size_t at = (size_t)XXH3_64bits(p, n) & m->mask;
    for (;; at = (at + 1) & m->mask) {
        if (m->slot[at] < 0) return at;
        size_t len;
        const char *s = key(v, m->slot[at], &len);
        if (len == n && memcmp(s, p, n) == 0) return at;
    }
}

static bool map_grow(const struct vocab *v, struct string_map *m, key_fn *key)
{
    size_t cap = m->slot ? (m->mask + 1) * 2 : 1024;
    struct string_map bigger = {mem_try_array(cap, sizeof *m->slot), cap - 1, m->n};
    if (!bigger.slot) return false;
    memset(bigger.slot, 0xFF, cap * sizeof *m->slot);
    for (size_t i = 0; m->slot && i <= m->mask; i++) {
        if (m->slot[i] < 0) continue;
        size_t n;
        const char *p = key(v, m->slot[i], &n);
        bigger.slot[probe(v, &bigger, key, p, n)] = m->slot[i];
    }
    mem_free(m->slot);
    *m = bigger;
    return true;
}

static bool map_put(const struct vocab *v, struct string_map *m, key_fn *key, int32_t id)
{
    if ((!m->slot || m->n * 2 > m->mask) && !map_grow(v, m, key)) return false;
    size_t n;
    const char *p = key(v, id, &n);
    size_t at = probe(v, m, key, p, n);
    if (m->slot[at] < 0) m->n++;
    m->slot[at] = id;
    return true;
}

static bool grow_tokens(struct vocab *v, int32_t id)
{
    int32_t cap = v->cap ? v->cap : 1024;
    while (cap <= id)
        cap *= 2; /* id < 2^24 */
    if (cap == v->cap) return true;
    struct token *t = mem_retry(v->token, (size_t)v->cap * sizeof *t, (size_t)cap * sizeof *t);
    if (!t) return false;
    memset(t + v->cap, 0, (size_t)(cap - v->cap) * sizeof *t);
    v->token = t;
    v->cap = cap;
    return true;
}

/* Fill the decoded bytes of `t` from the n bytes of text at `from` in the arena. */
static bool put_bytes(struct vocab *v, struct token *t, size_t from, size_t n)
{
    size_t start = v->arena.len, end = from + n;
    t->mapped = true;
    for (size_t i = from; i < end;) {
        int len;
        int b = byte_level_byte(utf8_get(v->arena.data + i, &len));
        if (b < 0) {
            v->arena.len = start; /* back to the content alone */
            t->mapped = false;
            t->bytes = (uint32_t)from;
            t->bytes_len = (uint32_t)n;
            return true;
        }
        if (!buf_putc(&v->arena, (char)b)) return false;
        i += (size_t)len;
    }
    t->bytes = (uint32_t)start;
    t->bytes_len = (uint32_t)(v->arena.len - start);
    return true;
}

err_t vocab_put(struct vocab *v, int64_t id, const char *content, size_t n, struct err *e)
{
    if (id < 0 || id >= VOCAB_MAX_ID)
        return err_set(e, ERR_INPUT, "token \"%.80s\": id %lld is not in 0..%d", content,
                       (long long)id, VOCAB_MAX_ID - 1);
    if (id < v->n && v->token[id].used)
        return err_set(e, ERR_INPUT, "token \"%.80s\": id %lld is already another token's", content,
                       (long long)id);
    struct token t = {.used = true, .content = (uint32_t)v->arena.len, .content_len = (uint32_t)n};
    bool ok = grow_tokens(v, (int32_t)id) && buf_put(&v->arena, content, n) &&
              put_bytes(v, &t, t.content, n);
    if (ok) {
        v->token[id] = t;
        ok = map_put(v, &v->by_content, content_of, (int32_t)id);
    }
    if (!ok) return err_set(e, ERR_NOMEM, "vocabulary: out of memory");
    if (id >= v->n) v->n = (int32_t)id + 1;
    v->count++;
    return OK;
}

bool vocab_decode_as(struct vocab *v, int32_t id, const char *text, size_t n)
{
    size_t from = v->arena.len;
    return buf_put(&v->arena, text, n) && put_bytes(v, &v->token[id], from, n);
}

int32_t vocab_find(const struct vocab *v, const char *content, size_t n)
{
    if (!v->by_content.slot) return -1;
    return v->by_content.slot[probe(v, &v->by_content, content_of, content, n)];
}

bool vocab_index_bytes(struct vocab *v, int32_t id)
{
    return map_put(v, &v->by_bytes, bytes_of, id);
}

int32_t vocab_find_bytes(const struct vocab *v, const char *bytes, size_t n)
{
    if (!v->by_bytes.slot) return -1;
    return v->by_bytes.slot[probe(v, &v->by_bytes, bytes_of, bytes, n)];
}

const struct token *vocab_token(const struct vocab *v, int32_t id)
{
    return id >= 0 && id < v->n && v->token[id].used ? &v->token[id] : NULL;
}

void vocab_release(struct vocab *v)
{
    mem_free(v->token);
    mem_free(v->by_content.slot);
    mem_free(v->by_bytes.slot);
    buf_release(&v->arena);
    memset(v, 0, sizeof *v);
}
