#include "backend/cuda/driver.h"
#include "base/mem.h"

err_t device_alloc(devptr_t *out, struct device *d, size_t bytes, struct err *e)
{
    CUdeviceptr p;
    err_t rc = driver_check(&d->cu, d->cu.cuMemAlloc(&p, bytes ? bytes : 1), e, "device memory");
    if (rc != OK) return err_wrap(e, rc, "%zu bytes", bytes);
    *out = p;
    return OK;
}

void device_free(struct device *d, devptr_t p)
{
    if (p) d->cu.cuMemFree(p);
}

err_t host_alloc(void **out, struct device *d, size_t bytes, struct err *e)
{
    void *p;
    CUresult r = d->cu.cuMemHostAlloc(&p, bytes ? bytes : 1, CU_MEMHOSTALLOC_PORTABLE);
    err_t rc = driver_check(&d->cu, r, e, "pinned host memory");
    if (rc != OK) return err_wrap(e, rc, "%zu bytes", bytes);
    *out = p;
    return OK;
}

void host_free(struct device *d, void *p)
{
    if (p) d->cu.cuMemFreeHost(p);
}

/* One physical allocation, mapped at `at` of its region. */
struct chunk {
    CUmemGenericAllocationHandle handle;
    size_t at, bytes;
};

enum { CHUNKS_MAX = 64 };

struct region {
    struct device *d;
    CUdeviceptr base;
    size_t bytes, mapped, page;
    int n_chunks;
    struct chunk chunks[CHUNKS_MAX];
};

static CUmemAllocationProp memory_kind(const struct device *d)
{
    CUmemAllocationProp p = {.type = CU_MEM_ALLOCATION_TYPE_PINNED};
    p.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    p.location.id = d->dev;
    return p;
}

/* `bytes` in whole pages; false when that overflows. */
static bool whole_pages(size_t *out, size_t bytes, size_t page)
{
    size_t n = bytes / page + (bytes % page != 0);
    return mul_size(out, n, page);
}

err_t region_new(struct region **out, struct device *d, size_t bytes, struct err *e)
{
    CUmemAllocationProp kind = memory_kind(d);
    size_t page, whole;
    CUresult r =
        d->cu.cuMemGetAllocationGranularity(&page, &kind, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
    err_t rc = driver_check(&d->cu, r, e, "size of device pages");
    if (rc != OK) return rc;
    if (!whole_pages(&whole, bytes ? bytes : 1, page))
        return err_set(e, ERR_NOMEM, "%zu bytes of device addresses: too many", bytes);
    CUdeviceptr base;
    rc = driver_check(&d->cu, d->cu.cuMemAddressReserve(&base, whole, page, 0, 0), e,
                      "reserving device addresses");
    if (rc != OK) return err_wrap(e, rc, "%zu bytes", whole);
    struct region *g = mem_alloc(sizeof *g);
    *g = (struct region){.d = d, .base = base, .bytes = whole, .page = page};
    *out = g;
    return OK;
}

err_t region_map(struct region *g, size_t bytes, struct err *e)
{
    struct device *d = g->d;
    CUmemAllocationProp kind = memory_kind(d);
    CUmemAccessDesc access = {.location = kind.location,
                              .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    size_t whole;
    CHECK(bytes <= g->bytes && whole_pages(&whole, bytes, g->page));
    if (whole <= g->mapped) return OK;
    CHECK(g->n_chunks < CHUNKS_MAX);
    struct chunk c = {.at = g->mapped, .bytes = whole - g->mapped};
    err_t rc =
        driver_check(&d->cu, d->cu.cuMemCreate(&c.handle, c.bytes, &kind, 0), e, "device memory");
    if (rc != OK) return err_wrap(e, rc, "%zu bytes", c.bytes);
    rc = driver_check(&d->cu, d->cu.cuMemMap(g->base + c.at, c.bytes, 0, c.handle, 0), e,
                      "mapping device memory");
    if (rc != OK) goto release;
    rc = driver_check(&d->cu, d->cu.cuMemSetAccess(g->base + c.at, c.bytes, &access, 1), e,
                      "access to device memory");
    if (rc != OK) goto unmap;
    g->chunks[g->n_chunks++] = c;
    g->mapped = whole;
    return OK;
unmap:
    d->cu.cuMemUnmap(g->base + c.at, c.bytes);
release:
    d->cu.cuMemRelease(c.handle);
    return rc;
}

err_t region_unmap(struct region *g, struct err *e)
{
    struct device *d = g->d;
    while (g->n_chunks > 0) {
        struct chunk *c = &g->chunks[g->n_chunks - 1];
        err_t rc = driver_check(&d->cu, d->cu.cuMemUnmap(g->base + c->at, c->bytes), e,
                                "unmapping device memory");
        if (rc == OK)
            rc =
                driver_check(&d->cu, d->cu.cuMemRelease(c->handle), e, "giving back device memory");
        if (rc != OK) return rc;
        g->mapped = c->at;
        g->n_chunks--;
    }
    return OK;
}

void region_free(struct region *g)
{
    if (!g) return;
    /* Fails only when the device is lost, and then its memory is gone too. */
    if (region_unmap(g, NULL) == OK) g->d->cu.cuMemAddressFree(g->base, g->bytes);
    mem_free(g);
}

devptr_t region_base(const struct region *g)
{
    return g->base;
}

size_t region_bytes(const struct region *g)
{
    return g->bytes;
}

size_t region_mapped(const struct region *g)
{
    return g->mapped;
}
