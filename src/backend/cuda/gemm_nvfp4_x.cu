/* Rows of x with a scale (nvfp4 activations). */
#define GEMM_X_SCALES 1
#include "backend/cuda/gemm.cuh"

GEMM_KERNELS(FORMAT_NVFP4, nvfp4_x)
