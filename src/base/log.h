/* log.h - one line per event on stderr; thread-safe.  Levels: 0 error, 1 warning, 2 info, 3 debug.
 */
#ifndef BASE_LOG_H
#define BASE_LOG_H

typedef enum { LOG_ERROR, LOG_WARN, LOG_INFO, LOG_DEBUG } log_level_t;

void log_set_level(log_level_t level);
void log_line(log_level_t level, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

#endif
