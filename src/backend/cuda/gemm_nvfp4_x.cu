/* Rows of x with a scale (nvfp4 activations). */
#define GEMM_X_SCALES 1
#include "backend/cuda/gemm.cuh"

GEMM_KERNEL(FORMAT_NVFP4, nvfp4_x, small, GEMM_SMALL)
GEMM_KERNEL(FORMAT_NVFP4, nvfp4_x, medium, GEMM_MEDIUM)
GEMM_KERNEL(FORMAT_NVFP4, nvfp4_x, large, GEMM_LARGE)
