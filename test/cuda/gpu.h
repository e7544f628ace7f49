/*
 * gpu.h - what the tests of the GPU share: one device and queue for a program, checked calls,
 * noise.
 *
 * A program without a GPU to run on prints why and ends with 0: `make check-cuda` is for machines
 * that have one; MOULT_NEED_GPU=1 makes that a failure.  MOULT_TEST_FEW=1: small shapes alone, for
 * compute-sanitizer, under which kernels take hundreds of times as long.
 */
#ifndef TEST_CUDA_GPU_H
#define TEST_CUDA_GPU_H

#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include "backend/backend.h"
#include "backend/cuda/device.h"
#include "base/mem.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct gpu {
    struct device *d;
    struct queue *q;
    bool few;
};

/* A call that must succeed. */
#define MUST(call)                                               \
    do {                                                         \
        struct err must_e = {0};                                 \
        if ((call) != OK) fail_msg("%s: %s", #call, must_e.msg); \
    } while (0)

static inline int gpu_open(struct gpu *g)
{
    struct err e = {0};
    g->few = getenv("MOULT_TEST_FEW") != NULL;
    if (device_open(&g->d, 0, 0, &e) == OK && queue_new(&g->q, g->d, &e) == OK) return 1;
    printf("skip: %s\n", e.msg);
    if (getenv("MOULT_NEED_GPU")) exit(1);
    return 0;
}

static inline void gpu_close(struct gpu *g)
{
    queue_free(g->q);
    device_close(g->d);
}

/* Device memory with the bytes of `p` (NULL: every byte 0xAA, so that nothing reads as zero by
 * luck). */
static inline devptr_t gpu_new(struct gpu *g, const void *p, size_t bytes)
{
    devptr_t out = 0;
    MUST(device_alloc(&out, g->d, bytes, &must_e));
    if (p)
        queue_copy(g->q, out, host_addr(p), bytes);
    else
        queue_fill(g->q, out, 0xAA, bytes);
    MUST(queue_sync(g->q, &must_e));
    return out;
}

/* Waits for the queue and reads back. */
static inline void gpu_read(struct gpu *g, void *to, devptr_t p, size_t bytes)
{
    queue_copy(g->q, host_addr(to), p, bytes);
    MUST(queue_sync(g->q, &must_e));
}

static inline void gpu_free(struct gpu *g, devptr_t p)
{
    device_free(g->d, p);
}

static inline uint32_t noise_u32(uint64_t *s)
{
    *s = *s * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*s >> 32);
}

/* Uniform in [-1, 1). */
static inline float noise_f32(uint64_t *s)
{
    return (float)(int32_t)noise_u32(s) * 0x1p-31f;
}

#endif
