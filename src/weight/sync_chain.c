#include "weight/sync_internal.h"

#include "base/file.h"
#include "base/mem.h"
#include "base/pool.h"
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

err_t chain_open(struct sync_chain *c, struct err *e)
{
    err_t rc = checkpoint_open(&c->base, c->seeded ? c->dir->next : c->dir->path, e);
    if (rc != OK) return rc;
    if ((c->fds = mem_try_array(c->base.n_files, sizeof c->fds[0])) == NULL)
        return err_set(e, ERR_NOMEM, "no memory for %zu files", c->base.n_files);
    for (size_t i = 0; i < c->base.n_files; i++)
        c->fds[i] = -1;
    return OK;
}

void chain_close(struct sync_chain *c)
{
    for (size_t i = 0; c->fds && i < c->base.n_files; i++)
        if (c->fds[i] >= 0) close(c->fds[i]);
    mem_free(c->fds);
    c->fds = NULL;
    checkpoint_close(&c->base);
}

/* The base's file in next/, copied there first if need be. */
static err_t writable(struct sync_chain *c, size_t file, struct err *e)
{
    if (c->fds[file] >= 0) return OK;
    const char *from = c->base.files[file].path, *name = strrchr(from, '/') + 1;
    char *to = sync_join(c->dir->next, name);
    err_t rc = to ? OK : err_set(e, ERR_NOMEM, "%s: no memory", name);
    if (rc == OK && !c->seeded) {
        rc = sync_copy(from, to, &c->result->bytes, e);
        if (rc == OK && json_array_append_new(c->files, json_string(name)) != 0)
            rc = err_set(e, ERR_NOMEM, "%s: no memory", name);
        if (rc == OK) rc = sync_step(c->dir->steps, "copy", e);
    }
    if (rc == OK && (c->fds[file] = open(to, O_RDWR | O_CLOEXEC)) < 0)
        rc = err_set(e, ERR_IO, "%s: %s", to, strerror(errno));
    mem_free(to);
    return rc;
}

/* ---- the files of one delta ---- */

struct delta_files {
    struct delta_index index;
    size_t n; /* opened */
    struct st_file *files;
    struct delta_change *changes; /* one for each entry of the index */
};

static void files_close(struct delta_files *d)
{
    for (size_t i = 0; i < d->n; i++)
        st_close(&d->files[i]);
    mem_free(d->files);
    mem_free(d->changes);
    delta_free(&d->index);
}

static err_t read_index(struct delta_index *x, const char *dir, int64_t version, struct err *e)
{
    struct buf text = {0};
    char *path = sync_join(dir, CHECKPOINT_INDEX);
    err_t rc = path ? file_read(&text, path, CHECKPOINT_INDEX_MAX, e)
                    : err_set(e, ERR_NOMEM, "%s: no memory", dir);
    if (rc == OK) rc = delta_parse(x, text.data, text.len, path, e);
    if (rc == OK && x->version != version)
        rc = err_set(e, ERR_INPUT, "%s: metadata.version: %lld; the folder's name says %lld", path,
                     (long long)x->version, (long long)version);
    if (rc == OK && x->base != version - 1)
        rc = err_set(e, ERR_STATE, "%s: metadata.base_version: %lld; the checkpoint is at %lld",
                     path, (long long)x->base, (long long)(version - 1));
    buf_release(&text);
    mem_free(path);
    return rc;
}

static int by_name(const void *a, const void *b)
{
    return strcmp((*(const struct st_tensor *const *)a)->name,
                  (*(const struct st_tensor *const *)b)->name);
}

/* The entries [first, last) of the index are file f's: exactly its tensors.  Both are in the order of names. */
static err_t match(struct delta_files *d, const struct st_file *f, size_t first, size_t last,
                   struct err *e)
{
    const struct st_tensor **sorted = mem_try_array(f->n, sizeof(struct st_tensor *));
    if (sorted == NULL) return err_set(e, ERR_NOMEM, "%s: no memory for %zu names", f->path, f->n);
    for (size_t i = 0; i < f->n; i++)
        sorted[i] = &f->tensors[i];
    if (f->n) qsort(sorted, f->n, sizeof sorted[0], by_name);
    err_t rc = OK;
    for (size_t i = 0; rc == OK && (i < f->n || first + i < last); i++) {
        const char *have = i < f->n ? sorted[i]->name : NULL;
        const char *want = first + i < last ? d->index.entries[first + i].tensor : NULL;
        int order = have == NULL ? 1 : want == NULL ? -1 : strcmp(have, want);
        if (order)
            rc = err_set(e, ERR_INPUT, "%s: tensor %.200s: %s", f->path, order < 0 ? have : want,
                         order < 0 ? "the index does not list it"
                                   : "the index lists it, the file lacks it");
        else
            d->changes[first + i] = (struct delta_change){
                .from = f, .frame = sorted[i], .checksum = st_metadata(f, have)};
    }
    mem_free(sorted);
    return rc;
}

static err_t open_files(struct delta_files *d, const char *dir, struct err *e)
{
    const struct delta_entry *x = d->index.entries;
    size_t n = d->index.n, files = 0;
    for (size_t i = 0; i < n; i++)
        files += i == 0 || strcmp(x[i].file, x[i - 1].file) != 0;
    d->files = mem_try_array(files, sizeof d->files[0]);
    d->changes = mem_try_array(n, sizeof d->changes[0]);
    if (d->files == NULL || d->changes == NULL)
        return err_set(e, ERR_NOMEM, "%s: no memory for %zu tensors", dir, n);
    for (size_t i = 0, last; i < n; i = last) {
        for (last = i + 1; last < n && strcmp(x[last].file, x[i].file) == 0; last++) {
        }
        char *path = sync_join(dir, x[i].file);
        err_t rc =
            path ? st_open(&d->files[d->n], path, e) : err_set(e, ERR_NOMEM, "%s: no memory", dir);
        mem_free(path);
        if (rc != OK) return rc;
        rc = match(d, &d->files[d->n++], i, last, e);
        if (rc != OK) return rc;
    }
    return OK;
}

/* Where each change goes. */
static err_t aim(struct sync_chain *c, struct delta_files *d, struct err *e)
{
    for (size_t i = 0; i < d->index.n; i++) {
        struct delta_change *x = &d->changes[i];
        const struct checkpoint_entry *t = checkpoint_get(&c->base, x->frame->name);
        if (t == NULL)
            return err_set(e, ERR_INPUT, "%s: tensor %.200s: the checkpoint has none of this name",
                           x->from->path, x->frame->name);
        size_t file = (size_t)(t->file - c->base.files);
        err_t rc = writable(c, file, e);
        if (rc != OK) return rc;
        x->to = c->fds[file];
        x->offset = t->tensor->offset;
        x->bytes = t->tensor->bytes;
        x->to_path = t->file->path;
        c->result->bytes += x->bytes;
        c->result->wire_bytes += x->frame->bytes;
    }
    return OK;
}

/* ---- all changes, on several threads ---- */

struct crew {
    const struct delta_files *d;
    const struct sync_steps *steps;
    pthread_mutex_t m;
    bool failed;
    int first; /* of the failed ones, so that the message does not depend on the threads */
    err_t rc;
    struct err e;
};

static void change_one(void *arg, int i)
{
    struct crew *w = arg;
    struct err e = {0};
    pthread_mutex_lock(&w->m);
    bool skip = w->failed && i > w->first;
    pthread_mutex_unlock(&w->m);
    if (skip) return;
    err_t rc = delta_apply(&w->d->changes[i], w->d->index.encoding, w->d->index.digest, &e);
    if (rc == OK) rc = sync_step(w->steps, "tensor", &e);
    if (rc == OK) return;
    pthread_mutex_lock(&w->m);
    if (!w->failed || i < w->first) {
        w->failed = true;
        w->first = i;
        w->rc = rc;
        w->e = e;
    }
    pthread_mutex_unlock(&w->m);
}

static err_t change_all(const struct sync_chain *c, const struct delta_files *d, struct err *e)
{
    struct crew w = {.d = d, .steps = c->dir->steps, .m = PTHREAD_MUTEX_INITIALIZER};
    if (d->index.n > INT32_MAX)
        return err_set(e, ERR_TOOBIG, "%zu tensors in one delta", d->index.n);
    struct pool *p = pool_new(c->threads);
    pool_run(p, change_one, &w, (int)d->index.n);
    pool_free(p);
    return w.failed ? err_set(e, w.rc, "%s", w.e.msg) : OK;
}

err_t chain_apply(struct sync_chain *c, const char *path, int64_t version, struct err *e)
{
    struct delta_files d = {0};
    err_t rc = read_index(&d.index, path, version, e);
    if (rc == OK) rc = open_files(&d, path, e);
    if (rc == OK) rc = aim(c, &d, e);
    if (rc == OK) rc = change_all(c, &d, e);
    if (rc == OK) {
        c->result->deltas++;
        c->result->tensors += d.index.n;
    }
    files_close(&d);
    return rc;
}

err_t chain_sync(const struct sync_chain *c, struct err *e)
{
    size_t i;
    const json_t *v;
    json_array_foreach(c->files, i, v)
    {
        char *path = sync_join(c->dir->next, json_string_value(v));
        int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
        err_t rc = OK;
        if (path == NULL)
            rc = err_set(e, ERR_NOMEM, "no memory for a path");
        else if (fd < 0 || fsync(fd) != 0)
            rc = err_set(e, ERR_IO, "%s: %s", path, strerror(errno));
        if (fd >= 0) close(fd);
        mem_free(path);
        if (rc == OK) rc = sync_step(c->dir->steps, "sync", e);
        if (rc != OK) return rc;
    }
    return OK;
}
