/* Any bytes as tokenizer.json; what is accepted must encode and decode without harm. */
#include "text/tokenizer.h"
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    static const char *const texts[] = {"hello <a> abc  Foo\n\te\xcc\x81 12", " ",
                                        "\xe6\x97\xa5\xe6\x9c\xac<|end|>"};
    struct tokenizer *t = NULL;
    struct err e;
    if (tokenizer_parse(&t, (const char *)data, n, &e) != OK) return 0;
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        struct ids ids = {0};
        struct buf b = {0};
        if (tokenizer_encode(t, &ids, texts[i], strlen(texts[i]), &e) == OK) {
            for (size_t k = 0; k < ids.n; k++)
                CHECK(ids.v[k] >= 0 && ids.v[k] < tokenizer_vocab_size(t));
            CHECK(tokenizer_decode(t, &b, ids.v, ids.n, i & 1));
        }
        buf_release(&b);
        ids_release(&ids);
    }
    tokenizer_free(t);
    return 0;
}
