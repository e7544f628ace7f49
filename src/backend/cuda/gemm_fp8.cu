#include "backend/cuda/gemm.cuh"

GEMM_KERNELS(FORMAT_FP8_CHANNEL, fp8)
