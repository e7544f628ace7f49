/* absent.c - all of the CUDA backend in a binary built without it (CUDA=0). */
#include "backend/cuda/device.h"

err_t device_open(struct device **out, int ordinal, size_t need_bytes, struct err *e)
{
    (void)out, (void)ordinal, (void)need_bytes;
    return err_set(e, ERR_UNSUPPORTED,
                   "this binary was built without CUDA (make CUDA=1 needs nvcc)");
}
