#include "base/digest.h"

#include "base/digest_x86.h"
#include <nettle/sha2.h>
#include <stdint.h>
#include <string.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

struct algorithm {
    const char *name;
    size_t size;
    void (*init)(void *state);
    void (*add)(void *state, const void *bytes, size_t n);
    void (*get)(void *state, unsigned char *out); /* may spoil the state */
};

#define ROOM sizeof(((struct digest *)0)->state)
_Static_assert(sizeof(XXH3_state_t) <= ROOM && sizeof(struct sha256_ctx) <= ROOM,
               "struct digest holds any state");

static void xxh_init(void *state)
{
    XXH3_INITSTATE((XXH3_state_t *)state);
    XXH3_128bits_reset(state);
}

static void xxh_add(void *state, const void *bytes, size_t n)
{
#ifdef __x86_64__
    if (__builtin_cpu_supports("avx2")) {
        digest_xxh_add_avx2(state, bytes, n);
        return;
    }
#endif
    XXH3_128bits_update(state, bytes, n);
}

static void xxh_get(void *state, unsigned char *out)
{
    XXH128_canonical_t c;
    XXH128_canonicalFromHash(&c, XXH3_128bits_digest(state));
    memcpy(out, c.digest, sizeof c.digest);
}

static void sha_init(void *state)
{
    sha256_init(state);
}

static void sha_add(void *state, const void *bytes, size_t n)
{
    sha256_update(state, n, bytes);
}

static void sha_get(void *state, unsigned char *out)
{
    sha256_digest(state, SHA256_DIGEST_SIZE, out);
}

/* Two sums modulo 65521: of the bytes, from 1, and of the first sum after each byte. */
#define ADLER_MOD  65521u
#define ADLER_SPAN 5552u /* bytes that a 32-bit sum takes before it must be reduced */

struct adler {
    uint32_t a, b;
};

static void adler_init(void *state)
{
    *(struct adler *)state = (struct adler){1, 0};
}

static void adler_add(void *state, const void *bytes, size_t n)
{
    struct adler *s = state;
    const unsigned char *p = bytes;
    while (n) {
        size_t k = n < ADLER_SPAN ? n : ADLER_SPAN;
        for (size_t i = 0; i < k; i++) {
            s->a += p[i];
            s->b += s->a;
        }
        s->a %= ADLER_MOD;
        s->b %= ADLER_MOD;
        p += k;
        n -= k;
    }
}

static void adler_get(void *state, unsigned char *out)
{
    const struct adler *s = state;
    uint32_t v = s->b << 16 | s->a;
    for (int i = 0; i < 4; i++)
        out[i] = (unsigned char)(v >> (24 - 8 * i));
}

static const struct algorithm algorithms[DIGEST_COUNT] = {
    [DIGEST_XXH3_128] = {"xxh3-128", 16, xxh_init, xxh_add, xxh_get},
    [DIGEST_SHA256] = {"sha256", 32, sha_init, sha_add, sha_get},
    [DIGEST_ADLER32] = {"adler32", 4, adler_init, adler_add, adler_get},
};

digest_t digest_find(const char *name)
{
    int i = 0;
    while (i < DIGEST_COUNT && strcmp(name, algorithms[i].name) != 0)
        i++;
    return (digest_t)i;
}

const char *digest_name(digest_t kind)
{
    return algorithms[kind].name;
}

size_t digest_size(digest_t kind)
{
    return algorithms[kind].size;
}

void digest_init(struct digest *d, digest_t kind)
{
    d->kind = kind;
    algorithms[kind].init(d->state);
}

void digest_add(struct digest *d, const void *bytes, size_t n)
{
    algorithms[d->kind].add(d->state, bytes, n);
}

void digest_get(const struct digest *d, unsigned char out[DIGEST_BYTES])
{
    struct digest copy = *d;
    algorithms[d->kind].get(copy.state, out);
}

void digest_hex(const struct digest *d, char out[DIGEST_HEX])
{
    static const char digits[] = "0123456789abcdef";
    unsigned char bytes[DIGEST_BYTES];
    digest_get(d, bytes);
    size_t n = algorithms[d->kind].size;
    for (size_t i = 0; i < n; i++) {
        out[2 * i] = digits[bytes[i] >> 4];
        out[2 * i + 1] = digits[bytes[i] & 15];
    }
    out[2 * n] = 0;
}

void digest_of(digest_t kind, const void *bytes, size_t n, char out[DIGEST_HEX])
{
    struct digest d;
    digest_init(&d, kind);
    digest_add(&d, bytes, n);
    digest_hex(&d, out);
}
