#include "weight/checkpoint.h"

#include "base/file.h"
#include "base/mem.h"
#include "base/pool.h"
#include "weight/sync_dir.h"
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <jansson.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define MAX_FILES 4096

/* ---- from a name to a folder ---- */

/* `name` or `org/name` of [A-Za-z0-9._-], no "..". */
static bool is_repo_id(const char *s)
{
    int slashes = 0;
    if (strstr(s, "..") || s[0] == '/' || s[0] == '.' || s[0] == 0) return false;
    for (const char *p = s; *p; p++) {
        if (*p == '/') {
            if (++slashes > 1 || p[1] == 0 || p[1] == '.') return false;
        } else if (!isalnum((unsigned char)*p) && !strchr("._-", *p)) {
            return false;
        }
    }
    return true;
}

/* The snapshot of a repository in one hub folder; false if there is none. */
static bool find_snapshot(char **dir, const char *hub, const char *id)
{
    struct buf repo = {0}, path = {0}, commit = {0};
    bool found = false;
    buf_printf(&repo, "%s/models--", hub);
    for (const char *p = id; *p; p++) {
        if (*p == '/')
            buf_puts(&repo, "--");
        else
            buf_putc(&repo, *p);
    }
    buf_printf(&path, "%s/refs/main", repo.data ? repo.data : "");
    if (!repo.failed && !path.failed && file_read(&commit, path.data, 256, NULL) == OK) {
        while (commit.len && isspace((unsigned char)commit.data[commit.len - 1]))
            commit.data[--commit.len] = 0;
        if (commit.len && is_repo_id(commit.data) && !strchr(commit.data, '/')) {
            buf_clear(&path);
            buf_printf(&path, "%s/snapshots/%s", repo.data, commit.data);
            found = !path.failed && file_is_dir(path.data);
        }
    }
    if (found) *dir = buf_take(&path);
    buf_release(&repo);
    buf_release(&path);
    buf_release(&commit);
    return found;
}

err_t checkpoint_find(char **dir, const char *model, struct err *e)
{
    if (file_is_dir(model)) {
        char *d = mem_dup_n(model, strlen(model));
        if (d == NULL) return err_set(e, ERR_NOMEM, "%s: no memory for the path", model);
        *dir = d;
        return OK;
    }
    if (!is_repo_id(model))
        return err_set(e, ERR_NOTFOUND, "%.500s: no such folder, and not a repository id", model);
    static const char *const roots[][2] = {
        {"HF_HUB_CACHE", ""}, {"HF_HOME", "/hub"}, {"HOME", "/.cache/huggingface/hub"}};
    struct buf searched = {0};
    bool found = false;
    buf_printf(&searched, "./%s", model);
    for (size_t i = 0; i < sizeof roots / sizeof roots[0] && !found; i++) {
        const char *root = getenv(roots[i][0]);
        struct buf hub = {0};
        if (root == NULL || *root == 0) continue;
        if (buf_printf(&hub, "%s%s", root, roots[i][1])) {
            found = find_snapshot(dir, hub.data, model);
            buf_printf(&searched, ", %s", hub.data);
        }
        buf_release(&hub);
    }
    err_t rc = OK;
    if (!found)
        rc = err_set(e, ERR_NOTFOUND, "%s: not found; searched: %s", model,
                     searched.data ? searched.data : "");
    buf_release(&searched);
    return rc;
}

/* ---- which files ---- */

struct names {
    char **v; /* sorted once complete, no doubles */
    size_t n;
};

static void names_free(struct names *s)
{
    for (size_t i = 0; i < s->n; i++)
        mem_free(s->v[i]);
    mem_free(s->v);
    *s = (struct names){0};
}

static int by_string(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

static err_t names_add(struct names *s, const char *name, struct err *e)
{
    if (s->n == MAX_FILES) return err_set(e, ERR_TOOBIG, "more than %d weight files", MAX_FILES);
    if (s->v == NULL) s->v = mem_try_array(MAX_FILES, sizeof s->v[0]);
    char *copy = s->v ? mem_dup_n(name, strlen(name)) : NULL;
    if (copy == NULL) return err_set(e, ERR_NOMEM, "no memory for file names");
    s->v[s->n++] = copy;
    return OK;
}

static bool names_has(const struct names *s, const char *name)
{
    for (size_t i = s->n; i-- > 0;)
        if (strcmp(s->v[i], name) == 0) return true;
    return false;
}

static bool plain_name(const char *s)
{
    return s && *s && s[0] != '.' && !strchr(s, '/') && !strstr(s, "..") && strlen(s) <= 255;
}

static err_t index_read(json_t **root, json_t **map, const char *path, struct err *e)
{
    struct buf text = {0};
    json_error_t je;
    err_t rc = file_read(&text, path, CHECKPOINT_INDEX_MAX, e);
    if (rc != OK) return rc;
    *root = json_loadb(text.data, text.len, JSON_REJECT_DUPLICATES, &je);
    buf_release(&text);
    if (*root == NULL) return err_set(e, ERR_INPUT, "%s: line %d: %s", path, je.line, je.text);
    *map = json_object_get(*root, "weight_map");
    if (json_is_object(*map) && json_object_size(*map) > 0) return OK;
    json_decref(*root);
    *root = NULL;
    return err_set(e, ERR_INPUT, "%s: weight_map: must be an object with entries", path);
}

static err_t index_files(struct names *out, json_t *map, const char *path, struct err *e)
{
    const char *tensor;
    json_t *v;
    json_object_foreach(map, tensor, v)
    {
        const char *file = json_string_value(v);
        if (!plain_name(file))
            return err_set(e, ERR_INPUT,
                           "%s: weight_map: %.200s: \"%.200s\" is not a plain file name", path,
                           tensor, file ? file : "");
        if (names_has(out, file)) continue;
        err_t rc = names_add(out, file, e);
        if (rc != OK) return rc;
    }
    return OK;
}

static err_t glob_files(struct names *out, const char *dir, struct err *e)
{
    static const char ext[] = ".safetensors";
    DIR *d = opendir(dir);
    if (d == NULL)
        return err_set(e, errno == ENOENT ? ERR_NOTFOUND : ERR_IO, "%s: %s", dir, strerror(errno));
    err_t rc = OK;
    const struct dirent *f;
    while (rc == OK && (f = readdir(d)) != NULL) {
        size_t n = strlen(f->d_name), k = sizeof ext - 1;
        if (n > k && strcmp(f->d_name + n - k, ext) == 0 && f->d_name[0] != '.')
            rc = names_add(out, f->d_name, e);
    }
    closedir(d);
    if (rc == OK && out->n == 0)
        rc = err_set(e, ERR_NOTFOUND, "%s: no %s and no *.safetensors", dir, CHECKPOINT_INDEX);
    return rc;
}

/* Every regular file, links followed. */
static err_t list_files(struct names *out, DIR *d, struct err *e)
{
    const struct dirent *f;
    struct stat st;
    err_t rc = OK;
    while (rc == OK && (f = readdir(d)) != NULL)
        if (fstatat(dirfd(d), f->d_name, &st, 0) == 0 && S_ISREG(st.st_mode))
            rc = names_add(out, f->d_name, e);
    if (out->n) qsort(out->v, out->n, sizeof out->v[0], by_string);
    return rc;
}

err_t checkpoint_stamp(char stamp[DIGEST_HEX], const char *dir, struct err *e)
{
    struct names files = {0};
    struct digest sum;
    DIR *d = opendir(dir);
    if (d == NULL)
        return err_set(e, errno == ENOENT ? ERR_NOTFOUND : ERR_IO, "%s: %s", dir, strerror(errno));
    digest_init(&sum, DIGEST_XXH3_128);
    err_t rc = list_files(&files, d, e);
    for (size_t i = 0; rc == OK && i < files.n; i++) {
        struct stat st;
        if (fstatat(dirfd(d), files.v[i], &st, 0) != 0) {
            rc = err_set(e, ERR_IO, "%s/%s: %s", dir, files.v[i], strerror(errno));
            break;
        }
        int64_t v[] = {(int64_t)st.st_size, (int64_t)st.st_mtim.tv_sec, (int64_t)st.st_mtim.tv_nsec,
                       (int64_t)st.st_ino, (int64_t)st.st_dev};
        digest_add(&sum, files.v[i], strlen(files.v[i]) + 1);
        digest_add(&sum, v, sizeof v);
    }
    closedir(d);
    names_free(&files);
    if (rc == OK) digest_hex(&sum, stamp);
    return rc;
}

/* All absent files in one message, as far as it goes. */
static err_t check_present(const struct names *s, const char *dir, struct err *e)
{
    struct buf absent = {0};
    for (size_t i = 0; i < s->n; i++) {
        struct buf p = {0};
        if (buf_printf(&p, "%s/%s", dir, s->v[i]) && !file_exists(p.data))
            buf_printf(&absent, "%s%s", absent.len ? ", " : "", s->v[i]);
        buf_release(&p);
    }
    err_t rc = OK;
    if (absent.len)
        rc = err_set(e, ERR_NOTFOUND, "%s: files named by %s are absent: %s", dir, CHECKPOINT_INDEX,
                     absent.data);
    buf_release(&absent);
    return rc;
}

/* A pull into the folder (sync_dir.h) that was cut short: files of two versions may lie in it. */
static err_t check_settled(const char *dir, struct err *e)
{
    struct buf p = {0};
    err_t rc = OK;
    if (!buf_printf(&p, "%s/" SYNC_JOURNAL, dir))
        rc = err_set(e, ERR_NOMEM, "%s: no memory for the path", dir);
    else if (file_exists(p.data))
        rc = err_set(e, ERR_STATE,
                     "%s: a pull is replacing its files, or was cut short; pull again", p.data);
    buf_release(&p);
    return rc;
}

/* ---- open ---- */

/* Headers of big checkpoints take a second to parse one after another: the files of the folder are opened by several
 * threads, beside the index, which may turn out to name others. */
struct early {
    const char *dir, *index; /* index: NULL if there is none */
    struct names names;
    struct st_file *files; /* those with a path are open */
    json_t *root, *map;
    err_t index_rc;
    struct err index_error;
    atomic_bool no_memory; /* for any of them */
};

static void open_early(void *arg, int i)
{
    struct early *y = arg;
    struct err e = {0};
    struct buf p = {0};
    if (i == 0) {
        if (y->index) y->index_rc = index_read(&y->root, &y->map, y->index, &y->index_error);
        return;
    }
    err_t rc = buf_printf(&p, "%s/%s", y->dir, y->names.v[i - 1])
                   ? st_open(&y->files[i - 1], p.data, &e)
                   : ERR_NOMEM;
    if (rc != OK) y->files[i - 1] = (struct st_file){.fd = -1}; /* asked again if it is wanted */
    if (rc == ERR_NOMEM) y->no_memory = true;
    buf_release(&p);
}

static err_t early_run(struct early *y, struct err *e)
{
    enum { THREADS = 8 };
    err_t rc = glob_files(&y->names, y->dir, e);
    if (rc == OK && !(y->files = mem_try_array(y->names.n, sizeof y->files[0])))
        rc = err_set(e, ERR_NOMEM, "%s: no memory for its files", y->dir);
    if (rc != OK) names_free(&y->names);
    if (rc == ERR_NOMEM) return rc; /* others are told when the files are wanted */
    if (y->names.n > 1) qsort(y->names.v, y->names.n, sizeof y->names.v[0], by_string);
    size_t n = y->names.n + 1;
    struct pool *pool = pool_new(n < THREADS ? (int)n : THREADS);
    pool_run(pool, open_early, y, (int)n);
    pool_free(pool);
    return y->no_memory ? err_set(e, ERR_NOMEM, "%s: no memory for its headers", y->dir) : OK;
}

static void early_free(struct early *y)
{
    for (size_t i = 0; i < y->names.n; i++)
        st_close(&y->files[i]);
    mem_free(y->files);
    names_free(&y->names);
    json_decref(y->root);
}

static bool early_take(struct st_file *out, struct early *y, const char *name)
{
    for (size_t i = 0; i < y->names.n; i++) {
        if (strcmp(y->names.v[i], name) != 0 || !y->files[i].path) continue;
        *out = y->files[i];
        y->files[i] = (struct st_file){.fd = -1};
        return true;
    }
    return false;
}

static err_t open_files(struct checkpoint *c, const struct names *s, struct early *y, struct err *e)
{
    c->files = mem_try_array(s->n, sizeof c->files[0]);
    if (c->files == NULL) return err_set(e, ERR_NOMEM, "no memory for %zu files", s->n);
    for (size_t i = 0; i < s->n; i++) {
        struct buf p = {0};
        err_t rc = OK;
        if (!early_take(&c->files[i], y, s->v[i])) {
            if (!buf_printf(&p, "%s/%s", c->dir, s->v[i]))
                return err_set(e, ERR_NOMEM, "%s: no memory for the path", s->v[i]);
            rc = st_open(&c->files[i], p.data, e);
            buf_release(&p);
        }
        if (rc != OK) return rc;
        c->n_files = i + 1;
    }
    return OK;
}

static int by_entry(const void *a, const void *b)
{
    const struct checkpoint_entry *x = a, *y = b;
    int c = strcmp(x->tensor->name, y->tensor->name);
    return c ? c : (x->file > y->file) - (x->file < y->file);
}

static err_t collect_entries(struct checkpoint *c, const struct st_file *files, size_t n_files,
                             struct err *e)
{
    size_t n = 0;
    for (size_t i = 0; i < n_files; i++)
        n += files[i].n;
    c->entries = mem_try_array(n, sizeof c->entries[0]);
    if (c->entries == NULL) return err_set(e, ERR_NOMEM, "no memory for %zu tensors", n);
    for (size_t i = 0; i < n_files; i++)
        for (size_t j = 0; j < files[i].n; j++)
            c->entries[c->n_tensors++] = (struct checkpoint_entry){&files[i], &files[i].tensors[j]};
    if (n) qsort(c->entries, n, sizeof c->entries[0], by_entry);
    for (size_t i = 1; i < n; i++) {
        const struct checkpoint_entry *x = &c->entries[i - 1], *y = &c->entries[i];
        if (strcmp(x->tensor->name, y->tensor->name) == 0)
            return err_set(e, ERR_INPUT, "tensor %s: defined in both %s and %s", x->tensor->name,
                           x->file->path, y->file->path);
    }
    return OK;
}

static err_t check_index(const struct checkpoint *c, json_t *map, struct err *e)
{
    const char *name;
    json_t *v;
    json_object_foreach(map, name, v)
    {
        const struct checkpoint_entry *t = checkpoint_get(c, name);
        const char *file = json_string_value(v);
        const char *in = t ? strrchr(t->file->path, '/') : NULL;
        if (in == NULL || strcmp(in + 1, file) != 0)
            return err_set(e, ERR_INPUT, "tensor %.200s: the index gives %s, which lacks it", name,
                           file);
    }
    return OK;
}

static err_t open_all(struct checkpoint *c, struct names *files, struct early *y, struct err *e)
{
    struct buf path = {0};
    if (!buf_printf(&path, "%s/" CHECKPOINT_INDEX, c->dir))
        return err_set(e, ERR_NOMEM, "%s: no memory for the path", c->dir);
    err_t rc = check_settled(c->dir, e);
    if (rc == OK) {
        if (file_exists(path.data)) y->index = path.data;
        rc = early_run(y, e);
        if (rc == OK && y->index_rc != OK) rc = err_set(e, y->index_rc, "%s", y->index_error.msg);
    }
    if (rc == OK && y->index) {
        rc = index_files(files, y->map, path.data, e);
        if (rc == OK) rc = check_present(files, c->dir, e);
    } else if (rc == OK) {
        rc = glob_files(files, c->dir, e);
    }
    buf_release(&path);
    if (rc != OK) return rc;
    qsort(files->v, files->n, sizeof files->v[0], by_string);
    rc = open_files(c, files, y, e);
    if (rc == OK) rc = collect_entries(c, c->files, c->n_files, e);
    if (rc == OK && y->map) rc = check_index(c, y->map, e);
    return rc;
}

err_t checkpoint_open(struct checkpoint *c, const char *dir, struct err *e)
{
    struct checkpoint t = {.dir = mem_dup_n(dir, strlen(dir))};
    if (t.dir == NULL) return err_set(e, ERR_NOMEM, "%s: no memory for the path", dir);
    struct names files = {0};
    struct early y = {.dir = t.dir};
    err_t rc = open_all(&t, &files, &y, e);
    names_free(&files);
    early_free(&y);
    if (rc != OK) {
        checkpoint_close(&t);
        return rc;
    }
    *c = t;
    return OK;
}

err_t checkpoint_of(struct checkpoint *c, const struct st_file *files, size_t n, struct err *e)
{
    struct checkpoint t = {0};
    err_t rc = collect_entries(&t, files, n, e);
    if (rc != OK) {
        checkpoint_close(&t);
        return rc;
    }
    *c = t;
    return OK;
}

void checkpoint_close(struct checkpoint *c)
{
    for (size_t i = 0; i < c->n_files; i++)
        st_close(&c->files[i]);
    mem_free(c->files);
    mem_free(c->entries);
    mem_free(c->dir);
    *c = (struct checkpoint){0};
}

const struct checkpoint_entry *checkpoint_get(const struct checkpoint *c, const char *name)
{
    size_t lo = 0, hi = c->n_tensors;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        int d = strcmp(c->entries[mid].tensor->name, name);
        if (d == 0) return &c->entries[mid];
        if (d < 0)
            lo = mid + 1;
        else
            hi = mid;
    }
    return NULL;
}
