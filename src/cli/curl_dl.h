/*
 * curl_dl.h - libcurl, opened at run time, so that only the bench needs it.
 *
 *     struct curl_dl c;
 *     if (curl_dl_open(&c, e) != OK) ...
 *     c.easy_setopt(h, CURLOPT_URL, url);
 *
 * The table holds exactly the functions that the bench calls, with curl/curl.h's signatures.
 */
#ifndef CLI_CURL_DL_H
#define CLI_CURL_DL_H

#include "base/err.h"
#include <curl/curl.h>

#ifdef curl_easy_setopt /* the checking macros cannot go through a table */
#undef curl_easy_setopt
#undef curl_easy_getinfo
#undef curl_multi_setopt
#endif

/*      member,        symbol */
#define CURL_DL_LIST(X)                       \
    X(global_init, curl_global_init)          \
    X(easy_init, curl_easy_init)              \
    X(easy_setopt, curl_easy_setopt)          \
    X(easy_getinfo, curl_easy_getinfo)        \
    X(easy_cleanup, curl_easy_cleanup)        \
    X(easy_strerror, curl_easy_strerror)      \
    X(slist_append, curl_slist_append)        \
    X(slist_free_all, curl_slist_free_all)    \
    X(multi_init, curl_multi_init)            \
    X(multi_setopt, curl_multi_setopt)        \
    X(multi_add, curl_multi_add_handle)       \
    X(multi_remove, curl_multi_remove_handle) \
    X(multi_perform, curl_multi_perform)      \
    X(multi_poll, curl_multi_poll)            \
    X(multi_info, curl_multi_info_read)       \
    X(multi_cleanup, curl_multi_cleanup)

struct curl_dl {
    void *handle;
#define X(member, symbol) __typeof__(symbol) *member;
    CURL_DL_LIST(X)
#undef X
};

err_t curl_dl_open(struct curl_dl *c, struct err *e) MUST_USE;
void curl_dl_close(struct curl_dl *c);

#endif
