#include "base/log.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>

static atomic_int max_level = LOG_INFO;

void log_set_level(log_level_t level)
{
    atomic_store(&max_level, (int)level);
}

void log_line(log_level_t level, const char *fmt, ...)
{
    static const char *const tag[] = {"error: ", "warning: ", "", "debug: "};
    if ((int)level > atomic_load(&max_level)) return;
    char line[2048];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(line, sizeof line, fmt, ap);
    va_end(ap);
    fprintf(stderr, "%s%s\n", tag[level], line);
}
