#include "text/rewrite.h"

#include <string.h>

/* White space: Oniguruma's \s.  PCRE2's own also takes U+180E. */
#define SPACE_MEMBERS "\\t-\\r\\x{85}\\p{Z}"

struct rewriter {
    struct buf *out;
    const char *p;
    size_t n, at;
    bool in_class;
    size_t class_start; /* the first member of the open class */
    bool after_range;   /* the last thing outside a class was {n,m} */
    struct err *e;
};

static err_t refuse(struct rewriter *r, const char *what)
{
    return err_set(r->e, ERR_UNSUPPORTED, "pre_tokenizer pattern at byte %zu: %s is not supported",
                   r->at, what);
}

/* \p{Name}, \P{Name}, \p{^Name}: general categories mean the same; a script name is PCRE2's script
 * extensions unless it says sc:. */
static err_t property(struct rewriter *r)
{
    size_t at = r->at + 2;
    if (at >= r->n || r->p[at] != '{') return refuse(r, "\\p without a brace");
    const char *close = memchr(r->p + at, '}', r->n - at);
    if (!close) return refuse(r, "\\p{ without an end");
    const char *name = r->p + at + 1;
    size_t len = (size_t)(close - name);
    bool negated = len > 0 && name[0] == '^';
    name += negated;
    len -= negated;
    if (len == 0 || len > 40) return refuse(r, "this property name");
    for (size_t i = 0; i < len; i++)
        if (!((name[i] >= 'a' && name[i] <= 'z') || (name[i] >= 'A' && name[i] <= 'Z') ||
              name[i] == '_'))
            return refuse(r, "this property name");
    buf_put(r->out, r->p + r->at, 2);
    buf_puts(r->out, negated ? "{^" : "{");
    if (len > 2) buf_puts(r->out, "sc:"); /* any other property fails to compile: refused */
    buf_put(r->out, name, len);
    buf_putc(r->out, '}');
    r->at = (size_t)(close - r->p) + 1;
    return OK;
}

static err_t escape(struct rewriter *r)
{
    if (r->at + 1 >= r->n) return refuse(r, "a backslash at the end");
    char c = r->p[r->at + 1];
    if (c == 'p' || c == 'P') return property(r);
    if (c == 's') {
        buf_puts(r->out, r->in_class ? SPACE_MEMBERS : "[" SPACE_MEMBERS "]");
    } else if (c == 'S') {
        if (r->in_class) return refuse(r, "\\S inside a class");
        buf_puts(r->out, "[^" SPACE_MEMBERS "]");
    } else if (((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z')) && !strchr("rntfvaedDAzx", c)) {
        char what[32] = "the escape \\?";
        what[12] = c;
        return refuse(r, what);
    } else if (c >= '0' && c <= '9') {
        return refuse(r, "a back reference or octal escape");
    } else if (c == 'v') {
        buf_puts(r->out, "\\x{0B}"); /* PCRE2's \v is a class */
    } else {
        buf_put(r->out, r->p + r->at, 2);
    }
    r->at += 2;
    return OK;
}

static err_t in_class(struct rewriter *r)
{
    char c = r->p[r->at];
    if (c == '[') return refuse(r, "a class inside a class");
    if (c == '&' && r->at + 1 < r->n && r->p[r->at + 1] == '&')
        return refuse(r, "class intersection &&");
    if (c == ']') {
        if (r->at == r->class_start) return refuse(r, "] as the first member of a class");
        r->in_class = false;
    }
    buf_putc(r->out, c);
    r->at++;
    return OK;
}

static err_t group(struct rewriter *r)
{
    /* Only groups that mean the same in both. */
    static const char *const known[] = {"(?:", "(?=", "(?!", "(?<=", "(?<!", "(?>", "(?i:", "(?i)"};
    bool ok = r->at + 1 < r->n && r->p[r->at + 1] != '?' && r->p[r->at + 1] != '*';
    for (size_t i = 0; i < sizeof known / sizeof *known && !ok; i++) {
        size_t len = strlen(known[i]);
        ok = r->n - r->at >= len && memcmp(r->p + r->at, known[i], len) == 0;
    }
    if (!ok) return refuse(r, "this kind of group");
    buf_putc(r->out, '(');
    r->at++;
    return OK;
}

static err_t outside(struct rewriter *r)
{
    char c = r->p[r->at];
    bool after_range = r->after_range;
    r->after_range = false;
    if (c == '(') return group(r);
    if (c == '+' && after_range) return refuse(r, "+ after {n,m}"); /* possessive in PCRE2 only */
    if (c == '}') r->after_range = true;
    buf_putc(r->out, c);
    r->at++;
    if (c == '[') {
        r->in_class = true;
        if (r->at < r->n && r->p[r->at] == '^') {
            buf_putc(r->out, '^');
            r->at++;
        }
        r->class_start = r->at;
    }
    return OK;
}

err_t regex_rewrite(struct buf *out, const char *pattern, size_t n, struct err *e)
{
    struct rewriter r = {.out = out, .p = pattern, .n = n, .e = e};
    while (r.at < n) {
        err_t rc;
        if (pattern[r.at] == '\\') {
            rc = escape(&r);
            r.after_range = false;
        } else {
            rc = r.in_class ? in_class(&r) : outside(&r);
        }
        if (rc != OK) return rc;
    }
    if (r.in_class) return refuse(&r, "a class without an end");
    if (out->failed) return err_set(e, ERR_NOMEM, "pre_tokenizer pattern: out of memory");
    return OK;
}

bool regex_literal(struct buf *out, const char *text, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        char c = text[i];
        bool plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                     (unsigned char)c >= 0x80;
        if (c == '\0')
            buf_puts(out, "\\x{0}");
        else if (!plain && (buf_putc(out, '\\'), true))
            buf_putc(out, c);
        else
            buf_putc(out, c);
    }
    return !out->failed;
}
