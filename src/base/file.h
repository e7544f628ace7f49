/* file.h - whole small files and exact reads at offsets.  Nothing is ever mapped. */
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
bool file_exists(const char *path);
bool file_is_dir(const char *path);

#endif
