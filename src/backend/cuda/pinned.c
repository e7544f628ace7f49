#include "backend/cuda/pinned.h"
#include "backend/cuda/driver.h"
#include "base/mem.h"
#include "base/pages.h"
#include <pthread.h>
#include <sys/mman.h>

enum piece { PIECE_PLAIN, PIECE_BUSY, PIECE_PINNED };

struct pinned {
    struct device *d;
    char *base;
    size_t bytes, n, n_pinned;
    unsigned char *pieces; /* [n] enum piece; like n_pinned under the lock */
    pthread_mutex_t lock;
    pthread_cond_t changed;
};

err_t pinned_new(struct pinned **out, struct device *d, size_t bytes, struct err *e)
{
    size_t n = bytes / PINNED_PIECE + (bytes % PINNED_PIECE != 0);
    struct pinned *p = mem_try(sizeof *p);
    unsigned char *pieces = mem_try(n ? n : 1);
    char *base = pages_reserve(bytes);
    if (!p || !pieces || !base) {
        mem_free(p);
        mem_free(pieces);
        pages_release(base, bytes);
        return err_set(e, ERR_NOMEM, "no host memory for %zu bytes", bytes);
    }
    (void)madvise(base, bytes, MADV_HUGEPAGE); /* pinning touches every page */
    *p = (struct pinned){.d = d, .base = base, .bytes = bytes, .n = n, .pieces = pieces};
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->changed, NULL);
    *out = p;
    return OK;
}

void pinned_free(struct pinned *p)
{
    if (!p) return;
    for (size_t i = 0; i < p->n; i++)
        if (p->pieces[i] == PIECE_PINNED) p->d->cu.cuMemHostUnregister(p->base + i * PINNED_PIECE);
    pages_release(p->base, p->bytes);
    pthread_mutex_destroy(&p->lock);
    pthread_cond_destroy(&p->changed);
    mem_free(p->pieces);
    mem_free(p);
}

char *pinned_base(const struct pinned *p)
{
    return p->base;
}

size_t pinned_bytes(const struct pinned *p)
{
    return p->bytes;
}

bool pinned_fits(struct pinned *p)
{
    size_t available, total;
    pages_left(&available, &total);
    pthread_mutex_lock(&p->lock);
    size_t rest = (p->n - p->n_pinned) * PINNED_PIECE;
    pthread_mutex_unlock(&p->lock);
    return (rest < p->bytes ? rest : p->bytes) <= available;
}

size_t pinned_run(size_t offset, size_t n)
{
    size_t left = PINNED_PIECE - offset % PINNED_PIECE;
    return n < left ? n : left;
}

static err_t pin(struct pinned *p, size_t i, struct err *e)
{
    const struct driver *cu = &p->d->cu;
    char *at = p->base + i * PINNED_PIECE;
    CUdeviceptr seen = 0;
    size_t n = pinned_run(i * PINNED_PIECE, p->bytes - i * PINNED_PIECE);
    if (mem_fault_now()) return err_set(e, ERR_NOMEM, "pinning host memory: out of memory");
    (void)pages_fill(at, n); /* where it cannot, the driver does */
    CUresult r =
        cu->cuMemHostRegister(at, n, CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP);
    err_t rc = driver_check(cu, r, e, "pinning host memory");
    if (rc != OK) return rc;
    rc = driver_check(cu, cu->cuMemHostGetDevicePointer(&seen, at, 0), e, "pinned host memory");
    if (rc == OK && seen != host_addr(at))
        rc = err_set(e, ERR_UNSUPPORTED, "pinned host memory has another address on the GPU");
    if (rc != OK) cu->cuMemHostUnregister(at);
    return rc;
}

/* The lock is held before and after. */
static err_t need_piece(struct pinned *p, size_t i, struct err *e)
{
    while (p->pieces[i] == PIECE_BUSY)
        pthread_cond_wait(&p->changed, &p->lock);
    if (p->pieces[i] == PIECE_PINNED) return OK;
    p->pieces[i] = PIECE_BUSY;
    pthread_mutex_unlock(&p->lock);
    err_t rc = pin(p, i, e);
    pthread_mutex_lock(&p->lock);
    p->pieces[i] = rc == OK ? PIECE_PINNED : PIECE_PLAIN;
    p->n_pinned += rc == OK;
    pthread_cond_broadcast(&p->changed);
    return rc;
}

err_t pinned_need(struct pinned *p, size_t offset, size_t n, struct err *e)
{
    err_t rc = OK;
    CHECK(offset <= p->bytes && n <= p->bytes - offset);
    if (n == 0) return OK;
    device_use(p->d);
    pthread_mutex_lock(&p->lock);
    for (size_t i = offset / PINNED_PIECE; rc == OK && i <= (offset + n - 1) / PINNED_PIECE; i++)
        rc = need_piece(p, i, e);
    pthread_mutex_unlock(&p->lock);
    return rc;
}
