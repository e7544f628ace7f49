/* utf8.h - strict UTF-8 (no surrogates, no overlong forms), one step at a time. */
#ifndef TEXT_UTF8_H
#define TEXT_UTF8_H

#include <stddef.h>
#include <stdint.h>

/* The sequence at p[0..n), n >= 1: > 0 the bytes of a whole character; 0 all n bytes are the start
 * of one that is not finished; < 0 minus the bytes of the invalid maximal subpart (one U+FFFD
 * each). */
int utf8_step(const char *p, size_t n);
/* The bytes of the longest valid prefix; n when all of it is valid. */
size_t utf8_valid(const char *p, size_t n);
/* The code point at p, which must be valid; *bytes is its length. */
uint32_t utf8_get(const char *p, int *bytes);
/* Write `c` (a scalar value) at `to`; returns 1 to 4. */
int utf8_write(char to[4], uint32_t c);

#endif
