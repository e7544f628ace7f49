#include "base/newdir.h"

#include "base/buf.h"
#include "base/file.h"
#include "base/mem.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static err_t system_err(struct err *e, const char *path)
{
    return err_set(e, ERR_IO, "%s: %s", path, strerror(errno));
}

err_t newdir_begin(struct newdir *d, const char *path, struct err *e)
{
    struct stat st;
    struct newdir t = {0};
    struct buf temp = {0};
    size_t n = strlen(path);
    while (n > 1 && path[n - 1] == '/')
        n--;
    if (n == 0) return err_set(e, ERR_INPUT, "a folder needs a name");
    t.path = mem_dup_n(path, n);
    if (t.path == NULL || !buf_printf(&temp, "%s.partial-XXXXXX", t.path)) {
        mem_free(t.path);
        return err_set(e, ERR_NOMEM, "no memory for a path");
    }
    err_t rc = OK;
    if (lstat(t.path, &st) == 0)
        rc =
            err_set(e, ERR_STATE, "%s: exists already; choose another folder or remove it", t.path);
    else if (errno != ENOENT || mkdtemp(temp.data) == NULL || chmod(temp.data, 0755) != 0)
        rc = system_err(e, t.path);
    if (rc != OK) {
        mem_free(t.path);
        buf_release(&temp);
        return rc;
    }
    t.temp = buf_take(&temp);
    *d = t;
    return OK;
}

err_t newdir_put(struct newdir *d, const char *name, const void *data, size_t n, struct err *e)
{
    struct buf path = {0};
    if (!buf_printf(&path, "%s/%s", d->temp, name))
        return err_set(e, ERR_NOMEM, "%s: no memory for the path", name);
    int fd = open(path.data, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    err_t rc = fd < 0 ? system_err(e, path.data) : file_write(fd, data, n, path.data, e);
    if (rc == OK && fsync(fd) != 0) rc = system_err(e, path.data);
    if (fd >= 0 && close(fd) != 0 && rc == OK) rc = system_err(e, path.data);
    buf_release(&path);
    return rc;
}

static void forget(struct newdir *d)
{
    mem_free(d->path);
    mem_free(d->temp);
    *d = (struct newdir){0};
}

err_t newdir_commit(struct newdir *d, struct err *e)
{
    err_t rc = file_sync_dir(d->temp, e);
    if (rc != OK) return rc;
    if (renameat2(AT_FDCWD, d->temp, AT_FDCWD, d->path, RENAME_NOREPLACE) != 0) {
        if (errno == EEXIST) return err_set(e, ERR_STATE, "%s: has appeared meanwhile", d->path);
        /* No such flag on this file system: an empty folder may be replaced, a full one is safe. */
        if (errno != EINVAL || rename(d->temp, d->path) != 0) return system_err(e, d->path);
    }
    char *slash = strrchr(d->path, '/');
    if (slash && slash != d->path) *slash = 0;
    rc = file_sync_dir(slash == NULL ? "." : slash == d->path ? "/" : d->path, e);
    forget(d);
    return rc;
}

void newdir_abort(struct newdir *d)
{
    if (d->temp == NULL) return;
    DIR *dir = opendir(d->temp);
    const struct dirent *f;
    while (dir && (f = readdir(dir)) != NULL)
        if (strcmp(f->d_name, ".") != 0 && strcmp(f->d_name, "..") != 0)
            (void)unlinkat(dirfd(dir), f->d_name, 0);
    if (dir) closedir(dir);
    (void)rmdir(d->temp);
    forget(d);
}
