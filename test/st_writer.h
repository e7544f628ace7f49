/* st_writer.h - a safetensors file of a test, built in memory. */
#ifndef TEST_ST_WRITER_H
#define TEST_ST_WRITER_H

#include "base/buf.h"
#include "base/mem.h"
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

struct st_draft {
    struct buf header, data;
    const char *drop;      /* tensors whose name holds this are left out */
    const char *from, *to; /* a part of names that is replaced */
    const char *front;     /* before names that do not have `from`; NULL: nothing */
};

/* `dims`: "[2, 3]". */
static inline void st_put(struct st_draft *w, const char *name, const char *dtype, const char *dims,
                          const void *bytes, size_t n)
{
    char as[600];
    const char *at = w->from ? strstr(name, w->from) : NULL;
    if (w->drop && strstr(name, w->drop)) return;
    if (at)
        snprintf(as, sizeof as, "%.*s%s%s", (int)(at - name), name, w->to, at + strlen(w->from));
    else
        snprintf(as, sizeof as, "%s%s", w->front ? w->front : "", name);
    CHECK(buf_printf(&w->header,
                     "%s\"%s\":{\"dtype\":\"%s\",\"shape\":%s,\"data_offsets\":[%zu,%zu]}",
                     w->header.len ? "," : "{", as, dtype, dims, w->data.len, w->data.len + n));
    CHECK(n == 0 || buf_put(&w->data, bytes, n));
}

static inline void file_put(const char *dir, const char *name, const void *bytes, size_t n)
{
    char path[512];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *f = fopen(path, "wb");
    CHECK(f && fwrite(bytes, 1, n, f) == n);
    fclose(f);
}

/* Writes DIR/m.safetensors and empties `w`. */
static inline void st_write(struct st_draft *w, const char *dir)
{
    struct buf all = {0};
    CHECK(w->header.len ? buf_putc(&w->header, '}') : buf_puts(&w->header, "{}"));
    uint64_t n = w->header.len;
    CHECK(buf_put(&all, &n, 8) && buf_put(&all, w->header.data, w->header.len));
    CHECK(w->data.len == 0 || buf_put(&all, w->data.data, w->data.len));
    file_put(dir, "m.safetensors", all.data, all.len);
    buf_release(&all);
    buf_release(&w->header);
    buf_release(&w->data);
}

static inline void dir_drop(const char *dir)
{
    static const char *const names[] = {"m.safetensors", "config.json", "hf_quant_config.json"};
    char path[512];
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        snprintf(path, sizeof path, "%s/%s", dir, names[i]);
        unlink(path);
    }
    rmdir(dir);
}

#endif
