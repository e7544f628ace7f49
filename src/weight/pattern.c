#include "weight/pattern.h"

#include "base/mem.h"
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define PATTERN_BYTES 512
#define NAME_BYTES    640
#define MATCH_LIMIT   10000 /* steps of one regular expression: no file may stop the server */
#define COUNT(a)      (sizeof(a) / sizeof(a)[0])

struct pattern {
    syntax_t syntax;
    char *text;
    uint64_t words;    /* it matches no name that lacks one of them; 0: unknown */
    pcre2_code *regex; /* of "re:", and what matching it needs; else NULL */
    pcre2_match_data *found;
    pcre2_match_context *limits;
};

/* In front of "layers." and the like; the first two before "lm_head" too. */
static const char *const prefixes[] = {"", "language_model.", "model.", "language_model.model.",
                                       "model.language_model."};
#define HEAD_PREFIXES 2

/* A projection that others build as part of one module. */
static const struct {
    const char *part, *fused;
} fusions[] = {
    {".q_proj", ".qkv_proj"},        {".k_proj", ".qkv_proj"},      {".v_proj", ".qkv_proj"},
    {".gate_proj", ".gate_up_proj"}, {".up_proj", ".gate_up_proj"},
};

/* A set of components, small and not exact: two may share a bit. */
static uint64_t words_of(const char *name)
{
    uint64_t set = 0;
    for (const char *p = name; *p;) {
        uint32_t h = 2166136261u; /* FNV-1a */
        const char *begin = p;
        for (; *p && *p != '.'; p++)
            h = (h ^ (unsigned char)*p) * 16777619u;
        if (p > begin) set |= (uint64_t)1 << (h * 2654435769u >> 26);
        p += *p == '.';
    }
    return set;
}

static err_t compile(struct pattern *p, const char *source, struct err *e)
{
    int code;
    PCRE2_SIZE at;
    p->regex = pcre2_compile((PCRE2_SPTR)source, PCRE2_ZERO_TERMINATED, PCRE2_ANCHORED | PCRE2_UTF,
                             &code, &at, NULL);
    if (p->regex) {
        p->found = pcre2_match_data_create(1, NULL);
        p->limits = pcre2_match_context_create(NULL);
        if (p->found == NULL || p->limits == NULL)
            return err_set(e, ERR_NOMEM, "no memory for \"re:%.200s\"", source);
        pcre2_set_match_limit(p->limits, MATCH_LIMIT);
        return OK;
    }
    char why[128] = "";
    pcre2_get_error_message(code, (PCRE2_UCHAR *)why, sizeof why);
    return err_set(e, ERR_INPUT, "\"re:%.200s\": %s", source, why);
}

static void pattern_free(struct pattern *p)
{
    pcre2_match_context_free(p->limits);
    pcre2_match_data_free(p->found);
    pcre2_code_free(p->regex);
    mem_free(p->text);
}

err_t patterns_add(struct patterns *p, syntax_t syntax, const char *text, struct err *e)
{
    size_t len = strlen(text);
    if (len > PATTERN_BYTES)
        return err_set(e, ERR_TOOBIG, "a name of %zu bytes, at most %d are allowed", len,
                       PATTERN_BYTES);
    if (p->n == p->cap) {
        size_t cap = p->cap ? 2 * p->cap : 64;
        struct pattern *v = mem_retry(p->v, p->cap * sizeof *v, cap * sizeof *v);
        if (v == NULL) return err_set(e, ERR_NOMEM, "no memory for %zu names", cap);
        p->v = v;
        p->cap = cap;
    }
    bool regex = syntax == SYNTAX_EXACT && strncmp(text, "re:", 3) == 0;
    struct pattern t = {.syntax = syntax, .text = mem_dup_n(text, len)};
    if (t.text == NULL) return err_set(e, ERR_NOMEM, "no memory for a name");
    err_t rc = OK;
    if (regex)
        rc = compile(&t, text + 3, e);
    else if (syntax == SYNTAX_EXACT || strchr(text, '*') == NULL)
        t.words = words_of(text);
    if (rc != OK)
        pattern_free(&t);
    else
        p->v[p->n++] = t;
    return rc;
}

void patterns_free(struct patterns *p)
{
    for (size_t i = 0; i < p->n; i++)
        pattern_free(&p->v[i]);
    mem_free(p->v);
    *p = (struct patterns){0};
}

/* Does pattern w with '*'s match all of s[0 .. n)?  On a mismatch the last '*' takes one more. */
static bool wild(const char *w, const char *s, size_t n)
{
    const char *end = s + n, *star = NULL, *retry = s;
    while (s < end) {
        if (*w == '*') {
            star = w++;
            retry = s;
        } else if (*w == *s) {
            w++;
            s++;
        } else if (star) {
            w = star + 1;
            s = ++retry;
        } else {
            return false;
        }
    }
    while (*w == '*')
        w++;
    return *w == 0;
}

/* Is w, without a dot at its end, a run of whole components of the name? */
static bool components(const char *w, const char *name)
{
    size_t n = strlen(w);
    if (n && w[n - 1] == '.') n--;
    if (n == 0) return false;
    for (const char *at = name; (at = strchr(at, *w)) != NULL; at++)
        if ((at == name || at[-1] == '.') && strncmp(at, w, n) == 0 && (at[n] == 0 || at[n] == '.'))
            return true;
    return false;
}

static bool match_prefix(const char *w, const char *name)
{
    if (strchr(w, '*') == NULL) return components(w, name);
    for (size_t i = 0; name[i]; i++)
        if (name[i] == '.' && wild(w, name, i)) return true;
    return wild(w, name, strlen(name));
}

static bool match_wildcard(const char *w, const char *name)
{
    if (strchr(w, '*') == NULL) return components(w, name);
    if (wild(w, name, strlen(name))) return true;
    for (const char *at = name; *at;) {
        size_t n = strcspn(at, ".");
        if (wild(w, at, n)) return true;
        at += n + (at[n] == '.');
    }
    return false;
}

static bool match_regex(const struct pattern *p, const char *name)
{
    return pcre2_match(p->regex, (PCRE2_SPTR)name, PCRE2_ZERO_TERMINATED, 0, 0, p->found,
                       p->limits) >= 0;
}

static bool match_one(const struct pattern *p, const char *name)
{
    if (p->regex) return match_regex(p, name);
    switch (p->syntax) {
    case SYNTAX_PREFIX: return match_prefix(p->text, name);
    case SYNTAX_WILDCARD: return match_wildcard(p->text, name);
    default: return strcmp(p->text, name) == 0;
    }
}

/* `words`: of the name, or more. */
static bool match_any(const struct patterns *p, const char *name, uint64_t words)
{
    for (size_t i = 0; i < p->n; i++)
        if (!(p->v[i].words & ~words) && match_one(&p->v[i], name)) return true;
    return false;
}

static const char *without_prefix(const char *name)
{
    const char *best = name;
    for (size_t i = 0; i < COUNT(prefixes); i++) {
        size_t n = strlen(prefixes[i]);
        if (strncmp(name, prefixes[i], n) == 0 && name + n > best) best = name + n;
    }
    return best;
}

static bool match_prefixed(const struct patterns *p, const char *name)
{
    char full[NAME_BYTES];
    const char *bare = without_prefix(name);
    size_t n_prefixes = bare == name ? HEAD_PREFIXES : COUNT(prefixes);
    uint64_t words = words_of(name) | words_of(prefixes[COUNT(prefixes) - 1]);
    for (size_t i = 0; i < n_prefixes; i++) {
        int n = snprintf(full, sizeof full, "%s%s", prefixes[i], bare);
        if (n >= 0 && (size_t)n < sizeof full && match_any(p, full, words)) return true;
    }
    return false;
}

bool patterns_match(const struct patterns *p, const char *module, const char *stored)
{
    if (p->n == 0) return false;
    if (match_prefixed(p, module)) return true;
    if (stored && strcmp(stored, module) != 0 && match_prefixed(p, stored)) return true;
    size_t len = strlen(module);
    for (size_t i = 0; i < COUNT(fusions); i++) {
        char fused[NAME_BYTES];
        size_t k = strlen(fusions[i].part);
        if (len < k || strcmp(module + len - k, fusions[i].part) != 0) continue;
        int n = snprintf(fused, sizeof fused, "%.*s%s", (int)(len - k), module, fusions[i].fused);
        if (n >= 0 && (size_t)n < sizeof fused && match_prefixed(p, fused)) return true;
    }
    return false;
}

bool patterns_match_one(const struct patterns *p, size_t i, const char *module, const char *stored)
{
    struct patterns one = {.v = &p->v[i], .n = 1, .cap = 1};
    return patterns_match(&one, module, stored);
}

const char *patterns_text(const struct patterns *p, size_t i)
{
    return p->v[i].text;
}
