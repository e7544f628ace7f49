/* test_device.c - the device layer on a GPU: memory, copies, graphs, errors. */
#include "backend/cuda/copy.h"
#include "cuda/gpu.h"

static struct gpu gpu;

static void about(void **state)
{
    (void)state;
    const struct device_info *i = device_about(gpu.d);
    size_t have = 0;
    MUST(device_free_bytes(&have, gpu.d, &must_e));
    printf("%s: %d SMs, %zu MiB (%zu free), L2 %zu MiB, %zu bytes of shared memory, CUDA %d\n",
           i->name, i->n_sms, i->total_bytes >> 20, have >> 20, i->l2_bytes >> 20,
           i->smem_max_bytes, i->driver);
    assert_int_equal(i->major, 9);
    assert_true(have > 0 && have <= i->total_bytes);
}

static void open_errors(void **state)
{
    (void)state;
    struct device *d = NULL;
    struct err e = {0};
    assert_int_equal(device_open(&d, 999, 0, &e), ERR_NOTFOUND);
    assert_non_null(strstr(e.msg, "GPU 999"));
    assert_int_equal(device_open(&d, 0, (size_t)1 << 60, &e), ERR_NOMEM);
    assert_non_null(strstr(e.msg, "MiB are needed"));
    assert_null(d);
}

static void kernel_errors(void **state)
{
    (void)state;
    struct kernel k = {0};
    struct err e = {0};
    assert_int_equal(device_kernel(&k, gpu.d, "no_such_kernel", 8, 0, &e), ERR_NOTFOUND);
    assert_int_equal(device_kernel(&k, gpu.d, "copy_rows", 16, 0, &e), ERR_SYSTEM);
    assert_non_null(strstr(e.msg, "32 bytes, not 16"));
    assert_int_equal(device_kernel(&k, gpu.d, "copy_rows", 32, 1u << 30, &e), ERR_SYSTEM);
    assert_null(k.fn);
}

/* A region keeps its address over unmap and map, grows in place, and frees its memory. */
static void regions(void **state)
{
    (void)state;
    enum { MIB = 1 << 20 };
    struct region *r = NULL;
    size_t before = 0, during = 0, after = 0;
    MUST(region_new(&r, gpu.d, 600u * MIB, &must_e));
    devptr_t base = region_base(r);
    assert_true(region_mapped(r) == 0 && region_bytes(r) == 600u * MIB);
    MUST(device_free_bytes(&before, gpu.d, &must_e));
    MUST(region_map(r, 3 * MIB, &must_e));
    assert_true(region_mapped(r) == 4 * MIB);
    queue_fill(gpu.q, base, 0x5c, 4 * MIB);
    MUST(region_map(r, 512u * MIB, &must_e));
    queue_fill(gpu.q, base + 4 * MIB, 0x77, 508u * MIB);
    uint8_t ends[2];
    queue_copy(gpu.q, host_addr(&ends[0]), base + 4 * MIB - 1, 1);
    queue_copy(gpu.q, host_addr(&ends[1]), base + 512u * MIB - 1, 1);
    MUST(queue_sync(gpu.q, &must_e));
    assert_int_equal(ends[0], 0x5c);
    assert_int_equal(ends[1], 0x77);
    MUST(device_free_bytes(&during, gpu.d, &must_e));
    assert_true(before - during == 512u * MIB);
    for (int i = 0; i < 20; i++) {
        MUST(region_unmap(r, &must_e));
        assert_true(region_mapped(r) == 0);
        MUST(device_free_bytes(&after, gpu.d, &must_e));
        assert_true(after == before);
        MUST(region_map(r, 600u * MIB, &must_e));
        assert_true(region_base(r) == base);
        queue_fill(gpu.q, base, (uint8_t)i, 600u * MIB);
        MUST(queue_sync(gpu.q, &must_e));
    }
    region_free(r);
    struct err e = {0};
    assert_int_equal(region_new(&r, gpu.d, SIZE_MAX, &e), ERR_NOMEM);
}

static void too_much_memory(void **state)
{
    (void)state;
    struct region *r = NULL;
    struct err e = {0};
    devptr_t p = 0;
    MUST(region_new(&r, gpu.d, (size_t)1 << 40, &must_e));
    assert_int_equal(region_map(r, (size_t)1 << 40, &e), ERR_NOMEM);
    assert_true(region_mapped(r) == 0);
    MUST(region_map(r, 1 << 20, &must_e));
    region_free(r);
    assert_int_equal(device_alloc(&p, gpu.d, (size_t)1 << 40, &e), ERR_NOMEM);
    assert_non_null(strstr(e.msg, "1099511627776 bytes"));
}

/* Rows among bytes that must stay as they are, from the device to pinned memory and back. */
static void rows(void **state)
{
    (void)state;
    enum { BYTES = 8 << 20 };
    static const uint32_t shapes[][3] = {/* pitch, width, n */
                                         {2304, 2048, 3000}, {2304, 256, 3000}, {4224, 128, 1},
                                         {8192, 16, 1000},   {64, 48, 77777},   {48, 48, 1000}};
    uint8_t *src = NULL, *got = NULL;
    uint64_t seed = 5;
    struct kernel k = {0};
    struct launch l = {.grid = {COPY_ROWS_BLOCKS}, .threads = COPY_ROWS_THREADS};
    MUST(host_alloc((void **)&src, gpu.d, BYTES, &must_e));
    MUST(host_alloc((void **)&got, gpu.d, BYTES, &must_e));
    for (size_t i = 0; i < BYTES; i++)
        src[i] = (uint8_t)noise_u32(&seed);
    devptr_t dev = gpu_new(&gpu, NULL, BYTES);
    MUST(device_kernel(&k, gpu.d, "copy_rows", sizeof(struct copy_rows_args), 0, &must_e));
    for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++) {
        struct copy_rows_args to = {.dst = dev,
                                    .src = host_addr(src),
                                    .pitch = shapes[s][0],
                                    .width = shapes[s][1],
                                    .n = shapes[s][2]};
        struct copy_rows_args back = to;
        back.dst = host_addr(got);
        back.src = dev;
        memset(got, 0x55, BYTES);
        queue_launch(gpu.q, &k, l, &to);
        queue_launch(gpu.q, &k, l, &back);
        MUST(queue_sync(gpu.q, &must_e));
        for (size_t i = 0; i < BYTES; i++) {
            bool in = i / to.pitch < to.n && i % to.pitch < to.width;
            if (got[i] != (in ? src[i] : 0x55)) fail_msg("shape %zu, byte %zu", s, i);
        }
    }
    gpu_free(&gpu, dev);
    host_free(gpu.d, src);
    host_free(gpu.d, got);
}

/* A captured copy runs as often as it is launched, and not when it is recorded. */
static void graphs(void **state)
{
    (void)state;
    struct graph *g = NULL;
    struct event *ev[2] = {0};
    uint32_t *host = NULL, back = 0;
    float ms = -1.0f;
    MUST(host_alloc((void **)&host, gpu.d, 4, &must_e));
    MUST(event_new(&ev[0], gpu.d, true, &must_e));
    MUST(event_new(&ev[1], gpu.d, true, &must_e));
    devptr_t p = gpu_new(&gpu, NULL, 4);
    *host = 7;
    queue_capture(gpu.q);
    queue_copy(gpu.q, p, host_addr(host), 4);
    MUST(queue_capture_end(gpu.q, &g, &must_e));
    gpu_read(&gpu, &back, p, 4);
    assert_int_equal(back, 0xAAAAAAAA);
    for (uint32_t i = 10; i < 13; i++) {
        *host = i;
        queue_record(gpu.q, ev[0]);
        queue_graph(gpu.q, g);
        queue_record(gpu.q, ev[1]);
        gpu_read(&gpu, &back, p, 4);
        assert_int_equal(back, i);
    }
    MUST(event_poll(ev[1], &must_e));
    MUST(event_ms(&ms, ev[0], ev[1], &must_e));
    assert_true(ms > 0.0f && ms < 1000.0f);
    graph_free(g);
    event_free(ev[0]);
    event_free(ev[1]);
    gpu_free(&gpu, p);
    host_free(gpu.d, host);
}

/* The first error stays until it is asked for; what follows it is not run. */
static void sticky(void **state)
{
    (void)state;
    struct kernel k = {0};
    struct copy_rows_args a = {0};
    struct err e = {0};
    uint32_t value = 1, back = 0;
    devptr_t p = gpu_new(&gpu, &value, 4);
    MUST(device_kernel(&k, gpu.d, "copy_rows", sizeof a, 0, &must_e));
    queue_launch(gpu.q, &k, (struct launch){.grid = {1, 1, 1}, .threads = 5000}, &a);
    queue_fill(gpu.q, p, 0, 4);
    assert_int_equal(queue_sync(gpu.q, &e), ERR_SYSTEM);
    assert_non_null(strstr(e.msg, "copy_rows"));
    MUST(queue_sync(gpu.q, &must_e));
    gpu_read(&gpu, &back, p, 4);
    assert_int_equal(back, 1);
    gpu_free(&gpu, p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(about),           cmocka_unit_test(open_errors),
        cmocka_unit_test(kernel_errors),   cmocka_unit_test(regions),
        cmocka_unit_test(too_much_memory), cmocka_unit_test(rows),
        cmocka_unit_test(graphs),          cmocka_unit_test(sticky),
    };
    if (!gpu_open(&gpu)) return 0;
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    gpu_close(&gpu);
    return failed;
}
