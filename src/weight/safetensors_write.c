#include "weight/safetensors_write.h"

#include "base/buf.h"
#include "base/mem.h"
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct shard {
    char *path;
    int fd;
    uint64_t data_bytes, data_start;
};

struct place {
    size_t tensor, shard;
    uint64_t offset, bytes; /* offset from the start of the shard's data */
};

struct st_writer {
    const char *dir;
    const struct st_out *tensors;
    size_t n, n_shards;
    struct place *places; /* [n], of tensor i */
    struct shard *shards;
    uint64_t bytes;
};

static err_t out_bytes(uint64_t *bytes, const struct st_out *t, struct err *e)
{
    uint64_t n = (uint64_t)st_dtype_bits(t->dtype);
    bool ok = true;
    for (int i = 0; i < t->n_dims; i++)
        ok = ok && !__builtin_mul_overflow(n, t->shape[i], &n);
    if (!ok || n % 8)
        return err_set(e, ERR_INPUT, "tensor %s: shape: not a size that can be written", t->name);
    *bytes = n / 8;
    return OK;
}

static int by_name(const void *a, const void *b)
{
    return strcmp((*(const struct st_out *const *)a)->name,
                  (*(const struct st_out *const *)b)->name);
}

static err_t check_names(const struct st_out *t, size_t n, struct err *e)
{
    const struct st_out **order = mem_try_array(n, sizeof *order);
    if (order == NULL) return err_set(e, ERR_NOMEM, "no memory for %zu tensors", n);
    for (size_t i = 0; i < n; i++)
        order[i] = &t[i];
    if (n) qsort(order, n, sizeof *order, by_name);
    err_t rc = OK;
    for (size_t i = 1; i < n && rc == OK; i++)
        if (by_name(&order[i - 1], &order[i]) == 0)
            rc = err_set(e, ERR_INPUT, "tensor %s: twice in one checkpoint", order[i]->name);
    mem_free(order);
    return rc;
}

/* Which shard each tensor belongs to. */
static err_t plan_shards(struct st_writer *w, uint64_t max_shard, struct err *e)
{
    uint64_t in_shard = 0;
    for (size_t i = 0; i < w->n; i++) {
        struct place *p = &w->places[i];
        err_t rc = out_bytes(&p->bytes, &w->tensors[i], e);
        if (rc != OK) return rc;
        bool over = p->bytes > max_shard || in_shard > max_shard - p->bytes;
        if (i == 0 || (in_shard > 0 && over)) {
            w->n_shards++;
            in_shard = 0;
        }
        p->tensor = i;
        p->shard = w->n_shards - 1;
        if (__builtin_add_overflow(in_shard, p->bytes, &in_shard) ||
            __builtin_add_overflow(w->bytes, p->bytes, &w->bytes))
            return err_set(e, ERR_TOOBIG, "the tensors exceed 64 bits of bytes");
    }
    return OK;
}

/* By shard, then wide types first; the rest as given.  Reads the dtype through `tensors`. */
static int by_place(const void *a, const void *b, void *ctx)
{
    const struct place *x = *(struct place *const *)a, *y = *(struct place *const *)b;
    const struct st_out *t = ctx;
    int wx = st_dtype_bits(t[x->tensor].dtype), wy = st_dtype_bits(t[y->tensor].dtype);
    if (x->shard != y->shard) return x->shard < y->shard ? -1 : 1;
    if (wx != wy) return wx > wy ? -1 : 1;
    return x->tensor < y->tensor ? -1 : 1;
}

/* {"name": {"dtype", "shape", "data_offsets"}} for the tensors of a shard, places in order. */
static json_t *header_of(const struct st_writer *w, struct place *const *order, size_t n)
{
    json_t *root = json_pack("{s:{s:s}}", "__metadata__", "format", "pt");
    for (size_t i = 0; i < n && root; i++) {
        const struct st_out *t = &w->tensors[order[i]->tensor];
        json_t *shape = json_array();
        for (int d = 0; d < t->n_dims; d++)
            json_array_append_new(shape, json_integer((json_int_t)t->shape[d]));
        json_t *entry = json_pack("{s:s, s:o, s:[I, I]}", "dtype", st_dtype_name(t->dtype), "shape",
                                  shape, "data_offsets", (json_int_t)order[i]->offset,
                                  (json_int_t)(order[i]->offset + order[i]->bytes));
        if (json_object_set_new(root, t->name, entry) != 0) {
            json_decref(root);
            root = NULL;
        }
    }
    return root;
}

static err_t pwrite_all(int fd, const char *data, size_t n, uint64_t at, const char *path,
                        struct err *e)
{
    while (n > 0) {
        ssize_t k = pwrite(fd, data, n, (off_t)at);
        if (k < 0 && errno == EINTR) continue;
        if (k <= 0) return err_set(e, ERR_IO, "%s: %s", path, strerror(k < 0 ? errno : EIO));
        data += k;
        at += (uint64_t)k;
        n -= (size_t)k;
    }
    return OK;
}

static err_t reserve(const struct shard *s, struct err *e)
{
    off_t size = (off_t)(s->data_start + s->data_bytes);
    if (fallocate(s->fd, 0, 0, size) == 0) return OK;
    if (errno == EOPNOTSUPP && ftruncate(s->fd, size) == 0) return OK;
    return err_set(e, ERR_IO, "%s: room for %llu bytes: %s", s->path, (unsigned long long)size,
                   strerror(errno));
}

/* Creates the file with its header; data follow at data_start. */
static err_t open_shard(struct st_writer *w, size_t index, struct place *const *order, size_t n,
                        struct err *e)
{
    struct shard *s = &w->shards[index];
    struct buf path = {0};
    bool one = w->n_shards == 1;
    bool ok = one ? buf_printf(&path, "%s/model.safetensors", w->dir)
                  : buf_printf(&path, "%s/model-%05zu-of-%05zu.safetensors", w->dir, index + 1,
                               w->n_shards);
    s->path = ok ? buf_take(&path) : NULL;
    json_t *root = s->path ? header_of(w, order, n) : NULL;
    char *text = root ? json_dumps(root, JSON_COMPACT) : NULL;
    json_decref(root);
    if (text == NULL) return err_set(e, ERR_NOMEM, "no memory for a header of %zu tensors", n);
    size_t len = strlen(text), padded = (len + 7) / 8 * 8;
    char head[8], pad[8] = "       ";
    for (int i = 0; i < 8; i++)
        head[i] = (char)(padded >> 8 * i);
    s->data_start = 8 + padded;
    s->fd = open(s->path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    err_t rc = s->fd < 0 ? err_set(e, ERR_IO, "%s: %s", s->path, strerror(errno)) : reserve(s, e);
    if (rc == OK) rc = pwrite_all(s->fd, head, 8, 0, s->path, e);
    if (rc == OK) rc = pwrite_all(s->fd, text, len, 8, s->path, e);
    if (rc == OK) rc = pwrite_all(s->fd, pad, padded - len, 8 + len, s->path, e);
    free(text);
    return rc;
}

static err_t open_shards(struct st_writer *w, struct err *e)
{
    struct place **order = mem_try_array(w->n, sizeof *order);
    w->shards = mem_try_array(w->n_shards, sizeof *w->shards);
    for (size_t i = 0; w->shards && i < w->n_shards; i++)
        w->shards[i].fd = -1;
    if (order == NULL || w->shards == NULL) {
        mem_free(order);
        return err_set(e, ERR_NOMEM, "no memory for %zu tensors", w->n);
    }
    for (size_t i = 0; i < w->n; i++)
        order[i] = &w->places[i];
    if (w->n) qsort_r(order, w->n, sizeof *order, by_place, (void *)(uintptr_t)w->tensors);
    for (size_t i = 0; i < w->n; i++) {
        struct shard *s = &w->shards[order[i]->shard];
        order[i]->offset = s->data_bytes;
        s->data_bytes += order[i]->bytes;
    }
    err_t rc = OK;
    for (size_t i = 0, first = 0; i < w->n_shards && rc == OK; i++) {
        size_t end = first;
        while (end < w->n && order[end]->shard == i)
            end++;
        rc = open_shard(w, i, order + first, end - first, e);
        first = end;
    }
    mem_free(order);
    return rc;
}

err_t st_writer_open(struct st_writer **out, const char *dir, const struct st_out *tensors,
                     size_t n, uint64_t max_shard_bytes, struct err *e)
{
    struct st_writer *w = mem_alloc(sizeof *w);
    *w = (struct st_writer){.dir = dir, .tensors = tensors, .n = n};
    w->places = mem_try_array(n, sizeof *w->places);
    err_t rc = w->places ? check_names(tensors, n, e)
                         : err_set(e, ERR_NOMEM, "no memory for %zu tensors", n);
    if (rc == OK) rc = plan_shards(w, max_shard_bytes, e);
    if (rc == OK) rc = open_shards(w, e);
    if (rc != OK) {
        st_writer_free(w);
        return rc;
    }
    *out = w;
    return OK;
}

uint64_t st_writer_bytes(const struct st_writer *w)
{
    return w->bytes;
}

err_t st_writer_put(struct st_writer *w, size_t tensor, uint64_t offset, const void *data,
                    size_t bytes, struct err *e)
{
    const struct place *p = &w->places[tensor];
    const struct shard *s = &w->shards[p->shard];
    CHECK(tensor < w->n && offset <= p->bytes && bytes <= p->bytes - offset);
    return pwrite_all(s->fd, data, bytes, s->data_start + p->offset + offset, s->path, e);
}

static err_t write_index(const struct st_writer *w, struct err *e)
{
    struct buf path = {0};
    json_t *map = json_object();
    for (size_t i = 0; i < w->n; i++)
        json_object_set_new(map, w->tensors[i].name,
                            json_string(strrchr(w->shards[w->places[i].shard].path, '/') + 1));
    json_t *root = json_pack("{s:{s:I}, s:o}", "metadata", "total_size", (json_int_t)w->bytes,
                             "weight_map", map);
    err_t rc = OK;
    if (root == NULL || !buf_printf(&path, "%s/model.safetensors.index.json", w->dir))
        rc = err_set(e, ERR_NOMEM, "no memory for the index of %zu tensors", w->n);
    int fd = rc == OK ? open(path.data, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644) : -1;
    if (rc == OK &&
        (fd < 0 || json_dumpfd(root, fd, JSON_INDENT(2) | JSON_SORT_KEYS) != 0 || fsync(fd) != 0))
        rc = err_set(e, ERR_IO, "%s: %s", path.data, strerror(errno));
    if (fd >= 0) close(fd);
    json_decref(root);
    buf_release(&path);
    return rc;
}

err_t st_writer_finish(struct st_writer *w, struct err *e)
{
    for (size_t i = 0; i < w->n_shards; i++)
        if (fsync(w->shards[i].fd) != 0)
            return err_set(e, ERR_IO, "%s: %s", w->shards[i].path, strerror(errno));
    return w->n_shards > 1 ? write_index(w, e) : OK;
}

void st_writer_free(struct st_writer *w)
{
    if (w == NULL) return;
    for (size_t i = 0; w->shards && i < w->n_shards; i++) {
        if (w->shards[i].fd >= 0) close(w->shards[i].fd);
        mem_free(w->shards[i].path);
    }
    mem_free(w->shards);
    mem_free(w->places);
    mem_free(w);
}
