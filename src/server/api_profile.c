/* api_profile.c - /start_profile and /stop_profile: a trace of the engine's steps in a file. */
#include "engine/profile.h"
#include "server/internal.h"
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

void api_start_profile(struct xchg *x, const json_t *b)
{
    struct server *s = x->s;
    struct err e = {0};
    const char *dir = getenv("TMPDIR");
    int64_t steps = 0;
    if (json_get_str(b, "output_dir", &dir, &e) ||
        json_get_int(b, "num_steps", 1, INT32_MAX, &steps, &e) ||
        (access(dir ? dir : "/tmp", W_OK | X_OK) &&
         err_set(&e, ERR_INPUT, "output_dir: %s is no folder that can be written", dir)) ||
        profile_start(s->engine, steps, &e)) {
        reply_err(x, &e);
        return;
    }
    pthread_mutex_lock(&s->m);
    snprintf(s->profile_dir, sizeof s->profile_dir, "%s", dir ? dir : "/tmp");
    pthread_mutex_unlock(&s->m);
    reply_text(x, 200, "text/plain", "Start profiling.\n");
}

void api_stop_profile(struct xchg *x, const json_t *b)
{
    struct server *s = x->s;
    struct err e = {0};
    char path[PATH_MAX], text[PATH_MAX + 64];
    int32_t n = 0;
    (void)b;
    pthread_mutex_lock(&s->m);
    snprintf(path, sizeof path, "%s/moult-%d-%lld.trace.json", s->profile_dir, s->port,
             (long long)time(NULL));
    pthread_mutex_unlock(&s->m);
    if (profile_stop(s->engine, path, &n, &e)) {
        reply_err(x, &e);
        return;
    }
    snprintf(text, sizeof text, "Stop profiling. %d steps are in %s\n", n, path);
    reply_text(x, 200, "text/plain", text);
}
