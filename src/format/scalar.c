#include "format/scalar.h"

#include "format/format.h"

float format_e4m3(uint8_t code)
{
    return scalar_e4m3(code);
}

float format_e8m0(uint8_t code)
{
    return scalar_e8m0(code);
}

float format_e2m1(uint8_t nibble)
{
    return scalar_e2m1(nibble);
}

float format_bf16(uint16_t code)
{
    return scalar_bf16(code);
}

uint16_t format_to_bf16(float x)
{
    return scalar_to_bf16(x);
}

uint8_t format_to_e4m3(float x)
{
    return scalar_to_e4m3(x);
}

uint8_t format_to_e2m1(float x)
{
    return scalar_to_e2m1(x);
}
