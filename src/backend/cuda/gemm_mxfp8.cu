#include "backend/cuda/gemm.cuh"

GEMM_KERNELS(FORMAT_MXFP8, mxfp8)
