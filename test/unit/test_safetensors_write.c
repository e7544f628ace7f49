/* test_safetensors_write.c - what the writer wrote, read by the reader; folders that appear whole.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/file.h"
#include "base/mem.h"
#include "base/newdir.h"
#include "base/pool.h"
#include "weight/checkpoint.h"
#include "weight/safetensors_write.h"
#include <dirent.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

static char root[64];

static int make_root(void **state)
{
    (void)state;
    strcpy(root, "/tmp/moult-write-XXXXXX");
    return mkdtemp(root) ? 0 : -1;
}

static int remove_root(void **state)
{
    (void)state;
    char command[128];
    snprintf(command, sizeof command, "rm -rf %s", root);
    return system(command);
}

static char *in_root(const char *name)
{
    static char path[8][160];
    static int next;
    char *p = path[next++ % 8];
    snprintf(p, sizeof path[0], "%s/%s", root, name);
    return p;
}

static int entries(const char *path)
{
    DIR *d = opendir(path);
    int n = 0;
    while (d && readdir(d))
        n++;
    if (d) closedir(d);
    return n - 2; /* . and .. */
}

/* A scalar, bytes, half-empty shapes, odd sizes; widths mixed so that order matters. */
static const struct st_out tensors[] = {
    {"a.weight", ST_U8, 2, {3, 5}},        {"a.scale", ST_F32, 0, {0}},
    {"b.weight", ST_BF16, 2, {7, 3}},      {"empty", ST_F32, 2, {0, 4}},
    {"c \"quoted\"", ST_F8_E4M3, 1, {11}}, {"d", ST_I64, 1, {2}},
    {"e.scale", ST_F32, 1, {1}},           {"f", ST_U8, 1, {100}},
};
enum { N = sizeof tensors / sizeof tensors[0] };
static const size_t sizes[N] = {15, 4, 42, 0, 11, 16, 4, 100};

static uint8_t byte_of(size_t tensor, size_t i)
{
    return (uint8_t)(tensor * 37 + i * 11 + 1);
}

static void put_piece(void *arg, int i)
{
    struct st_writer *w = arg;
    size_t t = (size_t)i / 2, half = sizes[t] / 2, from = i % 2 ? half : 0;
    uint8_t data[128];
    struct err e = {0};
    size_t n = i % 2 ? sizes[t] - half : half;
    for (size_t j = 0; j < n; j++)
        data[j] = byte_of(t, from + j);
    if (st_writer_put(w, t, from, data, n, &e) != OK) abort();
}

static void write_and_read(uint64_t max_shard, int shards)
{
    struct err e = {0};
    struct st_writer *w = NULL;
    char dir[128];
    snprintf(dir, sizeof dir, "%s/shard-%llu", root, (unsigned long long)max_shard);
    assert_int_equal(mkdir(dir, 0755), 0);
    if (st_writer_open(&w, dir, tensors, N, max_shard, &e) != OK) fail_msg("%s", e.msg);
    assert_int_equal(st_writer_bytes(w), 192);
    struct pool *pool = pool_new(3);
    pool_run(pool, put_piece, w, 2 * N);
    pool_free(pool);
    if (st_writer_finish(w, &e) != OK) fail_msg("%s", e.msg);
    st_writer_free(w);
    assert_int_equal(entries(dir), shards > 1 ? shards + 1 : 1);

    struct checkpoint c;
    if (checkpoint_open(&c, dir, &e) != OK) fail_msg("%s", e.msg); /* checks the index too */
    assert_int_equal(c.n_files, shards);
    assert_int_equal(c.n_tensors, N);
    for (size_t t = 0; t < N; t++) {
        const struct checkpoint_entry *x = checkpoint_get(&c, tensors[t].name);
        uint8_t data[128];
        assert_non_null(x);
        assert_true(x->tensor->dtype == tensors[t].dtype && x->tensor->bytes == sizes[t]);
        assert_int_equal(x->tensor->n_dims, tensors[t].n_dims);
        assert_memory_equal(x->tensor->shape, tensors[t].shape, 8 * (size_t)tensors[t].n_dims);
        int width = st_dtype_bits(tensors[t].dtype) / 8;
        assert_int_equal(x->tensor->offset % (uint64_t)width, 0);
        if (st_read(x->file, x->tensor, 0, data, sizes[t], &e) != OK) fail_msg("%s", e.msg);
        for (size_t j = 0; j < sizes[t]; j++)
            assert_int_equal(data[j], byte_of(t, j));
    }
    checkpoint_close(&c);
}

static void shards(void **state)
{
    (void)state;
    write_and_read(1 << 20, 1);
    write_and_read(100, 2); /* 92 bytes, then 100 */
    write_and_read(60, 4);  /* 19, 53, 20, and 100: larger than a shard may be */
    write_and_read(1, 7);   /* each its own, the empty one with the next */
}

static void refusals(void **state)
{
    (void)state;
    struct err e = {0};
    struct st_writer *w = NULL;
    struct st_out twice[2] = {tensors[0], tensors[0]}, huge = tensors[0];
    assert_int_equal(st_writer_open(&w, root, twice, 2, 100, &e), ERR_INPUT);
    assert_non_null(strstr(e.msg, "a.weight"));
    huge.shape[0] = huge.shape[1] = UINT64_C(1) << 33;
    assert_int_equal(st_writer_open(&w, root, &huge, 1, 100, &e), ERR_INPUT);
    assert_int_equal(st_writer_open(&w, "/nonexistent", tensors, N, 100, &e), ERR_IO);
    assert_non_null(strstr(e.msg, "/nonexistent"));
    for (long i = 1; i < 4; i++) { /* memory */
        mem_fault_at(i);
        assert_int_equal(st_writer_open(&w, root, tensors, N, 100, &e), ERR_NOMEM);
        mem_fault_at(0);
    }
}

/* A limit on the size of files stands for a full disk: both refuse the room at once. */
static void no_room(void **state)
{
    (void)state;
    struct err e = {0};
    struct st_writer *w = NULL;
    struct rlimit old, little = {4096, 4096};
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    little.rlim_max = old.rlim_max;
    void (*handler)(int) = signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(mkdir(in_root("full"), 0755), 0);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &little), 0);
    struct st_out big = {"big", ST_U8, 1, {1 << 20}};
    err_t rc = st_writer_open(&w, in_root("full"), &big, 1, 1 << 30, &e);
    setrlimit(RLIMIT_FSIZE, &old);
    signal(SIGXFSZ, handler);
    assert_int_equal(rc, ERR_IO);
    assert_non_null(strstr(e.msg, "model.safetensors"));
}

static void folders(void **state)
{
    (void)state;
    struct err e = {0};
    struct newdir d = {0}, other = {0};
    struct buf text = {0};
    int before = entries(root);
    assert_int_equal(newdir_begin(&d, in_root("new/"), &e), OK);
    assert_int_equal(newdir_put(&d, "a", "hello", 5, &e), OK);
    assert_int_equal(newdir_put(&d, "a", "again", 5, &e), ERR_IO);
    assert_false(file_exists(in_root("new")));
    assert_int_equal(newdir_commit(&d, &e), OK);
    assert_int_equal(file_read(&text, in_root("new/a"), 100, &e), OK);
    assert_string_equal(text.data, "hello");
    buf_release(&text);
    newdir_abort(&d); /* nothing after a commit */
    assert_true(file_exists(in_root("new/a")));
    assert_int_equal(newdir_begin(&d, in_root("new"), &e), ERR_STATE);
    assert_non_null(strstr(e.msg, "new"));

    assert_int_equal(newdir_begin(&d, in_root("gone"), &e), OK);
    assert_int_equal(newdir_put(&d, "a", "x", 1, &e), OK);
    newdir_abort(&d);
    assert_int_equal(entries(root), before + 1);

    /* Two at once: the second to finish is refused and loses nothing of the first. */
    assert_int_equal(newdir_begin(&d, in_root("race"), &e), OK);
    assert_int_equal(newdir_begin(&other, in_root("race"), &e), OK);
    assert_int_equal(newdir_put(&d, "first", "x", 1, &e), OK);
    assert_int_equal(newdir_commit(&d, &e), OK);
    assert_int_equal(newdir_commit(&other, &e), ERR_STATE);
    newdir_abort(&other);
    assert_true(file_exists(in_root("race/first")));
    assert_int_equal(entries(root), before + 2);
    assert_int_equal(newdir_begin(&d, "", &e), ERR_INPUT);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shards),
        cmocka_unit_test(refusals),
        cmocka_unit_test(no_room),
        cmocka_unit_test(folders),
    };
    return cmocka_run_group_tests(tests, make_root, remove_root);
}
