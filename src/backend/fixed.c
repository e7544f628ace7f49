#include "backend/fixed.h"
#include <math.h>
#include <string.h>

/* Bits of the largest magnitude. */
static uint32_t largest(const float *x)
{
    uint32_t u[FIXED_COLS], max = 0;
    memcpy(u, x, sizeof u);
    for (int i = 0; i < FIXED_COLS; i++) {
        uint32_t a = u[i] & 0x7fffffffu;
        max = a > max ? a : max;
    }
    return max;
}

/* Adding 1.5 * 2^52 rounds to an integer, which is the low bits of the sum. */
static int32_t nearest(double x)
{
    double t = x + 0x1.8p52;
    uint64_t u;
    memcpy(&u, &t, sizeof u);
    return (int32_t)(uint32_t)u;
}

static void fixed_block(struct fixed *out, const float *x)
{
    uint32_t max = largest(x), e = max >> 23 ? max >> 23 : 1; /* biased by 127 */
    memset(out, 0, sizeof *out);
    if (max >= 0x7f800000u) out->unit = NAN;
    if (max == 0 || max >= 0x7f800000u) return;
    uint64_t bits = (uint64_t)(1023 + 127 + 21 - e) << 52;
    double scale;
    float two_e;
    memcpy(&scale, &bits, sizeof scale);
    max = e << 23;
    memcpy(&two_e, &max, sizeof two_e);
    out->unit = two_e * 0x1p-22f;
    for (int i = 0; i < FIXED_COLS; i++) {
        int32_t v = nearest((double)x[i] * scale);
        uint32_t biased = (uint32_t)v + 0x808080u; /* each digit plus 128 */
        for (int d = 0; d < FIXED_DIGITS; d++)
            out->digit[d][i] = (int8_t)((int32_t)(biased >> 8 * d & 255u) - 128);
        out->bias -= 12 * v;
    }
}

void fixed_row(struct fixed *out, const float *x, size_t cols)
{
    size_t k = 0;
    for (; cols - k >= FIXED_COLS; k += FIXED_COLS)
        fixed_block(out++, x + k);
    if (k == cols) return;
    float last[FIXED_COLS] = {0};
    memcpy(last, x + k, (cols - k) * sizeof *x);
    fixed_block(out, last);
}
