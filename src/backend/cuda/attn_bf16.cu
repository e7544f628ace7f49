/* attn_bf16.cu - attn_columns.cuh over BF16 pages. */
#include "backend/cuda/attn_columns.cuh"

ATTN_HEAD_DIM(bf16, KV_BF16, 64)
ATTN_HEAD_DIM(bf16, KV_BF16, 128)
ATTN_HEAD_DIM(bf16, KV_BF16, 256)
