/* cast.h - F16 and F32 to BF16, rounded to nearest even, F16 to F32, exact; a NaN stays a NaN. */
#ifndef WEIGHT_CAST_H
#define WEIGHT_CAST_H

#include <stdbool.h>
#include <stdint.h>

static inline uint16_t cast_f32_bits(uint32_t u)
{
    if ((u & 0x7fffffff) > 0x7f800000) return (uint16_t)(u >> 16 | 0x40);
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

static inline uint32_t cast_f16_f32_bits(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exp = h >> 10 & 31, man = h & 1023;
    if (exp == 31) return sign | 0x7f800000 | man << 13;
    if (exp != 0) return sign | (exp + 112) << 23 | man << 13;
    if (man == 0) return sign;
    /* subnormal: man * 2^-24, normal as F32 */
    int shift = __builtin_clz(man) - 21; /* brings the top bit to bit 10 */
    man = man << shift & 1023;
    return sign | (uint32_t)(113 - shift) << 23 | man << 13;
}

static inline uint16_t cast_f16_bits(uint16_t h)
{
    return cast_f32_bits(cast_f16_f32_bits(h));
}

static inline bool cast_bf16_finite(uint16_t b)
{
    return (b & 0x7f80) != 0x7f80;
}

#endif
