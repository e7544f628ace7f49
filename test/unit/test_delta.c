#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "delta_rig.h"
#include "weight/checkpoint.h"
#include "weight/delta.h"
#include "weight/sync.h"
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>

static struct rig rig;

static int set_up(void **state)
{
    (void)state;
    rig_new(&rig);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    rig_drop(rig.root);
    return 0;
}

static const struct rig_delta xor_xxh = {.digest = DIGEST_XXH3_128};
static const struct rig_delta over_adler = {
    .overwrite = true, .digest = DIGEST_ADLER32, .split = true};
static const struct rig_delta xor_bare = {.bare = true, .digest = DIGEST_ADLER32, .split = true};
static const struct rig_delta over_bare = {
    .overwrite = true, .bare = true, .digest = DIGEST_XXH3_128};

static err_t pull_with(const struct sync_options *o, struct sync_result *r, struct err *e)
{
    struct sync *s = NULL;
    struct sync_result none;
    err_t rc = sync_begin(&s, o, e);
    if (rc == OK) rc = sync_pull(s, r ? r : &none, e);
    sync_end(s);
    return rc;
}

static struct sync_options options(int64_t target)
{
    return (struct sync_options){.local_dir = rig.local,
                                 .source_dir = rig.source,
                                 .launch_dir = rig.base,
                                 .target = target,
                                 .threads = 2,
                                 .lock_s = 10};
}

static err_t pull(int64_t target, struct sync_result *r, struct err *e)
{
    struct sync_options o = options(target);
    return pull_with(&o, r, e);
}

static void pull_ok(int64_t target, struct sync_result *r)
{
    struct err e = {0};
    if (pull(target, r, &e) != OK) fail_msg("pull(%d): %s", (int)target, e.msg);
}

/* Every tensor of the folder is that of version v. */
static bool is_version(int v)
{
    struct checkpoint c;
    struct err e;
    bool same = true;
    if (checkpoint_open(&c, rig.local, &e) != OK) return false;
    same = c.n_tensors == RIG_TENSORS;
    for (int t = 0; t < RIG_TENSORS; t++) {
        const struct checkpoint_entry *x = checkpoint_get(&c, rig_tensors[t].name);
        unsigned char *want = rig_data(t, v), *got = mem_alloc(rig_tensors[t].n + 1);
        same = same && x && x->tensor->bytes == rig_tensors[t].n &&
               st_read(x->file, x->tensor, 0, got, rig_tensors[t].n, &e) == OK &&
               memcmp(got, want, rig_tensors[t].n) == 0;
        mem_free(want);
        mem_free(got);
    }
    checkpoint_close(&c);
    return same;
}

static void assert_state(const char *want)
{
    char *text = rig_read(rig.local, ".weight_sync/state.json", NULL);
    if (want == NULL)
        assert_null(text);
    else
        assert_string_equal(text, want);
    mem_free(text);
}

static void test_chain(void **state)
{
    (void)state;
    struct sync_result r;
    pull_ok(0, &r);
    assert_true(is_version(0) && r.changed && r.seed == 0 && r.from == SYNC_NONE);
    assert_state("{\"version\": \"000000\"}");
    rig_publish(&rig, 1, &xor_xxh);
    rig_publish(&rig, 2, &over_adler);
    rig_publish(&rig, 3, &xor_bare);
    rig_publish(&rig, 4, &over_bare);
    pull_ok(1, &r);
    assert_true(is_version(1) && r.deltas == 1 && r.tensors == 2 && r.seed == SYNC_NONE &&
                r.from == 0);
    pull_ok(1, &r);
    assert_true(is_version(1) && !r.changed && r.bytes == 0);
    pull_ok(4, &r);
    assert_true(is_version(4) && r.deltas == 3 && r.tensors == 8);
    assert_state("{\"version\": \"000004\"}");
    /* Older, and 0: from the start again. */
    pull_ok(2, &r);
    assert_true(is_version(2) && r.seed == 0 && r.deltas == 2 && r.from == 4);
    pull_ok(0, &r);
    assert_true(is_version(0) && r.deltas == 0);
    pull_ok(4, &r);
    assert_true(is_version(4));
}

static void test_whole_versions(void **state)
{
    (void)state;
    struct sync_result r;
    struct err e;
    char dir[200];
    rig_publish(&rig, 1, &xor_xxh);
    rig_version(dir, sizeof dir, &rig, 2);
    rig_whole(dir, 2);
    rig_put(dir, "notes.txt", "x", 1);
    rig_publish(&rig, 3, &xor_xxh);
    pull_ok(1, &r);
    rig_put(rig.local, "old.bin", "y", 1);
    pull_ok(3, &r);
    assert_true(is_version(3) && r.seed == 2 && r.deltas == 1);
    char *notes = rig_read(rig.local, "notes.txt", NULL),
         *old = rig_read(rig.local, "old.bin", NULL);
    assert_non_null(notes); /* every file comes, and only those stay */
    assert_null(old);
    mem_free(notes);
    /* No history is needed behind a whole version. */
    rig_version(dir, sizeof dir, &rig, 1);
    rig_drop(dir);
    rig_drop(rig.local);
    pull_ok(3, &r);
    assert_true(is_version(3) && r.from == SYNC_NONE);
    /* Shards without an index are what a delta looks like before it is published. */
    rig_version(dir, sizeof dir, &rig, 4);
    rig_whole(dir, 4);
    snprintf(dir + strlen(dir), sizeof dir - strlen(dir), "/model.safetensors.index.json");
    assert_int_equal(unlink(dir), 0);
    assert_int_equal(pull(4, NULL, &e), ERR_NOTFOUND);
    assert_non_null(strstr(e.msg, "model.safetensors"));
    assert_true(is_version(3));
}

static void test_empty_delta(void **state)
{
    (void)state;
    struct sync_result r;
    char dir[200];
    static const char index[] = "{\"metadata\":{\"version\":1,\"base_version\":0,\"delta_"
                                "encoding\":\"xor\",\"compression_format\":\"zstd\","
                                "\"checksum_format\":\"xxh3-128\"},\"weight_map\":{}}";
    rig_version(dir, sizeof dir, &rig, 1);
    assert_int_equal(mkdir(dir, 0755), 0);
    rig_put(dir, "model.safetensors.index.json", index, sizeof index - 1);
    pull_ok(0, NULL);
    pull_ok(1, &r);
    assert_true(is_version(0) && r.deltas == 1 && r.tensors == 0);
    assert_state("{\"version\": \"000001\"}");
}

/* ---- what is refused ---- */

/* `from` (its first occurrence) becomes `to` in a file of version 1, whose length may change. */
static void edit(const char *name, const char *from, const char *to)
{
    char dir[200];
    size_t n = 0, k = strlen(from);
    rig_version(dir, sizeof dir, &rig, 1);
    char *text = rig_read(dir, name, &n);
    char *at = text ? memmem(text, n, from, k) : NULL;
    if (at == NULL) fail_msg("%s has no %s", name, from);
    struct buf out = {0};
    size_t before = (size_t)(at - text);
    assert_true(buf_put(&out, text, before) && buf_puts(&out, to) &&
                buf_put(&out, at + k, n - before - k));
    if (strstr(name, ".safetensors") && strcmp(name, "model.safetensors.index.json") != 0) {
        uint64_t len;
        memcpy(&len, out.data, 8);
        len = len + strlen(to) - k;
        memcpy(out.data, &len, 8);
    }
    rig_put(dir, name, out.data, out.len);
    buf_release(&out);
    mem_free(text);
}

#define INDEX "model.safetensors.index.json"
#define SHARD "model-00000-of-00001.safetensors"

static void test_refused_fields(void **state)
{
    (void)state;
    static const struct {
        const char *file, *from, *to, *says;
    } rows[] = {
        {INDEX, "\"000001\"", "\"one\"", "metadata.version"},
        {INDEX, "\"000001\"", "-1", "metadata.version"},
        {INDEX, "\"000001\"", "1e9", "metadata.version"},
        {INDEX, "\"000001\"", "1000000000", "metadata.version"},
        {INDEX, "\"000001\"", "\"\"", "metadata.version"},
        {INDEX, "\"000001\"", "null", "metadata.version"},
        {INDEX, "\"000001\"", "\"000002\"", "the folder's name says 1"},
        {INDEX, "\"000000\"", "\"000002\"", "metadata.base_version: 2; the checkpoint is at 0"},
        {INDEX, "\"base_version\"", "\"base\"", "metadata.base_version: missing"},
        {INDEX, "\"xor\"", "\"xor_sparse\"", "metadata.delta_encoding: \"xor_sparse\""},
        {INDEX, "\"xor\"", "5", "metadata.delta_encoding: not a string"},
        {INDEX, "\"xor\"", "\"overwrite\"", "tensor a"},
        {INDEX, "\"zstd\"", "\"lz4\"", "metadata.compression_format: \"lz4\""},
        {INDEX, "\"compression_format\"", "\"compression\"",
         "metadata.compression_format: missing"},
        {INDEX, "\"xxh3-128\"", "\"blake3\"", "metadata.checksum_format: \"blake3\""},
        {INDEX, "\"xxh3-128\"", "\"sha256\"", "metadata.checksum_format: \"sha256\""},
        {INDEX, "\"xxh3-128\"", "\"adler32\"", "adler32 of the result"},
        {INDEX, "\"checksum_format\"", "\"checksum\"", "metadata.checksum_format: missing"},
        {INDEX, "\"weight_map\"", "\"weights\"", "weight_map: missing"},
        {INDEX, "\"weight_map\": {", "\"weight_map\": [], \"x\": {", "weight_map: no object"},
        {INDEX, SHARD, "../base/" SHARD, "is not a plain file name"},
        {INDEX, SHARD, "..", "is not a plain file name"},
        {INDEX, SHARD, ".hidden", "is not a plain file name"},
        {INDEX, SHARD, "", "is not a plain file name"},
        {INDEX, "\"" SHARD "\"", "7", "is not a plain file name"},
        {INDEX, SHARD, "other.safetensors", "tensor a: the index does not list it"},
        {INDEX, "\"a\":", "\"z\":", "tensor a: the index does not list it"},
        {INDEX, "\"a\":", "\"a0\":\"" SHARD "\",\"a\":",
         "tensor a0: the index lists it, the file lacks it"},
        {INDEX, "{\"metadata\"", "[\"metadata\"", "line 1"},
        {INDEX, "{\"metadata\": {", "{\"metadata\": {\"version\": 1, ", "line 1"}, /* twice */
        {SHARD, "\"a\":\"", "\"q\":\"", "tensor a: __metadata__ has no checksum"},
        {SHARD, "\"__metadata__\":{\"a\":\"", "\"__metadata__\":{\"a\":\"0",
         "xxh3-128 of the result"},
        {SHARD, "\"dtype\":\"U8\"", "\"dtype\":\"I8\"", "I8 of 1 dimensions"},
        {SHARD, "\"shape\":[", "\"shape\":[1,", "U8 of 2 dimensions"},
        {SHARD, "\"dtype\":\"U8\"", "\"dtype\":\"Q8\"", "is unknown"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        struct err e = {0};
        rig_drop(rig.root);
        rig_new(&rig);
        pull_ok(0, NULL);
        rig_publish(&rig, 1, &xor_xxh);
        edit(rows[i].file, rows[i].from, rows[i].to);
        err_t rc = pull(1, NULL, &e);
        if (rc == OK || !strstr(e.msg, rows[i].says))
            fail_msg("row %zu: %s: %d %s", i, rows[i].to, rc, e.msg);
        assert_true(is_version(0));
        assert_state("{\"version\": \"000000\"}");
        /* and nothing of it is in the way of a good one */
        char dir[200];
        rig_version(dir, sizeof dir, &rig, 1);
        rig_drop(dir);
        rig_publish(&rig, 1, &over_adler);
        pull_ok(1, NULL);
        assert_true(is_version(1));
    }
}

static void put_frame(const void *frame, size_t n, bool overwrite, const char *name)
{
    char dir[200], header[300], hex[DIGEST_HEX];
    struct buf index = {0};
    unsigned char *now = rig_data(2, 1);
    digest_of(DIGEST_XXH3_128, now, rig_tensors[2].n, hex);
    mem_free(now);
    rig_version(dir, sizeof dir, &rig, 1);
    rig_drop(dir);
    assert_int_equal(mkdir(dir, 0755), 0);
    snprintf(header, sizeof header,
             "{\"__metadata__\":{\"%s\":\"%s\"},\"%s\":{\"dtype\":\"U8\",\"shape\":[%zu],\"data_"
             "offsets\":[0,%zu]}}",
             name, hex, name, n, n);
    rig_put_st(dir, SHARD, header, frame, n);
    buf_printf(&index,
               "{\"metadata\":{\"version\":1,\"base_version\":0,\"delta_encoding\":\"%s\","
               "\"compression_format\":\"zstd\","
               "\"checksum_format\":\"xxh3-128\"},\"weight_map\":{\"%s\":\"" SHARD "\"}}",
               overwrite ? "overwrite" : "xor", name);
    rig_put(dir, INDEX, index.data, index.len);
    buf_release(&index);
}

/* Frames of tensor c, 400 bytes, that a sound delta cannot hold. */
static void test_refused_frames(void **state)
{
    (void)state;
    struct buf good = {0}, frame = {0};
    struct err e = {0};
    uint32_t words[500];
    pull_ok(0, NULL);
    const struct {
        int kind;
        bool overwrite, bare;
        const char *says;
    } rows[] = {
        {0, false, false, "the frame declares 399 bytes, the change needs 400"},
        {0, false, true, "the frame ends before the change does"},
        {1, false, false, "the frame declares 401 bytes"},
        {1, false, true, "the frame goes on after the change"},
        {2, false, false, "bytes follow the frame"},
        {3, false, false, "the frame is cut"},
        {4, false, false, "zstd"},
        {5, false, false, "cut"},
        {6, false, false, "xxh3-128 of the result"},
        {10, true, false, "401 changes in a tensor of 400 bytes"},
        {11, true, false, "position 400"},
        {12, true, false, "they must ascend"},
        {13, true, false, "they must ascend"},
        {14, true, false, "the frame declares"},
        {14, true, true, "the frame ends before the change does"},
        {15, true, false, "the frame declares"},
        {15, true, true, "the frame goes on after the change"},
        {16, true, false, "xxh3-128 of the result"},
        {17, true, false, "the frame ends before the change does"},
        {18, true, false, "4294967295 changes"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        buf_clear(&good);
        buf_clear(&frame);
        memset(words, 0, sizeof words);
        size_t n = 0;
        switch (rows[i].kind) { /* what the frame holds */
        case 0: n = 399; break;
        case 1: n = 401; break;
        case 10: words[0] = 401, n = 4 + 5 * 401; break;
        case 11: words[0] = 1, words[1] = 400, n = 9; break;
        case 12: words[0] = 2, words[1] = 9, words[2] = 8, n = 14; break;
        case 13: words[0] = 2, words[1] = 9, words[2] = 9, n = 14; break;
        case 14: words[0] = 2, words[2] = 9, n = 13; break;
        case 15: words[0] = 2, words[2] = 9, n = 15; break;
        case 16: words[0] = 1, words[1] = 399, n = 9; break;
        case 17: n = 3; break;
        case 18: words[0] = UINT32_MAX, n = 1000; break;
        default: n = 400; break;
        }
        assert_true(n <= sizeof words || rows[i].kind == 10);
        assert_true(buf_put(&good, words, n < sizeof words ? n : sizeof words));
        while (good.len < n)
            assert_true(buf_putc(&good, 0));
        rig_frame(&frame, good.data, good.len, rows[i].bare);
        switch (rows[i].kind) { /* what is done to it */
        case 2: assert_true(buf_puts(&frame, "x")); break;
        case 3: frame.len -= 2; break;
        case 4: frame.data[0] ^= 1; break;
        case 5: frame.len = 0; break;
        default: break;
        }
        put_frame(frame.data, frame.len, rows[i].overwrite, "c");
        err_t rc = pull(1, NULL, &e);
        if (rc == OK || !strstr(e.msg, rows[i].says) || !strstr(e.msg, "tensor c"))
            fail_msg("row %zu (%s): %d %s", i, rows[i].says, rc, e.msg);
        assert_true(is_version(0));
    }
    put_frame(frame.data, frame.len, false, "nobody");
    assert_int_equal(pull(1, NULL, &e), ERR_INPUT);
    assert_non_null(strstr(e.msg, "the checkpoint has none of this name"));
    buf_release(&good);
    buf_release(&frame);
}

static void expect(const struct sync_options *o, err_t want, const char *says)
{
    struct err e = {0};
    err_t rc = pull_with(o, NULL, &e);
    if (rc != want || !strstr(e.msg, says))
        fail_msg("%d, not %d with %s: %s", rc, want, says, e.msg);
}

static void test_refused_calls(void **state)
{
    (void)state;
    char dir[200];
    struct sync_options o = options(1);
    o.local_dir = "relative/local";
    expect(&o, ERR_INPUT, "local_checkpoint_dir: \"relative/local\"; must be an absolute path");
    o = options(1);
    o.source_dir = "source";
    expect(&o, ERR_INPUT, "source_dir: \"source\"; must be an absolute path");
    o = options(-1);
    expect(&o, ERR_INPUT, "target_version: -1");
    o = options(1000000000);
    expect(&o, ERR_INPUT, "target_version: 1000000000");
    o = options(1);
    expect(&o, ERR_NOTFOUND, "weight_v000001: no such folder");
    o = options(0);
    o.launch_dir = "/nowhere";
    expect(&o, ERR_NOTFOUND, "/nowhere");
    o = options(0);
    o.launch_dir = o.local_dir = rig.base;
    expect(&o, ERR_INPUT, "its own seed");
    /* A folder of something else keeps its files. */
    snprintf(dir, sizeof dir, "%s/home", rig.root);
    assert_int_equal(mkdir(dir, 0755), 0);
    rig_put(dir, "thesis.tex", "x", 1);
    o = options(0);
    o.local_dir = dir;
    expect(&o, ERR_STATE, "thesis.tex");
    char *kept = rig_read(dir, "thesis.tex", NULL);
    assert_non_null(kept);
    mem_free(kept);
    /* A gap in the stream, and a base that is not whole. */
    pull_ok(0, NULL);
    rig_publish(&rig, 2, &xor_xxh);
    o = options(2);
    expect(&o, ERR_NOTFOUND, "weight_v000001");
    assert_true(is_version(0));
    snprintf(dir, sizeof dir, "%s/model-00002-of-00002.safetensors", rig.base);
    assert_int_equal(unlink(dir), 0);
    o = options(0);
    expect(&o, ERR_NOTFOUND, "model-00002-of-00002.safetensors");
    assert_true(is_version(0));
}

/* The local copy was changed by somebody: the checksum says so, and version 0 heals it. */
static void test_other_base(void **state)
{
    (void)state;
    struct err e = {0};
    size_t n = 0;
    pull_ok(0, NULL);
    rig_publish(&rig, 1, &xor_xxh);
    char *file = rig_read(rig.local, rig_tensors[0].file, &n);
    file[n - 200] ^= 1;
    rig_put(rig.local, rig_tensors[0].file, file, n);
    mem_free(file);
    assert_int_equal(pull(1, NULL, &e), ERR_INPUT);
    assert_non_null(strstr(e.msg, "another base"));
    pull_ok(0, NULL);
    pull_ok(1, NULL);
    assert_true(is_version(1));
}

static void test_bad_state(void **state)
{
    (void)state;
    static const char *const texts[] = {"", "{", "[]", "{\"version\": -1}", "{\"version\": \"x\"}"};
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        struct err e = {0};
        pull_ok(0, NULL);
        rig_put(rig.local, ".weight_sync/state.json", texts[i], strlen(texts[i]));
        assert_int_equal(pull(1, NULL, &e), ERR_STATE);
        assert_non_null(strstr(e.msg, "state.json"));
        assert_non_null(strstr(e.msg, "pull version 0"));
        pull_ok(0, NULL);
        assert_state("{\"version\": \"000000\"}");
    }
    rig_put(rig.local, ".weight_sync/commit.json", "{]", 2);
    struct checkpoint c;
    struct err e = {0};
    assert_int_equal(checkpoint_open(&c, rig.local, &e), ERR_STATE);
    assert_non_null(strstr(e.msg, "commit.json"));
    assert_int_equal(pull(1, NULL, &e), ERR_STATE);
    static const char out[] = "{\"from\":0,\"version\":1,\"files\":[\"../x\"],\"removed\":[]}";
    rig_put(rig.local, ".weight_sync/commit.json", out, sizeof out - 1);
    assert_int_equal(pull(1, NULL, &e), ERR_STATE);
    assert_non_null(strstr(e.msg, "not a plain file name"));
    pull_ok(0, NULL);
    assert_true(is_version(0));
}

/* ---- crashes ---- */

struct fuse {
    int left;
};

static err_t burn(void *ctx, const char *what, struct err *e)
{
    struct fuse *f = ctx;
    (void)what;
    (void)e;
    if (f->left-- == 0) _exit(9); /* no clean-up of any kind */
    return OK;
}

/* A pull in a process that ends at its k-th step; true: it ended before. */
static bool crash_at(int64_t target, int k)
{
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        struct fuse f = {k};
        struct sync_options o = options(target);
        struct err e;
        o.threads = 1;
        o.steps = (struct sync_steps){burn, &f};
        _exit(pull_with(&o, NULL, &e) == OK ? 0 : 1);
    }
    int status = 0;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status) && (WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == 9));
    return WEXITSTATUS(status) == 9;
}

/* Every file under its final name is wholly that of version a or of version b. */
static void assert_whole_files(const char *a, const char *b)
{
    static const char *const names[] = {"model-00001-of-00002.safetensors",
                                        "model-00002-of-00002.safetensors"};
    for (int i = 0; i < 2; i++) {
        size_t n = 0, na = 0, nb = 0;
        char *got = rig_read(rig.local, names[i], &n), *x = rig_read(a, names[i], &na),
             *y = rig_read(b, names[i], &nb);
        if (got)
            assert_true((n == na && memcmp(got, x, n) == 0) || (n == nb && memcmp(got, y, n) == 0));
        mem_free(got);
        mem_free(x);
        mem_free(y);
    }
}

static void test_crash_points(void **state)
{
    (void)state;
    char v2[200], v4[200];
    int points = 0, refused = 0, old = 0, new = 0;
    rig_publish(&rig, 1, &xor_xxh);
    rig_publish(&rig, 2, &over_adler);
    rig_publish(&rig, 3, &xor_bare);
    rig_publish(&rig, 4, &over_adler);
    snprintf(v2, sizeof v2, "%s/v2", rig.root);
    rig_whole(v2, 2);
    snprintf(v4, sizeof v4, "%s/v4", rig.root);
    rig_whole(v4, 4);
    for (int k = 0;; k++) {
        rig_drop(rig.local);
        pull_ok(2, NULL);
        if (!crash_at(4, k)) break;
        points++;
        assert_whole_files(v2, v4);
        struct checkpoint c;
        struct err e = {0};
        if (checkpoint_open(&c, rig.local, &e) == OK) {
            checkpoint_close(&c);
            bool is_old = is_version(2);
            assert_true(is_old || is_version(4));
            if (is_old)
                old++;
            else
                new ++;
        } else {
            assert_int_equal(e.code, ERR_STATE); /* decided, not finished */
            refused++;
        }
        /* The next pull, to whatever version, first finishes what was decided. */
        pull_ok(k % 2 ? 4 : 2, NULL);
        assert_true(is_version(k % 2 ? 4 : 2));
    }
    assert_true(is_version(4) && points >= 12 && refused >= 3 && old >= 6);
    (void)new;
}

/* The first pull, into a folder that is not there: nothing, or the whole of it. */
static void test_crash_points_of_a_seed(void **state)
{
    (void)state;
    int points = 0;
    rig_publish(&rig, 1, &xor_xxh);
    for (int k = 0;; k++, points++) {
        rig_drop(rig.local);
        if (!crash_at(1, k)) break;
        struct checkpoint c;
        struct err e = {0};
        if (checkpoint_open(&c, rig.local, &e) == OK) {
            checkpoint_close(&c);
            assert_true(is_version(1));
        }
        pull_ok(1, NULL);
        assert_true(is_version(1));
    }
    assert_true(points >= 14);
}

static err_t stop_at(void *ctx, const char *what, struct err *e)
{
    struct fuse *f = ctx;
    (void)what;
    return f->left-- == 0 ? err_set(e, ERR_BUSY, "stopped") : OK;
}

/* A pull that is told to stop: before the decision it does, and nothing has happened; after it, it ends. */
static void test_stop(void **state)
{
    (void)state;
    int stopped = 0;
    rig_publish(&rig, 1, &xor_xxh);
    pull_ok(0, NULL);
    for (int k = 0; k < 40; k++) {
        struct fuse f = {k};
        struct sync_options o = options(1);
        struct err e = {0};
        o.steps = (struct sync_steps){stop_at, &f};
        o.threads = 1;
        err_t rc = pull_with(&o, NULL, &e);
        if (rc == OK) break;
        assert_int_equal(rc, ERR_BUSY);
        assert_true(is_version(0));
        stopped++;
    }
    assert_true(stopped >= 5 && is_version(1));
}

static void test_no_memory(void **state)
{
    (void)state;
    int failed = 0;
    rig_publish(&rig, 1, &xor_xxh);
    rig_publish(&rig, 2, &over_adler);
    for (long n = 1;; n++) {
        struct err e = {0};
        struct sync_options o = options(2);
        o.threads = 1;
        rig_drop(rig.local);
        pull_ok(1, NULL);
        mem_fault_at(n);
        err_t rc = pull_with(&o, NULL, &e);
        if (mem_fault_at(0) != 0) {
            assert_int_equal(rc, OK);
            break;
        }
        failed++;
        if (rc == OK) continue;
        assert_int_equal(e.code, rc);
        if (strstr(e.msg, "is decided")) pull_ok(2, NULL);
        assert_true(is_version(1) || is_version(2));
    }
    assert_true(failed > 20 && is_version(2));
}

/* The disk takes no file above 200,000 bytes: an error of the system, and all is as it was. */
static void test_full_disk(void **state)
{
    (void)state;
    rig_publish(&rig, 1, &xor_xxh);
    pull_ok(0, NULL);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        struct rlimit limit = {200000, 200000};
        struct err e = {0};
        signal(SIGXFSZ, SIG_IGN);
        if (setrlimit(RLIMIT_FSIZE, &limit) != 0) _exit(2);
        _exit(pull(1, NULL, &e) == ERR_IO && strstr(e.msg, strerror(EFBIG)) ? 0 : 1);
    }
    int status = 0;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    assert_true(is_version(0));
    pull_ok(1, NULL);
    assert_true(is_version(1));
}

/* ---- the lock ---- */

static void test_lock(void **state)
{
    (void)state;
    char path[200];
    struct sync_options o = options(1);
    rig_publish(&rig, 1, &xor_xxh);
    pull_ok(0, NULL);
    snprintf(path, sizeof path, "%s/.weight_sync/lock", rig.local);
    int fd = open(path, O_RDWR);
    assert_true(fd >= 0 && flock(fd, LOCK_EX) == 0);
    o.lock_s = 0.1;
    expect(&o, ERR_BUSY, "held by another pull");
    pid_t child = fork(); /* it waits for us, then finds the work to do */
    assert_true(child >= 0);
    if (child == 0) {
        close(fd);
        struct err e;
        _exit(pull(1, NULL, &e) == OK ? 0 : 1);
    }
    nanosleep(&(struct timespec){.tv_nsec = 200000000}, NULL);
    assert_true(is_version(0));
    close(fd);
    int status = 0;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    assert_true(is_version(1));
}

/* Several servers of one host are asked at once, as a trainer does: one applies, xor exactly once, the others see it. */
static void test_many_at_once(void **state)
{
    (void)state;
    pid_t child[6];
    int changed = 0;
    rig_publish(&rig, 1, &xor_xxh);
    rig_publish(&rig, 2, &xor_xxh);
    for (int i = 0; i < 6; i++) {
        assert_true((child[i] = fork()) >= 0);
        if (child[i] == 0) {
            struct sync_result r;
            struct err e;
            _exit(pull(2, &r, &e) == OK ? r.changed : 7);
        }
    }
    for (int i = 0; i < 6; i++) {
        int status = 0;
        assert_int_equal(waitpid(child[i], &status, 0), child[i]);
        assert_true(WIFEXITED(status) && WEXITSTATUS(status) <= 1);
        changed += WEXITSTATUS(status);
    }
    assert_int_equal(changed, 1);
    assert_true(is_version(2));
}

#define T(f) cmocka_unit_test_setup_teardown(f, set_up, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        T(test_chain),          T(test_whole_versions),
        T(test_empty_delta),    T(test_refused_fields),
        T(test_refused_frames), T(test_refused_calls),
        T(test_other_base),     T(test_bad_state),
        T(test_crash_points),   T(test_crash_points_of_a_seed),
        T(test_stop),           T(test_no_memory),
        T(test_full_disk),      T(test_lock),
        T(test_many_at_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
