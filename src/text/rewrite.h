/* rewrite.h - a pre-tokenizer's pattern, written for Oniguruma, as PCRE2 must have it. */
#ifndef TEXT_REWRITE_H
#define TEXT_REWRITE_H

#include "base/buf.h"

/* Append to `out` the pattern that makes PCRE2 (UTF, UCP, MULTILINE) match what Oniguruma matches.
 * ERR_UNSUPPORTED names a construct whose meaning differs and is not translated. */
err_t regex_rewrite(struct buf *out, const char *pattern, size_t n, struct err *e) MUST_USE;
/* Append a pattern that matches the n bytes of `text` literally. */
bool regex_literal(struct buf *out, const char *text, size_t n);

#endif
