/* Any ids as a stream: each piece is whole characters, and the pieces together are the one-shot
 * decode. The first byte: skip special tokens or not; then two bytes an id, some outside the
 * vocabulary. */
#include "text/detok.h"
#include "text/utf8.h"
#include "tiny_tokenizer.h"
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    static struct tokenizer *t;
    struct buf whole = {0}, parts = {0};
    struct ids ids = {0};
    struct detok d;
    if (!t) t = tiny_tokenizer(TINY_STRIP);
    if (n < 1) return 0;
    bool skip = data[0] & 1;
    for (size_t i = 1; i + 1 < n; i += 2)
        CHECK(ids_push(&ids, (data[i] | data[i + 1] << 8) % 300 - 10));
    CHECK(tokenizer_decode(t, &whole, ids.v, ids.n, skip));
    detok_init(&d, t, skip);
    for (size_t i = 0; i < ids.n; i++) {
        size_t before = parts.len;
        CHECK(detok_push(&d, ids.v[i], &parts));
        CHECK(utf8_valid(parts.data + before, parts.len - before) == parts.len - before);
    }
    CHECK(detok_end(&d, &parts));
    CHECK(parts.len == whole.len && (!whole.len || !memcmp(parts.data, whole.data, whole.len)));
    buf_release(&whole);
    buf_release(&parts);
    ids_release(&ids);
    return 0;
}
