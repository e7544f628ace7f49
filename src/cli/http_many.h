/*
 * http_many.h - many POSTs to one server, at most so many at once.
 *
 * http_many sends job 0..n-1 in order, at most `parallel` in flight and none before its time, and calls
 * done(ctx, i, status, body) for each as it ends, in the caller's thread.  status 0: no answer, body is libcurl's
 * reason.
 */
#ifndef CLI_HTTP_MANY_H
#define CLI_HTTP_MANY_H

#include "base/buf.h"
#include "cli/curl_dl.h"

struct http_jobs {
    const char *url, *bearer; /* bearer NULL: none */
    char *const *urls;        /* [n], instead of url; NULL: url for all */
    const double *at;         /* [n] seconds after the call, not falling; NULL: at once */
    char *const *bodies;      /* [n] JSON */
    int n, parallel;
    void (*done)(void *ctx, int i, long status, const char *body, size_t bytes);
    void *ctx;
};

err_t http_many(const struct curl_dl *c, const struct http_jobs *j, struct err *e) MUST_USE;

#endif
