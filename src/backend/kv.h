/*
 * kv.h - one page of K and V of a head, as attention reads it.
 *
 * A page holds KV_PAGE_ROWS keys.  Elements are kv_t (BF16; f32 with MOULT_REFERENCE_F32), or E4M3
 * with one scale for all of K and one for all of V of a layer: code = nearest even, saturating, of
 * x / scale; read as the code's exact value, the scale applied later (backend.h, attention).
 *
 *     KV_BF16  K [head_dim / 2][16 keys][2], V [16 keys][head_dim]
 *     KV_E4M3  units of 32 bytes as in layout.h: K [head_dim / 2] units of 2 dimensions by 16 keys,
 *              V [8][head_dim / 16] units of 2 keys by 16 dimensions
 *
 * head_dim is a multiple of 16.  A page of zeros is valid.
 */
#ifndef BACKEND_KV_H
#define BACKEND_KV_H

#include <stddef.h>

typedef enum { KV_BF16, KV_E4M3, KV_TYPE_COUNT } kv_type_t;

size_t kv_elem_bytes(kv_type_t type);
/* One key (row 0 to 15) and its value into their pages; k and v are [head_dim]. */
void kv_write(kv_type_t type, void *k_page, void *v_page, int row, int head_dim, const float *k,
              const float *v, float k_scale, float v_scale);

#endif
