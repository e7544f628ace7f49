/* test_layout_cuda.c - the GPU's resident layout without a GPU: a permutation of bits, both ways;
 * and what a machine without a driver says. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include "backend/cuda/device.h"
#include "model/cuda/cuda.h"
#include "backend/cuda/layout_cuda.h"
#include "base/mem.h"
#include <string.h>

static uint8_t noise(uint64_t *s)
{
    *s = *s * 6364136223846793005u + 1442695040888963407u;
    return (uint8_t)(*s >> 40);
}

static size_t bits_of(const uint8_t *p, size_t n)
{
    size_t bits = 0;
    for (size_t i = 0; i < n; i++)
        bits += (size_t)__builtin_popcount(p[i]);
    return bits;
}

static void round_trip(format_t f, uint32_t rows, uint32_t cols)
{
    size_t n_data, n_scale, n_tiles;
    uint64_t seed = rows * 3u + cols;
    assert_true(format_bytes(f, rows, cols, &n_data, &n_scale));
    assert_true(layout_cuda_bytes(&n_tiles, f, rows, cols));
    if (!tile_shape(f).group) n_scale = 0; /* f32 scales stay as they are */
    uint8_t *data = mem_alloc(n_data), *scale = mem_alloc(n_scale + 1), *tiles = mem_alloc(n_tiles);
    uint8_t *data2 = mem_alloc(n_data), *scale2 = mem_alloc(n_scale + 1);
    for (size_t i = 0; i < n_data; i++)
        data[i] = noise(&seed);
    for (size_t i = 0; i < n_scale; i++)
        scale[i] = noise(&seed);
    for (size_t r = 0; formats[f].elem_bits == 4 && cols % 2 && r < rows; r++)
        data[(r + 1) * format_row_bytes(f, cols) - 1] &= 15; /* the upper nibble is padding */
    uint32_t panels = tile_panels(rows);
    for (uint32_t p = panels; p-- > 0;)
        layout_cuda_pack(tiles, f, data, scale, rows, cols, p, 1);
    assert_int_equal(bits_of(tiles, n_tiles), bits_of(data, n_data) + bits_of(scale, n_scale));
    layout_cuda_unpack(data2, scale2, f, tiles, rows, cols, 0, panels);
    assert_memory_equal(data, data2, n_data);
    assert_memory_equal(scale, scale2, n_scale);
    mem_free(data);
    mem_free(scale);
    mem_free(tiles);
    mem_free(data2);
    mem_free(scale2);
}

static void round_trips(void **state)
{
    (void)state;
    static const uint32_t shapes[][2] = {{1, 1},     {64, 64}, {65, 63},
                                         {200, 288}, {7, 130}, {130, 257}};
    for (int f = 0; f < FORMAT_COUNT; f++)
        for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
            round_trip((format_t)f, shapes[i][0], shapes[i][1]);
}

/* Where the header says that single elements lie. */
static void places(void **state)
{
    (void)state;
    uint8_t data[64 * 64] = {0}, tiles[64 * 64];
    data[9 * 64 + 16 + 2 * 3 + 9] =
        0x5a; /* row 9, k = 31: unit 1, lane 1 * 4 + 3, step 1, k 2c + 9 */
    layout_cuda_pack(tiles, FORMAT_FP8_TENSOR, data, NULL, 64, 64, 0, 1);
    assert_int_equal(tiles[512 + 7 * 16 + 4 + 3], 0x5a);
    memset(data, 0, sizeof data);
    uint8_t scale[64 * 4] = {0}, four[2304];
    data[10 * 32 + 0] = 0x0f; /* row 10, k 0: code 15 in the low nibble: t0's low half */
    scale[10 * 4 + 2] = 0x77;
    layout_cuda_pack(four, FORMAT_NVFP4, data, scale, 64, 64, 0, 1);
    uint32_t q;
    memcpy(&q, four + 256 + 8 * 8, 4);
    assert_int_equal(q, 0x81c0);
    assert_int_equal(four[2048 + 10 * 4 + 2], 0x77);
}

static void sizes(void **state)
{
    (void)state;
    size_t n = 0;
    assert_true(layout_cuda_bytes(&n, FORMAT_NVFP4, 768, 2048));
    assert_int_equal(n, 768 * 2048 / 2 + 768 * 2048 / 16); /* no byte more than stored */
    assert_false(layout_cuda_bytes(&n, FORMAT_BF16, UINT64_MAX, UINT64_MAX));
}

static void no_gpu(void **state)
{
    (void)state;
    struct device *d = NULL;
    struct err e = {0};
    err_t rc = device_open(&d, 0, 0, &e);
    if (rc == OK) {
        print_message("skip: this machine has a GPU\n");
        device_close(d);
        return;
    }
    assert_true(rc == ERR_NOTFOUND || rc == ERR_UNSUPPORTED || rc == ERR_SYSTEM);
    assert_true(strstr(e.msg, "CUDA") || strstr(e.msg, "GPU") ||
                strstr(e.msg, "compute capability"));
    assert_null(d);
}

/* What no kernel takes is refused by name before there is a device (in a build without CUDA: as such). */
static void refused(const struct config *c, const struct slot_spec *specs, const char *says)
{
    struct err e = {0};
    assert_int_equal(cuda_model_check(c, specs, KV_BF16, &e), ERR_UNSUPPORTED);
    if (!strstr(e.msg, says) && !strstr(e.msg, "without CUDA")) fail_msg("%s: %s", says, e.msg);
}

static void odd_models_are_refused(void **state)
{
    (void)state;
    static const char json[] =
        "{\"model_type\":\"qwen3_moe\",\"vocab_size\":320,\"hidden_size\":64,\"intermediate_size\":"
        "96,"
        "\"moe_intermediate_size\":32,\"num_hidden_layers\":2,\"num_attention_heads\":4,\"num_key_"
        "value_heads\":2,"
        "\"head_dim\":64,\"num_experts\":4,\"num_experts_per_tok\":2,\"norm_topk_prob\":true,"
        "\"rms_norm_eps\":1e-6,\"rope_theta\":10000,\"max_position_embeddings\":64,"
        "\"tie_word_embeddings\":false}";
    static const struct {
        size_t field;
        int32_t value;
        const char *says;
    } rows[] = {{offsetof(struct config, moe_intermediate_size), 20, "moe_intermediate_size: 20"},
                {offsetof(struct config, intermediate_size), 40968, "intermediate_size: 40968"},
                {offsetof(struct config, hidden_size), 8200, "hidden_size: 8200"},
                {offsetof(struct config, head_dim), 96, "head_dim: 96"},
                {offsetof(struct config, n_experts), 1024, "num_experts: 1024"}};
    struct config good, c;
    struct slot_spec *specs = NULL;
    struct err e = {0};
    size_t n;
    assert_int_equal(config_parse(&good, json, strlen(json), &e), OK);
    assert_int_equal(model_specs(&good, &specs, &n, &e), OK);
    err_t rc = cuda_model_check(&good, specs, KV_BF16, &e);
    if (rc != OK && !strstr(e.msg, "without CUDA")) fail_msg("%s", e.msg);
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        c = good;
        memcpy((char *)&c + rows[i].field, &rows[i].value, sizeof(int32_t));
        refused(&c, specs, rows[i].says);
    }
    for (size_t i = 0; i < n; i++) {
        if (!strstr(specs[i].name, "layers.1.mlp.experts.2.down_proj")) continue;
        specs[i].shape.format = FORMAT_MXFP8;
        refused(&good, specs,
                "experts.2.down_proj.weight is mxfp8, the experts before it are bf16");
        specs[i].shape.format = FORMAT_BF16;
    }
    for (size_t i = 0; i < n; i++)
        if (strstr(specs[i].name, "layers.1.mlp.experts.") && strstr(specs[i].name, "up_proj"))
            specs[i].shape.format = FORMAT_NVFP4;
    refused(&good, specs, "layer 1: gate is bf16, up is nvfp4");
    mem_free(specs);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(round_trips), cmocka_unit_test(places),
                                       cmocka_unit_test(sizes), cmocka_unit_test(no_gpu),
                                       cmocka_unit_test(odd_models_are_refused)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
