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

/* Sizes that no GEMM takes are refused when memory is planned, by name (in a build without CUDA: as such). */
static void odd_sizes_are_refused(void **state)
{
    (void)state;
    struct config c = {.hidden_size = 64, .moe_intermediate_size = 20, .n_layers = 1, .n_heads = 1,
                       .n_kv_heads = 1, .head_dim = 64, .vocab_size = 64, .max_positions = 64};
    struct cuda_options o = {.n_kv_pages = 4, .max_step_tokens = 16, .max_seqs = 1};
    struct err e = {0};
    size_t work, page;
    assert_int_equal(cuda_model_bytes(&work, &page, &c, &o, &e), ERR_UNSUPPORTED);
    assert_true(strstr(e.msg, "moe_intermediate_size: 20") || strstr(e.msg, "without CUDA"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(round_trips), cmocka_unit_test(places),
                                       cmocka_unit_test(sizes), cmocka_unit_test(no_gpu), cmocka_unit_test(odd_sizes_are_refused)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
