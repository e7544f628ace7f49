/* test_feed.c - batches of pieces: every byte comes where it belongs, from many threads, copied or lent. */
#include "cuda/gpu.h"
#include "backend/cuda/feed.h"
#include <pthread.h>

enum { THREADS = 20, MATRICES = 60 };

static struct gpu gpu;
static struct feed *feed;

/* A matrix, where it lies, and a plain piece behind it at an odd address. */
struct job {
    format_t f;
    uint32_t rows, cols;
    size_t data_bytes, scale_bytes, tile_bytes, plain_bytes;
    uint8_t *data, *scale, *plain;
    devptr_t tiles;
};
static struct job jobs[MATRICES];

static void job_new(struct job *j, int i, uint64_t *seed)
{
    static const uint32_t shapes[][2] = {{768, 2048}, {1, 1},      {65, 63},
                                         {200, 288},  {2048, 768}, {130, 257}};
    j->f = (format_t)(i % FORMAT_COUNT);
    j->rows = shapes[i % 6][0], j->cols = shapes[i % 6][1];
    assert_true(format_bytes(j->f, j->rows, j->cols, &j->data_bytes, &j->scale_bytes));
    assert_true(layout_cuda_bytes(&j->tile_bytes, j->f, j->rows, j->cols));
    if (!tile_shape(j->f).group) j->scale_bytes = 0;
    j->plain_bytes = noise_u32(seed) % 40000;
    uint8_t **parts[] = {&j->data, &j->scale, &j->plain};
    const size_t sizes[] = {j->data_bytes, j->scale_bytes, j->plain_bytes};
    for (int k = 0; k < 3; k++) {
        *parts[k] = mem_alloc(sizes[k] + 1);
        for (size_t b = 0; b < sizes[k]; b++)
            (*parts[k])[b] = (uint8_t)noise_u32(seed);
    }
    if (formats[j->f].elem_bits == 4 && j->cols % 2) /* padding */
        for (size_t r = 0; r < j->rows; r++)
            j->data[(r + 1) * format_row_bytes(j->f, j->cols) - 1] &= 15;
    j->tiles = gpu_new(&gpu, NULL, j->tile_bytes + 3 + j->plain_bytes);
}

static void job_put(struct job *j, bool lent)
{
    void *tiles = (void *)(uintptr_t)j->tiles;
    size_t data = (j->data_bytes + 63) / 64 * 64;
    uint8_t *room = lent ? feed_lend(feed, data + j->scale_bytes) : NULL, *scale = j->scale;
    const uint8_t *from = j->data;
    if (lent && !room) fail_msg("nothing was lent");
    if (room) {
        memcpy(room, j->data, j->data_bytes);
        memcpy(room + data, j->scale, j->scale_bytes);
        from = room, scale = room + data;
    }
    feed_tiles(feed, tiles, j->f, false, j->rows, j->cols, from, j->data_bytes);
    if (j->scale_bytes)
        feed_tiles(feed, tiles, j->f, true, j->rows, j->cols, scale, j->scale_bytes);
    if (room) feed_take_back(feed, room);
    feed_bytes(feed, (char *)tiles + j->tile_bytes + 3, j->plain, j->plain_bytes);
}

static void *worker(void *arg)
{
    int first = *(const int *)arg;
    for (int i = first; i < MATRICES; i += THREADS)
        job_put(&jobs[i], i % 2);
    feed_flush(feed);
    return NULL;
}

static void job_check(const struct job *j)
{
    size_t all = j->tile_bytes + 3 + j->plain_bytes;
    uint8_t *got = mem_alloc(all), *want = mem_alloc(j->tile_bytes);
    gpu_read(&gpu, got, j->tiles, all);
    layout_cuda_pack(want, j->f, j->data, j->scale, j->rows, j->cols, 0, tile_panels(j->rows));
    assert_memory_equal(got, want, j->tile_bytes);
    for (int i = 0; i < 3; i++)
        assert_int_equal(got[j->tile_bytes + (size_t)i],
                         0xAA); /* nothing between the pieces is touched */
    assert_memory_equal(got + j->tile_bytes + 3, j->plain, j->plain_bytes);
    mem_free(got);
    mem_free(want);
}

static void many_threads(void **state)
{
    (void)state;
    uint64_t seed = 5;
    pthread_t t[THREADS];
    int first[THREADS];
    for (int i = 0; i < MATRICES; i++)
        job_new(&jobs[i], i, &seed);
    for (int round = 0; round < 3; round++) { /* batches are used again */
        for (int i = 0; i < MATRICES; i++)
            queue_fill(gpu.q, jobs[i].tiles, 0xAA, jobs[i].tile_bytes + 3 + jobs[i].plain_bytes);
        MUST(queue_sync(gpu.q, &must_e));
        for (int i = 0; i < THREADS; i++) {
            first[i] = i;
            assert_int_equal(pthread_create(&t[i], NULL, worker, &first[i]), 0);
        }
        for (int i = 0; i < THREADS; i++)
            pthread_join(t[i], NULL);
        MUST(feed_settle(feed, &must_e));
        for (int i = 0; i < MATRICES; i++)
            job_check(&jobs[i]);
    }
}

/* More than a batch, more pieces than its table has, and a settle with a batch that nobody flushed. */
static void limits(void **state)
{
    (void)state;
    size_t big = 2 * FEED_BYTES + 12345, n = 3 * FEED_PIECES;
    uint8_t *x = mem_alloc(big), *got = mem_alloc(big);
    uint64_t seed = 9;
    for (size_t i = 0; i < big; i++)
        x[i] = (uint8_t)noise_u32(&seed);
    devptr_t to = gpu_new(&gpu, NULL, big), small = gpu_new(&gpu, NULL, n * 4);
    assert_null(feed_lend(feed, FEED_BYTES + 1));
    feed_bytes(feed, (void *)(uintptr_t)to, x, big);
    for (size_t i = 0; i < n; i++)
        feed_bytes(feed, (char *)(uintptr_t)small + 4 * i, x + 4 * i, 4);
    MUST(feed_settle(feed, &must_e));
    gpu_read(&gpu, got, to, big);
    assert_memory_equal(got, x, big);
    gpu_read(&gpu, got, small, n * 4);
    assert_memory_equal(got, x, n * 4);
    mem_free(x);
    mem_free(got);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(many_threads), cmocka_unit_test(limits)};
    struct err e = {0};
    if (!gpu_open(&gpu)) return 0;
    if (feed_new(&feed, gpu.d, &e) != OK) return printf("%s\n", e.msg), 1;
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    feed_free(feed);
    gpu_close(&gpu);
    return failed;
}
