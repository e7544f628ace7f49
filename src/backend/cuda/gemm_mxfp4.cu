#include "backend/cuda/gemm.cuh"

GEMM_KERNELS(FORMAT_MXFP4, mxfp4)
