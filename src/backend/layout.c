#include "backend/layout.h"
#include "backend/backend.h"
#include "base/err.h"
#include "base/mem.h"
#include <string.h>

/* BF16 values a panel. */
static size_t panel_stride(size_t cols)
{
    return (cols / 2 + cols % 2) * PANEL_ROWS * 2;
}

size_t layout_panel_bytes(format_t f, size_t cols)
{
    CHECK(f == FORMAT_BF16);
    return panel_stride(cols) * sizeof(uint16_t);
}

bool layout_bytes(size_t *out, format_t f, uint64_t rows, uint64_t cols)
{
    size_t panels = rows / PANEL_ROWS + (rows % PANEL_ROWS != 0), stride;
    CHECK(f == FORMAT_BF16);
    return mul_size(&stride, cols / 2 + cols % 2, PANEL_ROWS * 2 * sizeof(uint16_t)) &&
           mul_size(out, panels, stride);
}

size_t layout_part_rows(format_t f, part_t part, size_t rows)
{
    CHECK(f == FORMAT_BF16);
    return part == PART_DATA ? rows : 0;
}

size_t layout_part_row_bytes(format_t f, part_t part, size_t cols)
{
    CHECK(f == FORMAT_BF16 && part == PART_DATA);
    return cols * sizeof(uint16_t);
}

struct matrix layout_matrix(format_t f, size_t rows, size_t cols, const void *resident)
{
    CHECK(f == FORMAT_BF16);
    return (struct matrix){
        .format = f, .rows = (uint32_t)rows, .cols = (uint32_t)cols, .panel = resident};
}

/* One row of a panel: pairs of values, 32 values apart. */
static void row_to_panel(uint16_t *to, const uint16_t *row, size_t cols)
{
    size_t pairs = cols / 2;
    for (size_t j = 0; j < pairs; j++)
        memcpy(to + j * PANEL_ROWS * 2, row + j * 2, 4);
    if (cols % 2) {
        to[pairs * PANEL_ROWS * 2] = row[cols - 1];
        to[pairs * PANEL_ROWS * 2 + 1] = 0;
    }
}

static void row_from_panel(uint16_t *row, const uint16_t *from, size_t cols)
{
    size_t pairs = cols / 2;
    for (size_t j = 0; j < pairs; j++)
        memcpy(row + j * 2, from + j * PANEL_ROWS * 2, 4);
    if (cols % 2) row[cols - 1] = from[pairs * PANEL_ROWS * 2];
}

/* Address of element (r, 0). */
static size_t row_at(size_t r, size_t cols)
{
    return r / PANEL_ROWS * panel_stride(cols) + r % PANEL_ROWS * 2;
}

static void zero_row(uint16_t *to, size_t cols)
{
    size_t pairs = cols / 2 + cols % 2;
    for (size_t j = 0; j < pairs; j++)
        memset(to + j * PANEL_ROWS * 2, 0, 4);
}

void layout_put(void *resident, format_t f, size_t rows, size_t cols, part_t part, size_t row0,
                size_t n, const void *canon)
{
    CHECK(f == FORMAT_BF16 && part == PART_DATA && row0 <= rows && n <= rows - row0);
    uint16_t *panel = resident;
    const uint16_t *from = canon;
    for (size_t i = 0; i < n; i++)
        row_to_panel(panel + row_at(row0 + i, cols), from + i * cols, cols);
    if (n == 0 || row0 + n < rows) return;
    for (size_t r = rows; r % PANEL_ROWS != 0; r++)
        zero_row(panel + row_at(r, cols), cols);
}

void layout_get(void *canon, format_t f, size_t rows, size_t cols, part_t part, size_t row0,
                size_t n, const void *resident)
{
    CHECK(f == FORMAT_BF16 && part == PART_DATA && row0 <= rows && n <= rows - row0);
    const uint16_t *panel = resident;
    uint16_t *to = canon;
    for (size_t i = 0; i < n; i++)
        row_from_panel(to + i * cols, panel + row_at(row0 + i, cols), cols);
}
