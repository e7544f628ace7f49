#include "backend/cuda/layout_cuda.h"
#include "base/mem.h"
#include <string.h>

struct tile_shape tile_shape(format_t f)
{
    const struct format *row = &formats[f];
    struct tile_shape t = {.elem_bits = (uint32_t)row->elem_bits};
    t.data_bytes = TILE_ROWS * TILE_K * t.elem_bits / 8;
    if (row->scale == SCALE_E8M0 || row->scale == SCALE_E4M3) t.group = row->group_cols;
    t.bytes = t.data_bytes + (t.group ? TILE_ROWS * TILE_K / t.group : 0);
    return t;
}

bool layout_cuda_bytes(size_t *out, format_t f, uint64_t rows, uint64_t cols)
{
    size_t panels = rows / TILE_ROWS + (rows % TILE_ROWS != 0), n;
    size_t blocks = cols / TILE_K + (cols % TILE_K != 0);
    return mul_size(&n, panels, blocks) && mul_size(out, n, tile_shape(f).bytes);
}

/* Column of element j (0 .. 15, pairs in order) of lane c of a unit. */
static uint32_t column_of(uint32_t c, uint32_t j)
{
    return j / 4 * 16 + 2 * c + j % 2 + (j % 4 / 2) * 8;
}

static uint32_t rotl(uint32_t x, int n)
{
    return x << n | x >> (32 - n);
}

enum { NIBBLE_LOW = 0x06030603 };
#define NIBBLE_MASK 0x81C081C0u

/* Two E2M1 codes to where t(i) has them, and back. */
static uint32_t nibbles_spread(uint32_t lo, uint32_t hi)
{
    return (lo >> 3) << 15 | (lo & 7) << 6 | (hi >> 3) << 31 | (hi & 7) << 22;
}

static void words_pack(uint32_t q[2], const uint32_t t[8])
{
    uint32_t x = rotl(t[6], 24) | rotl(t[7], 18);
    q[0] = t[0] | t[1] >> 4 | rotl(t[2], 22) | (x & NIBBLE_LOW);
    q[1] = t[3] >> 2 | t[4] >> 6 | rotl(t[5], 20) | (x & ~(uint32_t)NIBBLE_LOW);
}

static void words_unpack(uint32_t t[8], const uint32_t q[2])
{
    uint32_t x = (q[0] & NIBBLE_LOW) | (q[1] & ~(uint32_t)NIBBLE_LOW);
    const uint32_t raw[8] = {q[0],      q[0] << 4,      rotl(q[0], 10), q[1] << 2,
                             q[1] << 6, rotl(q[1], 12), rotl(x, 8),     rotl(x, 14)};
    for (int i = 0; i < 8; i++)
        t[i] = raw[i] & NIBBLE_MASK;
}

/* A lane's 16 elements as codes, to and from its bytes in the unit. */
static void lane_pack(uint8_t *unit, uint32_t bits, uint32_t lane, const uint16_t code[16])
{
    if (bits == 16) {
        for (uint32_t j = 0; j < 16; j++)
            memcpy(unit + j / 8 * 512 + lane * 16 + j % 8 * 2, &code[j], 2);
    } else if (bits == 8) {
        for (uint32_t j = 0; j < 16; j++)
            unit[lane * 16 + j / 4 * 4 + j % 2 * 2 + j % 4 / 2] = (uint8_t)code[j];
    } else {
        uint32_t t[8], q[2];
        for (uint32_t i = 0; i < 8; i++)
            t[i] = nibbles_spread(code[2 * i], code[2 * i + 1]);
        words_pack(q, t);
        memcpy(unit + lane * 8, q, 8);
    }
}

static void lane_unpack(uint16_t code[16], const uint8_t *unit, uint32_t bits, uint32_t lane)
{
    if (bits == 16) {
        for (uint32_t j = 0; j < 16; j++)
            memcpy(&code[j], unit + j / 8 * 512 + lane * 16 + j % 8 * 2, 2);
    } else if (bits == 8) {
        for (uint32_t j = 0; j < 16; j++)
            code[j] = unit[lane * 16 + j / 4 * 4 + j % 2 * 2 + j % 4 / 2];
    } else {
        uint32_t t[8], q[2];
        memcpy(q, unit + lane * 8, 8);
        words_unpack(t, q);
        for (uint32_t i = 0; i < 8; i++) {
            code[2 * i] = (uint16_t)((t[i] >> 15 & 1) << 3 | (t[i] >> 6 & 7));
            code[2 * i + 1] = (uint16_t)((t[i] >> 31) << 3 | (t[i] >> 22 & 7));
        }
    }
}

/* Element (row, col) of canonical data as a code. */
static uint16_t code_read(const uint8_t *data, uint32_t bits, size_t row_bytes, uint32_t row,
                          uint32_t col)
{
    const uint8_t *p = data + row * row_bytes;
    uint16_t v;
    if (bits == 16) return memcpy(&v, p + (size_t)col * 2, 2), v;
    if (bits == 8) return p[col];
    return p[col / 2] >> (col % 2 * 4) & 15;
}

/* Even columns of 4-bit data come first and clear their byte. */
static void code_write(uint8_t *data, uint32_t bits, size_t row_bytes, uint32_t row, uint32_t col,
                       uint16_t v)
{
    uint8_t *p = data + row * row_bytes;
    if (bits == 16)
        memcpy(p + (size_t)col * 2, &v, 2);
    else if (bits == 8)
        p[col] = (uint8_t)v;
    else
        p[col / 2] = (uint8_t)(col % 2 ? p[col / 2] | v << 4 : v);
}

struct walk {
    struct tile_shape t;
    uint32_t rows, cols, blocks, scale_cols;
    size_t row_bytes;
};

static struct walk walk_of(format_t f, uint32_t rows, uint32_t cols)
{
    struct walk w = {.t = tile_shape(f), .rows = rows, .cols = cols, .blocks = tile_blocks(cols)};
    w.row_bytes = format_row_bytes(f, cols);
    w.scale_cols = w.t.group ? (uint32_t)format_scale_cols(f, cols) : 0;
    return w;
}

static void tile_pack(uint8_t *tile, const struct walk *w, const uint8_t *data,
                      const uint8_t *scale, uint32_t p, uint32_t b)
{
    uint16_t code[16];
    for (uint32_t r = 0; r < TILE_ROWS; r++)
        for (uint32_t c = 0; c < 4; c++) {
            uint32_t row = p * TILE_ROWS + r;
            for (uint32_t j = 0; j < 16; j++) {
                uint32_t col = b * TILE_K + column_of(c, j);
                code[j] = row < w->rows && col < w->cols
                              ? code_read(data, w->t.elem_bits, w->row_bytes, row, col)
                              : 0;
            }
            lane_pack(tile + r / 8 * (w->t.data_bytes / 8), w->t.elem_bits, r % 8 * 4 + c, code);
        }
    uint32_t n = w->t.group ? TILE_K / w->t.group : 0;
    for (uint32_t i = 0; i < TILE_ROWS * n; i++) {
        uint32_t row = p * TILE_ROWS + i / n, col = b * n + i % n;
        tile[w->t.data_bytes + i] =
            row < w->rows && col < w->scale_cols ? scale[(size_t)row * w->scale_cols + col] : 0;
    }
}

static void tile_unpack(uint8_t *data, uint8_t *scale, const struct walk *w, const uint8_t *tile,
                        uint32_t p, uint32_t b)
{
    uint16_t code[16];
    for (uint32_t r = 0; r < TILE_ROWS && p * TILE_ROWS + r < w->rows; r++)
        for (uint32_t c = 0; c < 4; c++) {
            lane_unpack(code, tile + r / 8 * (w->t.data_bytes / 8), w->t.elem_bits, r % 8 * 4 + c);
            for (uint32_t j = 0; j < 16; j++) {
                uint32_t col = b * TILE_K + column_of(c, j);
                if (col < w->cols)
                    code_write(data, w->t.elem_bits, w->row_bytes, p * TILE_ROWS + r, col, code[j]);
            }
        }
    uint32_t n = w->t.group ? TILE_K / w->t.group : 0;
    for (uint32_t i = 0; i < TILE_ROWS * n; i++) {
        uint32_t row = p * TILE_ROWS + i / n, col = b * n + i % n;
        if (row < w->rows && col < w->scale_cols)
            scale[(size_t)row * w->scale_cols + col] = tile[w->t.data_bytes + i];
    }
}

void layout_cuda_pack(void *tiles, format_t f, const void *data, const void *scale, uint32_t rows,
                      uint32_t cols, uint32_t panel0, uint32_t n)
{
    struct walk w = walk_of(f, rows, cols);
    for (uint32_t p = panel0; p < panel0 + n; p++)
        for (uint32_t b = 0; b < w.blocks; b++)
            tile_pack((uint8_t *)tiles + ((size_t)p * w.blocks + b) * w.t.bytes, &w, data, scale, p,
                      b);
}

void layout_cuda_unpack(void *data, void *scale, format_t f, const void *tiles, uint32_t rows,
                        uint32_t cols, uint32_t panel0, uint32_t n)
{
    struct walk w = walk_of(f, rows, cols);
    for (uint32_t p = panel0; p < panel0 + n; p++)
        for (uint32_t b = 0; b < w.blocks; b++)
            tile_unpack(data, scale, &w,
                        (const uint8_t *)tiles + ((size_t)p * w.blocks + b) * w.t.bytes, p, b);
}
