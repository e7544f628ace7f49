#include "backend/layout.h"
#include "base/err.h"
#include "base/mem.h"
#include <string.h>

bool layout_panel_len(size_t *out, uint64_t rows, uint64_t cols)
{
    size_t panels = rows / PANEL_ROWS + (rows % PANEL_ROWS != 0);
    size_t pairs = cols / 2 + cols % 2;
    size_t stride;
    return mul_size(&stride, pairs, PANEL_ROWS * 2) && mul_size(out, panels, stride);
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
    return r / PANEL_ROWS * layout_panel_stride(cols) + r % PANEL_ROWS * 2;
}

static void zero_row(uint16_t *to, size_t cols)
{
    size_t pairs = cols / 2 + cols % 2;
    for (size_t j = 0; j < pairs; j++)
        memset(to + j * PANEL_ROWS * 2, 0, 4);
}

void layout_to_panel(uint16_t *panel, const uint16_t *canon, size_t rows, size_t cols, size_t row0,
                     size_t n)
{
    CHECK(row0 <= rows && n <= rows - row0);
    for (size_t i = 0; i < n; i++)
        row_to_panel(panel + row_at(row0 + i, cols), canon + i * cols, cols);
    if (n == 0 || row0 + n < rows) return;
    for (size_t r = rows; r % PANEL_ROWS != 0; r++)
        zero_row(panel + row_at(r, cols), cols);
}

void layout_from_panel(uint16_t *canon, const uint16_t *panel, size_t rows, size_t cols,
                       size_t row0, size_t n)
{
    CHECK(row0 <= rows && n <= rows - row0);
    for (size_t i = 0; i < n; i++)
        row_from_panel(canon + i * cols, panel + row_at(row0 + i, cols), cols);
}
