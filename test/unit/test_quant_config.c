/* test_quant_config.c - exclusion lists and formats of every config, held against modules (C21). */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "weight/pattern.h"
#include "weight/quant_config.h"
#include <stdio.h>
#include <string.h>

static void patterns(void **state)
{
    (void)state;
    static const struct {
        syntax_t syntax;
        const char *pattern, *module;
        bool match;
    } t[] = {
        {SYNTAX_PREFIX, "model.layers.4", "model.layers.4.self_attn.q_proj", true},
        {SYNTAX_PREFIX, "model.layers.4", "model.layers.40.self_attn.q_proj", false},
        {SYNTAX_PREFIX, "model.layers.4.", "model.layers.4.mlp.gate", true},
        {SYNTAX_PREFIX, "model.layers.4.", "model.layers.47.mlp.gate", false},
        {SYNTAX_PREFIX, "layers.4.", "model.layers.4.mlp.gate", true},
        {SYNTAX_PREFIX, "lm_head", "lm_head", true},
        {SYNTAX_PREFIX, "model.lm_head", "lm_head", false},
        {SYNTAX_PREFIX, "mlp.gate", "model.layers.0.mlp.gate", true},
        {SYNTAX_PREFIX, "mlp.gate", "model.layers.0.mlp.experts.1.gate_proj", false},
        {SYNTAX_PREFIX, "gate", "model.layers.0.mlp.experts.1.gate_proj", false},
        {SYNTAX_PREFIX, "model.layers.*.self_attn", "model.layers.3.self_attn.k_proj", true},
        {SYNTAX_PREFIX, "model.layers.*.self_attn", "model.layers.3.mlp.gate", false},
        {SYNTAX_PREFIX, "model.layers.0.self_attn.qkv_proj", "model.layers.0.self_attn.v_proj",
         true},
        {SYNTAX_PREFIX, "model.layers.0.self_attn.qkv_proj", "model.layers.0.self_attn.o_proj",
         false},
        {SYNTAX_PREFIX, "model.layers.1.mlp.experts", "model.layers.1.mlp.experts.9.up_proj", true},
        {SYNTAX_WILDCARD, "model.layers.47*", "model.layers.47.mlp.experts.3.up_proj", true},
        {SYNTAX_WILDCARD, "model.layers.4*", "model.layers.40.self_attn.q_proj", true},
        {SYNTAX_WILDCARD, "model.layers.1.*", "model.layers.1.self_attn.q_proj", true},
        {SYNTAX_WILDCARD, "model.layers.1.*", "model.layers.10.self_attn.q_proj", false},
        {SYNTAX_WILDCARD, "layers.1.*", "model.layers.1.self_attn.q_proj", true},
        {SYNTAX_WILDCARD, "layers.1.*", "model.layers.10.self_attn.q_proj", false},
        {SYNTAX_WILDCARD, "language_model.model.layers.1.*", "model.layers.1.mlp.gate", true},
        {SYNTAX_WILDCARD, "model.language_model.layers.1.*", "model.layers.1.mlp.gate", true},
        {SYNTAX_WILDCARD, "*.mlp.gate", "model.layers.11.mlp.gate", true},
        {SYNTAX_WILDCARD, "*mlp.gate", "model.layers.11.mlp.experts.0.gate_proj", false},
        {SYNTAX_WILDCARD, "*.gate", "model.layers.0.mlp.experts.1.gate_proj", false},
        {SYNTAX_WILDCARD, "*self_attn*", "model.layers.5.self_attn.q_proj", true},
        {SYNTAX_WILDCARD, "self_at*", "model.layers.5.self_attn.q_proj", true},
        {SYNTAX_WILDCARD, "lm_head", "lm_head", true},
        {SYNTAX_WILDCARD, "language_model.lm_head", "lm_head", true},
        {SYNTAX_WILDCARD, "model.*", "lm_head", false},
        {SYNTAX_WILDCARD, "model?layers*", "model.layers.0.mlp.gate", false},
        {SYNTAX_WILDCARD, "model.layers.2.", "model.layers.2.self_attn.o_proj", true},
        {SYNTAX_WILDCARD, "model.layers.2.", "model.layers.20.self_attn.o_proj", false},
        {SYNTAX_WILDCARD, "a*b*c*d", "aXbXcXbXcd", true},
        {SYNTAX_WILDCARD, "*a*a*a*b", "aaaaaaaaaaaaaaaaaaaa", false},
        {SYNTAX_EXACT, "lm_head", "lm_head", true},
        {SYNTAX_EXACT, "model.layers.1.mlp", "model.layers.1.mlp.gate", false},
        {SYNTAX_EXACT, "re:.*mlp.gate$", "model.layers.3.mlp.gate", true},
        {SYNTAX_EXACT, "re:.*mlp.gate$", "model.layers.3.mlp.gate_proj", false},
        {SYNTAX_EXACT, "re:^model\\.layers\\.47\\.", "model.layers.47.mlp.experts.0.up_proj", true},
        {SYNTAX_EXACT, "re:^model\\.layers\\.4\\.", "model.layers.47.mlp.experts.0.up_proj", false},
        {SYNTAX_EXACT, "re:model.layers.4", "model.layers.47.mlp.gate", true}, /* not at the end */
        {SYNTAX_EXACT, "re:mlp", "model.layers.47.mlp.gate", false},           /* at the start */
        {SYNTAX_EXACT, "re:.*self_attn.qkv_proj", "model.layers.2.self_attn.k_proj", true},
        {SYNTAX_EXACT, "re:^layers\\.2\\.", "model.layers.2.self_attn.k_proj", true},
    };
    for (size_t i = 0; i < sizeof t / sizeof t[0]; i++) {
        struct patterns p = {0};
        assert_int_equal(patterns_add(&p, t[i].syntax, t[i].pattern, NULL), OK);
        if (patterns_match(&p, t[i].module, NULL) != t[i].match)
            fail_msg("\"%s\" %s \"%s\"", t[i].pattern, t[i].match ? "misses" : "hits", t[i].module);
        patterns_free(&p);
    }
}

/* As stored under another name. */
static void stored_names(void **state)
{
    (void)state;
    struct patterns p = {0};
    const char *module = "model.layers.3.mlp.experts.5.gate_proj";
    assert_int_equal(patterns_add(&p, SYNTAX_WILDCARD, "*block_sparse_moe*", NULL), OK);
    assert_false(patterns_match(&p, module, module));
    assert_true(patterns_match(&p, module, "model.layers.3.block_sparse_moe.experts.5.w1"));
    patterns_free(&p);
}

#define Q "model.layers.1.self_attn.q_proj"
#define X "model.layers.1.mlp.experts.2.down_proj"

static void configs(void **state)
{
    (void)state;
    static const struct {
        const char *json, *module;
        format_t format;
        const char *says; /* NULL: they agree */
    } t[] = {
        {"{}", Q, FORMAT_NVFP4, NULL}, /* nothing is said */
        {"{\"quantization_config\":null}", Q, FORMAT_FP8_BLOCK, NULL},
        {"{\"quantization_config\":{\"quant_method\":\"fp8\",\"weight_block_size\":[128,128],"
         "\"modules_to_not_convert\":[\"model.layers.1.self_attn\"]}}",
         X, FORMAT_FP8_BLOCK, NULL},
        {"{\"quantization_config\":{\"quant_method\":\"fp8\",\"weight_block_size\":[128,128],"
         "\"modules_to_not_convert\":[\"model.layers.1.self_attn\"]}}",
         Q, FORMAT_FP8_BLOCK,
         "module " Q ": stored as fp8-block, but the quantization config (fp8) excludes it"},
        {"{\"quantization_config\":{\"quant_method\":\"fp8\",\"weight_block_size\":[128,128]}}", Q,
         FORMAT_MXFP8, "stored as mxfp8, but the quantization config (fp8) has fp8-block"},
        {"{\"quantization_config\":{\"quant_method\":\"fp8\"}}", Q, FORMAT_FP8_TENSOR, NULL},
        {"{\"quantization_config\":{\"quant_method\":\"fp8\",\"weight_block_size\":[1,32]}}", Q,
         FORMAT_MXFP8, NULL},
        {"{\"quantization_config\":{\"quant_method\":\"mxfp8\",\"ignored_layers\":[\"layers.1.\"]}"
         "}",
         Q, FORMAT_MXFP8, "excludes it"},
        {"{\"quantization_config\":{\"quant_method\":\"mxfp8\",\"ignored_layers\":[\"layers.1.\"]}"
         "}",
         Q, FORMAT_BF16, NULL}, /* BF16 never contradicts */
        {"{\"quantization_config\":{\"quant_method\":\"modelopt\",\"quant_algo\":\"NVFP4\","
         "\"ignore\":[\"lm_head\"],\"config_groups\":{}}}",
         Q, FORMAT_NVFP4, NULL},
        {"{\"quantization_config\":{\"quant_method\":\"modelopt\",\"quantization\":{\"quant_algo\":"
         "\"NVFP4\",\"exclude_modules\":[\"*q_proj\"]}}}",
         Q, FORMAT_NVFP4, "modelopt NVFP4"},
        {"{\"producer\":{\"name\":\"modelopt\"},\"quantization\":{\"quant_algo\":\"FP8\","
         "\"exclude_modules\":[\"lm_head\"]}}",
         Q, FORMAT_FP8_TENSOR, NULL},
        {"{\"quantization\":{\"quant_algo\":\"FP8_PB_WO\"}}", Q, FORMAT_FP8_BLOCK, NULL},
        {"{\"quantization\":{\"quant_algo\":\"MIXED_PRECISION\",\"quantized_layers\":{"
         "\"model.layers.*.mlp.experts*\":{\"quant_algo\":\"NVFP4\"},"
         "\"" Q "\":{\"quant_algo\":\"FP8\"}}}}",
         X, FORMAT_NVFP4, NULL},
        {"{\"quantization\":{\"quant_algo\":\"MIXED_PRECISION\",\"quantized_layers\":{"
         "\"model.layers.*.mlp.experts*\":{\"quant_algo\":\"NVFP4\"},"
         "\"" Q "\":{\"quant_algo\":\"FP8\"}}}}",
         Q, FORMAT_NVFP4, "has fp8-tensor"},
        {"{\"quantization_config\":{\"quant_method\":\"compressed-tensors\",\"format\":"
         "\"nvfp4-pack-quantized\",\"config_groups\":{\"group_0\":{\"targets\":[\"Linear\"]}},"
         "\"ignore\":[\"lm_head\",\"re:.*self_attn.*\"]}}",
         X, FORMAT_NVFP4, NULL},
        {"{\"quantization_config\":{\"quant_method\":\"compressed-tensors\",\"format\":"
         "\"nvfp4-pack-quantized\",\"config_groups\":{\"group_0\":{\"targets\":[\"Linear\"]}},"
         "\"ignore\":[\"lm_head\",\"re:.*self_attn.*\"]}}",
         Q, FORMAT_NVFP4, "excludes it"},
        {"{\"quantization_config\":{\"quant_method\":\"compressed-tensors\",\"format\":"
         "\"float-quantized\",\"config_groups\":{\"group_0\":{\"targets\":[\"Linear\"],\"weights\":"
         "{\"strategy\":\"channel\"}}}}}",
         Q, FORMAT_FP8_BLOCK, "has fp8-channel"},
        {"{\"quantization_config\":{\"quant_method\":\"compressed-tensors\",\"format\":"
         "\"mixed-precision\",\"config_groups\":{\"a\":{\"targets\":[\"re:.*mlp.*\"],\"format\":"
         "\"nvfp4-pack-quantized\"},\"b\":{\"targets\":[\"re:.*self_attn.*\"],\"format\":"
         "\"float-quantized\",\"weights\":{\"strategy\":\"tensor\"}}}}}",
         Q, FORMAT_FP8_TENSOR, NULL},
        {"{\"quantization_config\":{\"quant_method\":\"compressed-tensors\",\"format\":"
         "\"mixed-precision\",\"config_groups\":{\"a\":{\"targets\":[\"re:.*mlp.*\"],\"format\":"
         "\"nvfp4-pack-quantized\"}}}}",
         Q, FORMAT_FP8_TENSOR, "has bf16"},
        {"{\"quantization_config\":{\"quant_method\":\"mxfp4\",\"modules_to_not_convert\":"
         "[\"model.layers.*.self_attn\",\"model.layers.*.mlp.router\"]}}",
         X, FORMAT_MXFP4, NULL},
    };
    for (size_t i = 0; i < sizeof t / sizeof t[0]; i++) {
        struct quant_config *q = NULL;
        struct err e = {0};
        if (quant_config_parse(&q, t[i].json, strlen(t[i].json), "config.json", &e) != OK)
            fail_msg("%zu: %s", i, e.msg);
        err_t rc = quant_config_check(q, t[i].module, t[i].module, t[i].format, &e);
        if ((rc == OK) != (t[i].says == NULL)) fail_msg("%zu: \"%s\"", i, e.msg);
        if (t[i].says && !strstr(e.msg, t[i].says))
            fail_msg("%zu: \"%s\" lacks \"%s\"", i, e.msg, t[i].says);
        quant_config_free(q);
    }
}

static void refuses(void **state)
{
    (void)state;
    static const struct {
        const char *json;
        err_t rc;
        const char *says;
    } t[] = {
        {"{\"quantization_config\":{\"quant_method\":\"awq\"}}", ERR_UNSUPPORTED,
         "config.json: quantization_config: quant_method: \"awq\" is not implemented (fp8, "},
        {"{\"quantization_config\":{}}", ERR_UNSUPPORTED, "quant_method: \"\""},
        {"{\"quantization_config\":7}", ERR_INPUT, "must be an object"},
        {"{\"quantization_config\":{\"quant_method\":\"fp8\",\"weight_block_size\":[64,64]}}",
         ERR_UNSUPPORTED, "weight_block_size: [64, 64]"},
        {"{\"quantization_config\":{\"quant_method\":\"fp8\",\"weight_block_size\":[128]}}",
         ERR_UNSUPPORTED, "weight_block_size: [128, 0]"},
        {"{\"quantization_config\":{\"quant_method\":\"modelopt\",\"quant_algo\":\"NVFP4_AWQ\"}}",
         ERR_UNSUPPORTED, "quant_algo: \"NVFP4_AWQ\" is not implemented (FP8, "},
        {"{\"quantization_config\":{\"quant_method\":\"mxfp8\",\"ignored_layers\":\"lm_head\"}}",
         ERR_INPUT, "ignored_layers: must be a list"},
        {"{\"quantization_config\":{\"quant_method\":\"mxfp8\",\"ignored_layers\":[1]}}", ERR_INPUT,
         "ignored_layers[0]: must be a string"},
        {"{\"quantization_config\":{\"quant_method\":\"compressed-tensors\",\"format\":"
         "\"pack-quantized\",\"config_groups\":{\"g\":{}}}}",
         ERR_UNSUPPORTED, "config_groups.g: format: \"pack-quantized\""},
        {"{\"quantization_config\":{\"quant_method\":\"compressed-tensors\",\"format\":"
         "\"float-quantized\",\"config_groups\":{},\"ignore\":[\"re:(\"]}}",
         ERR_INPUT, "ignore[0]: \"re:(\""},
        {"{\"quantization_config\":{\"quant_method\":\"compressed-tensors\",\"format\":"
         "\"float-quantized\",\"config_groups\":{\"g\":{\"weights\":{\"strategy\":\"block\","
         "\"block_structure\":[64,128]}}}}}",
         ERR_UNSUPPORTED, "block_structure: [64, 128]"},
        {"{", ERR_INPUT, "config.json: line"},
    };
    for (size_t i = 0; i < sizeof t / sizeof t[0]; i++) {
        struct quant_config *q = NULL;
        struct err e = {0};
        assert_int_equal(quant_config_parse(&q, t[i].json, strlen(t[i].json), "config.json", &e),
                         t[i].rc);
        assert_null(q);
        if (!strstr(e.msg, t[i].says)) fail_msg("%zu: \"%s\" lacks \"%s\"", i, e.msg, t[i].says);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(patterns),
        cmocka_unit_test(stored_names),
        cmocka_unit_test(configs),
        cmocka_unit_test(refuses),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
