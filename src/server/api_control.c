/* api_control.c - routes that change what runs: flush, abort, pause, labels (docs/control.md). */
#include "server/internal.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct {
    const char *name;
    enum pause_mode value;
} modes[] = {{"abort", PAUSE_ABORT}, {"retract", PAUSE_RETRACT}, {"in_place", PAUSE_IN_PLACE}};

const char *api_pause_name(enum pause_mode m)
{
    for (size_t i = 0; i < sizeof modes / sizeof *modes; i++)
        if (modes[i].value == m) return modes[i].name;
    return NULL;
}

err_t api_in_flight(struct xchg *x, const json_t *b, struct update_options *o, struct err *e)
{
    const char *name = NULL;
    bool abort_all = false;
    err_t rc;
    o->in_flight = x->s->o.update_in_flight;
    o->drain_timeout_s = x->s->o.update_drain_s;
    if ((rc = json_get_bool(b, "abort_all_requests", &abort_all, e)) ||
        (rc = json_get_str(b, "in_flight", &name, e)) ||
        (rc = json_get_real(b, "drain_timeout", 0, 1e6, false, &o->drain_timeout_s, e)) ||
        (rc = json_get_bool(b, "refuse_older_version", &o->refuse_older, e)))
        return rc;
    if (name && !in_flight_parse(name, &o->in_flight))
        return json_bad(e, "in_flight", json_field(b, "in_flight"),
                        "\"drain\", \"abort\", \"retract\" or \"continue\"");
    if (abort_all && name && o->in_flight != IN_FLIGHT_ABORT)
        return err_set(e, ERR_INPUT, "in_flight: \"%s\" contradicts abort_all_requests true", name);
    if (abort_all) o->in_flight = IN_FLIGHT_ABORT;
    return OK;
}

static void put_ok(struct xchg *x, const char *message)
{
    buf_printf(&x->out, "{\"message\":\"%s\",\"status\":\"ok\"}", message);
}

void api_flush(struct xchg *x, const json_t *body)
{
    (void)body;
    struct err e = {0};
    double timeout = 0;
    const char *arg = MHD_lookup_connection_value(x->c, MHD_GET_ARGUMENT_KIND, "timeout");
    if (arg) {
        char *end;
        timeout = strtod(arg, &end);
        if (end == arg || *end || !isfinite(timeout) || timeout < 0) {
            reply_error(x, 400, "timeout: must be a number of seconds, 0 or more");
            return;
        }
    }
    err_t rc = engine_flush(x->s->engine, timeout, &e);
    reply_text(x, rc ? err_http(rc) : 200, "text/plain", rc ? e.msg : "Cache flushed.\n");
}

void api_abort_request(struct xchg *x, const json_t *b)
{
    struct err e = {0};
    const char *rid = "";
    bool all = false;
    if (json_get_str(b, "rid", &rid, &e) || json_get_bool(b, "abort_all", &all, &e)) {
        reply_err(x, &e);
        return;
    }
    engine_abort(x->s->engine, rid, all);
}

void api_pause(struct xchg *x, const json_t *b)
{
    struct err e = {0};
    const char *name = "abort";
    enum pause_mode mode = PAUSE_NONE;
    err_t rc = json_get_str(b, "mode", &name, &e);
    for (size_t i = 0; i < sizeof modes / sizeof *modes; i++)
        if (strcmp(modes[i].name, name) == 0) mode = modes[i].value;
    if (!rc && mode == PAUSE_NONE)
        rc = json_bad(&e, "mode", json_field(b, "mode"), "\"abort\", \"retract\" or \"in_place\"");
    if (!rc) rc = engine_pause(x->s->engine, mode, &e);
    if (rc)
        reply_err(x, &e);
    else
        put_ok(x, "Generation paused successfully.");
}

void api_continue(struct xchg *x, const json_t *b)
{
    struct err e = {0};
    bool empty_cache = true; /* SGLang's; there is no allocator whose cache could be emptied */
    struct update_options o = {.flush_cache = true, .caller = x->caller};
    struct update_result res = {0};
    err_t rc = json_get_bool(b, "torch_empty_cache", &empty_cache, &e);
    if (rc == OK) rc = api_in_flight(x, b, &o, &e);
    /* Buckets that nobody ended (api_tensor.c): if they cannot be used nothing goes on, so that it is seen. */
    if (rc == OK) rc = engine_session_end_at_continue(x->s->engine, &o, &res, &e);
    if (rc == OK) rc = engine_continue(x->s->engine, &e);
    if (rc)
        reply_err(x, &e);
    else
        put_ok(x, "Generation continued successfully.");
}

/* Unlike SGLang's, abort_all_requests is false where it is not given (case C15). */
void api_update_weight_version(struct xchg *x, const json_t *b)
{
    struct err e = {0};
    const char *label = NULL;
    bool abort_all = false;
    if (json_get_str(b, "new_version", &label, &e) ||
        json_get_bool(b, "abort_all_requests", &abort_all, &e)) {
        reply_err(x, &e);
        return;
    }
    if (!label) {
        reply_error(x, 400, "new_version: missing; must be a string");
        return;
    }
    if (engine_relabel(x->s->engine, label, abort_all, &e)) {
        reply_err(x, &e);
        return;
    }
    buf_puts(&x->out, "{\"success\":true,\"message\":\"Weight version updated\",\"new_version\":");
    put_str(&x->out, label, strlen(label));
    buf_putc(&x->out, '}');
}
