/*
 * tokdump - ids and decoded text for comparison with another implementation.
 *
 *     tokdump tokenizer.json < requests > answers
 *
 * A request is a byte 'E' (encode), 'D' (decode) or 'S' (decode, skip special), a u32 count
 * (little-endian) and that many bytes of text or u32 ids.  The answer: u32 count, then u32 ids or
 * bytes; a refused text answers count 0xFFFFFFFF.
 */
#include "text/tokenizer.h"

#include <stdio.h>

static bool read_u32(uint32_t *v)
{
    return fread(v, 4, 1, stdin) == 1;
}

static bool fill(struct buf *b, size_t n)
{
    char chunk[4096];
    buf_clear(b);
    while (n > 0) {
        size_t k = n < sizeof chunk ? n : sizeof chunk;
        if (fread(chunk, 1, k, stdin) != k || !buf_put(b, chunk, k)) return false;
        n -= k;
    }
    return true;
}

static void answer(const void *p, uint32_t n, size_t bytes)
{
    fwrite(&n, 4, 1, stdout);
    if (bytes > 0) fwrite(p, 1, bytes, stdout);
}

static bool one(const struct tokenizer *t, int op, struct buf *in, struct buf *text)
{
    struct err e = {0};
    uint32_t n;
    if (!read_u32(&n)) return false;
    if (op == 'E') {
        if (!fill(in, n)) return false;
        struct ids ids = {0};
        if (tokenizer_encode(t, &ids, n ? in->data : "", n, &e) == OK)
            answer(ids.v, (uint32_t)ids.n, ids.n * 4);
        else
            answer(NULL, UINT32_MAX, 0);
        ids_release(&ids);
        return true;
    }
    struct ids ids = {0};
    for (uint32_t i = 0, id; i < n; i++)
        if (!read_u32(&id) || !ids_push(&ids, (int32_t)id)) return false;
    buf_clear(text);
    if (!tokenizer_decode(t, text, ids.v, ids.n, op == 'S')) return false;
    answer(text->data, (uint32_t)text->len, text->len);
    ids_release(&ids);
    return true;
}

int main(int argc, char **argv)
{
    struct tokenizer *t = NULL;
    struct err e = {0};
    if (argc != 2 || tokenizer_load(&t, argv[1], &e) != OK) {
        fprintf(stderr, "tokdump: %s\n", argc == 2 ? e.msg : "usage: tokdump tokenizer.json");
        return 1;
    }
    struct buf in = {0}, text = {0};
    int op;
    bool ok = true;
    while (ok && (op = getchar()) != EOF)
        ok = one(t, op, &in, &text);
    buf_release(&in);
    buf_release(&text);
    tokenizer_free(t);
    return ok ? 0 : 1;
}
