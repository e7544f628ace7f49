/*
 * device.h - one GPU: its context, kernels, memory, and queues of work.
 *
 *     struct device *d;
 *     if (device_open(&d, 0, 0, e) != OK) ...            // "no CUDA driver: ...", and so on
 *     struct kernel k;
 *     if (device_kernel(&k, d, "name_in_a_cu_file", sizeof(struct name_args), smem, e) != OK) ...
 *     struct queue *q;
 *     if (queue_new(&q, d, e) != OK) ...
 *     queue_copy(q, dst, host_addr(src), bytes);          // nothing here fails by itself:
 *     queue_launch(q, &k, (struct launch){.grid = {132, 1, 1}, .threads = 128}, &args);
 *     if (queue_sync(q, e) != OK) ...                     // the first failure since the last sync
 *
 * libcuda is opened at run time: the binary neither links it nor needs it.  The primary context is
 * used, so that other CUDA libraries share it.  A binary built with CUDA=0 has device_open alone,
 * which says so.
 *
 * Kernels  live in the .cu files here, each `extern "C" __global__ void name(const
 *          __grid_constant__ struct name_args a)`: one parameter, a struct that C and CUDA share
 *          (a header without C++).  device_kernel checks its size against the compiled kernel.  The
 *          Makefile compiles every .cu for sm_90a and embeds the result.
 * Queue    an in-order stream with its first error: after a failure its further calls do nothing,
 *          and queue_sync or queue_error reports it.  One thread at a time.
 * Threads  device_use once in each thread but the one that called device_open.
 * Lost     a kernel that faults loses the context for good: every later call fails, ERR_SYSTEM.
 * Memory   addresses are uint64_t on the host (devptr_t), so that nobody dereferences one.
 *          region: a reserved range of addresses whose memory can be given back and taken again.
 */
#ifndef BACKEND_CUDA_DEVICE_H
#define BACKEND_CUDA_DEVICE_H

#include "base/err.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef uint64_t devptr_t;

struct device;
struct queue;
struct event;
struct graph;
struct region;

struct device_info {
    char name[96];
    int n_sms;
    int major, minor;   /* compute capability */
    int driver;         /* 13010: CUDA 13.1 */
    size_t total_bytes; /* of the device's memory */
    size_t l2_bytes;
    size_t smem_max_bytes; /* dynamic shared memory a block may have */
};

/* Open GPU `ordinal` (of CUDA_VISIBLE_DEVICES).  Errors, each naming what was found and what is
 * needed: built without CUDA, no driver, driver too old, no such device, compute capability not 9.0
 * (ERR_UNSUPPORTED, ERR_NOTFOUND), fewer than `need_bytes` free (ERR_NOMEM; 0: not asked). */
err_t device_open(struct device **out, int ordinal, size_t need_bytes, struct err *e) MUST_USE;
void device_close(struct device *d); /* NULL is fine; free queues, regions, ... before */
void device_use(struct device *d);
/* For a library: device_use, and the thread's former context again. */
void *device_enter(struct device *d);
void device_leave(struct device *d, void *former);
void *device_former(const struct device *d); /* what was current before device_open */
const struct device_info *device_about(const struct device *d);
err_t device_free_bytes(size_t *out, struct device *d, struct err *e) MUST_USE;

/* --- kernels */
struct kernel {
    void *fn; /* CUfunction; NULL: not loaded */
    char name[40];
    uint32_t smem_bytes;
};
/* `smem_bytes`: dynamic shared memory of every launch.  `args_bytes`: sizeof its parameter. */
err_t device_kernel(struct kernel *out, struct device *d, const char *name, size_t args_bytes,
                    size_t smem_bytes, struct err *e) MUST_USE;
/* Blocks of `threads` that fit on one SM. */
err_t device_occupancy(int *out, struct device *d, const struct kernel *k, int threads,
                       struct err *e) MUST_USE;

/* --- memory */
/* Plain device memory, for small and lasting things.  Not zeroed. */
err_t device_alloc(devptr_t *out, struct device *d, size_t bytes, struct err *e) MUST_USE;
void device_free(struct device *d, devptr_t p); /* 0 is fine */
/* Pinned host memory, not zeroed. */
err_t host_alloc(void **out, struct device *d, size_t bytes, struct err *e) MUST_USE;
void host_free(struct device *d, void *p); /* NULL is fine */

/* A reserved range of `bytes` (rounded up to device pages of 2 MiB).  It starts without memory;
 * region_map gives memory to its first `bytes`, keeping what is mapped already (never less),
 * region_unmap takes all of it back; the base address stays.  New memory has undefined content.
 * Nothing queued may use the range while it is unmapped. */
err_t region_new(struct region **out, struct device *d, size_t bytes, struct err *e) MUST_USE;
void region_free(struct region *r);
devptr_t region_base(const struct region *r);
size_t region_bytes(const struct region *r);  /* reserved */
size_t region_mapped(const struct region *r); /* with memory */
err_t region_map(struct region *r, size_t bytes, struct err *e) MUST_USE;
err_t region_unmap(struct region *r, struct err *e) MUST_USE;

/* --- queues */
err_t queue_new(struct queue **out, struct device *d, struct err *e) MUST_USE;
void queue_free(struct queue *q);    /* waits for its work; NULL is fine */
void *queue_stream(struct queue *q); /* CUstream, for other libraries */
/* A queue over streams of the caller's: the default stream until queue_set_stream names one.  It is
 * neither waited for nor destroyed with the queue. */
struct queue *queue_borrow(struct device *d);
void queue_set_stream(struct queue *q, void *stream);

/* Any mix of device and host addresses; a host address must be pinned to be asynchronous. */
void queue_copy(struct queue *q, uint64_t dst, uint64_t src, size_t bytes);
void queue_fill(struct queue *q, devptr_t dst, uint8_t byte, size_t bytes);
static inline uint64_t host_addr(const void *p)
{
    return (uint64_t)(uintptr_t)p;
}

struct launch {
    uint32_t grid[3]; /* zeros count as 1 */
    uint32_t threads; /* a block */
    uint32_t cluster; /* blocks a cluster along x; 0: none */
    uint32_t smem;    /* bytes of dynamic shared memory; 0: all that the kernel was opened for */
    /* May start before the kernel before it has ended: it must wait for it itself (ptx.cuh,
     * griddepcontrol_wait; some thread of each kernel does, so that those before that one have
     * ended too).  Five such kernels were seen under way at once: until it has waited, a kernel
     * reads only what was written before the last launch that is not programmatic, and writes
     * nothing. */
    bool programmatic;
};
void queue_launch(struct queue *q, const struct kernel *k, struct launch l, const void *args);

void queue_record(struct queue *q, struct event *ev);
void queue_wait(struct queue *q, const struct event *ev); /* what follows waits on the device */
err_t queue_sync(struct queue *q,
                 struct err *e) MUST_USE; /* wait; the first error, then clear it */
err_t queue_error(struct queue *q, struct err *e) MUST_USE; /* the same without waiting */

/* --- events */
err_t event_new(struct event **out, struct device *d, bool timed, struct err *e) MUST_USE;
void event_free(struct event *ev);
/* OK: reached; ERR_BUSY: not yet (e is left alone); else the device failed. */
err_t event_poll(struct event *ev, struct err *e) MUST_USE;
err_t event_sync(struct event *ev, struct err *e) MUST_USE;
err_t event_ms(float *out, struct event *from, struct event *to,
               struct err *e) MUST_USE; /* both timed, reached */

/* --- graphs: what is queued between begin and end is recorded, not run.  Arguments are copied. */
void queue_capture(struct queue *q);
err_t queue_capture_end(struct queue *q, struct graph **out, struct err *e) MUST_USE;
void queue_graph(struct queue *q, const struct graph *g);
void graph_free(struct graph *g);

#endif
