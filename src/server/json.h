/*
 * json.h - strict typed readers of JSON fields.
 *
 * A field that is absent or null leaves *out alone.  A wrong type or range is ERR_INPUT and the
 * message names field, value and what is allowed.  Of duplicate keys the last wins.  NaN and
 * Infinity are no JSON and fail the parse; so does nesting deeper than JSON_MAX_DEPTH.
 */
#ifndef SERVER_JSON_H
#define SERVER_JSON_H

#include "base/buf.h"
#include "base/err.h"
#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#define JSON_MAX_DEPTH 64

/* An object, or NULL with `e` set. */
json_t *json_parse_object(const char *data, size_t n, struct err *e) MUST_USE;
const json_t *json_field(const json_t *o, const char *name); /* NULL if absent or null */
err_t json_bad(struct err *e, const char *name, const json_t *v, const char *allowed);

err_t json_get_int(const json_t *o, const char *name, int64_t lo, int64_t hi, int64_t *out,
                   struct err *e) MUST_USE;
err_t json_get_real(const json_t *o, const char *name, double lo, double hi, bool open_lo,
                    double *out, struct err *e) MUST_USE;
err_t json_get_bool(const json_t *o, const char *name, bool *out, struct err *e) MUST_USE;
/* Borrowed from `o`; a string holding U+0000 is refused. */
err_t json_get_str(const json_t *o, const char *name, const char **out, struct err *e) MUST_USE;
/* A list of ids in [0, vocab) into fresh memory; errors name position and value. */
err_t json_ids(const json_t *list, const char *name, int32_t vocab, int32_t **out, int32_t *n,
               struct err *e) MUST_USE;

#endif
