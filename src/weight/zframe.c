#include "weight/zframe.h"

#include "base/mem.h"
#include <zstd.h>

#define IN_BYTES   ((size_t)128 << 10)
#define WINDOW_LOG 27

static err_t bad(const struct zframe *z, struct err *e, const char *what)
{
    return err_set(e, ERR_INPUT, "%s: tensor %s: zstd: %s", z->file->path, z->tensor->name, what);
}

static err_t fill(struct zframe *z, struct err *e)
{
    uint64_t rest = z->tensor->bytes - z->taken;
    size_t n = rest < IN_BYTES ? (size_t)rest : IN_BYTES;
    if (n == 0) return bad(z, e, "the frame is cut");
    err_t rc = st_read(z->file, z->tensor, z->taken, z->in, n, e);
    if (rc != OK) return rc;
    z->taken += n;
    z->in_len = n;
    z->in_at = 0;
    return OK;
}

err_t zframe_open(struct zframe *z, const struct st_file *file, const struct st_tensor *tensor,
                  struct err *e)
{
    *z = (struct zframe){.file = file, .tensor = tensor};
    z->in = mem_try(IN_BYTES);
    z->ctx = ZSTD_createDCtx();
    if (z->in == NULL || z->ctx == NULL ||
        ZSTD_isError(ZSTD_DCtx_setParameter(z->ctx, ZSTD_d_windowLogMax, WINDOW_LOG)))
        return err_set(e, ERR_NOMEM, "%s: tensor %s: no memory to decompress", file->path,
                       tensor->name);
    return fill(z, e);
}

err_t zframe_check(struct zframe *z, uint64_t bytes, struct err *e)
{
    unsigned long long size = ZSTD_getFrameContentSize(z->in, z->in_len);
    if (size == ZSTD_CONTENTSIZE_ERROR) return bad(z, e, "not a frame");
    if (size == ZSTD_CONTENTSIZE_UNKNOWN || size == bytes) return OK;
    return err_set(e, ERR_INPUT,
                   "%s: tensor %s: zstd: the frame declares %llu bytes, the change needs %llu",
                   z->file->path, z->tensor->name, size, (unsigned long long)bytes);
}

/* Up to n bytes; *got < n only at the end of the frame. */
static err_t inflate_to(struct zframe *z, void *to, size_t n, size_t *got, struct err *e)
{
    ZSTD_outBuffer out = {to, n, 0};
    while (out.pos < n && !z->done) {
        err_t rc = z->in_at == z->in_len ? fill(z, e) : OK;
        if (rc != OK) return rc;
        ZSTD_inBuffer in = {z->in, z->in_len, z->in_at};
        size_t left = ZSTD_decompressStream(z->ctx, &out, &in);
        if (ZSTD_isError(left)) return bad(z, e, ZSTD_getErrorName(left));
        z->in_at = in.pos;
        z->done = left == 0;
    }
    *got = out.pos;
    return OK;
}

err_t zframe_read(struct zframe *z, void *to, size_t n, struct err *e)
{
    size_t got = 0;
    err_t rc = inflate_to(z, to, n, &got, e);
    if (rc == OK && got < n) rc = bad(z, e, "the frame ends before the change does");
    return rc;
}

err_t zframe_end(struct zframe *z, struct err *e)
{
    unsigned char more;
    size_t got = 0;
    err_t rc = inflate_to(z, &more, 1, &got, e);
    if (rc != OK) return rc;
    if (got) return bad(z, e, "the frame goes on after the change");
    if (z->in_at < z->in_len || z->taken < z->tensor->bytes)
        return bad(z, e, "bytes follow the frame");
    return OK;
}

void zframe_close(struct zframe *z)
{
    ZSTD_freeDCtx(z->ctx);
    mem_free(z->in);
    *z = (struct zframe){0};
}
