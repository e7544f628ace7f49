/* Text: code points, and the methods of Python's str. */
#include "text/jinja.h"
#include <string.h>
#include <utf8proc.h>

int32_t jn_cp(const char *s, size_t n, size_t *used)
{
    utf8proc_int32_t cp;
    utf8proc_ssize_t k = utf8proc_iterate((const utf8proc_uint8_t *)s, (utf8proc_ssize_t)n, &cp);
    *used = k > 0 ? (size_t)k : 1;
    return k > 0 ? cp : 0xFFFD;
}

bool jn_space(int32_t cp)
{
    return (cp >= 9 && cp <= 13) || (cp >= 28 && cp <= 32) || cp == 0x85 || cp == 0xA0 ||
           cp == 0x1680 || (cp >= 0x2000 && cp <= 0x200A) || cp == 0x2028 || cp == 0x2029 ||
           cp == 0x202F || cp == 0x205F || cp == 0x3000;
}

size_t jn_cp_len(const char *s, size_t n)
{
    size_t k = 0;
    for (size_t i = 0; i < n; i++)
        k += ((unsigned char)s[i] & 0xC0) != 0x80;
    return k;
}

size_t jn_cp_off(const char *s, size_t n, size_t cp)
{
    size_t i = 0;
    while (i < n && cp--) {
        i++;
        while (i < n && ((unsigned char)s[i] & 0xC0) == 0x80)
            i++;
    }
    return i;
}

void jb_cp(struct jctx *c, struct jbuf *b, int32_t cp)
{
    utf8proc_uint8_t t[4];
    utf8proc_ssize_t k = utf8proc_encode_char(cp, t);
    jb_put(c, b, (const char *)t, (size_t)k);
}

static bool strips(int32_t cp, struct jv chars)
{
    if (chars.k != J_STR) return jn_space(cp);
    for (size_t i = 0, used; i < chars.n; i += used)
        if (jn_cp(chars.s + i, chars.n - i, &used) == cp) return true;
    return false;
}

struct jv js_strip(struct jctx *c, struct jv s, struct jv chars, bool left, bool right)
{
    size_t a = 0, b = s.n, used;
    if (chars.k != J_STR && chars.k != J_NONE)
        jn_fail(c, ERR_INPUT, "strip takes a string, not '%s'", jv_type(chars));
    while (left && a < b && strips(jn_cp(s.s + a, b - a, &used), chars))
        a += used;
    while (right && b > a) {
        size_t k = b - 1;
        while (k > a && ((unsigned char)s.s[k] & 0xC0) == 0x80)
            k--;
        if (!strips(jn_cp(s.s + k, b - k, &used), chars)) break;
        b = k;
    }
    return jv_str(s.s + a, b - a);
}

static bool word_break(int32_t cp)
{
    return jn_space(cp) || (cp < 128 && cp && strchr("-({[<", cp));
}

struct jv js_case(struct jctx *c, struct jv s, char mode)
{
    struct jbuf b = {0};
    bool start = true;
    for (size_t i = 0, used; i < s.n; i += used) {
        int32_t cp = jn_cp(s.s + i, s.n - i, &used);
        bool up = mode == 'u' || (mode != 'l' && start);
        bool sharp = up && cp == 0xDF;
        if (sharp)
            jb_puts(c, &b, mode == 'u' ? "SS" : "Ss");
        else
            jb_cp(c, &b,
                  !up           ? utf8proc_tolower(cp)
                  : mode == 'u' ? utf8proc_toupper(cp)
                                : utf8proc_totitle(cp));
        bool cased = utf8proc_toupper(cp) != cp || utf8proc_tolower(cp) != cp || cp == 0xDF;
        start = mode == 't' ? !cased : mode == 'j' ? word_break(cp) : false;
    }
    return jb_str(&b);
}

static const char *find(struct jctx *c, struct jv s, size_t from, struct jv w)
{
    jn_charge(c, s.n - from);
    return w.n ? memmem(s.s + from, s.n - from, w.s, w.n) : s.s + from;
}

struct jv js_replace(struct jctx *c, struct jv s, struct jv a, struct jv b, int64_t count)
{
    struct jbuf o = {0};
    size_t i = 0;
    const char *p;
    if (!a.n) {
        for (size_t used; count != 0; count--, i += used) {
            jb_put(c, &o, b.s, b.n);
            if (i >= s.n) break;
            jn_cp(s.s + i, s.n - i, &used);
            jb_put(c, &o, s.s + i, used);
        }
    } else {
        for (; count != 0 && (p = find(c, s, i, a)) != NULL; count--) {
            jb_put(c, &o, s.s + i, (size_t)(p - s.s) - i);
            jb_put(c, &o, b.s, b.n);
            i = (size_t)(p - s.s) + a.n;
        }
    }
    if (i < s.n) jb_put(c, &o, s.s + i, s.n - i);
    return jb_str(&o);
}

static struct jv want_str(struct jctx *c, struct jv v, const char *what)
{
    if (v.k == J_UNDEF) jn_undefined(c, v);
    if (v.k != J_STR) jn_fail(c, ERR_INPUT, "%s takes a string, not '%s'", what, jv_type(v));
    return v;
}

static struct jv split(struct jctx *c, struct jv s, struct jv sep, int64_t max)
{
    struct jv out = jv_list(c, J_LIST);
    size_t i = 0, used;
    if (sep.k == J_NONE) {
        for (;;) {
            while (i < s.n && jn_space(jn_cp(s.s + i, s.n - i, &used)))
                i += used;
            if (i >= s.n) return out;
            size_t k = i;
            while (k < s.n && !jn_space(jn_cp(s.s + k, s.n - k, &used)))
                k += used;
            if (max-- == 0) {
                jv_push(c, out.l, jv_str(s.s + i, s.n - i)); /* trailing space stays */
                return out;
            }
            jv_push(c, out.l, jv_str(s.s + i, k - i));
            i = k;
        }
    }
    want_str(c, sep, "split");
    if (!sep.n) jn_fail(c, ERR_INPUT, "empty separator");
    const char *p;
    while (max-- != 0 && (p = find(c, s, i, sep)) != NULL) {
        jv_push(c, out.l, jv_str(s.s + i, (size_t)(p - s.s) - i));
        i = (size_t)(p - s.s) + sep.n;
    }
    jv_push(c, out.l, jv_str(s.s + i, s.n - i));
    return out;
}

static size_t rfind(struct jctx *c, struct jv s, size_t end, struct jv w)
{
    jn_charge(c, end);
    for (size_t i = end + 1; i-- > 0;)
        if (i + w.n <= end && memcmp(s.s + i, w.s, w.n) == 0) return i;
    return SIZE_MAX;
}

static struct jv rsplit(struct jctx *c, struct jv s, struct jv sep, int64_t max)
{
    struct jv rev = jv_list(c, J_LIST), out = jv_list(c, J_LIST);
    size_t end = s.n, at;
    if (max < 0) return split(c, s, sep, max);
    want_str(c, sep, "rsplit");
    if (!sep.n) jn_fail(c, ERR_INPUT, "empty separator");
    while (max-- > 0 && (at = rfind(c, s, end, sep)) != SIZE_MAX) {
        jv_push(c, rev.l, jv_str(s.s + at + sep.n, end - at - sep.n));
        end = at;
    }
    jv_push(c, rev.l, jv_str(s.s, end));
    for (size_t i = rev.l->n; i-- > 0;)
        jv_push(c, out.l, rev.l->v[i]);
    return out;
}

static bool affix(struct jctx *c, struct jv s, struct jv w, bool start)
{
    if (w.k == J_TUPLE) {
        for (size_t i = 0; i < w.l->n; i++)
            if (affix(c, s, want_str(c, w.l->v[i], "startswith"), start)) return true;
        return false;
    }
    want_str(c, w, start ? "startswith" : "endswith");
    return w.n <= s.n && (!w.n || memcmp(start ? s.s : s.s + s.n - w.n, w.s, w.n) == 0);
}

static struct jv join(struct jctx *c, struct jv s, struct jv v)
{
    struct jlist *l = jv_iter(c, v);
    struct jbuf b = {0};
    for (size_t i = 0; i < l->n; i++) {
        if (i) jb_put(c, &b, s.s, s.n);
        want_str(c, l->v[i], "join");
        jb_put(c, &b, l->v[i].s, l->v[i].n);
    }
    return jb_str(&b);
}

/* str.format with {}, {0}, {name}; anything finer is refused. */
static struct jv format(struct jctx *c, struct jv s, struct jargs *a)
{
    struct jbuf b = {0};
    size_t next = 0;
    for (size_t i = 0; i < s.n; i++) {
        char ch = s.s[i];
        if (ch != '{' && ch != '}') {
            jb_put(c, &b, &ch, 1);
            continue;
        }
        if (i + 1 < s.n && s.s[i + 1] == ch) {
            jb_put(c, &b, &ch, 1);
            i++;
            continue;
        }
        const char *e = ch == '{' ? memchr(s.s + i, '}', s.n - i) : NULL;
        if (!e) jn_fail(c, ERR_INPUT, "single '%c' in a format string", ch);
        struct jv key = jv_str(s.s + i + 1, (size_t)(e - s.s) - i - 1), v = jv_undef("", 0, 0);
        size_t idx = 0, k = 0;
        while (k < key.n && k < 6 && key.s[k] >= '0' && key.s[k] <= '9')
            idx = idx * 10 + (size_t)(key.s[k++] - '0');
        if (!key.n) idx = next++;
        if (k == key.n && idx < a->n) v = a->v[idx];
        for (k = 0; k < a->nkw; k++)
            if (a->kw[k].k.n == key.n && memcmp(a->kw[k].k.s, key.s, key.n) == 0) v = a->kw[k].v;
        if (v.k == J_UNDEF)
            jn_fail(c, ERR_UNSUPPORTED, "format field '{%.*s}' has no argument or is not supported",
                    (int)(key.n < 40 ? key.n : 40), key.s);
        jv_print(c, &b, v);
        i = (size_t)(e - s.s);
    }
    return jb_str(&b);
}

static bool all_class(struct jv s, char what)
{
    bool cased = false;
    for (size_t i = 0, used; i < s.n; i += used) {
        int32_t cp = jn_cp(s.s + i, s.n - i, &used);
        utf8proc_category_t g = utf8proc_category(cp);
        bool alpha = g >= UTF8PROC_CATEGORY_LU && g <= UTF8PROC_CATEGORY_LO;
        bool dig = g == UTF8PROC_CATEGORY_ND;
        if (what == 'd' && !dig) return false;
        if (what == 'a' && !alpha) return false;
        if (what == 'n' && !alpha && !dig) return false;
        if (what == 's' && !jn_space(cp)) return false;
        if (what == 'u' && g == UTF8PROC_CATEGORY_LL) return false;
        if (what == 'l' && g == UTF8PROC_CATEGORY_LU) return false;
        cased |= g == UTF8PROC_CATEGORY_LL || g == UTF8PROC_CATEGORY_LU;
    }
    return what == 'u' || what == 'l' ? cased : s.n > 0;
}

enum {
    M_SPLIT,
    M_RSPLIT,
    M_STRIP,
    M_LSTRIP,
    M_RSTRIP,
    M_STARTS,
    M_ENDS,
    M_UPPER,
    M_LOWER,
    M_TITLE,
    M_CAP,
    M_REPLACE,
    M_FIND,
    M_RFIND,
    M_JOIN,
    M_FORMAT,
    M_COUNT,
    M_LINES,
    M_DIGIT,
    M_ALPHA,
    M_ALNUM,
    M_SPACE,
    M_ISUPPER,
    M_ISLOWER,
    M_RMPRE,
    M_RMSUF,
    M_INDEX,
    M_END
};

static int method_id(const char *name, size_t n)
{
    static const char *const names[] = {
        "split",   "rsplit",  "strip",   "lstrip",       "rstrip",       "startswith", "endswith",
        "upper",   "lower",   "title",   "capitalize",   "replace",      "find",       "rfind",
        "join",    "format",  "count",   "splitlines",   "isdigit",      "isalpha",    "isalnum",
        "isspace", "isupper", "islower", "removeprefix", "removesuffix", "index"};
    for (int i = 0; i < M_END; i++)
        if (jv_is(jv_str(name, n), names[i])) return i;
    return -1;
}

bool js_has_method(struct jv self, const char *name, size_t n)
{
    static const char *const dict[] = {"get", "items", "keys", "values", "copy"};
    if (self.k == J_STR) return method_id(name, n) >= 0;
    if (self.k == J_DICT)
        for (size_t i = 0; i < sizeof dict / sizeof *dict; i++)
            if (jv_is(jv_str(name, n), dict[i])) return true;
    if (self.k == J_LIST || self.k == J_TUPLE)
        return jv_is(jv_str(name, n), "index") || jv_is(jv_str(name, n), "count");
    return self.k == J_LOOP &&
           (jv_is(jv_str(name, n), "cycle") || jv_is(jv_str(name, n), "changed"));
}

static struct jv lines(struct jctx *c, struct jv s)
{
    struct jv out = jv_list(c, J_LIST);
    size_t i = 0, from = 0;
    while (i < s.n) {
        size_t used, nl = 0;
        int32_t cp = jn_cp(s.s + i, s.n - i, &used);
        if ((cp >= 10 && cp <= 13) || (cp >= 28 && cp <= 30) || cp == 0x85 || cp == 0x2028 ||
            cp == 0x2029)
            nl = used + (cp == '\r' && i + 1 < s.n && s.s[i + 1] == '\n');
        if (nl) jv_push(c, out.l, jv_str(s.s + from, i - from));
        i += nl ? nl : used;
        if (nl) from = i;
    }
    if (from < s.n) jv_push(c, out.l, jv_str(s.s + from, s.n - from));
    return out;
}

static int64_t limit(struct jctx *c, struct jargs *a, size_t i, const char *name)
{
    int64_t v;
    if (!jv_isint(jn_arg(a, i, name, jv_int(-1)), &v))
        jn_fail(c, ERR_INPUT, "'%s' takes an integer", name);
    return v;
}

static struct jv count(struct jctx *c, struct jv s, struct jv w)
{
    int64_t k = 0;
    if (!w.n) return jv_int((int64_t)jn_cp_len(s.s, s.n) + 1);
    const char *p;
    for (size_t i = 0; (p = find(c, s, i, w)) != NULL; k++)
        i = (size_t)(p - s.s) + w.n;
    return jv_int(k);
}

static struct jv str_method(struct jctx *c, struct jv s, int id, struct jargs *a)
{
    struct jv none = jv_none(), x = jn_arg(a, 0, "sep", none);
    switch (id) {
    case M_SPLIT: return split(c, s, x, limit(c, a, 1, "maxsplit"));
    case M_RSPLIT: return rsplit(c, s, x, limit(c, a, 1, "maxsplit"));
    case M_STRIP: return js_strip(c, s, x, true, true);
    case M_LSTRIP: return js_strip(c, s, x, true, false);
    case M_RSTRIP: return js_strip(c, s, x, false, true);
    case M_UPPER: return js_case(c, s, 'u');
    case M_LOWER: return js_case(c, s, 'l');
    case M_TITLE: return js_case(c, s, 't');
    case M_CAP: return js_case(c, s, 'c');
    case M_FORMAT: return format(c, s, a);
    case M_LINES: return lines(c, s);
    case M_DIGIT: return jv_bool(all_class(s, 'd'));
    case M_ALPHA: return jv_bool(all_class(s, 'a'));
    case M_ALNUM: return jv_bool(all_class(s, 'n'));
    case M_SPACE: return jv_bool(all_class(s, 's'));
    case M_ISUPPER: return jv_bool(all_class(s, 'u'));
    case M_ISLOWER: return jv_bool(all_class(s, 'l'));
    case M_STARTS: return jv_bool(affix(c, s, x, true));
    case M_ENDS: return jv_bool(affix(c, s, x, false));
    case M_JOIN: return join(c, s, x);
    default: break;
    }
    want_str(c, x, "the method");
    switch (id) {
    case M_REPLACE:
        return js_replace(c, s, x, want_str(c, jn_arg(a, 1, "new", none), "replace"),
                          limit(c, a, 2, "count"));
    case M_COUNT: return count(c, s, x);
    case M_RMPRE: return affix(c, s, x, true) ? jv_str(s.s + x.n, s.n - x.n) : s;
    case M_RMSUF: return affix(c, s, x, false) ? jv_str(s.s, s.n - x.n) : s;
    default: break;
    }
    if (a->n > 1) jn_fail(c, ERR_UNSUPPORTED, "find with a range is not supported");
    const char *p = find(c, s, 0, x);
    size_t at = id == M_RFIND ? rfind(c, s, s.n, x) : p ? (size_t)(p - s.s) : SIZE_MAX;
    if (at == SIZE_MAX && id == M_INDEX) jn_fail(c, ERR_INPUT, "substring not found");
    return jv_int(at == SIZE_MAX ? -1 : (int64_t)jn_cp_len(s.s, at));
}

static struct jv dict_method(struct jctx *c, struct jv d, struct jv name, struct jargs *a)
{
    if (jv_is(name, "copy")) return d;
    if (jv_is(name, "get")) {
        struct jv *v = a->n ? jv_find(c, d.d, a->v[0]) : NULL;
        return v ? *v : jn_arg(a, 1, "default", jv_none());
    }
    struct jv out = jv_list(c, J_LIST);
    for (size_t i = 0; i < d.d->n; i++) {
        struct jv t = jv_is(name, "keys") ? d.d->p[i].k : d.d->p[i].v;
        if (jv_is(name, "items")) {
            t = jv_list(c, J_TUPLE);
            jv_push(c, t.l, d.d->p[i].k);
            jv_push(c, t.l, d.d->p[i].v);
        }
        jv_push(c, out.l, t);
    }
    return out;
}

static struct jv loop_method(struct jctx *c, struct jloop *l, struct jv name, struct jargs *a)
{
    if (jv_is(name, "cycle")) {
        if (!a->n) jn_fail(c, ERR_INPUT, "loop.cycle takes values");
        return a->v[l->i % a->n];
    }
    struct jv t = jv_list(c, J_TUPLE);
    for (size_t i = 0; i < a->n; i++)
        jv_push(c, t.l, a->v[i]);
    bool changed = !l->has_changed || !jv_eq(c, l->last_changed, t);
    l->has_changed = true;
    l->last_changed = t;
    return jv_bool(changed);
}

struct jv js_method(struct jctx *c, struct jv self, const char *name, size_t n, struct jargs *a)
{
    struct jv nm = jv_str(name, n);
    if (self.k == J_STR) return str_method(c, self, method_id(name, n), a);
    if (self.k == J_DICT) return dict_method(c, self, nm, a);
    if (self.k == J_LOOP) return loop_method(c, self.loop, nm, a);
    int64_t k = 0;
    if (!a->n) jn_fail(c, ERR_INPUT, "the list method takes a value");
    for (size_t i = 0; i < self.l->n; i++) {
        if (!jv_eq(c, self.l->v[i], a->v[0])) continue;
        if (jv_is(nm, "index")) return jv_int((int64_t)i);
        k++;
    }
    if (jv_is(nm, "index")) jn_fail(c, ERR_INPUT, "value is not in the list");
    return jv_int(k);
}
