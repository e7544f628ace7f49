/* attn_e4m3.cu - attn_columns.cuh over E4M3 pages. */
#include "backend/cuda/attn_columns.cuh"

ATTN_HEAD_DIM(e4m3, KV_E4M3, 64)
ATTN_HEAD_DIM(e4m3, KV_E4M3, 128)
ATTN_HEAD_DIM(e4m3, KV_E4M3, 256)
