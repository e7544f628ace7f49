#include "backend/cuda/gemm.cuh"

GEMM_KERNELS(FORMAT_FP8_BLOCK, fp8_block)
