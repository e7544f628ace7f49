/*
 * machine.h - what this machine can do, measured in the run that is compared with it.
 */
#ifndef BENCH_MACHINE_H
#define BENCH_MACHINE_H

#include "base/mem.h"
#include "base/pool.h"
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <time.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

#define READ_PARTS 64

/* Seconds by the wall, or (`cpu`, for one thread on a machine that others use) of this process. */
static inline double machine_now(bool cpu)
{
    struct timespec t;
    clock_gettime(cpu ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

typedef uint64_t machine_vec
    __attribute__((vector_size(32))); /* the compiler splits it if it must */

struct machine_read {
    const uint64_t *p;
    size_t n;
    uint64_t sum[READ_PARTS];
};

/* Four streams at once: one alone does not keep the prefetchers busy. */
static inline void machine_read_part(void *arg, int i)
{
    struct machine_read *s = arg;
    size_t n = s->n / READ_PARTS / 4; /* words of a stream */
    const uint64_t *p = s->p + (size_t)i * 4 * n;
    machine_vec a[4] = {{0}}, x[2];
    for (size_t k = 0; k + 8 <= n; k += 8)
#pragma GCC unroll 4
        for (size_t j = 0; j < 4; j++) {
            memcpy(x, p + j * n + k, sizeof x);
            a[j] += x[0] + x[1];
        }
    for (int j = 0; j < 4; j++)
        s->sum[i] += a[j][0] + a[j][1] + a[j][2] + a[j][3];
}

/* Best of `times` passes over 512 MiB in reads of 64 MiB by all threads, bytes per second: short ones,
 * as a step of one token is, for a machine that others use too. */
static inline double machine_bandwidth(struct pool *pool, int times, bool cpu)
{
    size_t all = (size_t)1 << 26, part = (size_t)1 << 23;
    uint64_t *p = mem_alloc(all * 8);
    memset(p, 1, all * 8);
    double best = 0;
    for (size_t r = 0; r < all / part * (size_t)times; r++) {
        struct machine_read s = {.p = p + r * part % all, .n = part};
        double t = machine_now(cpu);
        pool_run(pool, machine_read_part, &s, READ_PARTS);
        double rate = (double)part * 8 / (machine_now(cpu) - t);
        best = rate > best ? rate : best;
    }
    mem_free(p);
    return best;
}

#define FMA_CHAINS 12
#define FMA_STEPS  1000000

#ifdef __x86_64__
__attribute__((target("avx2,fma"))) static inline float machine_fma8(void)
{
    __m256 acc[FMA_CHAINS], x = _mm256_set1_ps(0.999f), y = _mm256_set1_ps(1e-3f);
    for (int j = 0; j < FMA_CHAINS; j++)
        acc[j] = _mm256_set1_ps((float)j);
    for (int i = 0; i < FMA_STEPS; i++)
#pragma GCC unroll 12
        for (int j = 0; j < FMA_CHAINS; j++)
            acc[j] = _mm256_fmadd_ps(acc[j], x, y);
    float sum = 0;
    for (int j = 0; j < FMA_CHAINS; j++)
        sum += _mm256_cvtss_f32(acc[j]);
    return sum;
}

__attribute__((target("avx512f"))) static inline float machine_fma16(void)
{
    __m512 acc[FMA_CHAINS], x = _mm512_set1_ps(0.999f), y = _mm512_set1_ps(1e-3f);
    for (int j = 0; j < FMA_CHAINS; j++)
        acc[j] = _mm512_set1_ps((float)j);
    for (int i = 0; i < FMA_STEPS; i++)
#pragma GCC unroll 12
        for (int j = 0; j < FMA_CHAINS; j++)
            acc[j] = _mm512_fmadd_ps(acc[j], x, y);
    float sum = 0;
    for (int j = 0; j < FMA_CHAINS; j++)
        sum += _mm512_cvtss_f32(acc[j]);
    return sum;
}
#endif

struct machine_fma {
    int lanes;
    float sum[64];
};

static inline void machine_fma_part(void *arg, int i)
{
    struct machine_fma *f = arg;
#ifdef __x86_64__
    f->sum[i % 64] = f->lanes == 16 ? machine_fma16() : machine_fma8();
#else
    f->sum[i % 64] = 0;
#endif
}

/* FLOP/s of multiply-adds in registers by all threads, best of `times`; 0 where there is no measure
 * for the instruction set. */
static inline double machine_peak(struct pool *pool, const char *isa, int times, bool cpu)
{
    struct machine_fma f = {.lanes = strcmp(isa, "avx512") == 0 ? 16
                                     : strcmp(isa, "avx2") == 0 ? 8
                                                                : 0};
    double best = 0;
    for (int r = 0; r < times && f.lanes; r++) {
        double t = machine_now(cpu);
        int n = pool_threads(pool);
        pool_run(pool, machine_fma_part, &f, n);
        double rate = 2.0 * f.lanes * FMA_CHAINS * (double)FMA_STEPS * n / (machine_now(cpu) - t);
        best = rate > best ? rate : best;
    }
    return best;
}

#endif
