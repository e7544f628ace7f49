/*
 * stop_regex.h - a pattern looked for in a text that grows.
 *
 *     stop_regex_new(&s, pattern, n, e);
 *     switch (stop_regex_search(s, text, n, &at, e)) ...   // each time the text has grown
 *
 * The pattern is found as soon as the text so far has a match.  Until then `at` is where a match might
 * still begin: what lies before can be sent.  Syntax is PCRE2's, characters are Unicode's.  A search
 * is bounded in steps and memory, so that no pattern can hold the caller up.
 */
#ifndef TEXT_STOP_REGEX_H
#define TEXT_STOP_REGEX_H

#include "base/err.h"
#include <stddef.h>

#define STOP_REGEX_BYTES 1000 /* of a pattern, at most */

struct stop_regex;
typedef enum { STOP_REGEX_NONE, STOP_REGEX_FOUND, STOP_REGEX_FAILED } stop_regex_t;

err_t stop_regex_new(struct stop_regex **out, const char *pattern, size_t n,
                     struct err *e) MUST_USE;
void stop_regex_free(struct stop_regex *s);
/* FOUND: the match begins at *at.  FAILED: `e` says why (too many steps, no memory). */
stop_regex_t stop_regex_search(struct stop_regex *s, const char *text, size_t n, size_t *at,
                               struct err *e);

#endif
