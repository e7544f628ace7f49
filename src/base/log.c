#include "base/log.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <time.h>

static atomic_int max_level = LOG_INFO;
static atomic_bool as_json;

void log_set_level(log_level_t level)
{
    atomic_store(&max_level, (int)level);
}

void log_set_json(bool json)
{
    atomic_store(&as_json, json);
}

/* The inside of a JSON string; what does not fit is cut. */
static void escape(char *to, size_t room, const char *s)
{
    char *end = to + room - 7;
    for (; *s && to < end; s++) {
        unsigned char c = (unsigned char)*s;
        if (c == '"' || c == '\\') *to++ = '\\';
        if (c >= 0x20)
            *to++ = (char)c;
        else
            to += snprintf(to, 7, "\\u%04x", c);
    }
    *to = 0;
}

void log_event(log_level_t level, const char *message, const char *fields)
{
    static const char *const tag[] = {"error: ", "warning: ", "", "debug: "};
    static const char *const name[] = {"error", "warning", "info", "debug"};
    if ((int)level > atomic_load(&max_level)) return;
    if (!atomic_load(&as_json)) {
        fprintf(stderr, "%s%s\n", tag[level], message);
        return;
    }
    char text[4096];
    struct timespec t;
    escape(text, sizeof text, message);
    clock_gettime(CLOCK_REALTIME, &t);
    fprintf(stderr, "{\"time\":%lld.%06ld,\"level\":\"%s\",\"message\":\"%s\"%s%s}\n",
            (long long)t.tv_sec, t.tv_nsec / 1000, name[level], text, *fields ? "," : "", fields);
}

void log_line(log_level_t level, const char *fmt, ...)
{
    if ((int)level > atomic_load(&max_level)) return;
    char line[2048];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(line, sizeof line, fmt, ap);
    va_end(ap);
    log_event(level, line, "");
}
