/* Any text through small tokenizers; the first byte chooses one.  Without flags that strip,
 * decoding gives the text (in NFC) back.  Bytes that are no UTF-8 are refused. */
#include "text/nfc.h"
#include "text/utf8.h"
#include "tiny_tokenizer.h"
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void round_trip(const struct tokenizer *t, const struct ids *ids, const char *text, size_t n,
                       bool nfc)
{
    struct buf back = {0}, norm = {0};
    CHECK(tokenizer_decode(t, &back, ids->v, ids->n, false));
    if (nfc)
        CHECK(nfc_put(&norm, text, n));
    else
        CHECK(buf_put(&norm, text, n));
    CHECK(back.len == norm.len && (!back.len || !memcmp(back.data, norm.data, back.len)));
    buf_release(&back);
    buf_release(&norm);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    static struct tokenizer *toks[4];
    struct err e;
    struct ids ids = {0};
    if (n < 1) return 0;
    int flags = data[0] & 3;
    if (!toks[flags]) toks[flags] = tiny_tokenizer(flags);
    const char *text = (const char *)data + 1;
    n--;
    err_t rc = tokenizer_encode(toks[flags], &ids, text, n, &e);
    CHECK((rc == OK) == (utf8_valid(text, n) == n));
    for (size_t i = 0; rc == OK && i < ids.n; i++)
        CHECK(ids.v[i] >= 0 && ids.v[i] < tokenizer_vocab_size(toks[flags]));
    if (rc == OK && !(flags & TINY_STRIP)) round_trip(toks[flags], &ids, text, n, flags & TINY_NFC);
    ids_release(&ids);
    return 0;
}
