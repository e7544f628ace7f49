/*
 * act_ref.h - activation formats by their public definitions in float64, code of its own: a row in
 * place, as products of element and scales.  `input` is the decode scale that nvfp4 has.
 */
#ifndef TEST_UNIT_ACT_REF_H
#define TEST_UNIT_ACT_REF_H

#include "format/act.h"
#include <math.h>

typedef void act_ref_fn(double *x, size_t n, double input);

/* Nearest of a minifloat with `mant` bits, least exponent `emin`, largest value `max`; ties to
 * even. */
static inline double ref_nearest(double x, int mant, int emin, double max)
{
    if (x == 0.0) return 0.0;
    int e = ilogb(x) < emin ? emin : ilogb(x);
    double y = ldexp(nearbyint(ldexp(x, mant - e)), e - mant);
    return fabs(y) > max ? copysign(max, y) : y;
}

static inline double ref_e4m3(double x)
{
    return ref_nearest(x, 3, -6, 448.0);
}

static inline double ref_e2m1(double x)
{
    return ref_nearest(x, 1, 0, 6.0);
}

static inline double ref_amax(const double *x, size_t n)
{
    double a = 0.0;
    for (size_t i = 0; i < n; i++)
        a = fmax(a, fabs(x[i]));
    return a;
}

static inline size_t ref_span(size_t n, size_t at, size_t group)
{
    return n - at < group ? n - at : group;
}

/* DeepGEMM: a scale of amax / 448 for 128 of K. */
static inline void ref_fp8_block(double *x, size_t n, double input)
{
    (void)input;
    for (size_t c = 0; c < n; c += 128) {
        double s = fmax(ref_amax(x + c, ref_span(n, c, 128)), 1e-10) / 448.0;
        for (size_t i = c; i < c + ref_span(n, c, 128); i++)
            x[i] = ref_e4m3(x[i] / s) * s;
    }
}

/* OCP MX with the scale rounded up: no element saturates. */
static inline void ref_mxfp8(double *x, size_t n, double input)
{
    (void)input;
    for (size_t c = 0; c < n; c += 32) {
        double a = ref_amax(x + c, ref_span(n, c, 32));
        double s = a > 0 ? exp2(ceil(log2(a / 448.0))) : 1.0;
        for (size_t i = c; i < c + ref_span(n, c, 32); i++)
            x[i] = ref_e4m3(x[i] / s) * s;
    }
}

/* NVFP4 with a decode scale `input` for the row. */
static inline void ref_nvfp4(double *x, size_t n, double input)
{
    for (size_t c = 0; c < n; c += 16) {
        double s = ref_e4m3(ref_amax(x + c, ref_span(n, c, 16)) / 6.0 / input);
        for (size_t i = c; i < c + ref_span(n, c, 16); i++)
            x[i] = s > 0 ? ref_e2m1(x[i] / (s * input)) * (s * input) : 0.0;
    }
}

static inline void ref_nvfp4_per_token(double *x, size_t n, double input)
{
    (void)input;
    double a = ref_amax(x, n);
    if (a > 0) ref_nvfp4(x, n, a / 2688.0);
}

static act_ref_fn *const act_ref[ACT_COUNT] = {[ACT_FP8_BLOCK] = ref_fp8_block,
                                               [ACT_MXFP8] = ref_mxfp8,
                                               [ACT_NVFP4] = ref_nvfp4,
                                               [ACT_NVFP4_PER_TOKEN] = ref_nvfp4_per_token};

#endif
