#include "backend/layout.h"
#include "backend/backend.h"
#include "base/err.h"
#include "base/mem.h"
#include <string.h>

/* One row's bytes of a unit from its canonical bytes, and back.  `n` bytes are there (at least 1);
 * past them zeros are written, or nothing. */
typedef void unit_put_fn(uint8_t *unit, size_t r, const uint8_t *canon, size_t n);
typedef void unit_get_fn(uint8_t *canon, size_t n, const uint8_t *unit, size_t r);

static size_t place(size_t r)
{
    return 2 * (r % 4) + 16 * (r / 4 % 2) + 8 * (r / 8);
}

static void bf16_put(uint8_t *unit, size_t r, const uint8_t *canon, size_t n)
{
    uint8_t t[4] = {0};
    memcpy(t, canon, n < 4 ? n : 4);
    memcpy(unit + r * 4, t, 4);
}

static void bf16_get(uint8_t *canon, size_t n, const uint8_t *unit, size_t r)
{
    memcpy(canon, unit + r * 4, n < 4 ? n : 4);
}

static void e4m3_put(uint8_t *unit, size_t r, const uint8_t *canon, size_t n)
{
    uint8_t *to = unit + place(r);
    to[0] = canon[0];
    to[1] = n > 1 ? canon[1] : 0;
}

static void e4m3_get(uint8_t *canon, size_t n, const uint8_t *unit, size_t r)
{
    memcpy(canon, unit + place(r), n < 2 ? n : 2);
}

/* Canonical bytes hold columns (0, 1), (2, 3), (4, 5), (6, 7), the unit's (0, 4), (1, 5), (2, 6),
 * (3, 7). */
static void e2m1_put(uint8_t *unit, size_t r, const uint8_t *canon, size_t n)
{
    uint8_t t[4] = {0}, *to = unit + r * 4;
    memcpy(t, canon, n < 4 ? n : 4);
    for (int i = 0; i < 2; i++) {
        to[2 * i] = (uint8_t)((t[i] & 15) | t[i + 2] << 4);
        to[2 * i + 1] = (uint8_t)(t[i] >> 4 | (t[i + 2] & 0xf0));
    }
}

static void e2m1_get(uint8_t *canon, size_t n, const uint8_t *unit, size_t r)
{
    const uint8_t *from = unit + r * 4;
    uint8_t t[4];
    for (int i = 0; i < 2; i++) {
        t[i] = (uint8_t)((from[2 * i] & 15) | from[2 * i + 1] << 4);
        t[i + 2] = (uint8_t)(from[2 * i] >> 4 | (from[2 * i + 1] & 0xf0));
    }
    memcpy(canon, t, n < 4 ? n : 4);
}

/* Rows of one panel, record by record: `r` is the first row in the panel, `n_rows` of them lie
 * `row_bytes` apart in canonical bytes.  `rec` and `n_units` are a record's bytes and units. */
struct rows {
    size_t r, n_rows, row_bytes, rec, n_units;
};

#define LINE_BYTES ((size_t)64)
#define INLINE     static inline __attribute__((always_inline))

/* Whole records, a cache line of each row at a time. */
INLINE void records_put(unit_put_fn *put, size_t unit_bytes, size_t step, uint8_t *panel,
                        const struct rows *w, const uint8_t *canon, size_t n_records)
{
    size_t at_once = LINE_BYTES / (step * w->n_units);
    if (at_once == 0) at_once = 1;
    for (size_t first = 0, n; first < n_records; first += n) {
        n = n_records - first < at_once ? n_records - first : at_once;
        for (size_t i = 0; i < w->n_rows; i++) {
            const uint8_t *from = canon + i * w->row_bytes + first * w->n_units * step;
            for (size_t rec = first; rec < first + n; rec++)
                for (size_t k = 0; k < w->n_units; k++, from += step)
                    put(panel + rec * w->rec + k * unit_bytes, w->r + i, from, step);
        }
    }
}

INLINE void rows_put(unit_put_fn *put, size_t unit_bytes, size_t step, uint8_t *panel,
                     const struct rows *w, const uint8_t *canon)
{
    static const uint8_t zeros[4];
    size_t whole = w->row_bytes / (step * w->n_units);
    records_put(put, unit_bytes, step, panel, w, canon, whole);
    panel += whole * w->rec;
    for (size_t at = whole * w->n_units * step; at < w->row_bytes; panel += w->rec)
        for (size_t k = 0; k < w->n_units; k++, at += step) {
            bool in = at < w->row_bytes;
            size_t left = in ? w->row_bytes - at : step;
            for (size_t i = 0; i < w->n_rows; i++)
                put(panel + k * unit_bytes, w->r + i, in ? canon + i * w->row_bytes + at : zeros,
                    left);
        }
}

INLINE void rows_get(unit_get_fn *get, size_t unit_bytes, size_t step, uint8_t *canon,
                     const struct rows *w, const uint8_t *panel)
{
    for (size_t at = 0; at < w->row_bytes; panel += w->rec)
        for (size_t k = 0; k < w->n_units && at < w->row_bytes; k++, at += step)
            for (size_t i = 0; i < w->n_rows; i++)
                get(canon + i * w->row_bytes + at, w->row_bytes - at, panel + k * unit_bytes,
                    w->r + i);
}

/* The loops, compiled for each unit. */
#define ROWS(NAME, BYTES, STEP)                                                             \
    static void NAME##_rows_put(uint8_t *panel, const struct rows *w, const uint8_t *canon) \
    {                                                                                       \
        rows_put(NAME##_put, BYTES, STEP, panel, w, canon);                                 \
    }                                                                                       \
    static void NAME##_rows_get(uint8_t *canon, const struct rows *w, const uint8_t *panel) \
    {                                                                                       \
        rows_get(NAME##_get, BYTES, STEP, canon, w, panel);                                 \
    }
ROWS(bf16, UNIT_BF16_BYTES, 4)
ROWS(e4m3, UNIT_E4M3_BYTES, 2)
ROWS(e2m1, UNIT_E2M1_BYTES, 4)

typedef uint32_t words __attribute__((vector_size(16)));

/* Four words of four rows: of row i to place i of four units. */
INLINE void turn(uint8_t *unit, const uint8_t *canon, size_t row_bytes)
{
    words r[4], low[2], high[2];
    for (int i = 0; i < 4; i++)
        memcpy(&r[i], canon + (size_t)i * row_bytes, sizeof r[i]);
    for (int i = 0; i < 2; i++) {
        low[i] = __builtin_shufflevector(r[2 * i], r[2 * i + 1], 0, 4, 1, 5);
        high[i] = __builtin_shufflevector(r[2 * i], r[2 * i + 1], 2, 6, 3, 7);
    }
    const words out[4] = {__builtin_shufflevector(low[0], low[1], 0, 1, 4, 5),
                          __builtin_shufflevector(low[0], low[1], 2, 3, 6, 7),
                          __builtin_shufflevector(high[0], high[1], 0, 1, 4, 5),
                          __builtin_shufflevector(high[0], high[1], 2, 3, 6, 7)};
    for (int i = 0; i < 4; i++)
        memcpy(unit + i * UNIT_BF16_BYTES, &out[i], sizeof out[i]);
}

/* BF16, of which an update moves the most bytes: all rows of a panel whose units lie side by side
 * are a matrix of 32-bit words that is transposed. */
static void bf16_panel_put(uint8_t *panel, const struct rows *w, const uint8_t *canon)
{
    if (w->n_rows < PANEL_ROWS || w->rec != w->n_units * UNIT_BF16_BYTES ||
        w->row_bytes % (4 * w->n_units) || w->row_bytes % sizeof(words)) {
        bf16_rows_put(panel, w, canon);
        return;
    }
    for (size_t at = 0; at < w->row_bytes; at += sizeof(words), panel += 4 * UNIT_BF16_BYTES)
        for (size_t i = 0; i < PANEL_ROWS; i += 4)
            turn(panel + i * 4, canon + i * w->row_bytes + at, w->row_bytes);
}

/* A unit of an element: columns, bytes, canonical bytes a row. */
static const struct unit {
    size_t cols, bytes, row_bytes;
    unit_put_fn *put;
    void (*rows_put)(uint8_t *panel, const struct rows *w, const uint8_t *canon);
    void (*rows_get)(uint8_t *canon, const struct rows *w, const uint8_t *panel);
} units[] = {
    [ELEM_BF16] = {UNIT_BF16_COLS, UNIT_BF16_BYTES, 4, bf16_put, bf16_panel_put, bf16_rows_get},
    [ELEM_E4M3] = {UNIT_E4M3_COLS, UNIT_E4M3_BYTES, 2, e4m3_put, e4m3_rows_put, e4m3_rows_get},
    [ELEM_E2M1] = {UNIT_E2M1_COLS, UNIT_E2M1_BYTES, 4, e2m1_put, e2m1_rows_put, e2m1_rows_get},
};

static const struct unit *unit_of(format_t f)
{
    return &units[formats[f].elem];
}

/* Are the scales bytes, which lie in the panels? */
static bool byte_scales(format_t f)
{
    return formats[f].scale_bytes == 1;
}

static size_t record_cols(format_t f)
{
    return byte_scales(f) ? formats[f].group_cols : unit_of(f)->cols;
}

static size_t record_units(format_t f)
{
    return record_cols(f) / unit_of(f)->cols;
}

static size_t record_bytes(format_t f)
{
    return record_units(f) * unit_of(f)->bytes + (byte_scales(f) ? PANEL_ROWS : 0);
}

static size_t ceil_div(size_t n, size_t d)
{
    return n / d + (n % d != 0);
}

size_t layout_panel_bytes(format_t f, size_t cols)
{
    return ceil_div(cols, record_cols(f)) * record_bytes(f);
}

size_t layout_part_rows(format_t f, part_t part, size_t rows)
{
    switch (part) {
    case PART_DATA: return rows;
    case PART_SCALE: return format_scale_rows(f, rows);
    case PART_TENSOR: return formats[f].tensor;
    default: return formats[f].scale != SCALE_NONE;
    }
}

size_t layout_part_row_bytes(format_t f, part_t part, size_t cols)
{
    switch (part) {
    case PART_DATA: return format_row_bytes(f, cols);
    case PART_SCALE: return format_scale_cols(f, cols) * (size_t)formats[f].scale_bytes;
    default: return sizeof(float);
    }
}

/* Offset of each part in the resident form, and behind them its length; false when it overflows. */
static bool offsets(size_t at[PART_COUNT + 1], format_t f, uint64_t rows, uint64_t cols)
{
    size_t n, panel;
    if (!mul_size(&panel, ceil_div(cols, record_cols(f)), record_bytes(f)) ||
        !mul_size(&n, ceil_div(rows, PANEL_ROWS), panel))
        return false;
    at[PART_DATA] = 0;
    at[PART_SCALE] = n;
    for (int p = PART_SCALE; p < PART_COUNT; p++) {
        size_t part = layout_part_rows(f, (part_t)p, rows);
        if (p == PART_SCALE && byte_scales(f)) part = 0;
        if (!mul_size(&part, part, layout_part_row_bytes(f, (part_t)p, cols)) ||
            !add_size(&at[p + 1], at[p], part))
            return false;
    }
    return true;
}

bool layout_bytes(size_t *out, format_t f, uint64_t rows, uint64_t cols)
{
    size_t at[PART_COUNT + 1];
    if (!offsets(at, f, rows, cols)) return false;
    *out = at[PART_COUNT];
    return true;
}

/* Of a matrix that exists. */
static size_t offset(format_t f, size_t rows, size_t cols, part_t part)
{
    size_t at[PART_COUNT + 1];
    CHECK(offsets(at, f, rows, cols));
    return at[part];
}

struct matrix layout_matrix(format_t f, size_t rows, size_t cols, const void *resident)
{
    const char *base = resident;
    struct matrix m = {
        .format = f, .rows = (uint32_t)rows, .cols = (uint32_t)cols, .panel = resident};
    const void *part[PART_COUNT] = {NULL};
    for (int p = PART_SCALE; p < PART_COUNT; p++)
        if (layout_part_rows(f, (part_t)p, rows) > 0)
            part[p] = base + offset(f, rows, cols, (part_t)p);
    m.scale = byte_scales(f) ? NULL : part[PART_SCALE];
    m.tensor = part[PART_TENSOR];
    m.input = part[PART_INPUT];
    return m;
}

/* ---- parts in the panels ---- */

static struct rows rows_of(format_t f, size_t cols, size_t r, size_t n_rows)
{
    return (struct rows){r, n_rows, format_row_bytes(f, cols), record_bytes(f), record_units(f)};
}

static void panel_put(uint8_t *panel, format_t f, size_t cols, size_t r, size_t n_rows,
                      const uint8_t *canon)
{
    const struct unit *u = unit_of(f);
    struct rows w = rows_of(f, cols, r, n_rows);
    u->rows_put(panel, &w, canon);
    if (formats[f].elem_bits >= 8 || cols % 2 == 0) return;
    /* The canonical nibble past the last column. */
    size_t c = cols % record_cols(f), unit = c / u->cols, bit = c % u->cols < 4 ? 0 : 4;
    uint8_t *rec = panel + cols / record_cols(f) * record_bytes(f) + unit * u->bytes;
    for (size_t i = 0; i < n_rows; i++)
        rec[(r + i) * 4 + c % 4] &= (uint8_t) ~(15 << bit);
}

static void panel_get(uint8_t *canon, format_t f, size_t cols, size_t r, size_t n_rows,
                      const uint8_t *panel)
{
    struct rows w = rows_of(f, cols, r, n_rows);
    unit_of(f)->rows_get(canon, &w, panel);
}

static size_t first_scale(format_t f)
{
    return record_units(f) * unit_of(f)->bytes;
}

static void panel_put_scales(uint8_t *panel, format_t f, size_t cols, size_t r, size_t n_rows,
                             const uint8_t *canon)
{
    size_t n = format_scale_cols(f, cols);
    uint8_t *to = panel + first_scale(f) + r;
    for (size_t g = 0; g < n; g++, to += record_bytes(f))
        for (size_t i = 0; i < n_rows; i++)
            to[i] = canon[i * n + g];
}

static void panel_get_scales(uint8_t *canon, format_t f, size_t cols, size_t r, size_t n_rows,
                             const uint8_t *panel)
{
    size_t n = format_scale_cols(f, cols);
    const uint8_t *from = panel + first_scale(f) + r;
    for (size_t g = 0; g < n; g++, from += record_bytes(f))
        for (size_t i = 0; i < n_rows; i++)
            canon[i * n + g] = from[i];
}

/* Zeros in the rows past the last. */
static void panel_pad(uint8_t *panel, format_t f, size_t cols, size_t r)
{
    const struct unit *u = unit_of(f);
    static const uint8_t zeros[4];
    for (size_t n = ceil_div(cols, record_cols(f)); n > 0; n--, panel += record_bytes(f))
        for (size_t i = r; i < PANEL_ROWS; i++)
            for (size_t k = 0; k < record_units(f); k++)
                u->put(panel + k * u->bytes, i, zeros, u->row_bytes);
}

static void panel_pad_scales(uint8_t *panel, format_t f, size_t cols, size_t r)
{
    panel += first_scale(f);
    for (size_t n = ceil_div(cols, record_cols(f)); n > 0; n--, panel += record_bytes(f))
        memset(panel + r, 0, PANEL_ROWS - r);
}

static bool in_panels(format_t f, part_t part)
{
    return part == PART_DATA || (part == PART_SCALE && byte_scales(f));
}

static void check_range(format_t f, part_t part, size_t rows, size_t row0, size_t n)
{
    size_t all = layout_part_rows(f, part, rows);
    CHECK(row0 <= all && n <= all - row0);
}

void layout_put(void *resident, format_t f, size_t rows, size_t cols, part_t part, size_t row0,
                size_t n, const void *canon)
{
    size_t row_bytes = layout_part_row_bytes(f, part, cols), panel_bytes, end = row0 + n, k;
    check_range(f, part, rows, row0, n);
    if (n == 0 || row_bytes == 0) return;
    if (!in_panels(f, part)) {
        memcpy((char *)resident + offset(f, rows, cols, part) + row0 * row_bytes, canon,
               n * row_bytes);
        return;
    }
    panel_bytes = layout_panel_bytes(f, cols);
    for (size_t r = row0; r < end; r += k) {
        uint8_t *panel = (uint8_t *)resident + r / PANEL_ROWS * panel_bytes;
        const uint8_t *from = (const uint8_t *)canon + (r - row0) * row_bytes;
        size_t first = r % PANEL_ROWS;
        k = end - r < PANEL_ROWS - first ? end - r : PANEL_ROWS - first;
        bool pad = r + k == rows && first + k < PANEL_ROWS;
        if (part == PART_DATA) {
            panel_put(panel, f, cols, first, k, from);
            if (pad) panel_pad(panel, f, cols, first + k);
        } else {
            panel_put_scales(panel, f, cols, first, k, from);
            if (pad) panel_pad_scales(panel, f, cols, first + k);
        }
    }
}

void layout_get(void *canon, format_t f, size_t rows, size_t cols, part_t part, size_t row0,
                size_t n, const void *resident)
{
    size_t row_bytes = layout_part_row_bytes(f, part, cols), panel_bytes, end = row0 + n, k;
    check_range(f, part, rows, row0, n);
    if (n == 0 || row_bytes == 0) return;
    if (!in_panels(f, part)) {
        memcpy(canon, (const char *)resident + offset(f, rows, cols, part) + row0 * row_bytes,
               n * row_bytes);
        return;
    }
    panel_bytes = layout_panel_bytes(f, cols);
    for (size_t r = row0; r < end; r += k) {
        const uint8_t *panel = (const uint8_t *)resident + r / PANEL_ROWS * panel_bytes;
        uint8_t *to = (uint8_t *)canon + (r - row0) * row_bytes;
        size_t first = r % PANEL_ROWS;
        k = end - r < PANEL_ROWS - first ? end - r : PANEL_ROWS - first;
        if (part == PART_DATA)
            panel_get(to, f, cols, first, k, panel);
        else
            panel_get_scales(to, f, cols, first, k, panel);
    }
}
