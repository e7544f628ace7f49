/* absent.c - the CUDA backend in a binary built without it (CUDA=0): no device opens, so nothing
 * after that is reached. */
#include "backend/cuda/selftest.h"
#include "backend/cuda/weights.h"

static err_t absent(struct err *e)
{
    return err_set(e, ERR_UNSUPPORTED,
                   "this binary was built without CUDA (make CUDA=1 needs nvcc)");
}

err_t device_open(struct device **out, int ordinal, size_t need_bytes, struct err *e)
{
    (void)out, (void)ordinal, (void)need_bytes;
    return absent(e);
}

void device_close(struct device *d)
{
    (void)d;
}

const struct device_info *device_about(const struct device *d)
{
    static const struct device_info none;
    (void)d;
    return &none;
}

err_t device_free_bytes(size_t *out, struct device *d, struct err *e)
{
    (void)out, (void)d;
    return absent(e);
}

err_t selftest_run(struct selftest **out, struct device *d, bool spoil, struct err *e)
{
    (void)out, (void)d, (void)spoil;
    return absent(e);
}

err_t weights_new(struct weights **out, struct device *d, struct err *e)
{
    (void)out, (void)d;
    return absent(e);
}

void weights_free(struct weights *w)
{
    (void)w;
}

struct memory weights_memory(struct weights *w)
{
    (void)w;
    return memory_host;
}

err_t weights_stage_on_host(struct weights *w, size_t bytes, struct err *e)
{
    (void)w, (void)bytes;
    return absent(e);
}

size_t weights_device_bytes(size_t bytes, enum staging_mode staging)
{
    (void)bytes, (void)staging;
    return 0;
}

err_t weights_error(struct weights *w, struct err *e)
{
    (void)w;
    return absent(e);
}
