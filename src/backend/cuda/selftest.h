/*
 * selftest.h - does this GPU compute what the kernels count on?  (moult check-gpu)
 *
 *     struct selftest *t;
 *     if (selftest_run(&t, device, false, e) != OK) ...    // it could not be asked
 *     for (int i = 0; i < t->n; i++) ... t->rows[i].differ
 *     mem_free(t);
 *
 * Rows: the GEMM of each format by each of its kernels against the integer model of the tensor core
 * (backend/oracle.h), on data of one size, of very different sizes, that cancels, and subnormal;
 * the combine of experts against the CPU; canonical bytes to tiles and back.  Every word must agree
 * bit for bit.  Then speeds: best of several copies.
 *
 * Takes about a second and a half and some hundred MB of the device.
 */
#ifndef BACKEND_CUDA_SELFTEST_H
#define BACKEND_CUDA_SELFTEST_H

#include "backend/cuda/device.h"

enum { SELFTEST_ROWS = 16 };

struct selftest_row {
    char what[48];
    uint64_t words, differ;
    char first[200]; /* the first word that differs: where, what it is, what it must be */
};

struct selftest {
    int n;
    struct selftest_row rows[SELFTEST_ROWS];
    /* bytes a second: read and written by a copy; from and to pinned host memory */
    double inside, to, from;
};

/* `spoil`: for the test of this test, a bit of one word of each result is turned around before it
 * is compared. */
err_t selftest_run(struct selftest **out, struct device *d, bool spoil, struct err *e) MUST_USE;

#endif
