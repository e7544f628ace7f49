/* delta_rig.h - a small published stream of versions: a base of two files, deltas and whole checkpoints on it. */
#ifndef TEST_DELTA_RIG_H
#define TEST_DELTA_RIG_H

#include "base/buf.h"
#include "base/digest.h"
#include "base/mem.h"
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zstd.h>

#define RIG_TENSORS 4

/* Tensor a is longer than one piece of the reader; its changes cross the border. */
static const struct rig_tensor {
    const char *name, *dtype, *shape, *file;
    size_t n;
} rig_tensors[RIG_TENSORS] = {
    {"a", "U8", "[300007]", "model-00001-of-00002.safetensors", 300007},
    {"b", "BF16", "[4,8]", "model-00001-of-00002.safetensors", 64},
    {"c", "F32", "[100]", "model-00002-of-00002.safetensors", 400},
    {"d", "I8", "[0]", "model-00002-of-00002.safetensors", 0},
};

struct rig {
    char root[64], base[128], source[128], local[128];
};

/* The byte of tensor t at i in version v: b changes in every second version only, d is empty. */
static inline unsigned char rig_byte(int t, size_t i, int v)
{
    unsigned char x = (unsigned char)(i * 7 + (size_t)t * 31 + (i >> 8));
    if (t == 1) v /= 2;
    return (unsigned char)(i % 5 == 0 || (i > 262100 && i < 262200) ? x + 3 * v : x);
}

static inline unsigned char *rig_data(int t, int v)
{
    unsigned char *p = mem_alloc(rig_tensors[t].n + 1);
    for (size_t i = 0; i < rig_tensors[t].n; i++)
        p[i] = rig_byte(t, i, v);
    return p;
}

static inline void rig_put(const char *dir, const char *name, const void *p, size_t n)
{
    char path[400];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *f = fopen(path, "wb");
    CHECK(f && fwrite(p, 1, n, f) == n);
    CHECK(fclose(f) == 0);
}

static inline char *rig_read(const char *dir, const char *name, size_t *n)
{
    char path[400];
    struct stat st;
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *f = fopen(path, "rb");
    if (f == NULL) return NULL;
    CHECK(fstat(fileno(f), &st) == 0);
    char *p = mem_alloc((size_t)st.st_size + 1);
    CHECK(fread(p, 1, (size_t)st.st_size, f) == (size_t)st.st_size);
    fclose(f);
    if (n) *n = (size_t)st.st_size;
    return p;
}

/* "{...}" and data as one safetensors file. */
static inline void rig_put_st(const char *dir, const char *name, const char *header,
                              const void *data, size_t n)
{
    struct buf all = {0};
    uint64_t len = strlen(header);
    CHECK(buf_put(&all, &len, 8) && buf_puts(&all, header) && (n == 0 || buf_put(&all, data, n)));
    rig_put(dir, name, all.data, all.len);
    buf_release(&all);
}

/* A whole checkpoint of version v. */
static inline void rig_whole(const char *dir, int v)
{
    struct buf header = {0}, data = {0};
    CHECK(mkdir(dir, 0755) == 0);
    for (int t = 0; t < RIG_TENSORS; t++) {
        const struct rig_tensor *x = &rig_tensors[t];
        unsigned char *p = rig_data(t, v);
        CHECK(buf_printf(&header,
                         "%s\"%s\":{\"dtype\":\"%s\",\"shape\":%s,\"data_offsets\":[%zu,%zu]}",
                         header.len ? "," : "{\"__metadata__\":{\"format\":\"pt\"},", x->name,
                         x->dtype, x->shape, data.len, data.len + x->n));
        CHECK(buf_put(&data, p, x->n));
        mem_free(p);
        if (t + 1 == RIG_TENSORS || strcmp(x->file, x[1].file) != 0) {
            CHECK(buf_putc(&header, '}'));
            rig_put_st(dir, x->file, header.data, data.data, data.len);
            buf_clear(&header);
            buf_clear(&data);
        }
    }
    buf_clear(&header);
    for (int t = 0; t < RIG_TENSORS; t++)
        CHECK(buf_printf(&header, "%s\"%s\":\"%s\"", t ? "," : "{\"metadata\":{},\"weight_map\":{",
                         rig_tensors[t].name, rig_tensors[t].file));
    CHECK(buf_puts(&header, "}}"));
    rig_put(dir, "model.safetensors.index.json", header.data, header.len);
    rig_put(dir, "config.json", "{}", 2);
    buf_release(&header);
    buf_release(&data);
}

/* The change of tensor t from version v - 1 to v, not yet compressed. */
static inline void rig_change(struct buf *out, int t, int v, bool overwrite)
{
    struct buf values = {0};
    uint32_t count = 0;
    if (overwrite) CHECK(buf_put(out, &count, 4));
    for (uint32_t i = 0; i < rig_tensors[t].n; i++) {
        unsigned char old = rig_byte(t, i, v - 1), now = rig_byte(t, i, v);
        if (!overwrite) {
            CHECK(buf_putc(out, (char)(old ^ now)));
        } else if (old != now) {
            CHECK(buf_put(out, &i, 4) && buf_putc(&values, (char)now));
            count++;
        }
    }
    if (!overwrite) return;
    memcpy(out->data, &count, 4);
    if (values.len) CHECK(buf_put(out, values.data, values.len));
    buf_release(&values);
}

/* One zstd frame; with `bare` it does not declare its size. */
static inline void rig_frame(struct buf *out, const void *p, size_t n, bool bare)
{
    size_t room = ZSTD_compressBound(n);
    char *to = mem_alloc(room);
    ZSTD_CCtx *c = ZSTD_createCCtx();
    CHECK(c && !ZSTD_isError(ZSTD_CCtx_setParameter(c, ZSTD_c_compressionLevel, 1)));
    CHECK(!ZSTD_isError(ZSTD_CCtx_setParameter(c, ZSTD_c_contentSizeFlag, !bare)));
    size_t k = ZSTD_compress2(c, to, room, p, n);
    CHECK(!ZSTD_isError(k) && buf_put(out, to, k));
    ZSTD_freeCCtx(c);
    mem_free(to);
}

struct rig_delta {
    bool overwrite, bare, split; /* split: the tensors lie in two files */
    digest_t digest;
};

static inline void rig_delta(const char *dir, int v, const struct rig_delta *o)
{
    struct buf header[2] = {{0}}, data[2] = {{0}}, sums[2] = {{0}}, map = {0}, change = {0};
    CHECK(mkdir(dir, 0755) == 0);
    for (int t = 0; t < RIG_TENSORS; t++) {
        unsigned char *now = rig_data(t, v), *old = rig_data(t, v - 1);
        bool same = memcmp(now, old, rig_tensors[t].n) == 0;
        int f = o->split ? t % 2 : 0;
        char hex[DIGEST_HEX];
        digest_of(o->digest, now, rig_tensors[t].n, hex);
        mem_free(now);
        mem_free(old);
        if (same) continue;
        size_t at = data[f].len;
        buf_clear(&change);
        rig_change(&change, t, v, o->overwrite);
        rig_frame(&data[f], change.data, change.len, o->bare);
        CHECK(buf_printf(&header[f],
                         ",\"%s\":{\"dtype\":\"U8\",\"shape\":[%zu],\"data_offsets\":[%zu,%zu]}",
                         rig_tensors[t].name, data[f].len - at, at, data[f].len));
        CHECK(buf_printf(&sums[f], "%s\"%s\":\"%s\"", sums[f].len ? "," : "", rig_tensors[t].name,
                         hex));
        CHECK(buf_printf(&map, "%s\"%s\":\"model-%05d-of-%05d.safetensors\"", map.len ? "," : "",
                         rig_tensors[t].name, f, 1 + o->split));
    }
    for (int f = 0; f < 2; f++) {
        if (header[f].len == 0) continue;
        char name[64];
        struct buf all = {0};
        snprintf(name, sizeof name, "model-%05d-of-%05d.safetensors", f, 1 + o->split);
        CHECK(buf_printf(&all, "{\"__metadata__\":{%s}%s}", sums[f].data, header[f].data));
        rig_put_st(dir, name, all.data, data[f].data, data[f].len);
        buf_release(&all);
    }
    buf_clear(&change);
    CHECK(buf_printf(
        &change,
        "{\"metadata\": {\"version\": \"%06d\", \"base_version\": \"%06d\", \"delta_encoding\": "
        "\"%s\", "
        "\"compression_format\": \"zstd\", \"checksum_format\": \"%s\"}, \"weight_map\": {%s}}",
        v, v - 1, o->overwrite ? "overwrite" : "xor", digest_name(o->digest),
        map.data ? map.data : ""));
    rig_put(dir, "model.safetensors.index.json", change.data, change.len);
    for (int f = 0; f < 2; f++)
        buf_release(&header[f]), buf_release(&data[f]), buf_release(&sums[f]);
    buf_release(&map);
    buf_release(&change);
}

static inline void rig_version(char *out, size_t n, const struct rig *r, int v)
{
    snprintf(out, n, "%s/weight_v%06d", r->source, v);
}

static inline void rig_publish(const struct rig *r, int v, const struct rig_delta *o)
{
    char dir[200];
    rig_version(dir, sizeof dir, r, v);
    rig_delta(dir, v, o);
}

static inline void rig_new(struct rig *r)
{
    /* In memory if possible: the tests sync hundreds of files. */
    snprintf(r->root, sizeof r->root, "%s/moult-delta-XXXXXX",
             access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp");
    CHECK(mkdtemp(r->root));
    snprintf(r->base, sizeof r->base, "%s/base", r->root);
    snprintf(r->source, sizeof r->source, "%s/source", r->root);
    snprintf(r->local, sizeof r->local, "%s/deep/local", r->root);
    CHECK(mkdir(r->source, 0755) == 0);
    rig_whole(r->base, 0);
}

static inline void rig_drop(const char *dir)
{
    DIR *d = opendir(dir);
    const struct dirent *f;
    while (d && (f = readdir(d)) != NULL) {
        struct buf path = {0};
        struct stat st;
        if (strcmp(f->d_name, ".") == 0 || strcmp(f->d_name, "..") == 0) continue;
        CHECK(buf_printf(&path, "%s/%s", dir, f->d_name));
        if (lstat(path.data, &st) == 0 && S_ISDIR(st.st_mode))
            rig_drop(path.data);
        else
            unlink(path.data);
        buf_release(&path);
    }
    if (d) closedir(d);
    rmdir(dir);
}

#endif
