/*
 * cpu.h - the CPU's op tables and how loops over them are shared by threads.
 */
#ifndef BACKEND_CPU_CPU_H
#define BACKEND_CPU_CPU_H

#include "backend/backend.h"
#include "backend/layout.h"
#include "base/err.h"
#include "base/pool.h"

extern const struct backend_ops cpu_ops_portable;
extern const struct backend_ops cpu_ops_avx2;   /* x86-64 only */
extern const struct backend_ops cpu_ops_avx512; /* x86-64 only */
extern const struct backend_ops cpu_ops_neon;   /* AArch64 only */

/* Rows of a that share one decoding of the weights: what callers should give a GEMM at once. */
#define GEMM_ROWS 128

/* Before loops over registers. */
#define UNROLL _Pragma("GCC unroll 16")

/* NULL where the machine or the build lacks it. */
const struct backend_ops *cpu_ops_find(const char *name);
const struct backend_ops *cpu_ops_best(void);
/* `name` NULL: the best.  ERR_UNSUPPORTED otherwise. */
err_t cpu_ops_get(const struct backend_ops **out, const char *name, struct err *e) MUST_USE;

/* All of g's columns for m rows, shared over panels and blocks of rows. */
void cpu_gemm(const struct backend_ops *ops, struct pool *pool, const struct gemm *g, size_t m);

#endif
