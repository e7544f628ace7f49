#include "text/pretok.h"

#include "base/mem.h"
#include "text/regex.h"
#include "text/rewrite.h"
#include "text/utf8.h"

#include <string.h>

#define MAX_STAGES 16
#define MAX_NESTED 8

/* ByteLevel's own pattern (GPT-2), use_regex true. */
#define BYTE_LEVEL_PATTERN \
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"

struct stage {
    struct regex *re; /* NULL: the piece stays whole */
    bool prefix_space;
};

struct pretok {
    struct stage stage[MAX_STAGES];
    int n;
    bool byte_level; /* the last stage is ByteLevel */
};

struct walk {
    const struct pretok *p;
    struct regex_run *run[MAX_STAGES];
    struct buf prefixed;
    pretok_sink *put;
    void *ctx;
    struct err *e;
};

static err_t add_pattern(struct pretok *p, const struct buf *pattern, bool prefix, struct err *e)
{
    if (p->n == MAX_STAGES)
        return err_set(e, ERR_UNSUPPORTED, "pre_tokenizer: more than %d stages", MAX_STAGES);
    struct stage s = {.prefix_space = prefix};
    if (pattern) {
        err_t rc = regex_compile(&s.re, pattern->data ? pattern->data : "", pattern->len, e);
        if (rc != OK) return err_wrap(e, rc, "pre_tokenizer");
    }
    p->stage[p->n++] = s;
    return OK;
}

static err_t flag(const json_t *o, const char *name, bool otherwise, bool *out, struct err *e)
{
    const json_t *v = json_object_get(o, name);
    if (v && !json_is_boolean(v) && !json_is_null(v))
        return err_set(e, ERR_INPUT, "pre_tokenizer: %s must be a boolean", name);
    *out = json_is_boolean(v) ? json_is_true(v) : otherwise;
    return OK;
}

static err_t parse_split(struct pretok *p, const json_t *o, struct err *e)
{
    const json_t *pattern = json_object_get(o, "pattern");
    const char *behavior = json_string_value(json_object_get(o, "behavior"));
    bool invert;
    err_t rc = flag(o, "invert", false, &invert, e);
    if (rc != OK) return rc;
    if (!behavior || strcmp(behavior, "Isolated") != 0)
        return err_set(
            e, ERR_UNSUPPORTED,
            "pre_tokenizer Split: behavior \"%.60s\" is not supported (only \"Isolated\")",
            behavior ? behavior : "?");
    if (invert) return err_set(e, ERR_UNSUPPORTED, "pre_tokenizer Split: invert is not supported");
    const json_t *re = json_object_get(pattern, "Regex"), *str = json_object_get(pattern, "String");
    struct buf b = {.max = 1 << 20};
    if (json_is_string(re))
        rc = regex_rewrite(&b, json_string_value(re), json_string_length(re), e);
    else if (json_is_string(str))
        rc = regex_literal(&b, json_string_value(str), json_string_length(str))
                 ? OK
                 : err_set(e, ERR_NOMEM, "pre_tokenizer Split: out of memory");
    else
        rc = err_set(e, ERR_INPUT,
                     "pre_tokenizer Split: pattern must be {\"Regex\": string} or "
                     "{\"String\": string}");
    if (rc == OK) rc = add_pattern(p, &b, false, e);
    buf_release(&b);
    return rc;
}

static err_t parse_byte_level(struct pretok *p, const json_t *o, struct err *e)
{
    bool use_regex, prefix;
    err_t rc = flag(o, "use_regex", true, &use_regex, e);
    if (rc == OK) rc = flag(o, "add_prefix_space", true, &prefix, e);
    struct buf b = {0};
    if (rc == OK && use_regex)
        rc = regex_rewrite(&b, BYTE_LEVEL_PATTERN, strlen(BYTE_LEVEL_PATTERN), e);
    if (rc == OK) rc = add_pattern(p, use_regex ? &b : NULL, prefix, e);
    buf_release(&b);
    p->byte_level = rc == OK;
    return rc;
}

static err_t parse_stage(struct pretok *p, const json_t *o, int depth, struct err *e)
{
    const char *type = json_string_value(json_object_get(o, "type"));
    if (!type) return err_set(e, ERR_INPUT, "pre_tokenizer: type must be a string");
    if (strcmp(type, "Sequence") == 0) {
        const json_t *list = json_object_get(o, "pretokenizers");
        if (!json_is_array(list) || depth == MAX_NESTED)
            return err_set(e, ERR_INPUT,
                           "pre_tokenizer Sequence: pretokenizers must be an array, "
                           "nested at most %d deep",
                           MAX_NESTED);
        for (size_t i = 0; i < json_array_size(list); i++) {
            err_t rc = parse_stage(p, json_array_get(list, i), depth + 1, e);
            if (rc != OK) return rc;
        }
        return OK;
    }
    if (p->byte_level)
        return err_set(e, ERR_UNSUPPORTED, "pre_tokenizer: \"%.60s\" after ByteLevel", type);
    if (strcmp(type, "Split") == 0) return parse_split(p, o, e);
    if (strcmp(type, "ByteLevel") == 0) return parse_byte_level(p, o, e);
    return err_set(e, ERR_UNSUPPORTED,
                   "pre_tokenizer type \"%.60s\" is not supported (Sequence, Split, ByteLevel)",
                   type);
}

err_t pretok_parse(struct pretok **out, const json_t *spec, struct err *e)
{
    struct pretok *p = mem_alloc(sizeof *p);
    err_t rc = OK;
    if (spec && !json_is_null(spec)) rc = parse_stage(p, spec, 0, e);
    if (rc == OK && !p->byte_level)
        rc = err_set(e, ERR_UNSUPPORTED, "pre_tokenizer: without ByteLevel is not supported");
    if (rc != OK) {
        pretok_free(p);
        return rc;
    }
    *out = p;
    return OK;
}

void pretok_free(struct pretok *p)
{
    if (!p) return;
    for (int i = 0; i < p->n; i++)
        regex_free(p->stage[i].re);
    mem_free(p);
}

static err_t walk_stage(struct walk *w, int i, const char *text, size_t n);

static inline err_t hand_on(struct walk *w, int next, const char *text, size_t n)
{
    if (n == 0) return OK;
    return next == w->p->n ? w->put(w->ctx, text, n, w->e) : walk_stage(w, next, text, n);
}

/* Recursion is as deep as the list of stages. */
static err_t walk_stage(struct walk *w, int i, const char *text, size_t n)
{
    const struct stage *s = &w->p->stage[i];
    if (s->prefix_space && text[0] != ' ') {
        buf_clear(&w->prefixed);
        if (!buf_putc(&w->prefixed, ' ') || !buf_put(&w->prefixed, text, n))
            return err_set(w->e, ERR_NOMEM, "tokenizing: out of memory");
        text = w->prefixed.data;
        n = w->prefixed.len;
    }
    if (!s->re) return hand_on(w, i + 1, text, n);
    size_t done = 0, from = 0, last = SIZE_MAX; /* last: the end of the match before */
    while (from <= n) {
        bool found;
        size_t a, b;
        err_t rc = regex_match(s->re, w->run[i], text, n, from, &found, &a, &b, w->e);
        if (rc != OK) return rc;
        if (!found) break;
        if (a == b && b == last) { /* an empty match right after a match does not count */
            int bytes = 1;
            if (from < n) utf8_get(text + from, &bytes);
            from += (size_t)bytes;
            continue;
        }
        rc = hand_on(w, i + 1, text + done, a - done);
        if (rc == OK) rc = hand_on(w, i + 1, text + a, b - a);
        if (rc != OK) return rc;
        done = from = last = b;
    }
    return hand_on(w, i + 1, text + done, n - done);
}

err_t pretok_run(const struct pretok *p, const char *text, size_t n, pretok_sink *put, void *ctx,
                 struct err *e)
{
    struct walk w = {.p = p, .put = put, .ctx = ctx, .e = e};
    err_t rc = OK;
    for (int i = 0; i < p->n && rc == OK; i++)
        if (p->stage[i].re && !(w.run[i] = regex_run_new(p->stage[i].re)))
            rc = err_set(e, ERR_NOMEM, "tokenizing: out of memory");
    if (rc == OK && n > 0) rc = walk_stage(&w, 0, text, n);
    for (int i = 0; i < p->n; i++)
        regex_run_free(w.run[i]);
    buf_release(&w.prefixed);
    return rc;
}
