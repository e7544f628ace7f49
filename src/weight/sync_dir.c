#include "weight/sync_dir.h"

#include "base/buf.h"
#include "base/clock.h"
#include "base/file.h"
#include "base/mem.h"
#include "weight/delta.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define META      ".weight_sync"
#define STATE     META "/state.json"
#define TEXT_MAX  ((size_t)64 << 20)
#define LOCK_STEP 20000000 /* ns between two tries */

err_t sync_step(const struct sync_steps *s, const char *what, struct err *e)
{
    return s && s->step ? s->step(s->ctx, what, e) : OK;
}

char *sync_join(const char *dir, const char *name)
{
    struct buf b = {0};
    if (buf_printf(&b, "%s/%s", dir, name)) return buf_take(&b);
    buf_release(&b);
    return NULL;
}

static err_t no_memory(struct err *e, const char *what)
{
    return err_set(e, ERR_NOMEM, "%s: no memory", what);
}

static err_t system_err(struct err *e, const char *path)
{
    return err_set(e, errno == ENOENT ? ERR_NOTFOUND : ERR_IO, "%s: %s", path, strerror(errno));
}

/* ---- files ---- */

static err_t copy_bytes(int from, int to, const char *from_path, const char *to_path,
                        uint64_t *bytes, struct err *e)
{
    static const size_t piece = (size_t)1 << 20;
    bool in_kernel = true; /* shares blocks where the file system can */
    char *buf = NULL;
    err_t rc = OK;
    for (;;) {
        ssize_t n = -1;
        if (in_kernel) {
            n = copy_file_range(from, NULL, to, NULL, (size_t)1 << 30, 0);
            in_kernel = n >= 0 || errno == EINTR;
            if (!in_kernel && (buf = mem_try(piece)) == NULL) rc = no_memory(e, to_path);
        } else {
            n = read(from, buf, piece);
            if (n < 0 && errno != EINTR) rc = system_err(e, from_path);
            if (n > 0) rc = file_write(to, buf, (size_t)n, to_path, e);
        }
        if (rc != OK || n == 0) break;
        if (n > 0) *bytes += (uint64_t)n;
    }
    mem_free(buf);
    return rc;
}

err_t sync_copy(const char *from, const char *to, uint64_t *bytes, struct err *e)
{
    struct stat st;
    uint64_t done = 0;
    int in = open(from, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (in < 0) return system_err(e, from);
    int out = open(to, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    err_t rc = out < 0 ? system_err(e, to) : fstat(in, &st) != 0 ? system_err(e, from) : OK;
    if (rc == OK) rc = copy_bytes(in, out, from, to, &done, e);
    if (rc == OK && done != (uint64_t)st.st_size)
        rc = err_set(e, ERR_IO, "%s: %llu bytes were copied of %llu", from,
                     (unsigned long long)done, (unsigned long long)st.st_size);
    close(in);
    if (out >= 0 && close(out) != 0 && rc == OK) rc = system_err(e, to);
    if (rc == OK) *bytes += done;
    return rc;
}

err_t sync_list(json_t *names, const char *dir, struct err *e)
{
    struct stat st;
    DIR *d = opendir(dir);
    if (d == NULL) return system_err(e, dir);
    err_t rc = OK;
    const struct dirent *f;
    while (rc == OK && (f = readdir(d)) != NULL) {
        if (fstatat(dirfd(d), f->d_name, &st, 0) != 0 || !S_ISREG(st.st_mode)) continue;
        json_t *name = json_string(f->d_name);
        if (name == NULL)
            rc = err_set(e, ERR_INPUT, "%s: a file's name is not UTF-8", dir);
        else if (json_array_append_new(names, name) != 0)
            rc = no_memory(e, dir);
    }
    closedir(d);
    return rc;
}

static err_t make_dirs(const char *path, struct err *e)
{
    char *p = mem_dup_n(path, strlen(path));
    if (p == NULL) return no_memory(e, path);
    err_t rc = OK;
    for (char *s = p + 1; rc == OK && (s = strchr(s, '/')) != NULL; s++) {
        *s = 0;
        if (mkdir(p, 0755) != 0 && errno != EEXIST) rc = system_err(e, p);
        *s = '/';
    }
    if (rc == OK && mkdir(p, 0755) != 0 && errno != EEXIST) rc = system_err(e, p);
    mem_free(p);
    return rc;
}

/* A small file replaced as a whole, on the disk when this returns. */
static err_t put_text(const char *dir, const char *name, const char *text, struct err *e)
{
    struct buf temp = {0}, path = {0}, parent = {0};
    if (!buf_printf(&path, "%s/%s", dir, name) || !buf_printf(&temp, "%s.tmp", path.data) ||
        !buf_printf(&parent, "%s/" META, dir)) {
        buf_release(&temp), buf_release(&path), buf_release(&parent);
        return no_memory(e, name);
    }
    int fd = open(temp.data, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    err_t rc = fd < 0 ? system_err(e, temp.data) : file_write(fd, text, strlen(text), temp.data, e);
    if (rc == OK && fsync(fd) != 0) rc = system_err(e, temp.data);
    if (fd >= 0 && close(fd) != 0 && rc == OK) rc = system_err(e, temp.data);
    if (rc == OK && rename(temp.data, path.data) != 0) rc = system_err(e, path.data);
    if (rc == OK) rc = file_sync_dir(parent.data, e);
    buf_release(&temp), buf_release(&path), buf_release(&parent);
    return rc;
}

/* ---- the state ---- */

static err_t read_json(json_t **out, const struct sync_dir *d, const char *name, struct err *e)
{
    struct buf text = {0};
    json_error_t je;
    char *path = sync_join(d->path, name);
    if (path == NULL) return no_memory(e, name);
    err_t rc = file_read(&text, path, TEXT_MAX, e);
    if (rc == OK && (*out = json_loadb(text.data, text.len, JSON_REJECT_DUPLICATES, &je)) == NULL)
        rc = err_set(e, ERR_STATE, "%s: line %d: %s", path, je.line, je.text);
    buf_release(&text);
    mem_free(path);
    return rc;
}

static err_t read_state(struct sync_dir *d, bool reseed, struct err *e)
{
    json_t *root = NULL;
    struct err why = {0};
    d->applied = SYNC_NONE;
    err_t rc = read_json(&root, d, STATE, &why);
    if (rc == OK)
        rc = delta_version(&d->applied, json_object_get(root, "version"), "version", &why);
    json_decref(root);
    if (rc == OK || rc == ERR_NOTFOUND || (reseed && rc != ERR_NOMEM)) return OK;
    return err_set(e, rc == ERR_NOMEM ? rc : ERR_STATE,
                   "%s/" STATE ": %s; pull version 0 to seed the folder anew", d->path, why.msg);
}

static err_t write_state(struct sync_dir *d, int64_t version, struct err *e)
{
    char text[64];
    snprintf(text, sizeof text, "{\"version\": \"%06lld\"}", (long long)version);
    err_t rc = put_text(d->path, STATE, text, e);
    if (rc == OK) d->applied = version;
    return rc;
}

/* ---- the change ---- */

err_t sync_dir_clear(struct sync_dir *d, struct err *e)
{
    err_t rc = make_dirs(d->next, e);
    if (rc != OK) return rc;
    DIR *dir = opendir(d->next);
    if (dir == NULL) return system_err(e, d->next);
    const struct dirent *f;
    while (rc == OK && (f = readdir(dir)) != NULL)
        if (strcmp(f->d_name, ".") != 0 && strcmp(f->d_name, "..") != 0 &&
            unlinkat(dirfd(dir), f->d_name, 0) != 0)
            rc = system_err(e, d->next);
    closedir(dir);
    return rc;
}

static err_t move_in(const struct sync_dir *d, const char *name, struct err *e)
{
    char *from = sync_join(d->next, name), *to = sync_join(d->path, name);
    err_t rc = from && to ? OK : no_memory(e, name);
    /* Absent: moved before a crash. */
    if (rc == OK && rename(from, to) != 0 && !(errno == ENOENT && file_exists(to)))
        rc = system_err(e, to);
    mem_free(from);
    mem_free(to);
    return rc;
}

static err_t take_away(const struct sync_dir *d, const char *name, struct err *e)
{
    char *path = sync_join(d->path, name);
    err_t rc = path ? OK : no_memory(e, name);
    if (rc == OK && unlink(path) != 0 && errno != ENOENT) rc = system_err(e, path);
    mem_free(path);
    return rc;
}

static void tell(const struct sync_dir *d, const char *what, const char *name)
{
    char text[300];
    snprintf(text, sizeof text, "%s%s", what, name);
    (void)!sync_step(d->steps, text, NULL); /* decided already: nothing stops it */
}

static err_t each_name(const struct sync_dir *d, const json_t *names, const char *what,
                       err_t (*act)(const struct sync_dir *, const char *, struct err *),
                       struct err *e)
{
    size_t i;
    const json_t *v;
    json_array_foreach(names, i, v)
    {
        const char *name = json_string_value(v);
        if (name == NULL || *name == 0 || strchr(name, '/') || strcmp(name, ".") == 0 ||
            strcmp(name, "..") == 0)
            return err_set(e, ERR_STATE, "%s/" SYNC_JOURNAL ": not a plain file name", d->path);
        err_t rc = act(d, name, e);
        if (rc != OK) return rc;
        tell(d, what, name);
    }
    return OK;
}

/* Everything behind the decision; may run again after a crash. */
static err_t carry_out(struct sync_dir *d, const struct sync_change *c, struct err *e)
{
    err_t rc = each_name(d, c->files, "rename ", move_in, e);
    if (rc == OK) rc = each_name(d, c->removed, "remove ", take_away, e);
    if (rc == OK) rc = file_sync_dir(d->path, e);
    if (rc == OK) rc = write_state(d, c->version, e);
    if (rc != OK) return rc;
    tell(d, "state", "");
    return take_away(d, SYNC_JOURNAL, e);
}

static err_t write_journal(struct sync_dir *d, const struct sync_change *c, struct err *e)
{
    json_t *root = json_pack("{s:I, s:I, s:O, s:O}", "from", (json_int_t)d->applied, "version",
                             (json_int_t)c->version, "files", c->files, "removed", c->removed);
    char *text = root ? json_dumps(root, 0) : NULL;
    err_t rc = text ? put_text(d->path, SYNC_JOURNAL, text, e) : no_memory(e, SYNC_JOURNAL);
    free(text);
    json_decref(root);
    return rc;
}

err_t sync_dir_commit(struct sync_dir *d, const struct sync_change *c, struct err *e)
{
    if (json_array_size(c->files) + json_array_size(c->removed) == 0)
        return write_state(d, c->version, e);
    err_t rc = file_sync_dir(d->next, e);
    if (rc == OK) rc = sync_step(d->steps, "synced", e);
    if (rc == OK) rc = write_journal(d, c, e);
    if (rc != OK) return rc;
    tell(d, "decided", "");
    rc = carry_out(d, c, e);
    if (rc != OK)
        return err_wrap(e, rc, "the change to version %lld is decided, the next pull finishes it",
                        (long long)c->version);
    (void)rmdir(d->next);
    return OK;
}

/* A decision that a crash left: finished, unless somebody moved the folder on since. */
static err_t recover(struct sync_dir *d, bool reseed, struct err *e)
{
    json_t *root = NULL;
    err_t rc = read_json(&root, d, SYNC_JOURNAL, e);
    if (rc == ERR_NOTFOUND) return OK;
    if (rc == OK) rc = read_state(d, true, e);
    if (rc == OK) {
        const json_t *from = json_object_get(root, "from");
        struct sync_change c = {.files = json_object_get(root, "files"),
                                .removed = json_object_get(root, "removed")};
        rc = delta_version(&c.version, json_object_get(root, "version"), SYNC_JOURNAL ": version",
                           e);
        bool ours = json_is_integer(from) &&
                    (json_integer_value(from) == d->applied || d->applied == SYNC_NONE);
        if (rc == OK) rc = ours ? carry_out(d, &c, e) : take_away(d, SYNC_JOURNAL, e);
    }
    json_decref(root);
    /* A seed replaces every file, so it needs nothing of what was decided. */
    return rc != OK && rc != ERR_NOMEM && reseed ? take_away(d, SYNC_JOURNAL, e) : rc;
}

/* ---- open ---- */

static err_t take_lock(struct sync_dir *d, double lock_s, struct err *e)
{
    char *path = sync_join(d->path, META "/lock");
    if (path == NULL) return no_memory(e, META "/lock");
    d->lock = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    err_t rc = d->lock < 0 ? system_err(e, path) : OK;
    double until = clock_s() + lock_s;
    while (rc == OK && flock(d->lock, LOCK_EX | LOCK_NB) != 0) {
        if (errno != EWOULDBLOCK && errno != EINTR)
            rc = system_err(e, path);
        else if (clock_s() >= until)
            rc =
                err_set(e, ERR_BUSY, "%s: held by another pull for more than %.0f s", path, lock_s);
        else if ((rc = sync_step(d->steps, "lock", e)) == OK)
            nanosleep(&(struct timespec){.tv_nsec = LOCK_STEP}, NULL);
    }
    mem_free(path);
    return rc;
}

/* A pull removes files that the new version has not: never those of a folder that is something else. */
static err_t check_owned(const struct sync_dir *d, struct err *e)
{
    json_t *names = json_array();
    char *meta = sync_join(d->path, META), *config = sync_join(d->path, "config.json");
    err_t rc = names && meta && config ? OK : no_memory(e, d->path);
    if (rc == OK && !file_is_dir(meta)) rc = sync_list(names, d->path, e);
    if (rc == OK && json_array_size(names) && !file_exists(config))
        rc = err_set(e, ERR_STATE,
                     "%s: holds files (%.100s, ...) and is no checkpoint; give an empty folder",
                     d->path, json_string_value(json_array_get(names, 0)));
    json_decref(names);
    mem_free(meta);
    mem_free(config);
    return rc;
}

err_t sync_dir_open(struct sync_dir *d, const char *path, double lock_s, bool reseed,
                    const struct sync_steps *steps, struct err *e)
{
    struct sync_dir t = {.path = mem_dup_n(path, strlen(path)),
                         .next = sync_join(path, META "/next"),
                         .lock = -1,
                         .applied = SYNC_NONE,
                         .steps = steps};
    char *meta = sync_join(path, META);
    err_t rc = t.path && t.next && meta ? OK : no_memory(e, path);
    if (rc == OK) rc = make_dirs(path, e);
    if (rc == OK) rc = check_owned(&t, e);
    if (rc == OK) rc = make_dirs(meta, e);
    if (rc == OK) rc = take_lock(&t, lock_s, e);
    if (rc == OK) rc = recover(&t, reseed, e);
    if (rc == OK) rc = read_state(&t, reseed, e);
    mem_free(meta);
    if (rc != OK) {
        sync_dir_close(&t);
        return rc;
    }
    *d = t;
    return OK;
}

void sync_dir_close(struct sync_dir *d)
{
    if (d->path && d->lock >= 0) close(d->lock); /* and with it the lock */
    mem_free(d->path);
    mem_free(d->next);
    *d = (struct sync_dir){.lock = -1};
}
