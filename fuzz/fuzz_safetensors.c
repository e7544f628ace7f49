/* Any bytes as a safetensors header.  The first two bytes choose the length of the data. */
#include "weight/safetensors.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    struct st_file f = {.fd = -1};
    struct err e;
    if (n < 2) return 0;
    uint64_t bytes = (uint64_t)data[0] << 8 | data[1];
    if (st_parse(&f, (const char *)data + 2, n - 2, n + 6, bytes, &e) == OK) {
        uint64_t at = n + 6;
        for (size_t i = 0; i < f.n; i++) {
            CHECK(f.tensors[i].offset == at);
            at += f.tensors[i].bytes;
        }
        CHECK(at == n + 6 + bytes);
        st_close(&f);
    }
    return 0;
}
