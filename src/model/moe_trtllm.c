#include "model/moe_trtllm.h"
#include "base/mem.h"
#include <string.h>

enum { TILE = 512, BLOCK_BYTES = 128 };

static size_t stored_rows(const struct trtllm *t)
{
    return t->w13 ? 2 * t->rows : t->rows;
}

static size_t shuffle_block(const struct trtllm *t)
{
    return t->format == FORMAT_FP8_BLOCK ? 16 : 32;
}

/* Bytes of a canonical row of the part; of FP8_BLOCK's scales the whole grid counts as one. */
static size_t row_bytes(const struct trtllm *t)
{
    if (t->part == TRTLLM_BIAS) return sizeof(float);
    if (t->part == TRTLLM_DATA) return format_row_bytes(t->format, t->cols);
    return format_scale_cols(t->format, t->cols) * (size_t)formats[t->format].scale_bytes;
}

static size_t grid_bytes(const struct trtllm *t)
{
    return format_scale_rows(t->format, t->rows) * row_bytes(t);
}

static bool is_grid(const struct trtllm *t)
{
    return t->part == TRTLLM_SCALE && t->format == FORMAT_FP8_BLOCK;
}

static bool is_swizzled(const struct trtllm *t)
{
    return t->part == TRTLLM_SCALE && !is_grid(t);
}

static err_t check_part(const struct trtllm *t, struct err *e)
{
    const char *name = formats[t->format].name;
    if (t->format == FORMAT_FP8_CHANNEL)
        return err_set(e, ERR_UNSUPPORTED, "format: %s has no trtllm layout", name);
    if (t->part == TRTLLM_SCALE && (t->format == FORMAT_BF16 || t->format == FORMAT_FP8_TENSOR))
        return err_set(e, ERR_INPUT, "part: %s has no scales by block", name);
    if (t->block_major && t->part != TRTLLM_DATA)
        return err_set(e, ERR_INPUT, "block_major: only data is block-major");
    return OK;
}

err_t trtllm_check(size_t *bytes, const struct trtllm *t, struct err *e)
{
    err_t rc = check_part(t, e);
    size_t m, n, block = shuffle_block(t);
    if (rc != OK) return rc;
    if (t->rows < 1 || t->cols < 1 || t->rows > INT32_MAX || t->cols > INT32_MAX)
        return err_set(e, ERR_INPUT, "rows %zu, cols %zu: at least 1", t->rows, t->cols);
    m = stored_rows(t);
    if (is_grid(t)) {
        if (t->w13 && t->rows % 128)
            return err_set(e, ERR_INPUT, "rows: %zu; allowed: multiples of 128", t->rows);
        n = grid_bytes(t) * (t->w13 ? 2 : 1);
    } else if (m % block) {
        return err_set(e, ERR_INPUT, "rows: %zu; %zu stored rows are no multiple of %zu", t->rows,
                       m, block);
    } else if (is_swizzled(t)) {
        n = (m + 127) / 128 * ((row_bytes(t) + 3) / 4) * TILE;
    } else {
        n = m * row_bytes(t);
    }
    if (t->block_major && row_bytes(t) % BLOCK_BYTES)
        return err_set(e, ERR_INPUT, "cols: %zu are %zu bytes; block_major needs a multiple of %d",
                       t->cols, row_bytes(t), BLOCK_BYTES);
    *bytes = n;
    return OK;
}

/* Canonical place of stored row r: true for up (or the only matrix), the row in *row. */
static bool source(const struct trtllm *t, size_t r, size_t *row)
{
    size_t block = shuffle_block(t), q = r % block, u = r - q + q % 8 * (block / 8) + q / 8;
    *row = u;
    if (!t->w13) return false;
    if (t->format == FORMAT_FP8_BLOCK) {
        *row = u < t->rows ? u : u - t->rows;
        return u < t->rows;
    }
    *row = u / 2;
    return u % 2 == 0;
}

/* Stored place of byte b of row r, and how many bytes from there belong together. */
static size_t place(const struct trtllm *t, size_t r, size_t b, size_t *run)
{
    size_t n = row_bytes(t);
    if (is_swizzled(t)) {
        *run = n - b < 4 ? n - b : 4;
        return ((r / 128) * ((n + 3) / 4) + b / 4) * TILE + r % 32 * 16 + r % 128 / 32 * 4;
    }
    if (t->block_major) {
        *run = BLOCK_BYTES;
        return b * stored_rows(t) + r * BLOCK_BYTES;
    }
    *run = n;
    return r * n;
}

void trtllm_export(void *stored, const struct trtllm *t, const void *gate, const void *up)
{
    size_t n = row_bytes(t), total, row, run, grid = grid_bytes(t);
    char *to = stored;
    CHECK(trtllm_check(&total, t, NULL) == OK);
    if (is_grid(t)) {
        if (t->w13) memcpy(to, up, grid);
        memcpy(to + (t->w13 ? grid : 0), gate, grid);
        return;
    }
    memset(to, 0, total);
    for (size_t r = 0; r < stored_rows(t); r++) {
        const char *from = source(t, r, &row) ? up : gate;
        for (size_t b = 0; b < n; b += run) {
            size_t at = place(t, r, b, &run);
            memcpy(to + at, from + row * n + b, run);
        }
    }
}

void trtllm_import(void *gate, void *up, const struct trtllm *t, const void *stored)
{
    size_t n = row_bytes(t), total, row, run, grid = grid_bytes(t);
    const char *from = stored;
    CHECK(trtllm_check(&total, t, NULL) == OK);
    if (is_grid(t)) {
        if (t->w13) memcpy(up, from, grid);
        memcpy(gate, from + (t->w13 ? grid : 0), grid);
        return;
    }
    for (size_t r = 0; r < stored_rows(t); r++) {
        char *to = source(t, r, &row) ? up : gate;
        for (size_t b = 0; b < n; b += run) {
            size_t at = place(t, r, b, &run);
            memcpy(to + row * n + b, from + at, run);
        }
    }
}
