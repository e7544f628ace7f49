#define PCRE2_CODE_UNIT_WIDTH 8
#include "text/stop_regex.h"

#include "base/mem.h"

#include <pcre2.h>

/* Steps of one search: a millisecond or so. */
#define STEPS    50000u
#define HEAP_KIB 1024u

struct stop_regex {
    pcre2_code *code;
    pcre2_match_context *ctx;
    pcre2_match_data *data;
    size_t from; /* no match begins before */
};

static err_t compile(struct stop_regex *s, const char *pattern, size_t n, struct err *e)
{
    pcre2_compile_context *cc = pcre2_compile_context_create(NULL);
    int code = 0;
    PCRE2_SIZE at = 0;
    s->ctx = pcre2_match_context_create(NULL);
    if (cc && s->ctx) {
        pcre2_set_newline(cc, PCRE2_NEWLINE_LF);
        pcre2_set_match_limit(s->ctx, STEPS);
        pcre2_set_depth_limit(s->ctx, STEPS);
        pcre2_set_heap_limit(s->ctx, HEAP_KIB);
        s->code =
            pcre2_compile((PCRE2_SPTR)pattern, n,
                          PCRE2_UTF | PCRE2_UCP | PCRE2_MATCH_INVALID_UTF | PCRE2_NEVER_BACKSLASH_C,
                          &code, &at, cc);
    }
    bool nomem = !cc || !s->ctx;
    pcre2_compile_context_free(cc);
    if (s->code) s->data = pcre2_match_data_create(1, NULL);
    if (nomem || (s->code && !s->data)) return err_set(e, ERR_NOMEM, "stop_regex: out of memory");
    if (s->code) return OK;
    char why[160];
    pcre2_get_error_message(code, (PCRE2_UCHAR *)why, sizeof why);
    return err_set(e, ERR_INPUT, "stop_regex: \"%.100s\" is no pattern: %s at byte %zu", pattern,
                   why, (size_t)at);
}

err_t stop_regex_new(struct stop_regex **out, const char *pattern, size_t n, struct err *e)
{
    if (n == 0 || n > STOP_REGEX_BYTES)
        return err_set(e, ERR_INPUT, "stop_regex: a pattern of %zu bytes; allowed: 1 to %d", n,
                       STOP_REGEX_BYTES);
    struct stop_regex *s = mem_alloc(sizeof *s);
    err_t rc = compile(s, pattern, n, e);
    if (rc == OK)
        *out = s;
    else
        stop_regex_free(s);
    return rc;
}

void stop_regex_free(struct stop_regex *s)
{
    if (!s) return;
    pcre2_match_data_free(s->data);
    pcre2_match_context_free(s->ctx);
    pcre2_code_free(s->code);
    mem_free(s);
}

/* PARTIAL_SOFT finds what the text as it stands has; only PARTIAL_HARD sees everything that more text
 * could change (\B, $ and lookarounds at the end), from the first place on where that is so. */
stop_regex_t stop_regex_search(struct stop_regex *s, const char *text, size_t n, size_t *at,
                               struct err *e)
{
    static const uint32_t ways[] = {PCRE2_PARTIAL_SOFT, PCRE2_PARTIAL_HARD};
    const PCRE2_SIZE *v = pcre2_get_ovector_pointer(s->data);
    int rc = PCRE2_ERROR_NOMATCH;
    for (int i = 0; i < 2; i++) {
        rc = pcre2_match(s->code, (PCRE2_SPTR)text, n, s->from, ways[i], s->data, s->ctx);
        if (rc >= 0) {
            *at = v[0] < s->from ? s->from : v[0] < n ? v[0] : n;
            return STOP_REGEX_FOUND;
        }
        if (rc != PCRE2_ERROR_NOMATCH && rc != PCRE2_ERROR_PARTIAL) break;
    }
    if (rc == PCRE2_ERROR_NOMATCH || rc == PCRE2_ERROR_PARTIAL) {
        *at = s->from = rc == PCRE2_ERROR_PARTIAL ? v[0] : n;
        return STOP_REGEX_NONE;
    }
    char why[160];
    pcre2_get_error_message(rc, (PCRE2_UCHAR *)why, sizeof why);
    (void)err_set(e, ERR_INPUT, "stop_regex: a search was given up: %s", why);
    return STOP_REGEX_FAILED;
}
