/*
 * log.h - one line per event on stderr; thread-safe.
 *
 * Two forms: text ("warning: ..."), or with log_set_json one JSON object a line: {"time": seconds since 1970,
 * "level": "...", "message": "..."} and an event's own fields.
 */
#ifndef BASE_LOG_H
#define BASE_LOG_H

#include <stdbool.h>

typedef enum { LOG_ERROR, LOG_WARN, LOG_INFO, LOG_DEBUG } log_level_t;

void log_set_level(log_level_t level);
void log_set_json(bool json);
void log_line(log_level_t level, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* An event with fields: `fields` is the inside of a JSON object ("\"rid\":\"a\",\"tokens\":3"), told in JSON
 * alone; message is what the text form says. */
void log_event(log_level_t level, const char *message, const char *fields);

#endif
