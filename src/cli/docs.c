#include "cli/docs.h"
#include <string.h>

/* Text of a paragraph: no character of it is a request or an escape of roff. */
static void roff(struct buf *out, const char *s)
{
    for (bool start = true; *s; start = *s++ == '\n') {
        if (start && (*s == '.' || *s == '\'')) (void)buf_puts(out, "\\&");
        if (*s == '-')
            (void)buf_puts(out, "\\-");
        else if (*s == '\\')
            (void)buf_puts(out, "\\e");
        else
            (void)buf_putc(out, *s);
    }
}

static void man_value(const struct opt *o, struct buf *out)
{
    static const char *const kinds[] = {[OPT_FLAG] = NULL,
                                        [OPT_INT] = "N",
                                        [OPT_REAL] = "X",
                                        [OPT_STRING] = "TEXT",
                                        [OPT_STRINGS] = "TEXT"};
    const char *v = o->kind == OPT_CHOICE ? o->choices : kinds[o->kind];
    if (v == NULL) return;
    (void)buf_puts(out, " \\fI");
    roff(out, v);
    (void)buf_puts(out, "\\fR");
}

/* ".TP", "--name", its aliases and its value on one line. */
static void man_flag(const struct opt *o, struct buf *out)
{
    (void)buf_puts(out, ".TP\n\\fB\\-\\-");
    roff(out, o->name);
    for (const char *a = o->alias; a && *a; a++) {
        (void)buf_puts(out, "\\fR, \\fB\\-\\-");
        for (; *a && *a != ','; a++) {
            char s[2] = {*a, 0};
            roff(out, s);
        }
        if (*a == 0) break;
    }
    (void)buf_puts(out, "\\fR");
    man_value(o, out);
    (void)buf_putc(out, '\n');
}

static void man_honoured(const struct opt_command *c, struct buf *out)
{
    for (size_t i = 0; i < c->n_opts; i++) {
        const struct opt *o = &c->opts[i];
        if (o->cls != OPT_HONOURED || !o->help) continue;
        man_flag(o, out);
        roff(out, o->help);
        if (o->preset) {
            (void)buf_puts(out, "\n[");
            roff(out, o->preset);
            (void)buf_putc(out, ']');
        }
        (void)buf_putc(out, '\n');
    }
}

static void man_ignored(const struct opt_command *c, struct buf *out)
{
    const char *before = ".PP\nAccepted and without effect here, since they concern speed:\n";
    for (size_t i = 0; i < c->n_opts; i++) {
        if (c->opts[i].cls != OPT_IGNORED) continue;
        (void)buf_puts(out, before);
        (void)buf_puts(out, "\\-\\-");
        roff(out, c->opts[i].name);
        before = ",\n";
    }
    if (before[0] == ',') (void)buf_puts(out, ".\n");
}

static void man_refused(const struct opt_command *c, struct buf *out)
{
    const char *before = ".PP\nRefused:\n";
    for (size_t i = 0; i < c->n_opts; i++) {
        const struct opt *o = &c->opts[i];
        if (o->cls != OPT_REFUSED) continue;
        (void)buf_puts(out, before);
        before = "";
        man_flag(o, out);
        roff(out, o->help);
        if (o->neutral) {
            (void)buf_puts(out, "\n(accepted: ");
            roff(out, o->neutral);
            (void)buf_putc(out, ')');
        }
        (void)buf_putc(out, '\n');
    }
}

void docs_man(const struct doc_command *c, size_t n, const char *version, struct buf *out)
{
    (void)buf_printf(out,
                     ".TH MOULT 1 \"\" \"moult %s\" \"User Commands\"\n.SH NAME\n"
                     "moult \\- serve mixture\\-of\\-experts models whose weights change while it "
                     "serves\n.SH SYNOPSIS\n.B moult\n.I COMMAND\n[flags]\n.SH COMMANDS\n",
                     version);
    for (size_t i = 0; i < n; i++) {
        (void)buf_printf(out, ".TP\n.B %s\n", c[i].name);
        roff(out, c[i].about);
        (void)buf_putc(out, '\n');
    }
    for (size_t i = 0; i < n; i++) {
        if (!c[i].options) continue;
        (void)buf_printf(out, ".SH \"FLAGS OF MOULT %s\"\n.nf\n", c[i].options->name);
        roff(out, c[i].options->about);
        (void)buf_puts(out, ".fi\n");
        man_honoured(c[i].options, out);
        man_ignored(c[i].options, out);
        man_refused(c[i].options, out);
    }
    (void)buf_puts(out, ".SH EXIT STATUS\n0 on success, 2 for a wrong command line, otherwise "
                        "another value.\n");
}

/* `list` cut at `sep`, each part with `lead` before it. */
static void bash_words(struct buf *out, const char *list, char sep, const char *lead)
{
    for (const char *p = list, *end; p; p = *end ? end + 1 : NULL) {
        end = strchrnul(p, sep);
        (void)buf_puts(out, lead);
        (void)buf_put(out, p, (size_t)(end - p));
    }
}

static bool listed(const struct opt *o)
{
    return o->cls == OPT_HONOURED && o->help;
}

/* After a flag that takes a value: its choices, or nothing, which leaves bash to offer files. */
static void bash_values(const struct opt *o, struct buf *out)
{
    (void)buf_printf(out, "        --%s", o->name);
    if (o->alias) bash_words(out, o->alias, ',', "|--");
    (void)buf_puts(out, ") words='");
    if (o->kind == OPT_CHOICE) bash_words(out, o->choices, '|', " ");
    (void)buf_puts(out, "' ;;\n");
}

static void bash_command(const struct opt_command *c, struct buf *out)
{
    (void)buf_printf(out, "    '%s')\n        case $prev in\n", c->name);
    for (size_t i = 0; i < c->n_opts; i++)
        if (listed(&c->opts[i]) && c->opts[i].kind != OPT_FLAG) bash_values(&c->opts[i], out);
    (void)buf_puts(out, "        *) words='--help");
    for (size_t i = 0; i < c->n_opts; i++)
        if (listed(&c->opts[i])) {
            bash_words(out, c->opts[i].name, ',', " --");
            if (c->opts[i].alias) bash_words(out, c->opts[i].alias, ',', " --");
        }
    (void)buf_puts(out, "' ;;\n        esac ;;\n");
}

void docs_bash(const struct doc_command *c, size_t n, struct buf *out)
{
    (void)buf_puts(out, "# Completion of moult's command line for bash.\n"
                        "_moult()\n{\n"
                        "    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]}\n"
                        "    local command=${COMP_WORDS[1]} words=\n    COMPREPLY=()\n"
                        "    [ \"$COMP_CWORD\" -eq 1 ] && command=\n");
    for (size_t i = 0; i < n; i++) { /* a command of two words */
        const char *second = c[i].options ? strchr(c[i].options->name, ' ') : NULL;
        if (!second) continue;
        (void)buf_printf(out,
                         "    if [ \"$command\" = %s ] && [ \"$COMP_CWORD\" -gt 2 ]; then\n"
                         "        command=\"%s ${COMP_WORDS[2]}\"\n    fi\n",
                         c[i].name, c[i].name);
    }
    (void)buf_puts(out, "    case $command in\n    '') words='");
    for (size_t i = 0; i < n; i++)
        (void)buf_printf(out, " %s", c[i].name);
    (void)buf_puts(out, "' ;;\n");
    for (size_t i = 0; i < n; i++) {
        if (!c[i].options) continue;
        const char *second = strchr(c[i].options->name, ' ');
        if (second) (void)buf_printf(out, "    %s) words=%s ;;\n", c[i].name, second + 1);
        bash_command(c[i].options, out);
    }
    (void)buf_puts(out,
                   "    esac\n"
                   "    [ -z \"$words\" ] || COMPREPLY=($(compgen -W \"$words\" -- \"$cur\"))\n"
                   "}\n"
                   "complete -o default -F _moult moult\n");
}
