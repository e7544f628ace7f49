#include "weight/bucket.h"

#include "base/mem.h"
#include <stdio.h>
#include <string.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#define FIRST_PLACES 64
#define HEADER_BYTES 1024 /* of a slot's tensors: names, shapes */

/* Where a name is, or would be put. */
static const char **place(const char **names, size_t n_places, const char *name)
{
    size_t i = (size_t)XXH3_64bits(name, strlen(name)) & (n_places - 1);
    while (names[i] && strcmp(names[i], name) != 0)
        i = (i + 1) & (n_places - 1);
    return &names[i];
}

static err_t grow_names(struct buckets *b, size_t more, struct err *e)
{
    size_t want = b->n_places ? b->n_places : FIRST_PLACES;
    while (want / 2 < b->n_tensors + more)
        want *= 2; /* a header bounds `more` */
    if (want == b->n_places) return OK;
    const char **names = mem_try_array(want, sizeof *names);
    if (names == NULL) return err_set(e, ERR_NOMEM, "no memory for %zu names", b->n_tensors + more);
    for (size_t i = 0; i < b->n_places; i++)
        if (b->names[i]) *place(names, want, b->names[i]) = b->names[i];
    mem_free(b->names);
    b->names = names;
    b->n_places = want;
    return OK;
}

static err_t grow_files(struct buckets *b, struct err *e)
{
    if (b->n < b->cap) return OK;
    size_t cap = b->cap * 2 + 4;
    struct st_file *files = mem_retry(b->files, b->cap * sizeof *files, cap * sizeof *files);
    if (files == NULL) return err_set(e, ERR_NOMEM, "no memory for %zu buckets", cap);
    b->files = files;
    b->cap = cap;
    return OK;
}

static err_t check_names(const struct buckets *b, const struct st_file *f, struct err *e)
{
    for (size_t i = 0; b->n_places && i < f->n; i++)
        if (*place(b->names, b->n_places, f->tensors[i].name))
            return err_set(e, ERR_INPUT, "tensor %s: given twice in one update",
                           f->tensors[i].name);
    return OK;
}

err_t buckets_add(struct buckets *b, void *bytes, uint64_t n, uint64_t limit, struct err *e)
{
    char name[48];
    struct st_file f;
    if (b->bytes > limit || n > limit - b->bytes)
        return err_set(
            e, ERR_TOOBIG, "%llu bytes of tensors and %llu more; a whole update has at most %llu",
            (unsigned long long)b->bytes, (unsigned long long)n, (unsigned long long)limit);
    snprintf(name, sizeof name, "bucket %zu", b->n + 1);
    err_t rc = st_open_memory(&f, name, bytes, n, e);
    if (rc != OK) return rc;
    rc = f.n ? check_names(b, &f, e) : err_set(e, ERR_INPUT, "%s: holds no tensors", name);
    if (rc == OK) rc = grow_files(b, e);
    if (rc == OK) rc = grow_names(b, f.n, e);
    if (rc != OK) {
        st_close(&f);
        return rc;
    }
    for (size_t i = 0; i < f.n; i++)
        *place(b->names, b->n_places, f.tensors[i].name) = f.tensors[i].name;
    b->files[b->n++] = f;
    b->n_tensors += f.n;
    b->bytes += n;
    return OK;
}

uint64_t buckets_limit(const struct store *s)
{
    uint64_t sum = HEADER_BYTES;
    for (size_t i = 0; i < store_slots(s); i++) {
        const struct resident *r = &store_spec(s, i)->shape; /* known to fit in memory */
        sum += r->rows * r->cols * sizeof(float) + HEADER_BYTES;
    }
    return sum;
}

void buckets_release(struct buckets *b)
{
    for (size_t i = 0; i < b->n; i++) {
        void *bytes = (void *)(uintptr_t)b->files[i].memory;
        st_close(&b->files[i]);
        mem_free(bytes);
    }
    mem_free(b->files);
    mem_free(b->names);
    *b = (struct buckets){0};
}
