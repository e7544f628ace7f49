/* Operators on values: arithmetic, attributes, items, slices. */
#include "text/jinja.h"
#include <math.h>
#include <string.h>

static struct jv float_op(struct jctx *c, int op, double x, double y)
{
    if ((op == '/' || op == O_IDIV || op == '%') && !(y < 0) && !(y > 0) && y == y)
        jn_fail(c, ERR_INPUT, "division by zero");
    switch (op) {
    case '+': return jv_float(x + y);
    case '-': return jv_float(x - y);
    case '*': return jv_float(x * y);
    case '/': return jv_float(x / y);
    case O_IDIV: return jv_float(floor(x / y));
    case O_POW: return jv_float(pow(x, y));
    default: {
        double r = fmod(x, y);
        if (r != 0 && (r < 0) != (y < 0)) r += y;
        return jv_float(r);
    }
    }
}

static struct jv int_op(struct jctx *c, int op, int64_t a, int64_t b)
{
    int64_t r = 0;
    bool over = false;
    switch (op) {
    case '+': over = __builtin_add_overflow(a, b, &r); break;
    case '-': over = __builtin_sub_overflow(a, b, &r); break;
    case '*': over = __builtin_mul_overflow(a, b, &r); break;
    case O_POW:
        if (b < 0) return float_op(c, op, (double)a, (double)b);
        for (r = 1; b > 0 && !over; b >>= 1) {
            if (b & 1) over = __builtin_mul_overflow(r, a, &r);
            if (b > 1) over |= __builtin_mul_overflow(a, a, &a);
        }
        break;
    default:
        if (op == '/' || b == 0) return float_op(c, op, (double)a, (double)b);
        if (b == -1) {
            if (op == '%') return jv_int(0);
            over = __builtin_sub_overflow((int64_t)0, a, &r);
            break;
        }
        r = op == '%' ? a % b : a / b;
        if (a % b != 0 && (a % b < 0) != (b < 0)) r += op == '%' ? b : -1;
    }
    if (over) jn_fail(c, ERR_INPUT, "integer over 64 bits");
    return jv_int(r);
}

static struct jv repeat(struct jctx *c, struct jv v, int64_t n)
{
    struct jbuf b = {0};
    if (v.k == J_STR) {
        for (; n > 0 && v.n; n--) {
            jn_charge(c, 64);
            jb_put(c, &b, v.s, v.n);
        }
        return jb_str(&b);
    }
    struct jv out = jv_list(c, v.k);
    for (; n > 0 && v.l->n; n--)
        for (size_t i = 0; i < v.l->n; i++)
            jv_push(c, out.l, v.l->v[i]);
    return out;
}

static bool is_seq(struct jv v)
{
    return v.k == J_STR || v.k == J_LIST || v.k == J_TUPLE;
}

struct jv jv_arith(struct jctx *c, int op, struct jv a, struct jv b)
{
    int64_t i, j;
    double x, y;
    if (jv_isint(a, &i) && jv_isint(b, &j)) return int_op(c, op, i, j);
    if (jv_num(a, &x) && jv_num(b, &y)) return float_op(c, op, x, y);
    if (a.k == J_UNDEF) jn_undefined(c, a);
    if (b.k == J_UNDEF) jn_undefined(c, b);
    if (op == '+' && a.k == J_STR && b.k == J_STR) {
        char *p = jn_alloc(c, a.n + b.n);
        if (a.n) memcpy(p, a.s, a.n);
        if (b.n) memcpy(p + a.n, b.s, b.n);
        return jv_str(p, a.n + b.n);
    }
    if (op == '+' && a.k == b.k && is_seq(a)) {
        struct jv out = jv_list(c, a.k);
        for (size_t k = 0; k < a.l->n; k++)
            jv_push(c, out.l, a.l->v[k]);
        for (size_t k = 0; k < b.l->n; k++)
            jv_push(c, out.l, b.l->v[k]);
        return out;
    }
    if (op == '*' && is_seq(a) && jv_isint(b, &j)) return repeat(c, a, j);
    if (op == '*' && is_seq(b) && jv_isint(a, &i)) return repeat(c, b, i);
    if (op == '%' && a.k == J_STR)
        jn_fail(c, ERR_UNSUPPORTED, "'%%' formatting of strings is not supported");
    jn_fail(c, ERR_INPUT, "unsupported operand types for %s: '%s' and '%s'",
            op == O_IDIV  ? "//"
            : op == O_POW ? "**"
                          : (char[2]){(char)op, 0},
            jv_type(a), jv_type(b));
}

static struct jv loop_attr(struct jctx *c, struct jv o, struct jv name)
{
    static const char *const names[] = {"index",    "index0", "revindex", "revindex0",
                                        "first",    "last",   "length",   "previtem",
                                        "nextitem", "depth",  "depth0"};
    const struct jloop *l = o.loop;
    size_t n = l->items->n, i = l->i, k = 0;
    while (k < 11 && !jv_is(name, names[k]))
        k++;
    switch (k) {
    case 0: return jv_int((int64_t)i + 1);
    case 1: return jv_int((int64_t)i);
    case 2: return jv_int((int64_t)(n - i));
    case 3: return jv_int((int64_t)(n - i) - 1);
    case 4: return jv_bool(i == 0);
    case 5: return jv_bool(i + 1 == n);
    case 6: return jv_int((int64_t)n);
    case 7: return i > 0 ? l->items->v[i - 1] : jv_undef("there is no previous item", 25, 0);
    case 8: return i + 1 < n ? l->items->v[i + 1] : jv_undef("there is no next item", 21, 0);
    case 9: return jv_int(1);
    case 10: return jv_int(0);
    default: (void)c; return jv_undef(name.s, name.n, 1 + J_LOOP);
    }
}

static struct jv method(struct jctx *c, struct jv o, const char *name, size_t n)
{
    struct jbound *b = jn_alloc(c, sizeof *b);
    *b = (struct jbound){o, name, n};
    return (struct jv){.k = J_BOUND, .bound = b};
}

/* o.name: an attribute (here: a method) before an item. */
struct jv jv_attr(struct jctx *c, struct jv o, const char *name, size_t n)
{
    struct jv key = jv_str(name, n);
    if (o.k == J_UNDEF) jn_undefined(c, o);
    if (js_has_method(o, name, n)) return method(c, o, name, n);
    if (o.k == J_LOOP) return loop_attr(c, o, key);
    struct jv *v = o.k == J_DICT || o.k == J_NS ? jv_find(c, o.d, key) : NULL;
    return v ? *v : jv_undef(name, n, 1 + (int)o.k);
}

/* o[key]: an item before an attribute. */
struct jv jv_item(struct jctx *c, struct jv o, struct jv key)
{
    int64_t i;
    if (o.k == J_UNDEF) jn_undefined(c, o);
    if (is_seq(o) && jv_isint(key, &i)) {
        int64_t n = (int64_t)jv_len(c, o);
        if (i < 0) i += n;
        if (i < 0 || i >= n) return jv_undef("item", 4, 1 + (int)o.k);
        if (o.k != J_STR) return o.l->v[i];
        size_t at = jn_cp_off(o.s, o.n, (size_t)i), used;
        jn_charge(c, o.n);
        jn_cp(o.s + at, o.n - at, &used);
        return jv_str(o.s + at, used);
    }
    if (o.k == J_DICT) {
        struct jv *v = jv_find(c, o.d, key);
        if (v) return *v;
    }
    if (key.k == J_STR) return jv_attr(c, o, key.s, key.n);
    return jv_undef("item", 4, 1 + (int)o.k);
}

static int64_t bound(struct jctx *c, struct jv v, int64_t dflt, int64_t n, int64_t lo, int64_t hi)
{
    int64_t i;
    if (v.k == J_NONE) return dflt;
    if (v.k == J_UNDEF) jn_undefined(c, v);
    if (!jv_isint(v, &i)) jn_fail(c, ERR_INPUT, "slice index is a '%s'", jv_type(v));
    if (i < 0) i = i < -n ? -1 : i + n;
    return i < lo ? lo : i > hi ? hi : i;
}

struct jv jv_slice(struct jctx *c, struct jv o, struct jv a, struct jv b, struct jv st)
{
    int64_t step = 1;
    if (o.k == J_UNDEF) jn_undefined(c, o);
    if (!is_seq(o)) jn_fail(c, ERR_INPUT, "'%s' cannot be sliced", jv_type(o));
    if (st.k != J_NONE && (!jv_isint(st, &step) || step == 0))
        jn_fail(c, ERR_INPUT, "slice step must be an integer other than 0");
    int64_t n = (int64_t)jv_len(c, o), lo = step < 0 ? -1 : 0, hi = step < 0 ? n - 1 : n;
    if (step > n + 1) step = n + 1;
    if (step < -n - 1) step = -n - 1;
    int64_t from = bound(c, a, step < 0 ? n - 1 : 0, n, lo, hi);
    int64_t to = bound(c, b, step < 0 ? -1 : n, n, lo, hi);
    if (o.k == J_STR && step == 1) {
        size_t x = jn_cp_off(o.s, o.n, (size_t)from);
        size_t y = jn_cp_off(o.s, o.n, (size_t)(to < from ? from : to));
        jn_charge(c, o.n);
        return jv_str(o.s + x, y - x);
    }
    struct jlist *l = jv_iter(c, o);
    struct jv out = jv_list(c, o.k == J_STR ? J_LIST : o.k);
    for (int64_t i = from; step > 0 ? i < to : i > to; i += step)
        jv_push(c, out.l, l->v[i]);
    if (o.k != J_STR) return out;
    struct jbuf s = {0};
    for (size_t i = 0; i < out.l->n; i++)
        jb_put(c, &s, out.l->v[i].s, out.l->v[i].n);
    return jb_str(&s);
}
