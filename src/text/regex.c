#define PCRE2_CODE_UNIT_WIDTH 8
#include "text/regex.h"

#include "base/mem.h"

#include <pcre2.h>

struct regex {
    pcre2_code *code;
    pcre2_match_context *ctx;
    bool jit;
};

struct regex_run {
    pcre2_match_data *data;
};

/* Enough for any linear pattern on the largest text; an exponential one fails instead of hanging.
 */
#define MATCH_LIMIT    400000000u
#define HEAP_LIMIT_KIB (512u << 10)

err_t regex_compile(struct regex **out, const char *pattern, size_t n, struct err *e)
{
    struct regex *r = mem_alloc(sizeof *r);
    pcre2_compile_context *cc = pcre2_compile_context_create(NULL);
    r->ctx = pcre2_match_context_create(NULL);
    int code = 0;
    PCRE2_SIZE at = 0;
    if (cc && r->ctx) {
        pcre2_set_newline(cc, PCRE2_NEWLINE_LF);
        pcre2_set_match_limit(r->ctx, MATCH_LIMIT);
        pcre2_set_depth_limit(r->ctx, MATCH_LIMIT);
        pcre2_set_heap_limit(r->ctx, HEAP_LIMIT_KIB);
        r->code = pcre2_compile((PCRE2_SPTR)pattern, n,
                                PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C,
                                &code, &at, cc);
    }
    bool nomem = !cc || !r->ctx;
    pcre2_compile_context_free(cc);
    if (r->code) {
        r->jit = pcre2_jit_compile(r->code, PCRE2_JIT_COMPLETE) == 0;
        *out = r;
        return OK;
    }
    regex_free(r);
    if (nomem) return err_set(e, ERR_NOMEM, "pattern: out of memory");
    char why[160];
    pcre2_get_error_message(code, (PCRE2_UCHAR *)why, sizeof why);
    return err_set(e, ERR_UNSUPPORTED, "pattern %.300s at byte %zu: %s", pattern, (size_t)at, why);
}

void regex_free(struct regex *r)
{
    if (!r) return;
    pcre2_code_free(r->code);
    pcre2_match_context_free(r->ctx);
    mem_free(r);
}

struct regex_run *regex_run_new(const struct regex *r)
{
    struct regex_run *run = mem_try(sizeof *run);
    if (!run) return NULL;
    run->data = pcre2_match_data_create_from_pattern(r->code, NULL);
    if (run->data) return run;
    mem_free(run);
    return NULL;
}

void regex_run_free(struct regex_run *run)
{
    if (!run) return;
    pcre2_match_data_free(run->data);
    mem_free(run);
}

err_t regex_match(const struct regex *r, struct regex_run *run, const char *text, size_t n,
                  size_t from, bool *found, size_t *start, size_t *end, struct err *e)
{
    PCRE2_SPTR s = (PCRE2_SPTR)text;
    int rc = r->jit ? pcre2_jit_match(r->code, s, n, from, 0, run->data, r->ctx)
                    : PCRE2_ERROR_JIT_BADOPTION;
    if (rc < 0 && rc != PCRE2_ERROR_NOMATCH) /* also when the JIT's stack is too small */
        rc = pcre2_match(r->code, s, n, from, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, run->data, r->ctx);
    *found = rc >= 0;
    if (rc == PCRE2_ERROR_NOMATCH) return OK;
    if (rc < 0) {
        char why[160];
        pcre2_get_error_message(rc, (PCRE2_UCHAR *)why, sizeof why);
        return err_set(e, ERR_INPUT, "splitting the text failed at byte %zu of a piece: %s", from,
                       why);
    }
    const PCRE2_SIZE *v = pcre2_get_ovector_pointer(run->data);
    *start = v[0];
    *end = v[1];
    return OK;
}
