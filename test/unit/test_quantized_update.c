/* test_quantized_update.c - updates between quantized checkpoints, and BF16 ones quantized while
 * they are staged: always the bytes of a fresh start. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/file.h"
#include "cli/commands.h"
#include "folder_store.h"
#include "spell_model.h"

#define FINAL  "models/tiny-moe"
#define EARLY  "models/tiny-moe-early"
#define SHARED "../shared/models/tiny-moe/"

static const char *const folders[] = {SHARED "fp8", SHARED "nvfp4", SHARED "mxfp8-last1-bf16"};

static struct store *must(const char *dir, format_t encode)
{
    struct store *s = NULL;
    struct config c;
    struct err e = {0};
    if (folder_store(&s, &c, dir, encode, &e) != OK) fail_msg("%s: %s", dir, e.msg);
    return s;
}

static void must_update(struct store *s, const char *dir, int threads)
{
    struct err e = {0};
    if (update_from(s, dir, threads, &e) != OK) fail_msg("%s: %s", dir, e.msg);
}

static void need(const char *dir)
{
    if (file_is_dir(dir)) return;
    printf("%s is absent\n", dir);
    skip();
}

/* A folder with the same files, some bytes of the weights changed. */
static void perturbed(char *to, const char *from)
{
    static const char *const names[] = {"config.json", "hf_quant_config.json"};
    struct buf b = {0}, path = {0};
    uint64_t header;
    assert_non_null(mkdtemp(to));
    assert_true(buf_printf(&path, "%s/model.safetensors", from));
    assert_int_equal(file_read(&b, path.data, BUF_MAX, NULL), OK);
    memcpy(&header, b.data, sizeof header);
    size_t n = 0;
    for (size_t i = 8 + (size_t)header + 4001; i < b.len; i += 4001, n++)
        if (i % 2 == 0 && (b.data[i] & 0x7f) < 0x7e) /* no NaN of E4M3 */
            b.data[i] ^= 1; /* the last bit of a mantissa, or of half a byte */
    assert_true(n > 1000);
    file_put(to, "m.safetensors", b.data, b.len);
    for (size_t i = 0; i < 2; i++) {
        buf_release(&b);
        buf_clear(&path);
        buf_printf(&path, "%s/%s", from, names[i]);
        if (file_read(&b, path.data, BUF_MAX, NULL) == OK) file_put(to, names[i], b.data, b.len);
    }
    buf_release(&b);
    buf_release(&path);
}

static void in_place_equals_fresh(void **state)
{
    (void)state;
    need(folders[0]);
    for (size_t i = 0; i < 3; i++) {
        char dir[] = "/tmp/moult-q-XXXXXX";
        perturbed(dir, folders[i]);
        struct store *a = must(folders[i], FORMAT_COUNT), *b = must(dir, FORMAT_COUNT);
        uint64_t ha = store_hash(a), hb = store_hash(b);
        assert_true(ha != hb);
        must_update(a, dir, 3);
        assert_true(store_hash(a) == hb);
        must_update(a, folders[i], 1);
        assert_true(store_hash(a) == ha);
        folder_store_free(a);
        folder_store_free(b);
        dir_drop(dir);
    }
}

/* Another format is refused by name, from and to each folder. */
static void format_changes(void **state)
{
    (void)state;
    static const char *const dirs[] = {SHARED "fp8", SHARED "nvfp4", SHARED "mxfp8-last1-bf16",
                                       FINAL};
    static const char *const names[] = {"fp8-block", "nvfp4", "mxfp8", "bf16"};
    need(folders[0]);
    for (size_t i = 0; i < 4; i++) {
        struct store *s = must(dirs[i], FORMAT_COUNT);
        uint64_t h = store_hash(s);
        for (size_t j = 0; j < 4; j++) {
            struct err e = {0};
            char says[128];
            if (i == j) continue;
            snprintf(says, sizeof says, "model.layers.0.self_attn.q_proj: %s -> %s", names[i],
                     names[j]);
            assert_int_equal(update_from(s, dirs[j], 2, &e), ERR_STATE);
            assert_string_equal(e.msg, says);
            assert_true(store_hash(s) == h && store_epoch(s) == 1);
        }
        folder_store_free(s);
    }
}

static void resident_bytes(void **state)
{
    (void)state;
    need(folders[0]);
    for (size_t i = 0; i < 3; i++) {
        struct checkpoint c;
        struct err e = {0};
        uint64_t stored = 0;
        struct store *s = must(folders[i], FORMAT_COUNT);
        assert_int_equal(checkpoint_open(&c, folders[i], &e), OK);
        for (size_t k = 0; k < c.n_tensors; k++)
            stored += c.entries[k].tensor->bytes;
        assert_true((double)store_bytes(s) <= 1.02 * (double)stored);
        assert_true((double)store_bytes(s) > 0.98 * (double)stored);
        checkpoint_close(&c);
        folder_store_free(s);
    }
}

/* --quantization F == moult quantize --format F, then loading; updates from either too. */
static void encode_equals_quantize(void **state)
{
    (void)state;
    need(FINAL);
    for (int f = FORMAT_BF16 + 1; f < FORMAT_COUNT; f++) {
        char parent[] = "/tmp/moult-q-XXXXXX", dir[64], cmd[128];
        assert_non_null(mkdtemp(parent));
        snprintf(dir, sizeof dir, "%s/x", parent);
        char from[] = FINAL, flag[] = "--format", name[16];
        snprintf(name, sizeof name, "%s", formats[f].name);
        char *argv[] = {from, dir, flag, name, NULL};
        assert_int_equal(cmd_quantize(4, argv), 0);
        struct store *stored = must(dir, FORMAT_COUNT), *fresh = must(FINAL, (format_t)f);
        struct store *moved = must(EARLY, (format_t)f);
        assert_true(store_hash(fresh) == store_hash(stored));
        assert_true(store_hash(moved) != store_hash(stored));
        assert_true(store_bytes(fresh) == store_bytes(stored));
        must_update(moved, FINAL, 3); /* BF16, encoded while staged */
        assert_true(store_hash(moved) == store_hash(stored));
        must_update(moved, EARLY, 1);
        assert_true(store_hash(moved) != store_hash(stored));
        must_update(moved, dir, 2); /* encoded before */
        assert_true(store_hash(moved) == store_hash(stored));
        folder_store_free(stored);
        folder_store_free(fresh);
        folder_store_free(moved);
        snprintf(cmd, sizeof cmd, "rm -rf %s", parent);
        assert_int_equal(system(cmd), 0);
    }
}

/* The arrangement of experts does not matter to the encoder, nor does F32. */
static void encode_every_spelling(void **state)
{
    (void)state;
    struct tiny t;
    uint64_t want[FORMAT_COUNT] = {0};
    tiny_new(&t, FORMAT_BF16, 96, 144); /* odd blocks */
    for (size_t i = 0; i < N_SPELLS && spells[i].format == FORMAT_BF16; i++) {
        char dir[] = "/tmp/moult-q-XXXXXX";
        assert_non_null(mkdtemp(dir));
        tiny_write(&t, dir, &spells[i], NULL);
        for (int f = FORMAT_BF16 + 1; f < FORMAT_COUNT; f++) {
            struct store *s = must(dir, (format_t)f);
            if (i == 0) want[f] = store_hash(s);
            if (store_hash(s) != want[f]) fail_msg("%s, %s", spells[i].name, formats[f].name);
            folder_store_free(s);
        }
        dir_drop(dir);
    }
    tiny_free(&t);
}

/* A value that is not finite is refused while it is encoded, and a quantized checkpoint is not
 * quantized again. */
static void encode_refuses(void **state)
{
    (void)state;
    struct tiny t;
    struct err e = {0};
    char ok[] = "/tmp/moult-q-XXXXXX", bad[] = "/tmp/moult-q-XXXXXX";
    tiny_new(&t, FORMAT_BF16, 64, 128);
    assert_non_null(mkdtemp(ok));
    assert_non_null(mkdtemp(bad));
    tiny_write(&t, ok, &spells[0], NULL);
    for (size_t i = 0; i < t.n; i++)
        if (strstr(t.specs[i].name, "layers.1.mlp.experts.3.up_proj")) t.w[i].bf16[700] = 0x7f80;
    tiny_write(&t, bad, &spells[0], NULL);
    for (int f = FORMAT_BF16 + 1; f < FORMAT_COUNT; f++) {
        struct store *s = must(ok, (format_t)f), *other = NULL;
        struct config c;
        uint64_t h = store_hash(s);
        assert_int_equal(update_from(s, bad, 2, &e), ERR_INPUT);
        assert_non_null(strstr(e.msg, "experts.3.up_proj.weight: element 700 is not finite"));
        assert_true(store_hash(s) == h && store_epoch(s) == 1);
        folder_store_free(s);
        if (file_is_dir(folders[0]) && f != FORMAT_FP8_BLOCK) {
            assert_int_equal(folder_store(&other, &c, folders[0], (format_t)f, &e), ERR_INPUT);
            assert_non_null(strstr(e.msg, "q_proj is fp8-block"));
        }
    }
    dir_drop(ok);
    dir_drop(bad);
    tiny_free(&t);
}

/* A start with --quantization would serve a partly quantized checkpoint as it is; so an update may
 * not encode the part that is left in BF16. */
static void encode_not_partly(void **state)
{
    (void)state;
    struct err e = {0};
    need(folders[2]);
    struct store *s = must(FINAL, FORMAT_MXFP8), *fresh = must(folders[2], FORMAT_MXFP8);
    uint64_t h = store_hash(s);
    assert_int_equal(store_spec(fresh, store_slots(fresh) - 1)->shape.format, FORMAT_BF16);
    assert_int_equal(update_from(s, folders[2], 2, &e), ERR_STATE);
    assert_string_equal(e.msg, "model.layers.2.self_attn.q_proj: mxfp8 -> bf16");
    assert_true(store_hash(s) == h);
    folder_store_free(s);
    folder_store_free(fresh);
}

static void survives_faults(void **state)
{
    (void)state;
    struct tiny t;
    struct err e = {0};
    static const struct {
        format_t stored, encode;
    } cases[] = {{FORMAT_NVFP4, FORMAT_COUNT}, {FORMAT_BF16, FORMAT_FP8_BLOCK}};
    for (size_t k = 0; k < 2; k++) {
        char dir[] = "/tmp/moult-q-XXXXXX";
        tiny_new(&t, cases[k].stored, 64, 128);
        assert_non_null(mkdtemp(dir));
        tiny_write(&t, dir, spell_of(cases[k].stored), NULL);
        struct store *s = must(dir, cases[k].encode);
        uint64_t h = store_hash(s);
        long i = 1;
        for (bool reached = true; reached; i++) { /* some it does without */
            mem_fault_at(i);
            err_t rc = update_from(s, dir, 1, &e);
            reached = mem_fault_at(0) == 0;
            assert_true(store_hash(s) == h && (rc == OK || reached));
            if (rc != OK) assert_int_equal(rc, ERR_NOMEM);
            assert_true(i < 2000);
        }
        assert_true(i > 10);
        folder_store_free(s);
        dir_drop(dir);
        tiny_free(&t);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(in_place_equals_fresh), cmocka_unit_test(format_changes),
        cmocka_unit_test(resident_bytes),        cmocka_unit_test(encode_equals_quantize),
        cmocka_unit_test(encode_every_spelling), cmocka_unit_test(encode_refuses),
        cmocka_unit_test(encode_not_partly),     cmocka_unit_test(survives_faults),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
