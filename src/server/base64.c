#include "server/base64.h"

static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

enum { GROUPS = 1024 }; /* encoded or decoded at once */

static void put_group(char *to, uint32_t v)
{
    to[0] = digits[v >> 18];
    to[1] = digits[v >> 12 & 63];
    to[2] = digits[v >> 6 & 63];
    to[3] = digits[v & 63];
}

bool base64_put(struct buf *b, const uint8_t *p, size_t n)
{
    char text[GROUPS * 4];
    size_t left = n % 3, at = 0;
    if (!n) return true;
    for (const uint8_t *end = p + (n - left); p < end; p += 3) {
        put_group(text + at, (uint32_t)p[0] << 16 | (uint32_t)p[1] << 8 | p[2]);
        at += 4;
        if (at < sizeof text) continue;
        if (!buf_put(b, text, at)) return false;
        at = 0;
    }
    if (left) {
        put_group(text + at, (uint32_t)p[0] << 16 | (left == 2 ? (uint32_t)p[1] << 8 : 0));
        text[at + 3] = '=';
        if (left == 1) text[at + 2] = '=';
        at += 4;
    }
    return !at || buf_put(b, text, at);
}

static int value_of(char c)
{
    if (c >= 'A' && c <= 'Z') return c - 'A';
    if (c >= 'a' && c <= 'z') return c - 'a' + 26;
    if (c >= '0' && c <= '9') return c - '0' + 52;
    return c == '+' ? 62 : c == '/' ? 63 : -1;
}

bool base64_get(struct buf *out, const char *s, size_t n)
{
    char bytes[GROUPS * 3];
    size_t at = 0, pad = n && s[n - 1] == '=' ? 1 + (n > 1 && s[n - 2] == '=') : 0;
    if (n % 4) return false;
    for (size_t i = 0; i < n; i += 4) {
        uint32_t v = 0;
        for (size_t k = 0; k < 4; k++) {
            int d = i + k < n - pad ? value_of(s[i + k]) : 0;
            if (d < 0) return false;
            v = v << 6 | (uint32_t)d;
        }
        size_t here = i + 4 == n ? 3 - pad : 3;
        if (here < 3 && (v & (here == 2 ? 0xffu : 0xffffu))) return false; /* bits beyond the end */
        for (size_t k = 0; k < here; k++)
            bytes[at++] = (char)(v >> (16 - 8 * k));
        if (at + 3 <= sizeof bytes && i + 4 < n) continue;
        if (!buf_put(out, bytes, at)) return false;
        at = 0;
    }
    return true;
}
