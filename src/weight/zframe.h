/*
 * zframe.h - one zstd frame that is a tensor of a safetensors file, read as a stream.
 *
 *     zframe_open(&z, file, tensor, e)
 *     zframe_check(&z, bytes, e)     // what its header declares, if it does, is `bytes`
 *     zframe_read(&z, to, n, e)      // exactly n bytes more
 *     zframe_end(&z, e)              // nothing more comes out, and the tensor ends where the frame does
 *     zframe_close(&z)               // also after a failure; a zeroed struct may be closed
 *
 * Nothing is decompressed beyond what is asked for but one block (128 KiB); a window above 128 MiB is refused.
 */
#ifndef WEIGHT_ZFRAME_H
#define WEIGHT_ZFRAME_H

#include "weight/safetensors.h"
#include <stdbool.h>

struct zframe {
    const struct st_file *file;
    const struct st_tensor *tensor;
    struct ZSTD_DCtx_s *ctx;
    unsigned char *in;
    size_t in_len, in_at;
    uint64_t taken; /* bytes of the tensor that went into `in` */
    bool done;      /* the frame's last byte came out */
};

err_t zframe_open(struct zframe *z, const struct st_file *file, const struct st_tensor *tensor,
                  struct err *e) MUST_USE;
err_t zframe_check(struct zframe *z, uint64_t bytes, struct err *e) MUST_USE;
err_t zframe_read(struct zframe *z, void *to, size_t n, struct err *e) MUST_USE;
err_t zframe_end(struct zframe *z, struct err *e) MUST_USE;
void zframe_close(struct zframe *z);

#endif
