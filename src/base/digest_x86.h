/* digest_x86.h - between digest.c and its twin for newer x86 processors. */
#ifndef BASE_DIGEST_X86_H
#define BASE_DIGEST_X86_H

#include <stddef.h>

void digest_xxh_add_avx2(void *state, const void *bytes, size_t n);

#endif
