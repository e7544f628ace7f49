/*
 * driver.h - libcuda's functions, found at run time.  For the files of this folder only.
 */
#ifndef BACKEND_CUDA_DRIVER_H
#define BACKEND_CUDA_DRIVER_H

#include "backend/cuda/device.h"
#include <cuda.h>

/* Every function used; the names are those of cuda.h, whose macros choose the version. */
#define DRIVER_LIST(X)                             \
    X(cuInit)                                      \
    X(cuDriverGetVersion)                          \
    X(cuGetErrorName)                              \
    X(cuGetErrorString)                            \
    X(cuDeviceGetCount)                            \
    X(cuDeviceGet)                                 \
    X(cuDeviceGetName)                             \
    X(cuDeviceGetAttribute)                        \
    X(cuDeviceTotalMem)                            \
    X(cuDevicePrimaryCtxRetain)                    \
    X(cuDevicePrimaryCtxRelease)                   \
    X(cuCtxSetCurrent)                             \
    X(cuCtxGetCurrent)                             \
    X(cuMemGetInfo)                                \
    X(cuModuleLoadData)                            \
    X(cuModuleUnload)                              \
    X(cuModuleGetFunction)                         \
    X(cuFuncSetAttribute)                          \
    X(cuFuncGetParamInfo)                          \
    X(cuOccupancyMaxActiveBlocksPerMultiprocessor) \
    X(cuMemAlloc)                                  \
    X(cuMemFree)                                   \
    X(cuMemHostAlloc)                              \
    X(cuMemFreeHost)                               \
    X(cuMemHostRegister)                           \
    X(cuMemHostUnregister)                         \
    X(cuMemHostGetDevicePointer)                   \
    X(cuMemAddressReserve)                         \
    X(cuMemAddressFree)                            \
    X(cuMemCreate)                                 \
    X(cuMemRelease)                                \
    X(cuMemMap)                                    \
    X(cuMemUnmap)                                  \
    X(cuMemSetAccess)                              \
    X(cuMemGetAllocationGranularity)               \
    X(cuMemcpyAsync)                               \
    X(cuMemsetD8Async)                             \
    X(cuLaunchKernelEx)                            \
    X(cuStreamCreate)                              \
    X(cuStreamDestroy)                             \
    X(cuStreamSynchronize)                         \
    X(cuStreamWaitEvent)                           \
    X(cuStreamBeginCapture)                        \
    X(cuStreamEndCapture)                          \
    X(cuEventCreate)                               \
    X(cuEventDestroy)                              \
    X(cuEventRecord)                               \
    X(cuEventQuery)                                \
    X(cuEventSynchronize)                          \
    X(cuEventElapsedTime)                          \
    X(cuGraphDestroy)                              \
    X(cuGraphInstantiateWithFlags)                 \
    X(cuGraphExecDestroy)                          \
    X(cuGraphLaunch)

struct driver {
    void *handle;
#define X(f) __typeof__(f) *f;
    DRIVER_LIST(X)
#undef X
};

enum { DEVICE_MODULES_MAX = 32 };

struct device {
    struct driver cu;
    CUdevice dev;
    CUcontext ctx;    /* the primary one, retained */
    CUcontext former; /* current before device_open */
    struct device_info info;
    int n_modules;
    CUmodule modules[DEVICE_MODULES_MAX];
};

/* The one way from a driver result to an error: OK, or `e` says "what: CUDA's text (CUDA's name)".
 */
err_t driver_check(const struct driver *cu, CUresult r, struct err *e, const char *what);

/* Compiled kernels, one a .cu file; written by the Makefile (build/cuda/modules.S).  The last has
 * start == NULL. */
struct cuda_module {
    const char *name;
    const void *start;
};
extern const struct cuda_module cuda_modules[];

#endif
