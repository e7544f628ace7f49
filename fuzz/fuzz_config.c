/* Any bytes as config.json; what is accepted must have usable specs sizes. */
#include "model/config.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    struct config c;
    struct err e;
    if (config_parse(&c, (const char *)data, n, &e) == OK) {
        CHECK(c.n_layers >= 1 && c.n_layers <= CONFIG_MAX_LAYERS);
        CHECK(c.n_heads % c.n_kv_heads == 0 && c.top_k <= c.n_experts);
        CHECK(config_same_forward(&c, &c, &e) == OK);
    }
    return 0;
}
