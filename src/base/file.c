#include "base/file.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

err_t file_read(struct buf *out, const char *path, size_t max, struct err *e)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return err_set(e, errno == ENOENT ? ERR_NOTFOUND : ERR_IO, "%s: %s", path, strerror(errno));
    char chunk[1 << 16];
    err_t rc = OK;
    for (;;) {
        ssize_t n = read(fd, chunk, sizeof chunk);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) {
            rc = err_set(e, ERR_IO, "%s: %s", path, strerror(errno));
            break;
        }
        if (n == 0) break;
        if (out->len + (size_t)n > max) {
            rc = err_set(e, ERR_TOOBIG, "%s: larger than %zu bytes", path, max);
            break;
        }
        if (!buf_put(out, chunk, (size_t)n)) {
            rc = err_set(e, ERR_NOMEM, "%s: out of memory after %zu bytes", path, out->len);
            break;
        }
    }
    close(fd);
    if (rc == OK && !buf_put(out, "", 0)) rc = err_set(e, ERR_NOMEM, "%s: out of memory", path);
    if (rc != OK) buf_release(out);
    return rc;
}

err_t file_pread(int fd, void *to, size_t bytes, uint64_t offset, const char *path, struct err *e)
{
    char *p = to;
    while (bytes) {
        ssize_t n = pread(fd, p, bytes, (off_t)offset);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return err_set(e, ERR_IO, "%s: %s", path, strerror(errno));
        if (n == 0)
            return err_set(e, ERR_IO, "%s: ends at byte %llu, %zu more were expected", path,
                           (unsigned long long)offset, bytes);
        p += n;
        bytes -= (size_t)n;
        offset += (uint64_t)n;
    }
    return OK;
}

err_t file_write(int fd, const void *data, size_t n, const char *path, struct err *e)
{
    const char *p = data;
    while (n) {
        ssize_t k = write(fd, p, n);
        if (k < 0 && errno == EINTR) continue;
        if (k <= 0) return err_set(e, ERR_IO, "%s: %s", path, strerror(k ? errno : ENOSPC));
        p += k;
        n -= (size_t)k;
    }
    return OK;
}

err_t file_sync_dir(const char *path, struct err *e)
{
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return err_set(e, ERR_IO, "%s: %s", path, strerror(errno));
    /* Some file systems cannot sync a folder and say EINVAL; there is nothing more to do then. */
    err_t rc = fsync(fd) == 0 || errno == EINVAL
                   ? OK
                   : err_set(e, ERR_IO, "%s: %s", path, strerror(errno));
    close(fd);
    return rc;
}

bool file_exists(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0;
}

bool file_is_dir(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}
