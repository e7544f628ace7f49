/* file.h - whole small files and exact reads at offsets, and what a durable write needs.  Nothing is ever mapped. */
#ifndef BASE_FILE_H
#define BASE_FILE_H

#include "base/buf.h"
#include "base/err.h"
#include <stdint.h>

/* The whole file (NUL-terminated beyond its length) into `out`, which must be empty.
 * ERR_NOTFOUND, ERR_IO; ERR_TOOBIG above `max` bytes. */
err_t file_read(struct buf *out, const char *path, size_t max, struct err *e) MUST_USE;
/* Exactly `bytes` bytes at `offset`; a short file is ERR_IO naming `path`. */
err_t file_pread(int fd, void *to, size_t bytes, uint64_t offset, const char *path,
                 struct err *e) MUST_USE;
/* All of it at the descriptor's position. */
err_t file_write(int fd, const void *data, size_t n, const char *path, struct err *e) MUST_USE;
/* A folder's entries reach the disk; where the file system cannot, nothing happens. */
err_t file_sync_dir(const char *path, struct err *e) MUST_USE;
bool file_exists(const char *path);
bool file_is_dir(const char *path);

#endif
