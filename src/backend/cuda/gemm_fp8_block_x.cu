/* Rows of x with a scale a chain (fp8-block activations). */
#define GEMM_X_SCALES 1
#include "backend/cuda/gemm.cuh"

GEMM_KERNEL(FORMAT_FP8_BLOCK, fp8_block_x, small, GEMM_SMALL)
GEMM_KERNEL(FORMAT_FP8_BLOCK, fp8_block_x, medium, GEMM_MEDIUM)
GEMM_KERNEL(FORMAT_FP8_BLOCK, fp8_block_x, large, GEMM_LARGE)
