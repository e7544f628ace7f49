#include "backend/cuda/gemm.cuh"

GEMM_KERNELS_CHAINS(FORMAT_FP8_BLOCK, fp8_block)
