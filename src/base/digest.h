/*
 * digest.h - checksums of bytes, chosen by name, one stream at a time.
 *
 *     digest_t kind = digest_find("sha256");             // DIGEST_COUNT: unknown
 *     struct digest d;
 *     digest_init(&d, kind);
 *     digest_add(&d, bytes, n);                          // as often as there are pieces
 *     char hex[DIGEST_HEX];
 *     digest_hex(&d, hex);                               // lower case; the stream may go on
 *
 * The same bytes in other pieces give the same digest.  Nothing is allocated and nothing fails.
 *
 *     xxh3-128   XXH3, 128 bits, seed 0, in its canonical (big-endian) form: quick, against accidents
 *     sha256     FIPS 180-4: against intent
 *     adler32    RFC 1950: what some delta checkpoints carry
 */
#ifndef BASE_DIGEST_H
#define BASE_DIGEST_H

#include <stddef.h>

#define DIGEST_HEX   65 /* the longest in hex, with its end */
#define DIGEST_BYTES 32

typedef enum { DIGEST_XXH3_128, DIGEST_SHA256, DIGEST_ADLER32, DIGEST_COUNT } digest_t;

struct digest {
    digest_t kind;
    _Alignas(64) unsigned char state[640]; /* the algorithm's */
};

digest_t digest_find(const char *name);
const char *digest_name(digest_t kind);
size_t digest_size(digest_t kind); /* bytes; hex has twice as many characters */

void digest_init(struct digest *d, digest_t kind);
void digest_add(struct digest *d, const void *bytes, size_t n);
/* digest_size bytes, in the order in which hex spells them. */
void digest_get(const struct digest *d, unsigned char out[DIGEST_BYTES]);
void digest_hex(const struct digest *d, char out[DIGEST_HEX]);
/* All at once. */
void digest_of(digest_t kind, const void *bytes, size_t n, char out[DIGEST_HEX]);

#endif
