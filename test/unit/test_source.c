/* test_source.c - rows of rectangles inside a tensor, and weights that are staged in many chunks. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "folder_store.h"
#include "format/encode.h"
#include "random_model.h"
#include "st_writer.h"
#include <stdlib.h>

/* Element i of the file of each conversion, and what it becomes. */
static void element(convert_t c, uint64_t i, void *in, void *out)
{
    uint32_t v = (uint32_t)mix(i + 7);
    uint32_t f = (v & 0x807fffff) | (v >> 8 & 0xf) << 23 | 120u << 23; /* 2^-7 .. 2^8 */
    float x;
    memcpy(&x, &f, 4);
    uint16_t b = format_to_bf16(x), h;
    uint32_t wide = (uint32_t)b << 16;
    h = (uint16_t)(wide >> 16 & 0x8000) | (uint16_t)((((wide >> 23) & 255) - 112) << 10 | (wide >> 13 & 1023));
    switch (c) {
    case CONVERT_BYTE: memcpy(in, &v, 1), memcpy(out, &v, 1); break;
    case CONVERT_BF16: memcpy(in, &b, 2), memcpy(out, &b, 2); break;
    case CONVERT_F16_BF16: memcpy(in, &h, 2), memcpy(out, &b, 2); break;
    case CONVERT_F32_BF16: memcpy(in, &x, 4), memcpy(out, &b, 2); break;
    case CONVERT_F32: memcpy(in, &x, 4), memcpy(out, &x, 4); break;
    case CONVERT_BF16_F32: memcpy(in, &b, 2), memcpy(out, &wide, 4); break;
    default: memcpy(in, &h, 2), memcpy(out, &wide, 4); break;
    }
}

static const struct {
    const char *dtype;
    size_t in, out;
} kinds[CONVERT_COUNT] = {
    {"U8", 1, 1}, {"BF16", 2, 2}, {"F16", 2, 2}, {"F32", 4, 2}, {"F32", 4, 4}, {"BF16", 2, 4}, {"F16", 2, 4},
};

static void check(const struct st_file *f, convert_t c, struct source s)
{
    struct source_scratch scratch = {0};
    struct err e = {0};
    size_t rows = (size_t)s.rows, cols = (size_t)s.cols;
    uint8_t *got = mem_alloc(rows * cols * 4 + 4), *want = mem_alloc(rows * cols * 4 + 4), in[4];
    s.file = f;
    s.tensor = &f->tensors[0];
    s.convert = c;
    for (size_t r = 0; r < rows; r++)
        for (size_t k = 0; k < cols; k++)
            element(c, s.first + r * s.row_stride + k * s.col_stride, in,
                    want + (r * cols + k) * kinds[c].out);
    assert_int_equal(source_row_bytes(&s), cols * kinds[c].out);
    assert_int_equal(source_bytes(&s), rows * cols * kinds[c].in);
    for (size_t r = 0, n = 1; r < rows; r += n, n = n * 3 % 401) {
        if (n > rows - r) n = rows - r;
        if (source_read(&s, r, n, got + r * source_row_bytes(&s), &scratch, &e) != OK)
            fail_msg("%s", e.msg);
    }
    assert_memory_equal(got, want, rows * cols * kinds[c].out);
    source_scratch_free(&scratch);
    mem_free(got);
    mem_free(want);
}

static void rectangles(void **state)
{
    (void)state;
    enum { E = 3, R = 500, C = 1700 }; /* 2.55 M elements: some reads take several spans */
    for (int c = 0; c < CONVERT_COUNT; c++) {
        char dir[] = "/tmp/moult-r-XXXXXX", path[64];
        struct st_draft o = {0};
        struct st_file f;
        struct err e = {0};
        size_t n = (size_t)E * 2 * R * C, in = kinds[c].in;
        uint8_t *data = mem_alloc(n * in), out[4];
        for (size_t i = 0; i < n; i++)
            element((convert_t)c, i, data + i * in, out);
        char dims[32];
        snprintf(dims, sizeof dims, "[%zu]", n);
        assert_non_null(mkdtemp(dir));
        st_put(&o, "x", kinds[c].dtype, dims, data, n * in);
        st_write(&o, dir);
        mem_free(data);
        snprintf(path, sizeof path, "%s/m.safetensors", dir);
        assert_int_equal(st_open(&f, path, &e), OK);
        const struct source s[] = {
            {.first = 0, .rows = R, .cols = C, .row_stride = C, .col_stride = 1},
            {.first = 3 * R * C, .rows = R, .cols = C, .row_stride = C, .col_stride = 1},
            {.first = 2 * R * C + C, .rows = R, .cols = C, .row_stride = 2 * C, .col_stride = 1},
            {.first = 2 * R * C, .rows = R, .cols = C, .row_stride = 1, .col_stride = 2 * R},
            {.first = 4 * R * C + R, .rows = R, .cols = C, .row_stride = 1, .col_stride = 2 * R},
            {.first = 5, .rows = 1, .cols = 1, .row_stride = 1, .col_stride = 1},
            {.first = 9, .rows = R, .cols = 1, .row_stride = 1, .col_stride = 1},
            {.first = 9, .rows = R, .cols = 1, .row_stride = 1, .col_stride = 2 * R},
            {.first = 9, .rows = R, .cols = 1, .row_stride = 2, .col_stride = 1},
            {.first = 9, .rows = 1, .cols = C, .row_stride = C, .col_stride = 1},
            {.first = 9, .rows = 1, .cols = C, .row_stride = 1, .col_stride = 2},
        };
        for (size_t i = 0; i < sizeof s / sizeof s[0]; i++)
            check(&f, (convert_t)c, s[i]);
        st_close(&f);
        dir_drop(dir);
    }
}

static void inverse(void **state)
{
    (void)state;
    char dir[] = "/tmp/moult-r-XXXXXX", path[64];
    struct st_draft o = {0};
    struct st_file f;
    struct err e = {0};
    struct source_scratch scratch = {0};
    float x[2] = {3.0f, 0.1f}, got[2];
    assert_non_null(mkdtemp(dir));
    st_put(&o, "x", "F32", "[2]", x, sizeof x);
    st_write(&o, dir);
    snprintf(path, sizeof path, "%s/m.safetensors", dir);
    assert_int_equal(st_open(&f, path, &e), OK);
    struct source s = {.file = &f, .tensor = f.tensors, .rows = 2, .cols = 1, .row_stride = 1,
                       .col_stride = 1, .convert = CONVERT_F32, .inverse = true};
    assert_int_equal(source_read(&s, 0, 2, got, &scratch, &e), OK);
    assert_true(got[0] == 1.0f / 3.0f && got[1] == 1.0f / 0.1f);
    source_scratch_free(&scratch);
    st_close(&f);
    dir_drop(dir);
}

/* ---- many chunks: 2,100 rows do not divide into whole ones, and a last block is short ---- */

enum { ROWS = 2100, COLS = 8200 };

struct big {
    uint16_t *bf16;
    struct encode en;
    uint8_t *data, *scale;
    size_t data_bytes, scale_bytes;
};

static void big_encode(struct big *b, format_t f)
{
    float *x = mem_alloc((size_t)128 * COLS * sizeof *x), amax = 0.0f;
    assert_true(format_bytes(f, ROWS, COLS, &b->data_bytes, &b->scale_bytes));
    b->data = mem_alloc(b->data_bytes);
    b->scale = mem_alloc(b->scale_bytes + 4);
    for (int pass = 0; pass < 2; pass++)
        for (size_t r = 0; r < ROWS; r += 128) {
            size_t n = ROWS - r < 128 ? ROWS - r : 128, g = formats[f].group_rows;
            for (size_t i = 0; i < n * COLS; i++)
                x[i] = format_bf16(b->bf16[r * COLS + i]);
            if (pass == 0) {
                amax = encode_amax(amax, x, n * COLS);
                if (r + n == ROWS)
                    encode_init(&b->en, f, encode_rule_find(f, NULL), ROWS, COLS, amax);
            } else {
                encode_rows(&b->en, x, r, n, b->data + r * format_row_bytes(f, COLS),
                            b->scale + (g ? r / g : 0) * format_scale_cols(f, COLS) *
                                           (size_t)formats[f].scale_bytes);
            }
        }
    mem_free(x);
}

static void big_folder(char *dir, const struct big *b, format_t f)
{
    struct st_draft o = {0};
    char dims[64];
    size_t bytes = f == FORMAT_BF16 ? (size_t)ROWS * COLS * 2 : b->data_bytes;
    bool e2m1 = formats[f].elem == ELEM_E2M1;
    snprintf(dims, sizeof dims, "[%d, %d]", ROWS, e2m1 ? COLS / 2 : COLS);
    assert_non_null(mkdtemp(dir));
    st_put(&o, "w.weight", f == FORMAT_BF16 ? "BF16" : e2m1 ? "U8" : "F8_E4M3", dims,
           f == FORMAT_BF16 ? (const void *)b->bf16 : b->data, bytes);
    if (f != FORMAT_BF16) {
        scale_t s = formats[f].scale;
        snprintf(dims, sizeof dims, "[%zu, %zu]", format_scale_rows(f, ROWS), format_scale_cols(f, COLS));
        st_put(&o, "w.weight_scale", s == SCALE_F32 ? "F32" : s == SCALE_E8M0 ? "U8" : "F8_E4M3", dims,
               b->scale, b->scale_bytes);
        if (formats[f].tensor) st_put(&o, "w.weight_scale_2", "F32", "[]", &b->en.tensor, 4);
    }
    st_write(&o, dir);
}

static void big_compare(const struct store *s, const struct big *b, format_t f)
{
    uint8_t *got = mem_alloc(b->data_bytes + b->scale_bytes);
    float x;
    assert_int_equal(store_spec(s, 0)->shape.format, f);
    store_get(s, got, 0, PART_DATA, 0, ROWS);
    assert_memory_equal(got, b->data, b->data_bytes);
    store_get(s, got, 0, PART_SCALE, 0, format_scale_rows(f, ROWS));
    assert_memory_equal(got, b->scale, b->scale_bytes);
    if (formats[f].tensor) {
        store_get(s, &x, 0, PART_TENSOR, 0, 1);
        assert_memory_equal(&x, &b->en.tensor, 4);
    }
    mem_free(got);
}

static struct store *big_store(const char *dir, format_t encode)
{
    struct slot_spec spec = {.name = "w.weight", .n_dims = 2, .linear = true,
                             .shape = {RESIDENT_MATRIX, FORMAT_BF16, ROWS, COLS}};
    struct plan p;
    struct store *s;
    struct err e = {0};
    err_t rc = plan_open(&p, dir, &spec, 1, &e);
    if (rc != OK) fail_msg("%s", e.msg);
    rc = plan_formats(&p, &spec, &e);
    if (rc == OK && encode != FORMAT_COUNT) rc = plan_encode(&p, &spec, encode, 1u << encode, &e);
    plan_close(&p);
    if (rc == OK) rc = store_new(&s, &spec, 1, memory_host, &e);
    if (rc == OK) rc = update_from(s, dir, 2, &e);
    if (rc != OK) fail_msg("%s", e.msg);
    return s;
}

static void chunks(void **state)
{
    (void)state;
    struct big b = {.bf16 = mem_alloc((size_t)ROWS * COLS * 2)};
    char bf16[] = "/tmp/moult-r-XXXXXX";
    random_bf16(b.bf16, (uint64_t)ROWS * COLS, COLS, 5);
    big_folder(bf16, &b, FORMAT_BF16);
    for (int f = FORMAT_BF16 + 1; f < FORMAT_COUNT; f++) {
        char dir[] = "/tmp/moult-r-XXXXXX";
        struct update *u = NULL;
        struct err e = {0};
        big_encode(&b, (format_t)f);
        big_folder(dir, &b, (format_t)f);
        struct store *s = big_store(dir, FORMAT_COUNT);
        big_compare(s, &b, (format_t)f);
        dir_drop(dir);
        store_free(s);
        s = big_store(bf16, (format_t)f);
        big_compare(s, &b, (format_t)f);
        uint64_t h = store_hash(s);
        assert_int_equal(update_begin(&u, s, &e), OK); /* one tensor, from memory */
        assert_int_equal(update_stage(u, "w.weight", b.bf16, ROWS, COLS, &e), OK);
        assert_int_equal(update_prepare(u, &e), OK);
        update_commit(u);
        update_free(u);
        assert_true(store_hash(s) == h && store_epoch(s) == 2);
        store_free(s);
        mem_free(b.data);
        mem_free(b.scale);
    }
    dir_drop(bf16);
    mem_free(b.bf16);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rectangles),
        cmocka_unit_test(inverse),
        cmocka_unit_test(chunks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
