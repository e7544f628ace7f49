/*
 * formatdump.c - scalar codecs for test/oracle_format.py.
 *
 *   formatdump decode          256 x f32 of E4M3, then of E8M0, then 16 of E2M1
 *   formatdump encode < f32s   for each f32 of the input its E4M3 code and its E2M1 code
 */
#include "format/format.h"
#include <stdio.h>
#include <string.h>

static void put(float x)
{
    fwrite(&x, sizeof x, 1, stdout);
}

int main(int argc, char **argv)
{
    if (argc == 2 && strcmp(argv[1], "decode") == 0) {
        for (int c = 0; c < 256; c++)
            put(format_e4m3((uint8_t)c));
        for (int c = 0; c < 256; c++)
            put(format_e8m0((uint8_t)c));
        for (int c = 0; c < 16; c++)
            put(format_e2m1((uint8_t)c));
        return 0;
    }
    if (argc != 2 || strcmp(argv[1], "encode") != 0) return 2;
    for (float x; fread(&x, sizeof x, 1, stdin) == 1;) {
        putchar(format_to_e4m3(x));
        putchar(format_to_e2m1(x));
    }
    return 0;
}
