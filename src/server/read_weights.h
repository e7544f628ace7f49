/* read_weights.h - resident tensors for replies: exact bytes, while serving goes on. */
#ifndef SERVER_READ_WEIGHTS_H
#define SERVER_READ_WEIGHTS_H

#include "server/internal.h"
#include "weight/export.h"

/* Everything that one of these reads is of one epoch, that of its first read; ERR_BUSY after a commit. */
struct weight_reader {
    struct engine *engine;
    uint64_t epoch; /* 0 to begin with */
};

/* Rows of the tensor's part; row0 a multiple of MEMORY_ROWS. */
err_t weight_read_rows(struct weight_reader *r, size_t slot, const struct export_tensor *t,
                       size_t row0, size_t n, void *to, struct err *e) MUST_USE;
/* Appends the tensor's bytes. */
err_t weight_read(struct weight_reader *r, size_t slot, const struct export_tensor *t,
                  struct buf *out, struct err *e) MUST_USE;

#endif
