#include "engine/profile.h"
#include "base/buf.h"
#include "base/mem.h"
#include "engine/internal.h"
#include <errno.h>
#include <stdio.h>
#include <string.h>

struct call {
    struct engine *e;
    int64_t limit;
    struct profile out; /* stop: the records, whose owner the caller becomes */
};

void profile_step(struct profile *p, const struct profile_record *r)
{
    if (!p->on || p->n == p->limit) return;
    if (p->n == p->cap) {
        int32_t cap = p->cap ? p->cap * 2 : 1024;
        void *grown = mem_retry(p->records, (size_t)p->cap * sizeof *r, (size_t)cap * sizeof *r);
        if (!grown) return; /* this step is missing in the trace */
        p->records = grown;
        p->cap = cap;
    }
    p->records[p->n++] = *r;
}

static err_t start(void *ctx, struct err *err)
{
    struct call *c = ctx;
    struct profile *p = &c->e->profile;
    if (p->on)
        return err_set(err, ERR_STATE, "a profile is already running; POST /stop_profile ends it");
    *p = (struct profile){.on = true, .limit = (int32_t)c->limit};
    return OK;
}

static err_t stop(void *ctx, struct err *err)
{
    struct call *c = ctx;
    if (!c->e->profile.on)
        return err_set(err, ERR_STATE, "no profile is running; POST /start_profile begins one");
    c->out = c->e->profile;
    c->e->profile = (struct profile){0};
    return OK;
}

err_t profile_start(struct engine *e, int64_t n_steps, struct err *err)
{
    struct call c = {.e = e,
                     .limit = n_steps <= 0 || n_steps > PROFILE_STEPS ? PROFILE_STEPS : n_steps};
    return engine_between_steps(e, start, &c, err);
}

static void put_event(struct buf *b, const struct profile_record *r, int64_t t0)
{
    double ts = (double)(r->begin - t0) * 1e-3;
    buf_printf(b,
               "{\"name\":\"%s\",\"ph\":\"X\",\"pid\":1,\"tid\":1,\"ts\":%.3f,\"dur\":%.3f,"
               "\"args\":{\"prompt_tokens\":%d,"
               "\"output_tokens\":%d,\"running\":%d,\"waiting\":%d,\"pages_free\":%d}},\n",
               !r->prompt_tokens  ? "decode"
               : r->output_tokens ? "mixed"
                                  : "prefill",
               ts, (double)(r->end - r->begin) * 1e-3, r->prompt_tokens, r->output_tokens,
               r->running, r->waiting, r->pages_free);
    buf_printf(b,
               "{\"name\":\"requests\",\"ph\":\"C\",\"pid\":1,\"ts\":%.3f,\"args\":{\"running\":%d,"
               "\"waiting\":%d}},\n",
               ts, r->running, r->waiting);
}

static err_t write_trace(const struct profile *p, const char *path, struct err *err)
{
    FILE *f = fopen(path, "w");
    if (!f) return err_set(err, ERR_IO, "output_dir: cannot write %s: %s", path, strerror(errno));
    struct buf b = {0};
    fputs("{\"traceEvents\":[\n", f);
    for (int32_t i = 0; i < p->n; i++) {
        buf_clear(&b);
        put_event(&b, &p->records[i], p->records[0].begin);
        fwrite(b.data, 1, b.len, f);
    }
    fputs("{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":1,\"args\":{\"name\":\"moult\"}}],"
          "\"displayTimeUnit\":\"ms\"}\n",
          f);
    buf_release(&b);
    bool bad = ferror(f) != 0;
    if (fclose(f) != 0 || bad) return err_set(err, ERR_IO, "output_dir: writing %s failed", path);
    return OK;
}

err_t profile_stop(struct engine *e, const char *path, int32_t *n, struct err *err)
{
    struct call c = {.e = e};
    err_t rc = engine_between_steps(e, stop, &c, err);
    if (rc != OK) return rc;
    *n = c.out.n;
    rc = write_trace(&c.out, path, err);
    mem_free(c.out.records);
    return rc;
}
