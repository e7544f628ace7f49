#include "backend/cuda/gemm.cuh"

GEMM_KERNELS(FORMAT_NVFP4, nvfp4)
