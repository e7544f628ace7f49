#include "base/histogram.h"

static const double bounds[HISTOGRAM_BOUNDS] = {
    1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1,
    0.2,  0.5,  1,    2,    5,    10,   20,   50,   100,  200,  500,  1000, 2000};

double histogram_bound(size_t i)
{
    return bounds[i];
}

void histogram_add(struct histogram *h, double seconds, uint64_t times)
{
    size_t i = 0;
    if (!(seconds >= 0)) seconds = 0;
    while (i < HISTOGRAM_BOUNDS && seconds > bounds[i])
        i++;
    atomic_fetch_add(&h->count[i], times);
    atomic_fetch_add(&h->sum_ns, (uint64_t)(seconds * 1e9) * times);
}
