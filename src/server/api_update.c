/* api_update.c - routes that change the weights from a folder, and what is told of updates. */
#include "base/clock.h"
#include "base/mem.h"
#include "engine/updates.h"
#include "server/internal.h"
#include <stdio.h>
#include <string.h>

struct call {
    const char *path; /* NULL: not given */
    struct update_options o;
};

static err_t get_options(struct xchg *x, const json_t *b, struct call *c, struct err *e)
{
    bool finite = true;
    const char *format = NULL;
    err_t rc;
    if ((rc = json_get_str(b, "model_path", &c->path, e)) ||
        (rc = json_get_str(b, "weight_version", &c->o.weight_version, e)) ||
        (rc = json_get_bool(b, "flush_cache", &c->o.flush_cache, e)) ||
        (rc = api_in_flight(x, b, &c->o, e)) ||
        (rc = json_get_str(b, "manifest", &c->o.manifest, e)) ||
        (rc = json_get_bool(b, "check_finite", &finite, e)) ||
        (rc = json_get_str(b, "load_format", &format, e)))
        return rc;
    if (format && strcmp(format, "auto") != 0 && strcmp(format, "safetensors") != 0)
        return json_bad(e, "load_format", json_field(b, "load_format"),
                        "\"auto\" or \"safetensors\"");
    c->o.any_bf16 = !finite;
    const struct update_record *r = NULL;
    if (c->path && strlen(c->path) >= sizeof r->source)
        return err_set(e, ERR_INPUT, "model_path: %zu bytes; at most %zu are allowed",
                       strlen(c->path), sizeof r->source - 1);
    return OK;
}

/* false: replied. */
static bool parse(struct xchg *x, const json_t *b, bool needs_path, struct call *c)
{
    struct err e = {0};
    *c = (struct call){.o = {.flush_cache = true, .caller = x->caller}};
    if (get_options(x, b, c, &e) != OK) {
        reply_err(x, &e);
        return false;
    }
    if (c->path || !needs_path) return true;
    reply_error(x, 400, "model_path: missing; must be a string");
    return false;
}

static void put_text(struct buf *b, const char *name, const char *text)
{
    buf_printf(b, ",\"%s\":", name);
    put_str(b, text, strlen(text));
}

static void reply(struct xchg *x, err_t rc, const char *message, const struct update_result *r,
                  int64_t t0)
{
    struct buf *b = &x->out;
    x->status = rc == OK ? 200 : x->s->stopping ? 503 : 400;
    buf_printf(b, "{\"success\":%s", rc ? "false" : "true");
    put_text(b, "message", message);
    buf_printf(b,
               ",\"num_paused_requests\":%d,\"stage_s\":%.6f,\"drain_s\":%.6f,\"swap_s\":%.6f,"
               "\"total_s\":%.6f,\"bytes\":%llu,\"epoch\":%llu,\"was_staged\":%s",
               r->num_paused, r->stage_s, r->drain_s, r->swap_s, (double)(clock_ns() - t0) * 1e-9,
               (unsigned long long)r->bytes, (unsigned long long)r->epoch,
               r->was_staged ? "true" : "false");
    if (*r->checksum) put_text(b, "checksum", r->checksum);
    if (*r->warning) put_text(b, "warning", r->warning);
    buf_putc(b, '}');
}

static const char *why(const struct xchg *x)
{
    return x->s->stopping ? "server is stopping: " : "";
}

void reply_updated(struct xchg *x, err_t rc, const struct err *e, const struct update_options *o,
                   const struct update_result *r, int64_t t0)
{
    char message[1400];
    if (rc)
        snprintf(message, sizeof message, "Failed to update weights: %s%s", why(x), e->msg);
    else if (o->weight_version)
        snprintf(message, sizeof message,
                 "Succeeded to update model weights. Weight version updated to %s.",
                 o->weight_version);
    else
        snprintf(message, sizeof message, "Succeeded to update model weights.");
    reply(x, rc, message, r, t0);
}

void api_update_from_disk(struct xchg *x, const json_t *b)
{
    struct err e = {0};
    struct update_result res = {0};
    struct call c;
    int64_t t = clock_ns();
    if (!parse(x, b, true, &c)) return;
    err_t rc = engine_update(x->s->engine, c.path, &c.o, &res, &e);
    reply_updated(x, rc, &e, &c.o, &res, t);
}

void api_stage_from_disk(struct xchg *x, const json_t *b)
{
    struct err e = {0};
    struct update_result res = {0};
    struct call c;
    char message[1400];
    int64_t t = clock_ns();
    if (!parse(x, b, true, &c)) return;
    err_t rc = engine_stage(x->s->engine, c.path, &c.o, &res, &e);
    if (rc)
        snprintf(message, sizeof message, "Failed to stage weights: %s%s", why(x), e.msg);
    else
        snprintf(message, sizeof message, "Staged.");
    reply(x, rc, message, &res, t);
}

void api_commit_weights(struct xchg *x, const json_t *b)
{
    struct err e = {0};
    struct update_result res = {0};
    struct call c;
    int64_t t = clock_ns();
    if (!parse(x, b, false, &c)) return;
    if (c.o.manifest || c.o.any_bf16) {
        reply_error(x, 400,
                    "manifest, check_finite: belong to /stage_weights_from_disk, which has read "
                    "the weights");
        return;
    }
    err_t rc = engine_commit(x->s->engine, c.path, &c.o, &res, &e);
    reply_updated(x, rc, &e, &c.o, &res, t);
}

void api_discard_weights(struct xchg *x, const json_t *b)
{
    (void)b;
    struct err e = {0};
    struct update_result none = {0};
    char message[1400];
    int64_t t = clock_ns();
    err_t rc = engine_discard(x->s->engine, &e);
    if (rc)
        snprintf(message, sizeof message, "Nothing was discarded: %s", e.msg);
    else
        snprintf(message, sizeof message, "Discarded.");
    reply(x, rc, message, &none, t);
}

/* ---- GET /weight_update_status ---- */

static void put_record(struct buf *b, const struct update_record *r)
{
    buf_puts(b, "{\"source\":");
    put_str(b, r->source, strlen(r->source));
    buf_puts(b, ",\"version\":");
    if (*r->version)
        put_str(b, r->version, strlen(r->version));
    else
        buf_puts(b, "null");
    put_text(b, "caller", r->caller);
    if (*r->outcome) put_text(b, "outcome", r->outcome);
    if (*r->error) put_text(b, "error", r->error);
    if (*r->checksum) put_text(b, "checksum", r->checksum);
    buf_printf(b,
               ",\"bytes\":%llu,\"stage_s\":%.6f,\"drain_s\":%.6f,\"swap_s\":%.6f,\"epoch\":%llu,"
               "\"ended\":%lld}",
               (unsigned long long)r->bytes, r->stage_s, r->drain_s, r->swap_s,
               (unsigned long long)r->epoch, (long long)r->ended);
}

void api_update_status(struct xchg *x, const json_t *body)
{
    (void)body;
    struct buf *b = &x->out;
    struct update_status *st = mem_try(sizeof *st);
    if (!st) {
        reply_error(x, 503, "out of memory");
        return;
    }
    engine_update_status(x->s->engine, st);
    bool open = *st->now.source != 0;
    double part = st->bytes_total ? (double)st->bytes_done / (double)st->bytes_total : 0;
    buf_printf(b, "{\"state\":\"%s\",\"valid_weights\":%s,\"seconds\":%.3f",
               update_state_name(st->state), st->no_weights ? "false" : "true", st->seconds);
    if (open) {
        buf_printf(b, ",\"progress\":%.4f,\"bytes_done\":%llu,\"bytes_total\":%llu,\"update\":",
                   part > 1 ? 1 : part, (unsigned long long)st->bytes_done,
                   (unsigned long long)st->bytes_total);
        put_record(b, &st->now);
    }
    buf_puts(b, ",\"updates\":[");
    for (int i = 0; i < st->n_done; i++) {
        if (i) buf_putc(b, ',');
        put_record(b, &st->done[i]);
    }
    buf_puts(b, "]}");
    mem_free(st);
}
