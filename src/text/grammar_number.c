/* grammar_number.c - JSON numbers, also between limits. */
#include "text/grammar_build.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define DIGITS 18

static int32_t put_digits(struct gbuild *b, int min, int max, int32_t next)
{
    int32_t r = next;
    for (int i = min; i < max; i++)
        r = gb_split(b, gb_range(b, '0', '9', r), next);
    for (int i = 0; i < min; i++)
        r = gb_range(b, '0', '9', r);
    return r;
}

/* Numbers of n digits between two of n digits. */
static int32_t put_between(struct gbuild *b, const char *lo, const char *hi, int n, int32_t next)
{
    if (n == 0 || b->rc) return next;
    if (strspn(lo, "0") >= (size_t)n && strspn(hi, "9") >= (size_t)n)
        return put_digits(b, n, n, next);
    unsigned l = (unsigned char)*lo, h = (unsigned char)*hi;
    if (l == h) return gb_range(b, l, h, put_between(b, lo + 1, hi + 1, n - 1, next));
    static const char zeros[] = "0000000000000000000", nines[] = "9999999999999999999";
    int32_t low = gb_range(b, l, l, put_between(b, lo + 1, nines, n - 1, next));
    int32_t high = gb_range(b, h, h, put_between(b, zeros, hi + 1, n - 1, next));
    int32_t r = gb_split(b, low, high);
    if (h - l > 1) r = gb_split(b, r, gb_range(b, l + 1, h - 1, put_digits(b, n - 1, n - 1, next)));
    return r;
}

/* Decimal integers lo..hi, 0 <= lo <= hi, without leading zeros. */
static int32_t put_integers(struct gbuild *b, uint64_t lo, uint64_t hi, int32_t next)
{
    char l[24], h[24];
    int32_t r = -1;
    for (uint64_t from = lo; from <= hi && b->rc == OK;) {
        int n = snprintf(l, sizeof l, "%" PRIu64, from);
        uint64_t end = 9;
        for (int i = 1; i < n; i++)
            end = end * 10 + 9;
        if (end > hi) end = hi;
        snprintf(h, sizeof h, "%" PRIu64, end);
        int32_t one = put_between(b, l, h, n, next);
        r = r < 0 ? one : gb_split(b, one, r);
        from = end + 1;
    }
    return r;
}

#define LARGEST 999999999999999999 /* DIGITS nines */

/* Absolute values lo..hi with a sign in front or not; -1: there are none. */
struct span {
    uint64_t lo, hi;
    bool open_lo, open_hi;
};

static int32_t put_fraction(struct gbuild *b, bool not_zero, int32_t next)
{
    int32_t r;
    if (!not_zero) {
        r = put_digits(b, 1, DIGITS, next);
    } else { /* zeros, a digit that is none, any digits */
        int32_t rest = put_digits(b, 0, DIGITS / 2, next);
        r = gb_range(b, '1', '9', rest);
        for (int i = 1; i < DIGITS / 2; i++)
            r = gb_split(b, gb_range(b, '0', '0', r), gb_range(b, '1', '9', rest));
    }
    return gb_range(b, '.', '.', r);
}

/* Values of a span: an integer, for numbers also with a fraction. */
static int32_t put_span(struct gbuild *b, const struct span *s, bool integer, int32_t next)
{
    uint64_t lo = s->lo + (s->open_lo ? 1 : 0), hi = s->hi - (s->open_hi ? 1 : 0);
    int32_t r = -1;
    if (!(s->open_hi && s->hi == 0) && lo <= hi) r = put_integers(b, lo, hi, next);
    if (integer) return r;
    if (s->lo < s->hi) { /* lo.xx up to (hi - 1).xx; where lo is out lo.000 is too */
        int32_t f = put_fraction(b, false, next);
        uint64_t from = s->lo + (s->open_lo ? 1 : 0);
        if (from < s->hi) {
            int32_t one = put_integers(b, from, s->hi - 1, f);
            r = r < 0 ? one : gb_split(b, one, r);
        }
        if (s->open_lo) {
            int32_t one = put_integers(b, s->lo, s->lo, put_fraction(b, true, next));
            r = r < 0 ? one : gb_split(b, one, r);
        }
    }
    if (!s->open_hi && !(s->open_lo && s->lo == s->hi)) { /* hi.000 */
        int32_t zeros = next;
        for (int i = 1; i < DIGITS; i++)
            zeros = gb_split(b, gb_range(b, '0', '0', zeros), next);
        int32_t one =
            put_integers(b, s->hi, s->hi, gb_range(b, '.', '.', gb_range(b, '0', '0', zeros)));
        r = r < 0 ? one : gb_split(b, one, r);
    }
    return r;
}

static int32_t put_any(struct gbuild *b, bool integer, int32_t next)
{
    int32_t tail = next;
    if (!integer) {
        int32_t digits = put_digits(b, 1, 2, next);
        int32_t sign = gb_split(
            b, gb_split(b, gb_range(b, '+', '+', digits), gb_range(b, '-', '-', digits)), digits);
        int32_t power = gb_split(
            b, gb_split(b, gb_range(b, 'e', 'e', sign), gb_range(b, 'E', 'E', sign)), next);
        tail = gb_split(b, put_fraction(b, false, power), power);
    }
    int32_t abs = gb_split(b, gb_range(b, '0', '0', tail),
                           gb_range(b, '1', '9', put_digits(b, 0, DIGITS - 1, tail)));
    return gb_split(b, abs, gb_range(b, '-', '-', abs));
}

int32_t gb_number(struct gbuild *b, const struct gnumber *s, int32_t next)
{
    if (!s->has_lo && !s->has_hi) return put_any(b, s->integer, next);
    int64_t lo = s->has_lo ? s->lo : -LARGEST, hi = s->has_hi ? s->hi : LARGEST;
    int32_t r = -1;
    if (lo < -LARGEST || lo > LARGEST || hi < -LARGEST || hi > LARGEST) {
        gb_fail(b, ERR_INPUT, "json_schema: a limit of a number has more than %d digits", DIGITS);
        return 0;
    }
    if (hi > 0 || (hi == 0 && !s->open_hi && lo <= 0)) { /* what is not below zero */
        struct span up = {lo > 0 ? (uint64_t)lo : 0, (uint64_t)hi, s->open_lo && lo >= 0,
                          s->open_hi};
        if (lo <= hi) r = put_span(b, &up, s->integer, next);
    }
    if (lo < 0) { /* -x: the limits change places */
        struct span down = {hi < 0 ? (uint64_t)-hi : 0, (uint64_t)-lo, hi < 0 ? s->open_hi : true,
                            s->open_lo};
        int32_t one = lo <= hi ? put_span(b, &down, s->integer, next) : -1;
        if (one >= 0) {
            one = gb_range(b, '-', '-', one);
            r = r < 0 ? one : gb_split(b, one, r);
        }
    }
    if (r < 0) gb_fail(b, ERR_INPUT, "json_schema: no number is between minimum and maximum");
    return r < 0 ? 0 : r;
}
