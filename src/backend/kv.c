#include "backend/kv.h"
#include "backend/backend.h"

size_t kv_elem_bytes(kv_type_t type)
{
    return type == KV_E4M3 ? 1 : sizeof(kv_t);
}

static void write_plain(kv_t *k_page, kv_t *v_page, int row, int head_dim, const float *k,
                        const float *v)
{
    for (int d = 0; d < head_dim; d++) {
        k_page[(d / 2 * KV_PAGE_ROWS + row) * 2 + d % 2] = kv_from_f32(k[d]);
        v_page[row * head_dim + d] = kv_from_f32(v[d]);
    }
}

/* Place of row r of 16 in a unit. */
static int place(int r)
{
    return 2 * (r % 4) + 16 * (r / 4 % 2) + 8 * (r / 8);
}

static void write_e4m3(uint8_t *k_page, uint8_t *v_page, int row, int head_dim, const float *k,
                       const float *v, float k_scale, float v_scale)
{
    for (int d = 0; d < head_dim; d++) {
        k_page[d / 2 * 32 + place(row) + d % 2] = format_to_e4m3(k[d] / k_scale);
        v_page[(row / 2 * (head_dim / 16) + d / 16) * 32 + place(d % 16) + row % 2] =
            format_to_e4m3(v[d] / v_scale);
    }
}

void kv_write(kv_type_t type, void *k_page, void *v_page, int row, int head_dim, const float *k,
              const float *v, float k_scale, float v_scale)
{
    if (type == KV_E4M3)
        write_e4m3(k_page, v_page, row, head_dim, k, v, k_scale, v_scale);
    else
        write_plain(k_page, v_page, row, head_dim, k, v);
}
