/* test_layout.c - tiles are a permutation: device equals the definition, both ways, any bytes, odd
 * shapes. */
#include "cuda/matrices.h"

static struct gpu gpu;

static void random_bytes(uint8_t *p, size_t n, uint64_t *seed)
{
    for (size_t i = 0; i < n; i++)
        p[i] = (uint8_t)noise_u32(seed);
}

static void unpack_on_device(const struct test_matrix *m, uint8_t *data, uint8_t *scale)
{
    const struct format_parts *p = &m->parts;
    devptr_t dd = gpu_new(&gpu, NULL, m->data_bytes),
             ds = gpu_new(&gpu, m->scale, m->scale_bytes + 4);
    if (tile_shape(p->format).group) queue_fill(gpu.q, ds, 0x55, m->scale_bytes);
    struct layout_args a = {(void *)(uintptr_t)m->tiles, (void *)(uintptr_t)dd,
                            (void *)(uintptr_t)ds, (uint32_t)p->rows, (uint32_t)p->cols};
    repack_from_tiles(&matrix_repack, gpu.q, p->format, &a);
    gpu_read(&gpu, data, dd, m->data_bytes);
    gpu_read(&gpu, scale, ds, m->scale_bytes);
    gpu_free(&gpu, dd);
    gpu_free(&gpu, ds);
}

static void round_trip(format_t f, size_t rows, size_t cols)
{
    uint64_t seed = rows * 1000 + cols + (uint64_t)f;
    struct test_matrix m = matrix_new(f, rows, cols, DATA_NORMAL, &seed);
    random_bytes(m.data, m.data_bytes, &seed);
    random_bytes(m.scale, m.scale_bytes, &seed);
    if (formats[f].elem_bits == 4 && cols % 2) /* the last byte's upper nibble is padding */
        for (size_t r = 0; r < rows; r++)
            m.data[(r + 1) * format_row_bytes(f, cols) - 1] &= 15;
    matrix_upload(&gpu, &m);
    uint8_t *tiles = mem_alloc(m.tile_bytes), *got = mem_alloc(m.tile_bytes);
    uint8_t *data = mem_alloc(m.data_bytes), *scale = mem_alloc(m.scale_bytes + 1);
    uint32_t panels = tile_panels((uint32_t)rows), half = panels / 2;
    layout_cuda_pack(tiles, f, m.data, m.scale, (uint32_t)rows, (uint32_t)cols, 0, half);
    layout_cuda_pack(tiles, f, m.data, m.scale, (uint32_t)rows, (uint32_t)cols, half,
                     panels - half);
    gpu_read(&gpu, got, m.tiles, m.tile_bytes);
    assert_memory_equal(got, tiles, m.tile_bytes);
    size_t ones = 0, ones_canonical = 0; /* a permutation keeps the number of set bits */
    for (size_t i = 0; i < m.tile_bytes; i++)
        ones += (size_t)__builtin_popcount(tiles[i]);
    for (size_t i = 0; i < m.data_bytes; i++)
        ones_canonical += (size_t)__builtin_popcount(m.data[i]);
    for (size_t i = 0; tile_shape(f).group && i < m.scale_bytes; i++)
        ones_canonical += (size_t)__builtin_popcount(m.scale[i]);
    assert_int_equal(ones, ones_canonical);
    layout_cuda_unpack(data, scale, f, tiles, (uint32_t)rows, (uint32_t)cols, 0, panels);
    assert_memory_equal(data, m.data, m.data_bytes);
    if (tile_shape(f).group) assert_memory_equal(scale, m.scale, m.scale_bytes);
    memset(data, 0, m.data_bytes);
    unpack_on_device(&m, data, scale);
    assert_memory_equal(data, m.data, m.data_bytes);
    assert_memory_equal(scale, m.scale, m.scale_bytes);
    mem_free(tiles);
    mem_free(got);
    mem_free(data);
    mem_free(scale);
    matrix_free(&gpu, &m);
}

static void round_trips(void **state)
{
    (void)state;
    static const size_t shapes[][2] = {{1, 1},      {64, 64}, {65, 63},   {128, 96},
                                       {200, 2880}, {7, 130}, {2880, 48}, {130, 257}};
    for (int f = 0; f < FORMAT_COUNT; f++)
        for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
            round_trip((format_t)f, shapes[i][0], shapes[i][1]);
}

static void sizes(void **state)
{
    (void)state;
    size_t n = 0;
    assert_true(layout_cuda_bytes(&n, FORMAT_NVFP4, 768, 2048));
    assert_int_equal(n, 768 * 2048 / 2 + 768 * 2048 / 16);
    assert_true(layout_cuda_bytes(&n, FORMAT_BF16, 151936, 2048));
    assert_int_equal(n, (size_t)151936 * 2048 * 2);
    assert_false(layout_cuda_bytes(&n, FORMAT_BF16, UINT64_MAX, UINT64_MAX));
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(sizes), cmocka_unit_test(round_trips)};
    struct err e = {0};
    if (!gpu_open(&gpu)) return 0;
    if (repack_open(&matrix_repack, gpu.d, &e) != OK) return printf("%s\n", e.msg), 1;
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    gpu_close(&gpu);
    return failed;
}
