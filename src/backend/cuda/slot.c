#include "backend/cuda/slot.h"
#include "backend/cuda/layout_cuda.h"
#include "base/mem.h"

enum { SLOT_ALIGN = 16 };

static size_t align(size_t n)
{
    return (n + SLOT_ALIGN - 1) / SLOT_ALIGN * SLOT_ALIGN;
}

bool slot_place(struct slot_places *p, const struct resident *r)
{
    size_t tiles, scales, rows = format_scale_rows(r->format, (size_t)r->rows);
    if (!layout_cuda_bytes(&tiles, r->format, r->rows, r->cols)) return false;
    p->scale = tiles; /* a multiple of 16 */
    scales = formats[r->format].scale == SCALE_F32
                 ? rows * format_scale_cols(r->format, (size_t)r->cols) * sizeof(float)
                 : 0;
    if (!add_size(&p->tensor, p->scale, align(scales))) return false;
    p->input = p->tensor + (formats[r->format].tensor ? SLOT_ALIGN : 0);
    p->end = p->input + (r->format != FORMAT_BF16 ? SLOT_ALIGN : 0);
    return true;
}

static const size_t elem_bytes[] = {
    [RESIDENT_PLAIN] = sizeof(uint16_t), [RESIDENT_F32] = sizeof(float)};

bool slot_bytes(size_t *out, const struct resident *r)
{
    struct slot_places p;
    if (r->kind == RESIDENT_MATRIX) {
        if (!slot_place(&p, r)) return false;
        *out = p.end;
        return true;
    }
    size_t len;
    return mul_size(&len, r->rows, r->cols) && mul_size(out, len, elem_bytes[r->kind]);
}

/* Bytes of a row of a part, and where the part lies in the slot (PART_DATA and small scales: in the
 * tiles). */
size_t slot_row(const struct resident *r, part_t part)
{
    if (part == PART_TENSOR || part == PART_INPUT) return sizeof(float);
    if (r->kind != RESIDENT_MATRIX) return (size_t)r->cols * elem_bytes[r->kind];
    if (part == PART_DATA) return format_row_bytes(r->format, (size_t)r->cols);
    return format_scale_cols(r->format, (size_t)r->cols) * (size_t)formats[r->format].scale_bytes;
}

bool slot_tiled(const struct resident *r, part_t part)
{
    if (r->kind != RESIDENT_MATRIX || part == PART_TENSOR || part == PART_INPUT) return false;
    return part == PART_DATA || formats[r->format].scale != SCALE_F32;
}

size_t slot_part(const struct resident *r, part_t part)
{
    struct slot_places p;
    if (r->kind != RESIDENT_MATRIX) return 0;
    CHECK(slot_place(&p, r));
    return part == PART_SCALE ? p.scale : part == PART_TENSOR ? p.tensor : p.input;
}

size_t slot_panel(const struct resident *r)
{
    return (size_t)tile_blocks((uint32_t)r->cols) * tile_shape(r->format).bytes;
}

void slot_rows(size_t *offset, size_t *bytes, const struct resident *r, part_t part, size_t row0,
               size_t n)
{
    if (slot_tiled(r, part)) {
        *offset = row0 / TILE_ROWS * slot_panel(r);
        *bytes = (n / TILE_ROWS + (n % TILE_ROWS != 0)) * slot_panel(r);
    } else {
        *offset = slot_part(r, part) + row0 * slot_row(r, part);
        *bytes = n * slot_row(r, part);
    }
}

struct gemm_weight slot_matrix(const struct resident *r, const void *at)
{
    struct slot_places p;
    CHECK(r->kind == RESIDENT_MATRIX && slot_place(&p, r));
    const char *base = at;
    struct gemm_weight w = {.tiles = base};
    if (formats[r->format].tensor)
        w.scale = (const float *)(const void *)(base + p.tensor);
    else if (formats[r->format].scale == SCALE_F32)
        w.scale = (const float *)(const void *)(base + p.scale);
    return w;
}

const float *slot_input(const struct resident *r, const void *at)
{
    struct slot_places p;
    CHECK(r->kind == RESIDENT_MATRIX && r->format != FORMAT_BF16 && slot_place(&p, r));
    return (const float *)(const void *)((const char *)at + p.input);
}
