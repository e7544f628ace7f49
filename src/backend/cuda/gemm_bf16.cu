#include "backend/cuda/gemm.cuh"

GEMM_KERNELS(FORMAT_BF16, bf16)
