/*
 * error.c - how a failure is told: the one place that knows the forms.
 *
 * SGLang has two: {"error":{"message"}} where a native route refuses a value, and a flat object with `type`, `param` and
 * `code` for all the rest (bodies of the wrong type, OpenAI routes, a full queue).  OpenAI's clients read a nested
 * object with OpenAI's own types and the field's name.  A reply has both at once, so that each finds what it looks for,
 * whoever refused; a stream's frame is nested alone, and a missing key is told as SGLang tells it.
 */
#include "server/internal.h"
#include <string.h>

enum { FLAT = 1, NESTED = 2, TEXT = 4 };

static const int forms[] = {
    [ERROR_REPLY] = FLAT | NESTED,
    [ERROR_FRAME] = NESTED,
    [ERROR_KEY] = TEXT,
    [ERROR_MODEL] = NESTED,
};

/* The last row whose status is at most the one told.  `again`: the same call may succeed later. */
static const struct row {
    int status;
    const char *type, *openai_type;
    bool again;
} rows[] = {
    {400, "BadRequestError", "invalid_request_error", false},
    {401, "Unauthorized", "authentication_error", false},
    {402, "BadRequestError", "invalid_request_error", false},
    {404, "NotFoundError", "invalid_request_error", false},
    {405, "BadRequestError", "invalid_request_error", false},
    {429, "RateLimitError", "rate_limit_error", true},
    {430, "BadRequestError", "invalid_request_error", false},
    {500, "InternalServerError", "server_error", false},
    {503, "ServiceUnavailableError", "server_error", true},
    {504, "InternalServerError", "server_error", false},
};

static const struct row *row_of(int status)
{
    size_t i = sizeof rows / sizeof rows[0];
    while (i > 1 && rows[i - 1].status > status)
        i--;
    return &rows[i - 1];
}

/* Messages about a field begin with its name and a colon. */
static size_t param_len(const char *message)
{
    size_t n = strspn(message, "abcdefghijklmnopqrstuvwxyz0123456789_.[]");
    return n && message[n] == ':' ? n : 0;
}

static void put_nested(struct buf *b, enum error_form form, int status, const struct row *r,
                       const char *message)
{
    size_t n = param_len(message);
    buf_puts(b, "{\"message\":");
    put_str(b, message, strlen(message));
    buf_printf(b, ",\"type\":\"%s\",\"param\":", r->openai_type);
    if (form == ERROR_MODEL) {
        buf_puts(b, "\"model\",\"code\":\"model_not_found\"}");
        return;
    }
    if (n && status < 500)
        put_str(b, message, n);
    else
        buf_puts(b, "null");
    buf_printf(b, ",\"code\":%d,\"retryable\":%s}", status, r->again ? "true" : "false");
}

void error_put(struct buf *b, enum error_form form, int status, const char *message)
{
    const struct row *r = row_of(status);
    if (forms[form] & TEXT) {
        buf_puts(b, "{\"error\":");
        put_str(b, message, strlen(message));
        buf_putc(b, '}');
        return;
    }
    buf_putc(b, '{');
    if (forms[form] & FLAT) {
        buf_puts(b, "\"object\":\"error\",\"message\":");
        put_str(b, message, strlen(message));
        buf_printf(b, ",\"type\":\"%s\",\"param\":null,\"code\":%d,", r->type, status);
    }
    buf_puts(b, "\"error\":");
    put_nested(b, form, status, r, message);
    buf_putc(b, '}');
}

void reply_failure(struct xchg *x, enum error_form form, int status, const char *message)
{
    buf_clear(&x->out);
    x->out_at = 0;
    x->stream = false;
    x->status = status;
    x->type = "application/json";
    error_put(&x->out, form, status, message);
}

void reply_error(struct xchg *x, int status, const char *message)
{
    reply_failure(x, ERROR_REPLY, status, message);
}

void reply_err(struct xchg *x, const struct err *e)
{
    reply_error(x, err_http(e->code), e->msg);
}
