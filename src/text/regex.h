/* regex.h - one compiled pattern. */
#ifndef TEXT_REGEX_H
#define TEXT_REGEX_H

#include "base/err.h"

#include <stdbool.h>
#include <stddef.h>

struct regex;
struct regex_run; /* the memory of matches; one per user at a time */

err_t regex_compile(struct regex **out, const char *pattern, size_t n, struct err *e) MUST_USE;
void regex_free(struct regex *r);
struct regex_run *regex_run_new(const struct regex *r); /* NULL: out of memory */
void regex_run_free(struct regex_run *run);
/* The first match in text[0..n) (valid UTF-8) at or after `from`; *found false when there is none.
 */
err_t regex_match(const struct regex *r, struct regex_run *run, const char *text, size_t n,
                  size_t from, bool *found, size_t *start, size_t *end, struct err *e) MUST_USE;

#endif
