/*
 * histogram.h - how often something took how long.
 *
 *     histogram_add(&h, seconds, 1);        // any thread, without a lock
 *     histogram_bound(i)                    // upper bound of count[i]; the last count is above all of them
 *
 * 1-2-5 a decade, from the swap of an address to the longest request.
 */
#ifndef BASE_HISTOGRAM_H
#define BASE_HISTOGRAM_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#define HISTOGRAM_BOUNDS 26

struct histogram {
    _Atomic uint64_t count[HISTOGRAM_BOUNDS + 1]; /* not cumulative */
    _Atomic uint64_t sum_ns;
};

void histogram_add(struct histogram *h, double seconds, uint64_t times);
double histogram_bound(size_t i); /* seconds */

#endif
