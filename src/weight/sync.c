/* sync.c - which versions a pull needs, and a whole one copied. */
#include "weight/sync.h"

#include "base/file.h"
#include "base/mem.h"
#include "weight/sync_internal.h"
#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

struct sync {
    struct sync_options o;
    struct sync_dir dir;
};

/* ---- a published version ---- */

static char *version_path(const struct sync *s, int64_t version)
{
    char name[32];
    snprintf(name, sizeof name, "weight_v%06lld", (long long)version);
    return sync_join(s->o.source_dir, name);
}

/* Deltas' files may appear before their index does, so without one only the standard single file is a checkpoint. */
static err_t check_single(const char *dir, struct err *e)
{
    json_t *names = json_array();
    err_t rc = names ? sync_list(names, dir, e) : err_set(e, ERR_NOMEM, "%s: no memory", dir);
    bool single = false, other = false;
    size_t i;
    const json_t *v;
    json_array_foreach(names, i, v)
    {
        const char *name = json_string_value(v), *ext = strrchr(name, '.');
        if (ext == NULL || strcmp(ext, ".safetensors") != 0) continue;
        if (strcmp(name, "model.safetensors") == 0)
            single = true;
        else
            other = true;
    }
    json_decref(names);
    if (rc == OK && (!single || other))
        rc = err_set(e, ERR_NOTFOUND,
                     "%s: no " CHECKPOINT_INDEX
                     ", and without one a version must be the single file model.safetensors",
                     dir);
    return rc;
}

/* Is version a delta?  Its folder must be there; `text` gets the index. */
static err_t version_kind(const struct sync *s, int64_t version, bool *delta, struct err *e)
{
    struct buf text = {0};
    char *dir = version_path(s, version), *path = dir ? sync_join(dir, CHECKPOINT_INDEX) : NULL;
    err_t rc = path ? OK : err_set(e, ERR_NOMEM, "version %lld: no memory", (long long)version);
    if (rc == OK && !file_is_dir(dir))
        rc = err_set(e, ERR_NOTFOUND, "%s: no such folder: the version is missing", dir);
    if (rc == OK) {
        rc = file_read(&text, path, CHECKPOINT_INDEX_MAX, e);
        if (rc == OK)
            rc = delta_is(delta, text.data, text.len, path, e);
        else if (rc == ERR_NOTFOUND)
            *delta = false, rc = check_single(dir, e);
    }
    buf_release(&text);
    mem_free(path);
    mem_free(dir);
    return rc;
}

/* ---- a whole version ---- */

static bool same_folder(const char *a, const char *b)
{
    struct stat x, y;
    return stat(a, &x) == 0 && stat(b, &y) == 0 && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

static bool has(const json_t *names, const char *name)
{
    size_t i;
    const json_t *v;
    json_array_foreach(names, i, v) if (strcmp(json_string_value(v), name) == 0) return true;
    return false;
}

static err_t copy_files(const struct sync *s, const char *from, const json_t *names,
                        uint64_t *bytes, struct err *e)
{
    size_t i;
    const json_t *v;
    err_t rc = OK;
    json_array_foreach(names, i, v)
    {
        const char *name = json_string_value(v);
        char *a = sync_join(from, name), *b = sync_join(s->dir.next, name);
        rc = a && b ? sync_copy(a, b, bytes, e) : err_set(e, ERR_NOMEM, "%s: no memory", name);
        mem_free(a);
        mem_free(b);
        if (rc == OK) rc = sync_step(&s->o.steps, "copy", e);
        if (rc != OK) break;
    }
    return rc;
}

/* The checkpoint in `from` into next/; the folder's files that it lacks are to go. */
static err_t seed(const struct sync *s, const char *from, struct sync_change *c, uint64_t *bytes,
                  struct err *e)
{
    json_t *old = json_array();
    if (old == NULL) return err_set(e, ERR_NOMEM, "%s: no memory", from);
    err_t rc = OK;
    if (same_folder(from, s->o.local_dir))
        rc = err_set(e, ERR_INPUT,
                     "local_checkpoint_dir: %s is where its own seed lies; give another folder",
                     from);
    if (rc == OK) rc = sync_list(c->files, from, e);
    if (rc == OK) rc = sync_list(old, s->o.local_dir, e);
    size_t i;
    const json_t *v;
    json_array_foreach(old, i, v)
    {
        if (rc == OK && !has(c->files, json_string_value(v)) &&
            json_array_append(c->removed, (json_t *)v) != 0)
            rc = err_set(e, ERR_NOMEM, "%s: no memory", from);
    }
    json_decref(old);
    return rc == OK ? copy_files(s, from, c->files, bytes, e) : rc;
}

/* ---- the pull ---- */

/* The version that the deltas begin at: a whole one that must be copied (*copied), or the folder's own. */
static err_t find_start(const struct sync *s, int64_t applied, int64_t *start, bool *copied,
                        struct err *e)
{
    int64_t floor = applied == SYNC_NONE ? 0 : applied, at = s->o.target;
    while (at > floor) {
        bool delta = false;
        err_t rc = version_kind(s, at, &delta, e);
        if (rc == OK) rc = sync_step(&s->o.steps, "index", e);
        if (rc != OK) return rc;
        if (!delta) break;
        at--;
    }
    *copied = applied == SYNC_NONE || at > applied;
    *start = at;
    return OK;
}

static err_t build(struct sync *s, int64_t applied, struct sync_change *c, struct sync_result *r,
                   struct err *e)
{
    int64_t start = 0;
    bool copied = false;
    err_t rc = find_start(s, applied, &start, &copied, e);
    if (rc != OK) return rc;
    if (!copied && start == s->o.target) return OK;
    if ((rc = sync_dir_clear(&s->dir, e)) != OK) return rc;
    r->changed = true;
    if (copied) {
        char *from = start ? version_path(s, start) : NULL;
        if (start && from == NULL)
            rc = err_set(e, ERR_NOMEM, "version %lld: no memory", (long long)start);
        if (rc == OK) rc = seed(s, from ? from : s->o.launch_dir, c, &r->bytes, e);
        mem_free(from);
        r->seed = start;
    }
    struct sync_chain chain = {
        .dir = &s->dir, .seeded = copied, .threads = s->o.threads, .files = c->files, .result = r};
    if (rc == OK) rc = chain_open(&chain, e);
    for (int64_t v = start + 1; rc == OK && v <= s->o.target; v++) {
        char *path = version_path(s, v);
        rc = path ? chain_apply(&chain, path, v, e)
                  : err_set(e, ERR_NOMEM, "version %lld: no memory", (long long)v);
        mem_free(path);
    }
    if (rc == OK) rc = chain_sync(&chain, e);
    chain_close(&chain);
    return rc;
}

err_t sync_begin(struct sync **out, const struct sync_options *o, struct err *e)
{
    const struct {
        const char *name, *path;
    } paths[] = {{"local_checkpoint_dir", o->local_dir}, {"source_dir", o->source_dir}};
    for (size_t i = 0; i < 2; i++)
        if (paths[i].path[0] != '/')
            return err_set(e, ERR_INPUT, "%s: \"%.300s\"; must be an absolute path", paths[i].name,
                           paths[i].path);
    if (o->target < 0 || o->target > DELTA_VERSION_MAX)
        return err_set(e, ERR_INPUT, "target_version: %lld; must be 0 to %d", (long long)o->target,
                       DELTA_VERSION_MAX);
    struct sync *s = mem_alloc(sizeof *s);
    s->o = *o;
    err_t rc = sync_dir_open(&s->dir, o->local_dir, o->lock_s, o->target == 0, &s->o.steps, e);
    if (rc != OK) {
        mem_free(s);
        return rc;
    }
    *out = s;
    return OK;
}

err_t sync_pull(struct sync *s, struct sync_result *r, struct err *e)
{
    struct sync_result t = {.from = s->dir.applied, .version = s->o.target, .seed = SYNC_NONE};
    struct sync_change c = {.version = s->o.target, .files = json_array(), .removed = json_array()};
    bool forget = s->o.target == 0 || s->o.target < s->dir.applied;
    err_t rc =
        c.files && c.removed ? OK : err_set(e, ERR_NOMEM, "no memory for the names of files");
    if (rc == OK) rc = build(s, forget ? SYNC_NONE : s->dir.applied, &c, &t, e);
    if (rc == OK && t.changed) rc = sync_dir_commit(&s->dir, &c, e);
    json_decref(c.files);
    json_decref(c.removed);
    if (rc == OK) *r = t;
    return rc;
}

void sync_end(struct sync *s)
{
    if (s == NULL) return;
    sync_dir_close(&s->dir);
    mem_free(s);
}
