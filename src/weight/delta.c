#include "weight/delta.h"

#include "base/file.h"
#include "base/mem.h"
#include "weight/zframe.h"
#include <errno.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CHUNK  ((size_t)256 << 10)
#define PLACES ((size_t)16 << 10) /* positions and values of an overwrite that are held at once */

/* ---- the index ---- */

bool delta_plain_name(const char *s)
{
    return s && *s && s[0] != '.' && !strchr(s, '/') && strlen(s) <= 255;
}

err_t delta_version(int64_t *out, const json_t *v, const char *what, struct err *e)
{
    const char *s = json_string_value(v);
    int64_t n = -1;
    if (json_is_integer(v))
        n = json_integer_value(v);
    else if (s && *s && strlen(s) <= 9 && strspn(s, "0123456789") == strlen(s))
        n = strtoll(s, NULL, 10);
    if (n < 0 || n > DELTA_VERSION_MAX)
        return err_set(e, ERR_INPUT, "%s: %s%.40s%s; must be a number of 0 to %d", what,
                       s ? "\"" : "",
                       s   ? s
                       : v ? "not a version"
                           : "missing",
                       s ? "\"" : "", DELTA_VERSION_MAX);
    *out = n;
    return OK;
}

static err_t load(json_t **root, const char *text, size_t n, const char *path, struct err *e)
{
    json_error_t je;
    *root = json_loadb(text, n, JSON_REJECT_DUPLICATES, &je);
    if (*root == NULL) return err_set(e, ERR_INPUT, "%s: line %d: %s", path, je.line, je.text);
    const json_t *meta = json_object_get(*root, "metadata");
    if (json_is_object(*root) && (meta == NULL || json_is_object(meta))) return OK;
    json_decref(*root);
    *root = NULL;
    return err_set(e, ERR_INPUT, "%s: %s: must be an object", path,
                   meta ? "metadata" : "the index");
}

err_t delta_is(bool *out, const char *text, size_t n, const char *path, struct err *e)
{
    json_t *root = NULL;
    err_t rc = load(&root, text, n, path, e);
    if (rc == OK)
        *out = json_object_get(json_object_get(root, "metadata"), "delta_encoding") != NULL;
    json_decref(root);
    return rc;
}

static const char *const encodings[] = {[DELTA_XOR] = "xor", [DELTA_OVERWRITE] = "overwrite"};

/* One string of metadata; `allowed` is for the message. */
static err_t meta_string(const char **out, const json_t *meta, const char *name,
                         const char *allowed, struct err *e)
{
    const json_t *v = json_object_get(meta, name);
    *out = json_string_value(v);
    if (*out) return OK;
    return err_set(e, ERR_INPUT, "metadata.%s: %s; must be %s", name,
                   v ? "not a string" : "missing", allowed);
}

static err_t refuse(const char *name, const char *value, const char *allowed, struct err *e)
{
    return err_set(e, ERR_UNSUPPORTED, "metadata.%s: \"%.60s\" is not supported; must be %s", name,
                   value, allowed);
}

static err_t parse_meta(struct delta_index *x, const json_t *meta, struct err *e)
{
    const char *s = NULL;
    err_t rc = delta_version(&x->version, json_object_get(meta, "version"), "metadata.version", e);
    if (rc == OK)
        rc = delta_version(&x->base, json_object_get(meta, "base_version"), "metadata.base_version",
                           e);
    if (rc == OK) rc = meta_string(&s, meta, "delta_encoding", "xor or overwrite", e);
    if (rc != OK) return rc;
    size_t i = 0, n = sizeof encodings / sizeof encodings[0];
    while (i < n && strcmp(s, encodings[i]) != 0)
        i++;
    if (i == n) return refuse("delta_encoding", s, "xor or overwrite", e);
    x->encoding = (enum delta_encoding)i;
    rc = meta_string(&s, meta, "compression_format", "zstd", e);
    if (rc == OK && strcmp(s, "zstd") != 0) rc = refuse("compression_format", s, "zstd", e);
    if (rc == OK) rc = meta_string(&s, meta, "checksum_format", "xxh3-128 or adler32", e);
    if (rc != OK) return rc;
    x->digest = digest_find(s);
    if (x->digest == DIGEST_XXH3_128 || x->digest == DIGEST_ADLER32) return OK;
    return refuse("checksum_format", s, "xxh3-128 or adler32", e);
}

static int by_file(const void *a, const void *b)
{
    const struct delta_entry *x = a, *y = b;
    int c = strcmp(x->file, y->file);
    return c ? c : strcmp(x->tensor, y->tensor);
}

static err_t parse_map(struct delta_index *x, json_t *map, struct err *e)
{
    const char *tensor;
    json_t *v;
    if (!json_is_object(map))
        return err_set(e, ERR_INPUT, "weight_map: %s; must be an object",
                       map ? "no object" : "missing");
    if ((x->entries = mem_try_array(json_object_size(map), sizeof x->entries[0])) == NULL)
        return err_set(e, ERR_NOMEM, "no memory for %zu tensors", json_object_size(map));
    json_object_foreach(map, tensor, v)
    {
        const char *file = json_string_value(v);
        if (!delta_plain_name(file))
            return err_set(e, ERR_INPUT, "weight_map: %.200s: \"%.200s\" is not a plain file name",
                           tensor, file ? file : "");
        x->entries[x->n++] = (struct delta_entry){file, tensor};
    }
    if (x->n) qsort(x->entries, x->n, sizeof x->entries[0], by_file);
    return OK;
}

err_t delta_parse(struct delta_index *x, const char *text, size_t n, const char *path,
                  struct err *e)
{
    struct delta_index t = {0};
    err_t rc = load(&t.root, text, n, path, e);
    if (rc != OK) return rc;
    rc = parse_meta(&t, json_object_get(t.root, "metadata"), e);
    if (rc == OK) rc = parse_map(&t, json_object_get(t.root, "weight_map"), e);
    if (rc != OK) {
        delta_free(&t);
        return err_wrap(e, rc, "%s", path);
    }
    *x = t;
    return OK;
}

void delta_free(struct delta_index *x)
{
    mem_free(x->entries);
    json_decref(x->root);
    *x = (struct delta_index){0};
}

/* ---- the change of one tensor ---- */

struct work {
    const struct delta_change *c;
    struct digest run;
    struct zframe places, values; /* an xor uses `values` alone */
    unsigned char *old, *change;
};

static err_t put(const struct delta_change *c, const unsigned char *p, size_t n, uint64_t at,
                 struct err *e)
{
    while (n) {
        ssize_t k = pwrite(c->to, p, n, (off_t)at);
        if (k < 0 && errno == EINTR) continue;
        if (k <= 0) return err_set(e, ERR_IO, "%s: %s", c->to_path, strerror(k ? errno : ENOSPC));
        p += k;
        n -= (size_t)k;
        at += (uint64_t)k;
    }
    return OK;
}

/* The next piece of the tensor, whose bytes before were changed: *n bytes of it lie in w->old. */
static err_t next_piece(struct work *w, uint64_t at, size_t *n, struct err *e)
{
    uint64_t rest = w->c->bytes - at;
    *n = rest < CHUNK ? (size_t)rest : CHUNK;
    return file_pread(w->c->to, w->old, *n, w->c->offset + at, w->c->to_path, e);
}

static err_t piece_done(struct work *w, uint64_t at, size_t n, struct err *e)
{
    digest_add(&w->run, w->old, n);
    return put(w->c, w->old, n, w->c->offset + at, e);
}

/* Both begin at blocks of the heap, so they are aligned. */
static void xor_into(unsigned char *to, const unsigned char *change, size_t n)
{
    uint64_t *a = (uint64_t *)(void *)to;
    const uint64_t *b = (const uint64_t *)(const void *)change;
    for (size_t i = 0; i < n / 8; i++)
        a[i] ^= b[i];
    for (size_t i = n & ~(size_t)7; i < n; i++)
        to[i] ^= change[i];
}

static err_t apply_xor(struct work *w, struct err *e)
{
    size_t n = 0;
    err_t rc = zframe_open(&w->values, w->c->from, w->c->frame, e);
    if (rc == OK) rc = zframe_check(&w->values, w->c->bytes, e);
    for (uint64_t at = 0; rc == OK && at < w->c->bytes; at += n) {
        rc = next_piece(w, at, &n, e);
        if (rc == OK) rc = zframe_read(&w->values, w->change, n, e);
        if (rc != OK) break;
        xor_into(w->old, w->change, n);
        rc = piece_done(w, at, n, e);
    }
    return rc == OK ? zframe_end(&w->values, e) : rc;
}

static uint32_t le32(const unsigned char *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

/* A cursor over the changes of an overwrite, PLACES of them in memory. */
struct places {
    struct work *w;
    uint64_t count, taken; /* taken: into memory */
    size_t n, at;
    int64_t last; /* the position before; they ascend */
};

static unsigned char *value_at(const struct places *p)
{
    return p->w->change + 4 * PLACES + p->at;
}

static err_t more_places(struct places *p, struct err *e)
{
    uint64_t rest = p->count - p->taken;
    p->n = rest < PLACES ? (size_t)rest : PLACES;
    p->at = 0;
    p->taken += p->n;
    err_t rc = zframe_read(&p->w->places, p->w->change, 4 * p->n, e);
    return rc == OK ? zframe_read(&p->w->values, p->w->change + 4 * PLACES, p->n, e) : rc;
}

/* The next position, at or beyond the tensor's end when there are no more. */
static err_t peek_place(struct places *p, uint64_t *at, struct err *e)
{
    const struct delta_change *c = p->w->c;
    *at = UINT64_MAX;
    if (p->at == p->n) {
        if (p->taken == p->count) return OK;
        err_t rc = more_places(p, e);
        if (rc != OK) return rc;
    }
    *at = le32(p->w->change + 4 * p->at);
    if ((int64_t)*at > p->last && *at < c->bytes) return OK;
    return err_set(e, ERR_INPUT,
                   "%s: tensor %s: position %llu after %lld; they must ascend below %llu",
                   c->from->path, c->frame->name, (unsigned long long)*at, (long long)p->last,
                   (unsigned long long)c->bytes);
}

/* Both readers of an overwrite at their first byte: behind the count, and behind the positions. */
static err_t open_places(struct places *p, struct err *e)
{
    const struct delta_change *c = p->w->c;
    unsigned char raw[4];
    err_t rc = zframe_open(&p->w->places, c->from, c->frame, e);
    if (rc == OK) rc = zframe_read(&p->w->places, raw, 4, e);
    if (rc != OK) return rc;
    p->count = le32(raw);
    p->last = -1;
    if (p->count > c->bytes)
        return err_set(e, ERR_INPUT, "%s: tensor %s: %llu changes in a tensor of %llu bytes",
                       c->from->path, c->frame->name, (unsigned long long)p->count,
                       (unsigned long long)c->bytes);
    rc = zframe_open(&p->w->values, c->from, c->frame, e);
    if (rc == OK) rc = zframe_check(&p->w->values, 4 + 5 * p->count, e);
    uint64_t skip = 4 + 4 * p->count;
    while (rc == OK && skip) {
        size_t n = skip < CHUNK ? (size_t)skip : CHUNK;
        rc = zframe_read(&p->w->values, p->w->change, n, e);
        skip -= n;
    }
    return rc;
}

static err_t apply_overwrite(struct work *w, struct err *e)
{
    struct places p = {.w = w};
    size_t n = 0;
    uint64_t place = UINT64_MAX;
    err_t rc = open_places(&p, e);
    if (rc == OK) rc = peek_place(&p, &place, e);
    for (uint64_t at = 0; rc == OK && at < w->c->bytes; at += n) {
        rc = next_piece(w, at, &n, e);
        while (rc == OK && place < at + n) {
            w->old[place - at] = *value_at(&p);
            p.last = (int64_t)place;
            p.at++;
            rc = peek_place(&p, &place, e);
        }
        if (rc == OK) rc = piece_done(w, at, n, e);
    }
    return rc == OK ? zframe_end(&w->values, e) : rc;
}

static err_t verify(const struct work *w, digest_t digest, struct err *e)
{
    const struct delta_change *c = w->c;
    char hex[DIGEST_HEX];
    digest_hex(&w->run, hex);
    if (strcmp(hex, c->checksum) == 0) return OK;
    return err_set(e, ERR_INPUT,
                   "%s: tensor %s: %s of the result is %s, the version says %.64s: another base or "
                   "a broken file",
                   c->from->path, c->frame->name, digest_name(digest), hex, c->checksum);
}

err_t delta_apply(const struct delta_change *c, enum delta_encoding encoding, digest_t digest,
                  struct err *e)
{
    if (c->frame->dtype != ST_U8 || c->frame->n_dims != 1)
        return err_set(e, ERR_INPUT, "%s: tensor %s: %s of %d dimensions; a change is U8 of one",
                       c->from->path, c->frame->name, st_dtype_name(c->frame->dtype),
                       c->frame->n_dims);
    if (c->checksum == NULL)
        return err_set(e, ERR_INPUT, "%s: tensor %s: __metadata__ has no checksum", c->from->path,
                       c->frame->name);
    struct work w = {.c = c, .old = mem_try(CHUNK), .change = mem_try(CHUNK)};
    err_t rc = OK;
    if (w.old == NULL || w.change == NULL)
        rc = err_set(e, ERR_NOMEM, "%s: tensor %s: no memory to apply it", c->from->path,
                     c->frame->name);
    digest_init(&w.run, digest);
    if (rc == OK) rc = encoding == DELTA_XOR ? apply_xor(&w, e) : apply_overwrite(&w, e);
    if (rc == OK) rc = verify(&w, digest, e);
    zframe_close(&w.places);
    zframe_close(&w.values);
    mem_free(w.old);
    mem_free(w.change);
    return rc;
}
