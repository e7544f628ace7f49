/*
 * test_layout.c - resident forms: a bijection for every format, odd size and order of pieces, in the
 * bytes that layout.h promises.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "backend/backend.h"
#include "backend/layout.h"
#include "base/mem.h"
#include <stdio.h>
#include <string.h>

static uint64_t rng = 1;

static uint32_t next(void)
{
    rng = rng * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(rng >> 33);
}

static void random_bytes(uint8_t *p, size_t n)
{
    for (size_t i = 0; i < n; i++)
        p[i] = (uint8_t)next();
}

struct parts {
    size_t rows[PART_COUNT], row_bytes[PART_COUNT];
    uint8_t *canon[PART_COUNT];
};

static void parts_new(struct parts *p, format_t f, size_t rows, size_t cols)
{
    for (int i = 0; i < PART_COUNT; i++) {
        p->rows[i] = layout_part_rows(f, (part_t)i, rows);
        p->row_bytes[i] = p->rows[i] ? layout_part_row_bytes(f, (part_t)i, cols) : 0;
        size_t n = p->rows[i] * p->row_bytes[i];
        p->canon[i] = mem_alloc(n + 1);
        random_bytes(p->canon[i], n);
    }
    if (formats[f].elem_bits == 4 && cols % 2)
        for (size_t r = 1; r <= rows; r++)
            p->canon[PART_DATA][r * p->row_bytes[PART_DATA] - 1] &= 15;
}

static void parts_free(struct parts *p)
{
    for (int i = 0; i < PART_COUNT; i++)
        mem_free(p->canon[i]);
}

/* All parts, rows in random pieces in a random order of pieces and parts. */
static void put_pieces(uint8_t *res, format_t f, size_t rows, size_t cols, const struct parts *p)
{
    struct {
        part_t part;
        size_t row0, n;
    } piece[512];
    size_t n = 0;
    for (int i = 0; i < PART_COUNT; i++)
        for (size_t r = 0, k; r < p->rows[i]; r += k, n++) {
            k = 1 + next() % 21;
            if (k > p->rows[i] - r) k = p->rows[i] - r;
            piece[n].part = (part_t)i, piece[n].row0 = r, piece[n].n = k;
        }
    for (size_t left = n; left > 0; left--) {
        size_t i = next() % left;
        part_t part = piece[i].part;
        layout_put(res, f, rows, cols, part, piece[i].row0, piece[i].n,
                   p->canon[part] + piece[i].row0 * p->row_bytes[part]);
        piece[i] = piece[left - 1];
    }
}

static void round_trip(format_t f, size_t rows, size_t cols)
{
    struct parts p;
    size_t len;
    parts_new(&p, f, rows, cols);
    assert_true(layout_bytes(&len, f, rows, cols));
    uint8_t *whole = mem_alloc(len + 1), *cut = mem_alloc(len + 1);
    /* Whatever was there before, padding too, is overwritten. */
    memset(whole, 0xa5, len + 1);
    random_bytes(cut, len);
    cut[len] = 0xa5;
    for (int i = 0; i < PART_COUNT; i++)
        layout_put(whole, f, rows, cols, (part_t)i, 0, p.rows[i], p.canon[i]);
    put_pieces(cut, f, rows, cols, &p);
    assert_memory_equal(whole, cut, len + 1);
    for (int i = 0; i < PART_COUNT; i++) {
        size_t n = p.rows[i] * p.row_bytes[i];
        uint8_t *back = mem_alloc(n + 1);
        back[n] = 0x5a;
        layout_get(back, f, rows, cols, (part_t)i, 0, p.rows[i], whole);
        assert_memory_equal(back, p.canon[i], n);
        assert_int_equal(back[n], 0x5a);
        for (size_t r = 0; r < p.rows[i]; r += 7) {
            layout_get(back, f, rows, cols, (part_t)i, r, 1, whole);
            assert_memory_equal(back, p.canon[i] + r * p.row_bytes[i], p.row_bytes[i]);
        }
        mem_free(back);
    }
    mem_free(whole);
    mem_free(cut);
    parts_free(&p);
}

static void every_size_comes_back(void **state)
{
    (void)state;
    static const size_t rows[] = {1, 2, 15, 16, 17, 33, 130, 257};
    static const size_t cols[] = {1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 95, 128, 129, 160, 301};
    for (int f = 0; f < FORMAT_COUNT; f++)
        for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
            for (size_t j = 0; j < sizeof cols / sizeof cols[0]; j++)
                round_trip((format_t)f, rows[i], cols[j]);
}

/* Code and scale of an element by the rule of layout.h, written a second time from its text. */
static unsigned code_at(const uint8_t *res, format_t f, size_t cols, size_t r, size_t c)
{
    static const size_t rec_cols[] = {2, 2, 2, 2, 32, 16, 32},
                        rec[] = {64, 32, 32, 32, 528, 144, 272};
    size_t q = r % 16, place = 2 * (q % 4) + 16 * (q / 4 % 2) + 8 * (q / 8), k = c % rec_cols[f];
    const uint8_t *p =
        res + (r / 16 * ((cols + rec_cols[f] - 1) / rec_cols[f]) + c / rec_cols[f]) * rec[f];
    switch (formats[f].elem_bits) {
    case 16: return p[q * 4 + c % 2 * 2] | (unsigned)p[q * 4 + c % 2 * 2 + 1] << 8;
    case 8: return p[k / 2 * 32 + place + k % 2];
    default: return p[k / 8 * 64 + q * 4 + k % 4] >> (k % 8 < 4 ? 0 : 4) & 15;
    }
}

static unsigned scale_at(const uint8_t *res, format_t f, size_t cols, size_t r, size_t c)
{
    size_t g = formats[f].group_cols, rec = f == FORMAT_MXFP8 ? 528 : f == FORMAT_NVFP4 ? 144 : 272;
    return res[(r / 16 * ((cols + g - 1) / g) + c / g) * rec + rec - 16 + r % 16];
}

static void places_are_as_documented(void **state)
{
    (void)state;
    enum { ROWS = 37, COLS = 75 };
    for (int i = 0; i < FORMAT_COUNT; i++) {
        format_t f = (format_t)i;
        struct parts p;
        size_t len;
        parts_new(&p, f, ROWS, COLS);
        assert_true(layout_bytes(&len, f, ROWS, COLS));
        uint8_t *res = mem_alloc(len);
        put_pieces(res, f, ROWS, COLS, &p);
        struct matrix m = layout_matrix(f, ROWS, COLS, res);
        for (size_t r = 0; r < ROWS; r++)
            for (size_t c = 0; c < COLS; c++) {
                const uint8_t *row = p.canon[PART_DATA] + r * p.row_bytes[PART_DATA];
                unsigned bits = (unsigned)formats[f].elem_bits;
                unsigned want = bits == 16  ? row[2 * c] | (unsigned)row[2 * c + 1] << 8
                                : bits == 8 ? row[c]
                                            : row[c / 2] >> 4 * (c % 2) & 15;
                assert_int_equal(code_at(res, f, COLS, r, c), want);
                if (formats[f].scale_bytes != 1) continue;
                assert_int_equal(
                    scale_at(res, f, COLS, r, c),
                    p.canon[PART_SCALE][r * p.row_bytes[PART_SCALE] + c / formats[f].group_cols]);
            }
        assert_true((m.scale != NULL) == (formats[f].scale_bytes == 4));
        assert_true((m.tensor != NULL) == (f == FORMAT_NVFP4));
        assert_true((m.input != NULL) == (f != FORMAT_BF16));
        if (m.scale)
            assert_memory_equal(m.scale, p.canon[PART_SCALE],
                                p.rows[PART_SCALE] * p.row_bytes[PART_SCALE]);
        if (m.tensor) assert_memory_equal(m.tensor, p.canon[PART_TENSOR], 4);
        if (m.input) {
            assert_memory_equal(m.input, p.canon[PART_INPUT], 4);
            assert_ptr_equal((const uint8_t *)m.input + 4, res + len);
        }
        mem_free(res);
        parts_free(&p);
    }
}

static void resident_bytes_are_the_stored_ones(void **state)
{
    (void)state;
    static const size_t shapes[][2] = {{2048, 768}, {768, 2048}, {4096, 2048}, {2880, 2880}};
    for (int i = 0; i < FORMAT_COUNT; i++)
        for (int s = 0; s < 4; s++) {
            size_t data, scale, len;
            assert_true(format_bytes((format_t)i, shapes[s][0], shapes[s][1], &data, &scale));
            assert_true(layout_bytes(&len, (format_t)i, shapes[s][0], shapes[s][1]));
            assert_true((double)len <= 1.02 * (double)(data + scale));
            assert_true(len >= data + scale);
        }
}

static void sizes_are_checked(void **state)
{
    (void)state;
    size_t len = 7;
    for (int i = 0; i < FORMAT_COUNT; i++) {
        assert_false(layout_bytes(&len, (format_t)i, UINT64_MAX, 2));
        assert_false(layout_bytes(&len, (format_t)i, UINT64_MAX / 2, UINT64_MAX / 2));
        assert_false(layout_bytes(&len, (format_t)i, 1, UINT64_MAX));
        assert_int_equal(len, 7);
        assert_true(layout_bytes(&len, (format_t)i, 0, 16));
        assert_true(len <= 12);
        len = 7;
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_size_comes_back), cmocka_unit_test(places_are_as_documented),
        cmocka_unit_test(resident_bytes_are_the_stored_ones), cmocka_unit_test(sizes_are_checked)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
