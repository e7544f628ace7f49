/* base64.h - RFC 4648, with padding. */
#ifndef SERVER_BASE64_H
#define SERVER_BASE64_H

#include "base/buf.h"
#include <stdint.h>

/* Appends; a piece that another follows must be a multiple of 3 bytes. */
bool base64_put(struct buf *b, const uint8_t *p, size_t n);
/* Appends what `s` stands for.  False: some character, the length or the padding is wrong (spaces are, too), or
 * out of memory (out->failed). */
bool base64_get(struct buf *out, const char *s, size_t n);

#endif
