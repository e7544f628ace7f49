#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/buf.h"
#include "base/file.h"
#include "base/mem.h"
#include "model/config.h"
#include "model/model.h"
#include "model/tensors.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

#define FINAL "models/tiny-moe"

static const char good[] =
    "{\"model_type\":\"qwen3_moe\",\"vocab_size\":64,\"hidden_size\":32,\"moe_intermediate_size\":"
    "16,"
    "\"num_hidden_layers\":3,\"num_attention_heads\":4,\"num_key_value_heads\":2,\"head_dim\":8,"
    "\"num_experts\":4,\"num_experts_per_tok\":2,\"max_position_embeddings\":128,"
    "\"rms_norm_eps\":1e-6,\"rope_theta\":10000,\"norm_topk_prob\":true,\"eos_token_id\":[1,2,1]";

/* `good` with more fields, and `was` in it replaced by `now`. */
static err_t parse(struct config *c, const char *was, const char *now, const char *more,
                   struct err *e)
{
    struct buf b = {0};
    const char *at = was ? strstr(good, was) : NULL;
    if (was) {
        assert_non_null(at);
        buf_put(&b, good, (size_t)(at - good));
        buf_puts(&b, now);
        buf_puts(&b, at + strlen(was));
    } else {
        buf_puts(&b, good);
    }
    buf_printf(&b, "%s}", more);
    err_t rc = config_parse(c, b.data, b.len, e);
    buf_release(&b);
    return rc;
}

static void accepts(void **state)
{
    (void)state;
    struct config c;
    struct err e = {0};
    assert_int_equal(parse(&c, NULL, NULL, "", &e), OK);
    assert_int_equal(c.n_eos, 2);
    assert_true(isnan(c.gen_temperature) && c.gen_do_sample && c.gen_top_k == -1);
    assert_int_equal(parse(&c, NULL, NULL, ",\"rope_scaling\":{\"type\":\"default\"}", &e), OK);
    assert_int_equal(parse(&c, "\"rope_theta\":10000",
                           "\"rope_parameters\":{\"rope_type\":"
                           "\"default\",\"rope_theta\":5e5}",
                           "", &e),
                     OK);
    assert_true(c.rope_theta == 5e5f);
    assert_int_equal(parse(&c, NULL, NULL, ",\"mlp_only_layers\":[1],\"intermediate_size\":64", &e),
                     OK);
    assert_true(!c.dense[0] && c.dense[1] && !c.dense[2]);
}

static void refuses(void **state)
{
    (void)state;
    static const struct {
        const char *was, *now, *more;
        err_t rc;
        const char *says;
    } t[] = {
        {"qwen3_moe", "llama", "", ERR_UNSUPPORTED, "model_type: \"llama\""},
        {"\"head_dim\":8,", "", "", ERR_INPUT, "head_dim: missing"},
        {"\"head_dim\":8", "\"head_dim\":7", "", ERR_INPUT, "head_dim: 7"},
        {"\"head_dim\":8", "\"head_dim\":8.0", "", ERR_INPUT, "head_dim"},
        {"\"vocab_size\":64", "\"vocab_size\":-1", "", ERR_INPUT, "vocab_size: -1"},
        {"\"vocab_size\":64", "\"vocab_size\":99999999999999999999", "", ERR_INPUT, "line"},
        {"heads\":2", "heads\":3", "", ERR_INPUT, "num_key_value_heads: 3"},
        {"tok\":2", "tok\":5", "", ERR_INPUT, "num_experts_per_tok: 5"},
        {"\"norm_topk_prob\":true,", "", "", ERR_INPUT, "norm_topk_prob"},
        {"\"rope_theta\":10000,", "", "", ERR_INPUT, "rope_theta: missing"},
        {"10000", "0", "", ERR_INPUT, "rope_theta: 0"},
        {"[1,2,1]", "[64]", "", ERR_INPUT, "eos_token_id"},
        {NULL, NULL, ",\"rope_scaling\":{\"rope_type\":\"yarn\"}", ERR_UNSUPPORTED,
         "rope_scaling.rope_type: \"yarn\" is not implemented"},
        {NULL, NULL, ",\"use_sliding_window\":true", ERR_UNSUPPORTED, "use_sliding_window"},
        {NULL, NULL, ",\"attention_bias\":true", ERR_UNSUPPORTED, "attention_bias"},
        {NULL, NULL, ",\"hidden_act\":\"gelu\"", ERR_UNSUPPORTED, "hidden_act: \"gelu\""},
        {NULL, NULL, ",\"mlp_only_layers\":[1]", ERR_INPUT, "intermediate_size: missing"},
        {NULL, NULL, ",\"mlp_only_layers\":[3]", ERR_INPUT, "mlp_only_layers[0]"},
        {NULL, NULL, ",\"head_dim\":8", ERR_INPUT, "line"},
    };
    for (size_t i = 0; i < sizeof t / sizeof t[0]; i++) {
        struct config c;
        struct err e = {0};
        assert_int_equal(parse(&c, t[i].was, t[i].now, t[i].more, &e), t[i].rc);
        if (!strstr(e.msg, t[i].says)) fail_msg("%zu: \"%s\" lacks \"%s\"", i, e.msg, t[i].says);
    }
}

static void same_forward(void **state)
{
    (void)state;
    struct config a, b;
    struct err e = {0};
    assert_int_equal(parse(&a, NULL, NULL, "", &e), OK);
    assert_int_equal(parse(&b, "10000", "20000", "", &e), OK);
    assert_int_equal(config_same_forward(&a, &a, &e), OK);
    assert_int_equal(config_same_forward(&a, &b, &e), ERR_STATE);
    assert_string_equal(e.msg, "rope_theta: 10000 -> 20000");
    assert_int_equal(parse(&b, NULL, NULL, ",\"tie_word_embeddings\":true", &e), OK);
    assert_int_equal(config_same_forward(&a, &b, &e), ERR_STATE);
    assert_non_null(strstr(e.msg, "tie_word_embeddings"));
}

static void specs_match_slots(void **state)
{
    (void)state;
    struct config c;
    struct err e = {0};
    struct slot_spec *s;
    struct layer_slots l;
    size_t n;
    assert_int_equal(parse(&c, NULL, NULL,
                           ",\"mlp_only_layers\":[0],\"intermediate_size\":64,"
                           "\"tie_word_embeddings\":true",
                           &e),
                     OK);
    assert_int_equal(model_specs(&c, &s, &n, &e), OK);
    assert_int_equal(n, 3 + 3 * 9 + 3 + 2 * (1 + 12));
    assert_string_equal(s[SLOT_HEAD].name, s[SLOT_EMBED].name);
    tensors_layer(&l, &c, 0);
    assert_string_equal(s[l.down].name, "model.layers.0.mlp.down_proj.weight");
    assert_int_equal(s[l.down].shape.cols, 64);
    tensors_layer(&l, &c, 2);
    assert_string_equal(s[l.router].name, "model.layers.2.mlp.gate.weight");
    assert_string_equal(s[slot_expert(&l, 3, MLP_UP)].name,
                        "model.layers.2.mlp.experts.3.up_proj.weight");
    assert_int_equal(slot_expert(&l, 3, MLP_DOWN), n - 1);
    assert_string_equal(s[l.k_norm].name, "model.layers.2.self_attn.k_norm.weight");
    assert_string_equal(s[l.kv_scale].name, "model.layers.2.self_attn.kv_scale");
    for (size_t i = 0; i < n; i++) { /* slots of an amax are neighbours */
        assert_true(s[i].linear == (strstr(s[i].name, "_proj.weight") != NULL));
        if (s[i].amax_n > 1 && s[i].amax_at == 0)
            for (int k = 0; k < s[i].amax_n; k++)
                assert_int_equal(s[i + (size_t)k].amax_at, k);
    }
    assert_int_equal(s[l.k].shape.rows, 16);
    mem_free(s);
}

static void loads_folder(void **state)
{
    (void)state;
    if (!file_is_dir(FINAL)) {
        printf("%s is absent\n", FINAL);
        skip();
    }
    struct config c;
    struct err e = {0};
    assert_int_equal(config_load(&c, FINAL, &e), OK);
    assert_int_equal(c.n_layers, 3);
    assert_true(c.n_eos >= 1);
    assert_int_equal(config_load(&c, "/nonexistent", &e), ERR_NOTFOUND);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(accepts),      cmocka_unit_test(refuses),
        cmocka_unit_test(same_forward), cmocka_unit_test(specs_match_slots),
        cmocka_unit_test(loads_folder),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
