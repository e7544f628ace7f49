#include "cli/options.h"
#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NAME_MAX_BYTES 64

static int min3(int a, int b, int c)
{
    int m = a < b ? a : b;
    return m < c ? m : c;
}

int options_distance(const char *a, const char *b)
{
    int rows[3][NAME_MAX_BYTES + 1];
    size_t na = strnlen(a, NAME_MAX_BYTES), nb = strnlen(b, NAME_MAX_BYTES);
    for (size_t j = 0; j <= nb; j++)
        rows[0][j] = (int)j;
    for (size_t i = 1; i <= na; i++) {
        int *cur = rows[i % 3], *up = rows[(i + 2) % 3], *up2 = rows[(i + 1) % 3];
        cur[0] = (int)i;
        for (size_t j = 1; j <= nb; j++) {
            int change = a[i - 1] != b[j - 1];
            cur[j] = min3(up[j] + 1, cur[j - 1] + 1, up[j - 1] + change);
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] &&
                up2[j - 2] + 1 < cur[j])
                cur[j] = up2[j - 2] + 1;
        }
    }
    return rows[na % 3][nb];
}

/* Is the word [w, w + n) one of the parts of `list` cut at `sep`? */
static bool in_list(const char *list, char sep, const char *w, size_t n)
{
    for (const char *p = list; p;) {
        const char *end = strchrnul(p, sep);
        if ((size_t)(end - p) == n && memcmp(p, w, n) == 0) return true;
        p = *end ? end + 1 : NULL;
    }
    return false;
}

static const struct opt *find(const struct opt_command *c, const char *name, size_t n)
{
    for (size_t i = 0; i < c->n_opts; i++) {
        const struct opt *o = &c->opts[i];
        if (in_list(o->name, ',', name, n) || in_list(o->alias, ',', name, n)) return o;
    }
    return NULL;
}

const struct opt *options_find(const struct opt_command *c, const char *name)
{
    return find(c, name, strlen(name));
}

static err_t unknown(const struct opt_command *c, const char *name, struct err *e)
{
    const char *best = NULL;
    int least = INT_MAX;
    for (size_t i = 0; i < c->n_opts; i++) {
        if (!c->opts[i].help && c->opts[i].cls == OPT_HONOURED) continue;
        int d = options_distance(name, c->opts[i].name);
        if (d < least) {
            least = d;
            best = c->opts[i].name;
        }
    }
    int limit = (int)strlen(name) / 3 + 2;
    if (best && least <= limit)
        return err_set(e, ERR_INPUT, "unknown flag --%s; did you mean --%s?", name, best);
    return err_set(e, ERR_INPUT, "unknown flag --%s; see moult %s --help", name, c->name);
}

static err_t check_range(const struct opt *o, double v, const char *text, struct err *e)
{
    if (o->min == 0 && o->max == 0) return OK;
    if (v >= o->min && v <= o->max) return OK;
    return err_set(e, ERR_INPUT, "--%s: %s is outside %.15g .. %.15g", o->name, text, o->min,
                   o->max);
}

static err_t store_number(const struct opt *o, const char *text, char *to, struct err *e)
{
    char *end = NULL;
    errno = 0;
    if (o->kind == OPT_INT) {
        long long v = strtoll(text, &end, 10);
        if (end == text || *end || errno)
            return err_set(e, ERR_INPUT, "--%s: \"%s\" is not a whole number", o->name, text);
        err_t rc = check_range(o, (double)v, text, e);
        if (rc != OK) return rc;
        int64_t out = v;
        memcpy(to, &out, sizeof out);
        return OK;
    }
    double v = strtod(text, &end);
    if (end == text || *end || errno || !isfinite(v))
        return err_set(e, ERR_INPUT, "--%s: \"%s\" is not a number", o->name, text);
    err_t rc = check_range(o, v, text, e);
    if (rc == OK) memcpy(to, &v, sizeof v);
    return rc;
}

static err_t store_more(const struct opt *o, const char *text, struct opt_strings *to,
                        struct err *e)
{
    if (to->n == OPT_STRINGS_MAX)
        return err_set(e, ERR_TOOBIG, "--%s: given more than %d times", o->name, OPT_STRINGS_MAX);
    to->v[to->n++] = text;
    return OK;
}

static err_t store_value(const struct opt *o, const char *text, void *into, struct err *e)
{
    char *to = (char *)into + o->offset;
    switch (o->kind) {
    case OPT_FLAG: {
        bool on = true;
        memcpy(to, &on, sizeof on);
        return OK;
    }
    case OPT_INT:
    case OPT_REAL: return store_number(o, text, to, e);
    case OPT_CHOICE:
        if (!in_list(o->choices, '|', text, strlen(text)))
            return err_set(e, ERR_INPUT, "--%s: \"%s\" is not one of %s", o->name, text,
                           o->choices);
        memcpy(to, &text, sizeof text);
        return OK;
    case OPT_STRING: memcpy(to, &text, sizeof text); return OK;
    case OPT_STRINGS: return store_more(o, text, (struct opt_strings *)(void *)to, e);
    }
    return OK;
}

static err_t refuse(const struct opt *o, const char *value, struct err *e)
{
    if (value && o->neutral && in_list(o->neutral, '|', value, strlen(value))) return OK;
    if (o->neutral && value)
        return err_set(e, ERR_UNSUPPORTED, "--%s %s is not supported: %s (accepted: %s)", o->name,
                       value, o->help, o->neutral);
    return err_set(e, ERR_UNSUPPORTED, "--%s is not supported: %s", o->name, o->help);
}

static err_t apply(const struct opt *o, const char *value, void *into, struct buf *ignored,
                   struct err *e)
{
    switch (o->cls) {
    case OPT_HONOURED: return store_value(o, value, into, e);
    case OPT_IGNORED: (void)buf_printf(ignored, " --%s", o->name); return OK;
    case OPT_REFUSED: return refuse(o, value, e);
    }
    return OK;
}

static err_t presets(const struct opt_command *c, void *into, struct err *e)
{
    for (size_t i = 0; i < c->n_opts; i++) {
        const struct opt *o = &c->opts[i];
        if (o->cls != OPT_HONOURED || !o->preset) continue;
        err_t rc = store_value(o, o->preset, into, e);
        if (rc != OK) return rc;
    }
    return OK;
}

/* One argument; *used counts the further words it took. */
static err_t parse_one(const struct opt_command *c, int argc, char **argv, int *used, void *into,
                       struct buf *ignored, struct err *e)
{
    const char *arg = argv[0];
    *used = 0;
    if (arg[0] != '-' || arg[1] != '-' || !arg[2])
        return err_set(e, ERR_INPUT, "unexpected argument \"%s\"; see moult %s --help", arg,
                       c->name);
    const char *name = arg + 2, *eq = strchr(name, '=');
    size_t n = eq ? (size_t)(eq - name) : strlen(name);
    const struct opt *o = find(c, name, n);
    if (!o) {
        char word[NAME_MAX_BYTES + 1];
        if (n > NAME_MAX_BYTES) n = NAME_MAX_BYTES;
        memcpy(word, name, n);
        word[n] = 0;
        return unknown(c, word, e);
    }
    const char *value = eq ? eq + 1 : NULL;
    if (o->kind == OPT_FLAG) {
        if (value) return err_set(e, ERR_INPUT, "--%s takes no value", o->name);
        return apply(o, NULL, into, ignored, e);
    }
    if (!value) {
        if (argc < 2) return err_set(e, ERR_INPUT, "--%s needs a value", o->name);
        value = argv[1];
        *used = 1;
    }
    return apply(o, value, into, ignored, e);
}

options_t options_parse(const struct opt_command *c, int argc, char **argv, void *into,
                        struct buf *ignored, struct err *e)
{
    if (presets(c, into, e) != OK) return OPTIONS_ERROR;
    for (int i = 0; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) return OPTIONS_HELP;
        int used;
        if (parse_one(c, argc - i, argv + i, &used, into, ignored, e) != OK) return OPTIONS_ERROR;
        i += used;
    }
    return OPTIONS_RUN;
}

static void help_row(const struct opt *o, struct buf *out)
{
    static const char *const kinds[] = {"", " N", " X", " TEXT", "", " TEXT"};
    char left[96];
    snprintf(left, sizeof left, "--%s%s%s", o->name, o->kind == OPT_CHOICE ? " " : kinds[o->kind],
             o->kind == OPT_CHOICE ? o->choices : "");
    (void)buf_printf(out, "  %-36s %s", left, o->help);
    if (o->preset) (void)buf_printf(out, " [%s]", o->preset);
    (void)buf_putc(out, '\n');
}

/* The names of one class, wrapped. */
static void help_names(const struct opt_command *c, opt_class_t cls, const char *title,
                       struct buf *out)
{
    size_t column = 0;
    for (size_t i = 0; i < c->n_opts; i++) {
        const struct opt *o = &c->opts[i];
        if (o->cls != cls) continue;
        if (column == 0) (void)buf_printf(out, "\n%s\n ", title);
        if (column + strlen(o->name) + 3 > 92) {
            (void)buf_puts(out, "\n ");
            column = 0;
        }
        (void)buf_printf(out, " --%s", o->name);
        column += strlen(o->name) + 3;
    }
    if (column) (void)buf_putc(out, '\n');
}

void options_help(const struct opt_command *c, struct buf *out)
{
    (void)buf_puts(out, c->about);
    (void)buf_puts(out, "\n");
    for (size_t i = 0; i < c->n_opts; i++)
        if (c->opts[i].cls == OPT_HONOURED && c->opts[i].help) help_row(&c->opts[i], out);
    help_names(c, OPT_IGNORED, "Accepted and without effect here (they concern speed):", out);
    help_names(c, OPT_REFUSED, "Refused with the reason, unless they ask for nothing:", out);
}
