#include "weight/safetensors.h"

#include "base/file.h"
#include "base/mem.h"
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define HEADER_MAX     100000000u
#define NAME_MAX_BYTES 512
#define PIECE_BYTES    (1u << 16)

static const struct {
    const char *name;
    int bits;
} dtypes[] = {
    [ST_BOOL] = {"BOOL", 8},       [ST_U8] = {"U8", 8},           [ST_I8] = {"I8", 8},
    [ST_F8_E4M3] = {"F8_E4M3", 8}, [ST_F8_E5M2] = {"F8_E5M2", 8}, [ST_F8_E8M0] = {"F8_E8M0", 8},
    [ST_F4] = {"F4", 4},           [ST_I16] = {"I16", 16},        [ST_U16] = {"U16", 16},
    [ST_F16] = {"F16", 16},        [ST_BF16] = {"BF16", 16},      [ST_I32] = {"I32", 32},
    [ST_U32] = {"U32", 32},        [ST_F32] = {"F32", 32},        [ST_F64] = {"F64", 64},
    [ST_I64] = {"I64", 64},        [ST_U64] = {"U64", 64},
};

#define N_DTYPES (sizeof dtypes / sizeof dtypes[0])

const char *st_dtype_name(st_dtype_t d)
{
    return (size_t)d < N_DTYPES ? dtypes[d].name : "?";
}

int st_dtype_bits(st_dtype_t d)
{
    return (size_t)d < N_DTYPES ? dtypes[d].bits : 0;
}

static err_t parse_dtype(struct st_tensor *t, const json_t *v, struct err *e)
{
    const char *s = json_string_value(v);
    if (s == NULL) return err_set(e, ERR_INPUT, "tensor %s: dtype: must be a string", t->name);
    for (size_t i = 0; i < N_DTYPES; i++) {
        if (strcmp(s, dtypes[i].name) != 0) continue;
        t->dtype = (st_dtype_t)i;
        return OK;
    }
    return err_set(e, ERR_INPUT, "tensor %s: dtype: \"%.40s\" is unknown", t->name, s);
}

static err_t parse_shape(struct st_tensor *t, const json_t *v, struct err *e)
{
    if (!json_is_array(v))
        return err_set(e, ERR_INPUT, "tensor %s: shape: must be an array", t->name);
    size_t n = json_array_size(v);
    if (n > ST_MAX_DIMS)
        return err_set(e, ERR_INPUT, "tensor %s: shape: %zu dimensions, at most %d are allowed",
                       t->name, n, ST_MAX_DIMS);
    for (size_t i = 0; i < n; i++) {
        const json_t *d = json_array_get(v, i);
        if (!json_is_integer(d) || json_integer_value(d) < 0)
            return err_set(e, ERR_INPUT, "tensor %s: shape[%zu]: must be an integer >= 0", t->name,
                           i);
        t->shape[i] = (uint64_t)json_integer_value(d);
    }
    t->n_dims = (int)n;
    return OK;
}

/* Bytes that shape and dtype ask for. */
static err_t shape_bytes(uint64_t *out, const struct st_tensor *t, struct err *e)
{
    uint64_t n = 1, bits;
    bool ok = true;
    for (int i = 0; i < t->n_dims; i++)
        ok = ok && !__builtin_mul_overflow(n, t->shape[i], &n);
    if (!ok || __builtin_mul_overflow(n, (uint64_t)dtypes[t->dtype].bits, &bits))
        return err_set(e, ERR_INPUT, "tensor %s: shape: the number of bits exceeds 64 bits",
                       t->name);
    if (bits % 8)
        return err_set(e, ERR_INPUT, "tensor %s: %llu elements of %s do not fill whole bytes",
                       t->name, (unsigned long long)n, dtypes[t->dtype].name);
    *out = bits / 8;
    return OK;
}

/* Fills offset and bytes, still relative to the data. */
static err_t parse_span(struct st_tensor *t, const json_t *v, uint64_t data_bytes, struct err *e)
{
    const json_t *b = json_array_get(v, 0), *z = json_array_get(v, 1);
    if (json_array_size(v) != 2 || !json_is_integer(b) || !json_is_integer(z))
        return err_set(e, ERR_INPUT, "tensor %s: data_offsets: must be two integers", t->name);
    json_int_t begin = json_integer_value(b), end = json_integer_value(z);
    if (begin < 0 || end < begin || (uint64_t)end > data_bytes)
        return err_set(e, ERR_INPUT,
                       "tensor %s: data_offsets: [%lld, %lld] is not a span of the %llu data bytes",
                       t->name, (long long)begin, (long long)end, (unsigned long long)data_bytes);
    t->offset = (uint64_t)begin;
    t->bytes = (uint64_t)(end - begin);
    uint64_t want = 0;
    err_t rc = shape_bytes(&want, t, e);
    if (rc != OK) return rc;
    if (want == t->bytes) return OK;
    return err_set(e, ERR_INPUT,
                   "tensor %s: data_offsets: a span of %llu bytes, shape and dtype need %llu",
                   t->name, (unsigned long long)t->bytes, (unsigned long long)want);
}

static err_t parse_tensor(struct st_tensor *t, const json_t *v, uint64_t data_bytes, struct err *e)
{
    if (!json_is_object(v)) return err_set(e, ERR_INPUT, "tensor %s: must be an object", t->name);
    const char *key;
    json_t *field;
    json_object_foreach((json_t *)v, key, field)
    {
        if (strcmp(key, "dtype") && strcmp(key, "shape") && strcmp(key, "data_offsets"))
            return err_set(e, ERR_INPUT, "tensor %s: unknown field \"%.40s\"", t->name, key);
    }
    err_t rc = parse_dtype(t, json_object_get(v, "dtype"), e);
    if (rc == OK) rc = parse_shape(t, json_object_get(v, "shape"), e);
    if (rc == OK) rc = parse_span(t, json_object_get(v, "data_offsets"), data_bytes, e);
    return rc;
}

static int by_offset(const void *a, const void *b)
{
    const struct st_tensor *x = a, *y = b;
    if (x->offset != y->offset) return x->offset < y->offset ? -1 : 1;
    if (x->bytes != y->bytes) return x->bytes < y->bytes ? -1 : 1;
    return strcmp(x->name, y->name);
}

/* The spans must tile the data. `t` is sorted. */
static err_t check_tiling(const struct st_tensor *t, size_t n, uint64_t data_bytes, struct err *e)
{
    uint64_t at = 0;
    for (size_t i = 0; i < n; i++) {
        if (t[i].offset != at)
            return err_set(e, ERR_INPUT, "tensor %s: begins at data byte %llu, which %s", t[i].name,
                           (unsigned long long)t[i].offset,
                           t[i].offset < at ? "overlaps the tensor before it"
                                            : "leaves a hole before it");
        at += t[i].bytes; /* <= data_bytes: parse_span */
    }
    if (at == data_bytes) return OK;
    return err_set(e, ERR_INPUT, "tensors cover %llu of %llu data bytes", (unsigned long long)at,
                   (unsigned long long)data_bytes);
}

static bool is_metadata(const char *name)
{
    return strcmp(name, "__metadata__") == 0;
}

static err_t check_metadata(const json_t *v, struct err *e)
{
    const char *key;
    json_t *s;
    if (!json_is_object(v)) return err_set(e, ERR_INPUT, "__metadata__: must be an object");
    json_object_foreach((json_t *)v, key, s)
    {
        if (!json_is_string(s))
            return err_set(e, ERR_INPUT, "__metadata__: \"%.60s\": must be a string", key);
    }
    return OK;
}

/* Tensors and their names lie in one block, so that one mem_free releases both. */
static err_t block_new(struct st_tensor **out, json_t *root, size_t *n_out, struct err *e)
{
    size_t n = 0, chars = 0, bytes;
    const char *key;
    json_t *v;
    json_object_foreach(root, key, v)
    {
        if (is_metadata(key)) continue;
        size_t len = strlen(key);
        if (len == 0 || len > NAME_MAX_BYTES)
            return err_set(e, ERR_INPUT, "a tensor name has %zu bytes, 1 to %d are allowed", len,
                           NAME_MAX_BYTES);
        n++;
        chars += len + 1; /* <= header bytes */
    }
    bool ok = mul_size(&bytes, n, sizeof **out) && add_size(&bytes, bytes, chars);
    *out = ok ? mem_try(bytes) : NULL;
    if (*out == NULL) return err_set(e, ERR_NOMEM, "no memory for %zu tensor entries", n);
    *n_out = n;
    return OK;
}

static err_t parse_root(struct st_file *f, json_t *root, uint64_t data_start, uint64_t data_bytes,
                        struct err *e)
{
    struct st_tensor *tensors = NULL;
    size_t n = 0, i = 0;
    err_t rc = block_new(&tensors, root, &n, e);
    if (rc != OK) return rc;
    char *names = (char *)(tensors + n);
    const char *key;
    json_t *v;
    json_object_foreach(root, key, v)
    {
        if (is_metadata(key)) {
            rc = check_metadata(v, e);
            if (rc == OK) f->metadata = json_incref(v);
        } else {
            size_t len = strlen(key) + 1;
            memcpy(names, key, len);
            tensors[i].name = names;
            names += len;
            rc = parse_tensor(&tensors[i++], v, data_bytes, e);
        }
        if (rc != OK) break;
    }
    if (rc == OK) {
        if (n) qsort(tensors, n, sizeof tensors[0], by_offset);
        rc = check_tiling(tensors, n, data_bytes, e);
    }
    if (rc != OK) {
        mem_free(tensors);
        json_decref(f->metadata);
        f->metadata = NULL;
        return rc;
    }
    for (i = 0; i < n; i++)
        tensors[i].offset += data_start;
    f->tensors = tensors;
    f->n = n;
    return OK;
}

err_t st_parse(struct st_file *f, const char *header, size_t n, uint64_t data_start,
               uint64_t data_bytes, struct err *e)
{
    uint64_t end;
    if (__builtin_add_overflow(data_start, data_bytes, &end))
        return err_set(e, ERR_INPUT, "the data ends beyond 64 bits");
    if (n == 0 || header[0] != '{')
        return err_set(e, ERR_INPUT, "the header does not begin with '{'");
    json_error_t je;
    json_t *root = json_loadb(header, n, JSON_REJECT_DUPLICATES, &je);
    if (root == NULL) return err_set(e, ERR_INPUT, "header: byte %d: %s", je.position, je.text);
    err_t rc = parse_root(f, root, data_start, data_bytes, e);
    json_decref(root);
    return rc;
}

/* Bytes [at, at + n), wherever they are. */
static err_t fetch(const struct st_file *f, void *to, size_t n, uint64_t at, struct err *e)
{
    if (f->memory == NULL) return file_pread(f->fd, to, n, at, f->path, e);
    CHECK(at <= f->file_bytes && n <= f->file_bytes - at);
    if (n) memcpy(to, f->memory + at, n);
    return OK;
}

/* The header's n bytes, but of white space outside of strings only the first of each run and piece (99 MB of it
 * may pad a header, C65); into `to` with room for *kept bytes, or only counted (to NULL).  The file may change between the two: what does not fit is an error. */
static err_t squeezed(const struct st_file *f, size_t n, char *to, size_t *kept, struct err *e)
{
    char piece[PIECE_BYTES + 1];
    size_t len = 0, room = *kept;
    bool in_string = false, escaped = false;
    for (size_t at = 0; at < n;) {
        size_t m = n - at < PIECE_BYTES ? n - at : PIECE_BYTES;
        err_t rc = fetch(f, piece, m, 8 + at, e);
        if (rc != OK) return rc;
        piece[m] = 0;
        for (size_t i = 0; i < m;) {
            size_t run = in_string ? 0 : strspn(piece + i, " \t\r\n");
            char c = piece[i];
            i += run ? run : 1;
            if (to && len == room)
                return err_set(e, ERR_IO, "%s: changed while it was being read", f->path);
            if (to) to[len] = c;
            len++;
            if (escaped)
                escaped = false;
            else if (in_string && c == '\\')
                escaped = true;
            else if (c == '"')
                in_string = !in_string;
        }
        at += m;
    }
    *kept = len;
    return OK;
}

static err_t read_header(struct st_file *f, struct err *e)
{
    unsigned char raw[8];
    if (f->file_bytes < sizeof raw)
        return err_set(e, ERR_INPUT, "%s: %llu bytes, too short for a header length", f->path,
                       (unsigned long long)f->file_bytes);
    err_t rc = fetch(f, raw, sizeof raw, 0, e);
    if (rc != OK) return rc;
    uint64_t n = 0, rest = f->file_bytes - sizeof raw;
    for (int i = 7; i >= 0; i--)
        n = n << 8 | raw[i];
    if (n > HEADER_MAX || n > rest)
        return err_set(e, ERR_INPUT,
                       "%s: header length %llu, at most %u and the %llu bytes that follow are "
                       "allowed",
                       f->path, (unsigned long long)n, HEADER_MAX, (unsigned long long)rest);
    char *header = NULL;
    size_t kept = 0;
    rc = squeezed(f, (size_t)n, NULL, &kept, e);
    if (rc == OK) header = mem_try(kept + 1);
    if (rc == OK && header == NULL)
        rc = err_set(e, ERR_NOMEM, "%s: no memory for a header of %zu bytes", f->path, kept);
    if (rc == OK) rc = squeezed(f, (size_t)n, header, &kept, e);
    if (rc == OK) {
        rc = st_parse(f, header, kept, sizeof raw + n, rest - n, e);
        if (rc != OK) rc = err_wrap(e, rc, "%s", f->path);
    }
    mem_free(header);
    return rc;
}

err_t st_open(struct st_file *f, const char *path, struct err *e)
{
    struct stat st;
    struct st_file t = {.fd = -1, .path = mem_dup_n(path, strlen(path))};
    if (t.path == NULL) return err_set(e, ERR_NOMEM, "%s: no memory for the path", path);
    /* O_NONBLOCK: a FIFO under this name must not hang us; it means nothing for a file. */
    t.fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    err_t rc = OK;
    if (t.fd < 0 || fstat(t.fd, &st) != 0)
        rc = err_set(e, errno == ENOENT ? ERR_NOTFOUND : ERR_IO, "%s: %s", path, strerror(errno));
    else if (!S_ISREG(st.st_mode))
        rc = err_set(e, ERR_INPUT, "%s: not a regular file", path);
    if (rc == OK) {
        t.file_bytes = (uint64_t)st.st_size;
        t.mtime = st.st_mtim;
        rc = read_header(&t, e);
    }
    if (rc != OK) {
        st_close(&t);
        return rc;
    }
    *f = t;
    return OK;
}

err_t st_open_memory(struct st_file *f, const char *name, const void *memory, uint64_t bytes,
                     struct err *e)
{
    struct st_file t = {.fd = -1, .file_bytes = bytes, .path = mem_dup_n(name, strlen(name))};
    t.memory = memory ? memory : (const uint8_t *)"";
    if (t.path == NULL) return err_set(e, ERR_NOMEM, "%s: no memory for the name", name);
    err_t rc = read_header(&t, e);
    if (rc != OK) {
        st_close(&t);
        return rc;
    }
    *f = t;
    return OK;
}

const char *st_metadata(const struct st_file *f, const char *name)
{
    return json_string_value(json_object_get(f->metadata, name));
}

void st_close(struct st_file *f)
{
    if (f->path && f->fd >= 0) close(f->fd);
    mem_free(f->path);
    mem_free(f->tensors);
    json_decref(f->metadata);
    *f = (struct st_file){.fd = -1};
}

err_t st_unchanged(const struct st_file *f, struct err *e)
{
    struct stat st;
    if (f->memory) return OK; /* nobody else has it */
    if (fstat(f->fd, &st) != 0) return err_set(e, ERR_IO, "%s: %s", f->path, strerror(errno));
    if ((uint64_t)st.st_size == f->file_bytes && st.st_mtim.tv_sec == f->mtime.tv_sec &&
        st.st_mtim.tv_nsec == f->mtime.tv_nsec)
        return OK;
    return err_set(e, ERR_IO, "%s: changed while it was being read", f->path);
}

err_t st_read(const struct st_file *f, const struct st_tensor *t, uint64_t offset, void *to,
              size_t bytes, struct err *e)
{
    CHECK(offset <= t->bytes && bytes <= t->bytes - offset);
    err_t rc = fetch(f, to, bytes, t->offset + offset, e);
    if (rc != OK) return err_wrap(e, rc, "tensor %s", t->name);
    return st_unchanged(f, e); /* after the read: what came before it is then known too */
}
