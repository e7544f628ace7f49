#include "weight/manifest.h"

#include "base/buf.h"
#include "base/file.h"
#include "base/mem.h"
#include <fcntl.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#define MANIFEST_MAX ((size_t)256 << 20)
#define PIECE        ((size_t)1 << 20)
#define MAX_NAMED    8

struct check {
    const json_t *files, *tensors; /* NULL: not asked for */
    struct update_progress *progress;
    unsigned char *piece;
    struct buf wrong; /* what is missing or not met, by name */
    size_t n_wrong;
};

/* The sums of one entry while its bytes pass. */
struct sums {
    const json_t *want; /* NULL: none */
    size_t n;
    struct digest d[DIGEST_COUNT];
};

static void complain(struct check *c, const char *what, const char *name, const char *why)
{
    if (c->n_wrong++ < MAX_NAMED)
        (void)buf_printf(&c->wrong, "%s%s %.200s: %s", c->wrong.len ? "; " : "", what, name, why);
}

/* ---- reading the manifest ---- */

static bool is_hex(const char *s, size_t n)
{
    return strlen(s) == n && strspn(s, "0123456789abcdefABCDEF") == n;
}

static err_t check_entry(const char *part, const char *name, const json_t *v, struct err *e)
{
    const char *algorithm;
    json_t *sum;
    if (!json_is_object(v) || json_object_size(v) == 0)
        return err_set(e, ERR_INPUT, "%s: %.200s: must be an object of checksums", part, name);
    json_object_foreach((json_t *)v, algorithm, sum)
    {
        digest_t k = digest_find(algorithm);
        if (k == DIGEST_COUNT)
            return err_set(e, ERR_INPUT,
                           "%s: %.200s: \"%.40s\" is not one of xxh3-128, sha256, adler32", part,
                           name, algorithm);
        if (!json_is_string(sum) || !is_hex(json_string_value(sum), 2 * digest_size(k)))
            return err_set(e, ERR_INPUT, "%s: %.200s: %s: must be %zu hex digits", part, name,
                           algorithm, 2 * digest_size(k));
    }
    return OK;
}

static err_t check_part(const json_t **out, const json_t *root, const char *part, struct err *e)
{
    json_t *v = json_object_get(root, part), *entry;
    const char *name;
    if (v == NULL) return OK;
    if (!json_is_object(v)) return err_set(e, ERR_INPUT, "%s: must be an object", part);
    json_object_foreach(v, name, entry)
    {
        err_t rc = check_entry(part, name, entry, e);
        if (rc != OK) return rc;
    }
    *out = v;
    return OK;
}

static err_t read_manifest(json_t **root, struct check *c, const char *path, struct err *e)
{
    struct buf text = {0};
    json_error_t at;
    err_t rc = file_read(&text, path, MANIFEST_MAX, e);
    if (rc != OK) return err_wrap(e, rc, "manifest");
    *root = json_loadb(text.data, text.len, JSON_REJECT_DUPLICATES, &at);
    buf_release(&text);
    if (*root == NULL)
        return err_set(e, ERR_INPUT, "manifest: %s: line %d: %s", path, at.line, at.text);
    rc = check_part(&c->files, *root, "files", e);
    if (rc == OK) rc = check_part(&c->tensors, *root, "tensors", e);
    if (rc == OK && !c->files && !c->tensors)
        rc = err_set(e, ERR_INPUT, "neither \"files\" nor \"tensors\" is there");
    return rc == OK ? OK : err_wrap(e, rc, "manifest: %s", path);
}

/* ---- sums ---- */

static void sums_begin(struct sums *s, const json_t *want)
{
    const char *algorithm;
    json_t *v;
    s->want = want;
    s->n = 0;
    json_object_foreach((json_t *)want, algorithm, v)
    {
        digest_init(&s->d[s->n++], digest_find(algorithm));
    }
}

static void sums_add(struct sums *s, const void *bytes, size_t n)
{
    for (size_t i = 0; i < s->n; i++)
        digest_add(&s->d[i], bytes, n);
}

static void sums_end(struct check *c, struct sums *s, const char *what, const char *name)
{
    for (size_t i = 0; i < s->n; i++) {
        char hex[DIGEST_HEX], why[2 * DIGEST_HEX + 64];
        const char *algorithm = digest_name(s->d[i].kind);
        const char *want = json_string_value(json_object_get(s->want, algorithm));
        digest_hex(&s->d[i], hex);
        if (strcasecmp(hex, want) == 0) continue;
        snprintf(why, sizeof why, "%s is %s, the manifest has %s", algorithm, hex, want);
        complain(c, what, name, why);
    }
}

/* What the manifest says of a thing that is there; a part that does not mention it is incomplete. */
static const json_t *wanted(struct check *c, const json_t *part, const char *what, const char *name)
{
    if (part == NULL) return NULL;
    const json_t *v = json_object_get(part, name);
    if (v == NULL) complain(c, what, name, "not in the manifest");
    return v;
}

/* ---- files ---- */

static const char *base_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

/* Bytes [from, to) of a file into one or two entries' sums. */
static err_t pass(struct check *c, int fd, const char *path, uint64_t from, uint64_t to,
                  struct sums *a, struct sums *b, struct err *e)
{
    if (a->n == 0 && (b == NULL || b->n == 0)) return OK;
    while (from < to) {
        size_t n = to - from < PIECE ? (size_t)(to - from) : PIECE;
        if (c->progress && atomic_load(&c->progress->cancel))
            return err_set(e, ERR_STATE, "the update was cancelled");
        update_turn(c->progress, true);
        err_t rc = file_pread(fd, c->piece, n, from, path, e);
        if (rc != OK) return rc;
        sums_add(a, c->piece, n);
        if (b) sums_add(b, c->piece, n);
        from += n;
    }
    return OK;
}

/* Its header, then its tensors, which follow each other without a hole. */
static err_t check_file(struct check *c, const struct st_file *f, struct err *e)
{
    struct sums file, tensor;
    const char *name = base_name(f->path);
    uint64_t data = f->n ? f->tensors[0].offset : f->file_bytes;
    sums_begin(&file, wanted(c, c->files, "file", name));
    err_t rc = pass(c, f->fd, f->path, 0, data, &file, NULL, e);
    for (size_t i = 0; rc == OK && i < f->n; i++) {
        const struct st_tensor *t = &f->tensors[i];
        sums_begin(&tensor, wanted(c, c->tensors, "tensor", t->name));
        rc = pass(c, f->fd, f->path, t->offset, t->offset + t->bytes, &file, &tensor, e);
        if (rc == OK) sums_end(c, &tensor, "tensor", t->name);
    }
    if (rc == OK) rc = st_unchanged(f, e);
    if (rc == OK) sums_end(c, &file, "file", name);
    return rc;
}

static bool is_weight_file(const struct checkpoint *k, const char *name)
{
    for (size_t i = 0; i < k->n_files; i++)
        if (strcmp(base_name(k->files[i].path), name) == 0) return true;
    return false;
}

/* A file that holds no weights. */
static err_t check_other(struct check *c, const char *dir, const char *name, const json_t *want,
                         struct err *e)
{
    struct buf path = {0};
    struct sums s;
    err_t rc = OK;
    if (strchr(name, '/') || !buf_printf(&path, "%s/%s", dir, name)) {
        complain(c, "file", name, "not a plain name");
        buf_release(&path);
        return OK;
    }
    int fd = open(path.data, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    off_t end = fd < 0 ? -1 : lseek(fd, 0, SEEK_END);
    if (end < 0) {
        complain(c, "file", name, "not there");
    } else {
        sums_begin(&s, want);
        rc = pass(c, fd, path.data, 0, (uint64_t)end, &s, NULL, e);
        if (rc == OK) sums_end(c, &s, "file", name);
    }
    if (fd >= 0) close(fd);
    buf_release(&path);
    return rc;
}

static err_t check_all(struct check *c, const struct checkpoint *k, struct err *e)
{
    const char *name;
    json_t *v;
    err_t rc = OK;
    for (size_t i = 0; rc == OK && i < k->n_files; i++)
        rc = check_file(c, &k->files[i], e);
    if (rc != OK) return rc;
    json_object_foreach((json_t *)c->files, name, v)
    {
        if (!is_weight_file(k, name)) rc = check_other(c, k->dir, name, v, e);
        if (rc != OK) return rc;
    }
    json_object_foreach((json_t *)c->tensors, name, v)
    {
        if (!checkpoint_get(k, name)) complain(c, "tensor", name, "not in the checkpoint");
    }
    if (c->n_wrong == 0) return OK;
    if (c->n_wrong > MAX_NAMED)
        (void)buf_printf(&c->wrong, "; and %zu more", c->n_wrong - MAX_NAMED);
    return err_set(e, ERR_INPUT, "manifest: %s", c->wrong.data ? c->wrong.data : "not met");
}

err_t manifest_check(const char *path, const struct checkpoint *k, struct update_progress *progress,
                     struct err *e)
{
    struct check c = {.progress = progress, .piece = mem_try(PIECE)};
    struct buf at = {0};
    json_t *root = NULL;
    err_t rc = OK;
    if (c.piece == NULL || !buf_printf(&at, "%s%s%s", strchr(path, '/') ? "" : k->dir,
                                       strchr(path, '/') ? "" : "/", path))
        rc = err_set(e, ERR_NOMEM, "manifest: no memory to check it");
    if (rc == OK) rc = read_manifest(&root, &c, at.data, e);
    if (rc == OK) rc = check_all(&c, k, e);
    update_turn(progress, false);
    json_decref(root);
    buf_release(&at);
    buf_release(&c.wrong);
    mem_free(c.piece);
    return rc;
}
