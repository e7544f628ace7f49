#include "backend/cuda/driver.h"
#include "base/mem.h"
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#define STR_(x) #x
#define STR(x)  STR_(x)

err_t driver_check(const struct driver *cu, CUresult r, struct err *e, const char *what)
{
    if (r == CUDA_SUCCESS) return OK;
    const char *name = NULL, *text = NULL;
    cu->cuGetErrorName(r, &name);
    cu->cuGetErrorString(r, &text);
    err_t code = r == CUDA_ERROR_OUT_OF_MEMORY ? ERR_NOMEM : ERR_SYSTEM;
    return err_set(e, code, "%s: %s (%s)", what, text ? text : "unknown error", name ? name : "?");
}

static err_t driver_open(struct driver *cu, struct err *e)
{
    struct driver got = {.handle = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL)};
    if (!got.handle)
        return err_set(e, ERR_NOTFOUND,
                       "no CUDA driver: libcuda.so.1 was not found; a GPU needs NVIDIA's "
                       "driver 580 or newer");
    const char *missing = NULL;
    void *p;
    int version = 0;
#define X(f)                              \
    p = dlsym(got.handle, STR(f));        \
    if (!p && !missing) missing = STR(f); \
    memcpy(&got.f, &p, sizeof p);
    DRIVER_LIST(X)
#undef X
    if (got.cuDriverGetVersion) got.cuDriverGetVersion(&version);
    int need = CUDA_VERSION / 1000 * 1000; /* what nvcc N.x compiled, a driver of N.0 loads */
    if (missing || version < need) {
        dlclose(got.handle);
        return err_set(e, ERR_UNSUPPORTED,
                       "CUDA driver too old: it supports CUDA %d.%d, this binary needs %d.%d%s%s",
                       version / 1000, version % 1000 / 10, need / 1000, need % 1000 / 10,
                       missing ? "; it has no " : "", missing ? missing : "");
    }
    *cu = got;
    return OK;
}

static err_t find_device(struct device *d, int ordinal, struct err *e)
{
    const struct driver *cu = &d->cu;
    int n = 0;
    CUresult r = cu->cuInit(0);
    if (r == CUDA_ERROR_NO_DEVICE)
        return err_set(e, ERR_NOTFOUND, "no GPU: the CUDA driver sees none");
    err_t rc = driver_check(cu, r, e, "starting the CUDA driver");
    if (rc == OK) rc = driver_check(cu, cu->cuDeviceGetCount(&n), e, "counting GPUs");
    if (rc != OK) return rc;
    if (ordinal < 0 || ordinal >= n)
        return err_set(e, ERR_NOTFOUND, "GPU %d: the CUDA driver sees %d (0 .. %d)", ordinal, n,
                       n - 1);
    return driver_check(cu, cu->cuDeviceGet(&d->dev, ordinal), e, "opening the GPU");
}

static err_t read_info(struct device *d, struct err *e)
{
    const struct driver *cu = &d->cu;
    struct device_info *i = &d->info;
    int l2 = 0, smem = 0;
    const struct {
        CUdevice_attribute what;
        int *to;
    } attributes[] = {
        {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, &i->major},
        {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, &i->minor},
        {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, &i->n_sms},
        {CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, &l2},
        {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, &smem},
    };
    CUresult r = cu->cuDeviceGetName(i->name, sizeof i->name, d->dev);
    for (size_t k = 0; k < sizeof attributes / sizeof *attributes && r == CUDA_SUCCESS; k++)
        r = cu->cuDeviceGetAttribute(attributes[k].to, attributes[k].what, d->dev);
    if (r == CUDA_SUCCESS) r = cu->cuDeviceTotalMem(&i->total_bytes, d->dev);
    if (r == CUDA_SUCCESS) r = cu->cuDriverGetVersion(&i->driver);
    err_t rc = driver_check(cu, r, e, "asking the GPU for its properties");
    if (rc != OK) return rc;
    i->l2_bytes = (size_t)l2;
    i->smem_max_bytes = (size_t)smem;
    if (i->major != 9 || i->minor != 0)
        return err_set(e, ERR_UNSUPPORTED,
                       "%s has compute capability %d.%d; the kernels are for 9.0 (H100, H200)",
                       i->name, i->major, i->minor);
    return OK;
}

static err_t load_modules(struct device *d, struct err *e)
{
    for (const struct cuda_module *m = cuda_modules; m->start; m++) {
        CHECK(d->n_modules < DEVICE_MODULES_MAX);
        CUresult r = d->cu.cuModuleLoadData(&d->modules[d->n_modules], m->start);
        err_t rc = driver_check(&d->cu, r, e, m->name);
        if (rc != OK) return err_wrap(e, rc, "loading kernels");
        d->n_modules++;
    }
    return OK;
}

static err_t check_memory(struct device *d, size_t need, struct err *e)
{
    size_t have;
    err_t rc = device_free_bytes(&have, d, e);
    if (rc != OK || have >= need) return rc;
    return err_set(e, ERR_NOMEM, "%s has %zu MiB free of %zu; %zu MiB are needed", d->info.name,
                   have >> 20, d->info.total_bytes >> 20, (need + (1u << 20) - 1) >> 20);
}

err_t device_open(struct device **out, int ordinal, size_t need_bytes, struct err *e)
{
    struct device *d = mem_alloc(sizeof *d);
    err_t rc = driver_open(&d->cu, e);
    if (rc == OK) rc = find_device(d, ordinal, e);
    if (rc == OK) rc = read_info(d, e);
    if (rc == OK)
        rc = driver_check(&d->cu, d->cu.cuCtxGetCurrent(&d->former), e, "asking for the context");
    if (rc == OK) {
        rc = driver_check(&d->cu, d->cu.cuDevicePrimaryCtxRetain(&d->ctx, d->dev), e,
                          "opening the GPU's context");
        if (rc != OK) d->ctx = NULL;
    }
    if (rc == OK)
        rc = driver_check(&d->cu, d->cu.cuCtxSetCurrent(d->ctx), e, "using the GPU's context");
    if (rc == OK) rc = check_memory(d, need_bytes, e);
    if (rc == OK) rc = load_modules(d, e);
    if (rc != OK) {
        if (d->ctx) d->cu.cuCtxSetCurrent(d->former);
        device_close(d);
        return rc;
    }
    *out = d;
    return OK;
}

void device_close(struct device *d)
{
    if (!d) return;
    if (d->ctx) {
        CUcontext former = NULL;
        d->cu.cuCtxGetCurrent(&former);
        d->cu.cuCtxSetCurrent(d->ctx); /* modules are unloaded from the current one */
        for (int i = 0; i < d->n_modules; i++)
            d->cu.cuModuleUnload(d->modules[i]);
        d->cu.cuCtxSetCurrent(former);
        d->cu.cuDevicePrimaryCtxRelease(d->dev);
    }
    /* libcuda stays loaded: it does not survive being closed and opened again. */
    mem_free(d);
}

void device_use(struct device *d)
{
    CHECK(d->cu.cuCtxSetCurrent(d->ctx) == CUDA_SUCCESS);
}

void *device_enter(struct device *d)
{
    CUcontext former = NULL;
    CHECK(d->cu.cuCtxGetCurrent(&former) == CUDA_SUCCESS);
    device_use(d);
    return former;
}

void *device_former(const struct device *d)
{
    return d->former;
}

void device_leave(struct device *d, void *former)
{
    CHECK(d->cu.cuCtxSetCurrent(former) == CUDA_SUCCESS);
}

const struct device_info *device_about(const struct device *d)
{
    return &d->info;
}

err_t device_free_bytes(size_t *out, struct device *d, struct err *e)
{
    size_t have, total;
    err_t rc = driver_check(&d->cu, d->cu.cuMemGetInfo(&have, &total), e, "asking for free memory");
    if (rc == OK) *out = have;
    return rc;
}

static CUfunction find_function(struct device *d, const char *name)
{
    CUfunction f;
    for (int i = 0; i < d->n_modules; i++)
        if (d->cu.cuModuleGetFunction(&f, d->modules[i], name) == CUDA_SUCCESS) return f;
    return NULL;
}

err_t device_kernel(struct kernel *out, struct device *d, const char *name, size_t args_bytes,
                    size_t smem_bytes, struct err *e)
{
    const struct driver *cu = &d->cu;
    CUfunction f = find_function(d, name);
    if (!f) return err_set(e, ERR_NOTFOUND, "kernel %s: not in this binary", name);
    size_t offset, size, more;
    CUresult r = cu->cuFuncGetParamInfo(f, 0, &offset, &size);
    if (r == CUDA_SUCCESS &&
        (size != args_bytes || cu->cuFuncGetParamInfo(f, 1, &offset, &more) == CUDA_SUCCESS))
        return err_set(e, ERR_SYSTEM, "kernel %s: takes one parameter of %zu bytes, not %zu", name,
                       size, args_bytes);
    if (r == CUDA_SUCCESS)
        r = cu->cuFuncSetAttribute(f, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                   (int)smem_bytes);
    err_t rc = driver_check(cu, r, e, name);
    if (rc != OK) return rc;
    *out = (struct kernel){.fn = f, .smem_bytes = (uint32_t)smem_bytes};
    snprintf(out->name, sizeof out->name, "%s", name);
    return rc;
}

err_t device_occupancy(int *out, struct device *d, const struct kernel *k, int threads,
                       struct err *e)
{
    return driver_check(&d->cu,
                        d->cu.cuOccupancyMaxActiveBlocksPerMultiprocessor(out, (CUfunction)k->fn,
                                                                          threads, k->smem_bytes),
                        e, k->name);
}
