/* Any bytes as config.json or hf_quant_config.json, held against a few modules. */
#include "weight/quant_config.h"
#include <stddef.h>
#include <stdint.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    static const char *const modules[] = {"lm_head", "model.layers.1.self_attn.q_proj",
                                          "model.layers.10.mlp.experts.3.gate_proj"};
    struct quant_config *q = NULL;
    struct err e;
    if (quant_config_parse(&q, (const char *)data, n, "config.json", &e) != OK) {
        CHECK(q == NULL && e.msg[0]);
        return 0;
    }
    for (size_t i = 0; i < sizeof modules / sizeof modules[0]; i++)
        for (int f = 0; f < FORMAT_COUNT; f++) {
            err_t rc = quant_config_check(q, modules[i], modules[i], (format_t)f, &e);
            CHECK(rc == OK || rc == ERR_INPUT);
        }
    quant_config_free(q);
    return 0;
}
