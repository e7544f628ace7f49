#include "text/utf8.h"

#include <string.h>

/* Length by the lead byte and the range of the second byte (Unicode table 3-7); 0: not a lead. */
static int lead_length(unsigned char b, unsigned char *lo, unsigned char *hi)
{
    *lo = 0x80;
    *hi = 0xBF;
    if (b < 0x80) return 1;
    if (b < 0xC2) return 0;
    if (b < 0xE0) return 2;
    if (b < 0xF0) {
        if (b == 0xE0) *lo = 0xA0;
        if (b == 0xED) *hi = 0x9F;
        return 3;
    }
    if (b > 0xF4) return 0;
    if (b == 0xF0) *lo = 0x90;
    if (b == 0xF4) *hi = 0x8F;
    return 4;
}

int utf8_step(const char *p, size_t n)
{
    const unsigned char *s = (const unsigned char *)p;
    unsigned char lo, hi;
    int want = lead_length(s[0], &lo, &hi);
    if (want == 0) return -1;
    for (int i = 1; i < want; i++) {
        if ((size_t)i >= n) return 0;
        if (s[i] < lo || s[i] > hi) return -i;
        lo = 0x80;
        hi = 0xBF;
    }
    return want;
}

size_t utf8_valid(const char *p, size_t n)
{
    size_t at = 0;
    while (at < n) {
        uint64_t w;
        if (n - at >= 8) {
            memcpy(&w, p + at, 8);
            if (!(w & 0x8080808080808080u)) {
                at += 8;
                continue;
            }
        }
        int r = utf8_step(p + at, n - at);
        if (r <= 0) break;
        at += (size_t)r;
    }
    return at;
}

uint32_t utf8_get(const char *p, int *bytes)
{
    const unsigned char *s = (const unsigned char *)p;
    if (s[0] < 0x80) {
        *bytes = 1;
        return s[0];
    }
    if (s[0] < 0xE0) {
        *bytes = 2;
        return (uint32_t)(s[0] & 0x1F) << 6 | (s[1] & 0x3F);
    }
    if (s[0] < 0xF0) {
        *bytes = 3;
        return (uint32_t)(s[0] & 0x0F) << 12 | (uint32_t)(s[1] & 0x3F) << 6 | (s[2] & 0x3F);
    }
    *bytes = 4;
    return (uint32_t)(s[0] & 0x07) << 18 | (uint32_t)(s[1] & 0x3F) << 12 |
           (uint32_t)(s[2] & 0x3F) << 6 | (s[3] & 0x3F);
}

int utf8_write(char to[4], uint32_t c)
{
    if (c < 0x80) {
        to[0] = (char)c;
        return 1;
    }
    if (c < 0x800) {
        to[0] = (char)(0xC0 | c >> 6);
        to[1] = (char)(0x80 | (c & 0x3F));
        return 2;
    }
    if (c < 0x10000) {
        to[0] = (char)(0xE0 | c >> 12);
        to[1] = (char)(0x80 | (c >> 6 & 0x3F));
        to[2] = (char)(0x80 | (c & 0x3F));
        return 3;
    }
    to[0] = (char)(0xF0 | c >> 18);
    to[1] = (char)(0x80 | (c >> 12 & 0x3F));
    to[2] = (char)(0x80 | (c >> 6 & 0x3F));
    to[3] = (char)(0x80 | (c & 0x3F));
    return 4;
}
