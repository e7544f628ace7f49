#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/mem.h"
#include "weight/checkpoint.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char dir[64];

static int set_up(void **state)
{
    (void)state;
    snprintf(dir, sizeof dir, "/tmp/moult-c-XXXXXX");
    return mkdtemp(dir) ? 0 : -1;
}

static int tear_down(void **state)
{
    (void)state;
    static const char *const files[] = {
        "a.safetensors",          "b.safetensors",     "model.safetensors.index.json",
        "models--o--m/refs/main", "models--o--m/refs", "models--o--m/snapshots/abc",
        "models--o--m/snapshots", "models--o--m"};
    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++) {
        char path[256];
        snprintf(path, sizeof path, "%s/%s", dir, files[i]);
        remove(path);
    }
    return rmdir(dir);
}

static void put(const char *name, const char *text, size_t n)
{
    char path[256];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    fwrite(text, 1, n, f);
    fclose(f);
}

/* A file with one U8 tensor. */
static void put_tensor(const char *file, const char *tensor)
{
    char d[256];
    snprintf(d + 8, sizeof d - 8,
             "{\"%s\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}x", tensor);
    uint64_t n = strlen(d + 8) - 1;
    memcpy(d, &n, 8);
    put(file, d, n + 9);
}

static void put_index(const char *map)
{
    char d[512];
    snprintf(d, sizeof d, "{\"metadata\":{},\"weight_map\":%s}", map);
    put("model.safetensors.index.json", d, strlen(d));
}

static void refused(err_t rc, const char *says)
{
    struct checkpoint c;
    struct err e = {0};
    assert_int_equal(checkpoint_open(&c, dir, &e), rc);
    if (!strstr(e.msg, says)) fail_msg("\"%s\" lacks \"%s\"", e.msg, says);
}

static void without_index(void **state)
{
    (void)state;
    struct checkpoint c;
    struct err e = {0};
    refused(ERR_NOTFOUND, "no *.safetensors");
    put_tensor("a.safetensors", "t2");
    put_tensor("b.safetensors", "t1");
    assert_int_equal(checkpoint_open(&c, dir, &e), OK);
    assert_int_equal(c.n_tensors, 2);
    assert_string_equal(c.entries[0].tensor->name, "t1");
    assert_non_null(checkpoint_get(&c, "t2"));
    assert_null(checkpoint_get(&c, "t3"));
    checkpoint_close(&c);
    put_tensor("b.safetensors", "t2");
    refused(ERR_INPUT, "a.safetensors and "); /* C05 */
}

static void with_index(void **state)
{
    (void)state;
    struct checkpoint c;
    struct err e = {0};
    put_tensor("a.safetensors", "t1");
    put_index("{\"t1\":\"a.safetensors\",\"t2\":\"x1.safetensors\",\"t3\":\"x2.safetensors\"}");
    refused(ERR_NOTFOUND, "x1.safetensors, x2.safetensors"); /* C01 */
    put_index("{\"t1\":\"a.safetensors\",\"t2\":\"a.safetensors\"}");
    refused(ERR_INPUT, "tensor t2"); /* C03 */
    put_index("{\"t1\":\"../a.safetensors\"}");
    refused(ERR_INPUT, "plain file name");
    put_index("{\"t1\":7}");
    refused(ERR_INPUT, "plain file name");
    put_index("[]");
    refused(ERR_INPUT, "weight_map");
    put_index("{\"t1\":\"a.safetensors\"}");
    put("b.safetensors", "stray", 5); /* C05: never opened */
    assert_int_equal(checkpoint_open(&c, dir, &e), OK);
    assert_int_equal(c.n_files, 1);
    checkpoint_close(&c);
}

static void sub(const char *name)
{
    char path[256];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    assert_int_equal(mkdir(path, 0700), 0);
}

static void hub_cache(void **state)
{
    (void)state;
    char *found = NULL;
    struct err e = {0};
    setenv("HF_HUB_CACHE", dir, 1);
    assert_int_equal(checkpoint_find(&found, "o/m", &e), ERR_NOTFOUND);
    assert_non_null(strstr(e.msg, dir));
    sub("models--o--m");
    sub("models--o--m/refs");
    sub("models--o--m/snapshots");
    sub("models--o--m/snapshots/abc");
    put("models--o--m/refs/main", "abc\n", 4);
    assert_int_equal(checkpoint_find(&found, "o/m", &e), OK);
    assert_non_null(strstr(found, "models--o--m/snapshots/abc"));
    mem_free(found);
    put("models--o--m/refs/main", "../..", 5);
    assert_int_equal(checkpoint_find(&found, "o/m", &e), ERR_NOTFOUND);
    assert_int_equal(checkpoint_find(&found, "../o", &e), ERR_NOTFOUND);
    assert_int_equal(checkpoint_find(&found, dir, &e), OK);
    assert_string_equal(found, dir);
    mem_free(found);
    unsetenv("HF_HUB_CACHE");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(without_index, set_up, tear_down),
        cmocka_unit_test_setup_teardown(with_index, set_up, tear_down),
        cmocka_unit_test_setup_teardown(hub_cache, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
