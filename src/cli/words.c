#include "cli/words.h"
#include "base/file.h"
#include "base/mem.h"
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CONFIG_MAX ((size_t)1 << 20)

static void push(struct words *w, char *word)
{
    if (w->n == w->cap) {
        int cap = w->cap ? w->cap * 2 : 64;
        char **v = mem_alloc((size_t)cap * sizeof *v);
        if (w->n) memcpy(v, w->v, (size_t)w->n * sizeof *v);
        mem_free(w->v);
        w->v = v;
        w->cap = cap;
    }
    w->v[w->n++] = word;
}

/* --name=value; a flag without a value takes true, false or nothing. */
static err_t push_flag(struct words *w, const struct opt *o, const char *value, const char *from,
                       struct err *e)
{
    struct buf word = {0};
    if (o->kind == OPT_FLAG) {
        bool on = !*value || !strcmp(value, "true") || !strcmp(value, "1");
        if (!on && strcmp(value, "false") != 0 && strcmp(value, "0") != 0)
            return err_set(e, ERR_INPUT, "%s: %s takes true or false, not \"%s\"", from, o->name,
                           value);
        if (!on) return OK;
        buf_printf(&word, "--%s", o->name);
    } else {
        buf_printf(&word, "--%s=%s", o->name, value);
    }
    push(w, mem_dup(word.data));
    buf_release(&word);
    return OK;
}

static char *trim(char *s)
{
    while (isspace((unsigned char)*s))
        s++;
    size_t n = strlen(s);
    while (n && isspace((unsigned char)s[n - 1]))
        s[--n] = 0;
    bool quoted = n >= 2 && (s[0] == '"' || s[0] == '\'') && s[n - 1] == s[0];
    if (!quoted) return s;
    s[n - 1] = 0;
    return s + 1;
}

static err_t read_line(struct words *w, const struct opt_command *c, char *line, const char *from,
                       struct err *e)
{
    char *name = trim(line);
    if (!*name || *name == '#') return OK;
    char *cut = name + strcspn(name, ":= \t"), *value = cut;
    while (isspace((unsigned char)*value))
        value++;
    if (*value == ':' || *value == '=')
        value++;
    else if (*value)
        return err_set(e, ERR_INPUT, "%s: \"%s\" is not name: value", from, name);
    *cut = 0;
    for (char *p = name; *p; p++)
        if (*p == '_') *p = '-';
    const struct opt *o = options_find(c, name);
    if (!o)
        return err_set(e, ERR_INPUT, "%s: unknown flag \"%s\"; see moult %s --help", from, name,
                       c->name);
    return push_flag(w, o, value == cut ? "" : trim(value), from, e);
}

static err_t read_config(struct words *w, const struct opt_command *c, const char *path,
                         struct err *e)
{
    struct buf text = {0};
    char from[512];
    err_t rc = file_read(&text, path, CONFIG_MAX, e);
    if (rc != OK) return err_wrap(e, rc, "--config");
    int number = 0;
    for (char *line = text.data, *next; rc == OK && line; line = next) {
        next = strchr(line, '\n');
        if (next) *next++ = 0;
        snprintf(from, sizeof from, "%s:%d", path, ++number);
        rc = read_line(w, c, line, from, e);
    }
    buf_release(&text);
    return rc;
}

static const char *variable(const struct opt *o, char name[128])
{
    char *to = name + snprintf(name, 128, "MOULT_");
    for (const char *p = o->name; *p && to < name + 126; p++)
        *to++ = *p == '-' ? '_' : (char)toupper((unsigned char)*p);
    *to = 0;
    return getenv(name);
}

static const char *config_path(const struct opt_command *c, int argc, char **argv)
{
    char name[128];
    const char *path = NULL;
    const struct opt *o = options_find(c, "config");
    if (!o) return NULL;
    path = variable(o, name);
    for (int i = 0; i < argc; i++) {
        if (!strncmp(argv[i], "--config=", 9))
            path = argv[i] + 9;
        else if (!strcmp(argv[i], "--config") && i + 1 < argc)
            path = argv[i + 1];
    }
    return path;
}

err_t words_gather(struct words *w, const struct opt_command *c, int argc, char **argv,
                   struct err *e)
{
    *w = (struct words){0};
    const char *path = config_path(c, argc, argv);
    err_t rc = path && *path ? read_config(w, c, path, e) : OK;
    for (size_t i = 0; rc == OK && i < c->n_opts; i++) {
        char name[128];
        const char *v = variable(&c->opts[i], name);
        if (v) rc = push_flag(w, &c->opts[i], v, name, e);
    }
    w->owned = w->n;
    for (int i = 0; i < argc; i++)
        push(w, argv[i]);
    return rc;
}

void words_release(struct words *w)
{
    for (int i = 0; i < w->owned; i++)
        mem_free(w->v[i]);
    mem_free(w->v);
    *w = (struct words){0};
}
