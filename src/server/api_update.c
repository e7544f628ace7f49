/* api_update.c - routes that change the weights. */
#include "base/clock.h"
#include "server/internal.h"
#include <stdio.h>
#include <string.h>

void api_update_from_disk(struct xchg *x, const json_t *b)
{
    struct err e = {0};
    const char *path = NULL;
    struct update_options o = {.flush_cache = true};
    struct update_result res = {0};
    char message[1400];
    err_t rc;
    if ((rc = json_get_str(b, "model_path", &path, &e)) ||
        (rc = json_get_str(b, "weight_version", &o.weight_version, &e)) ||
        (rc = json_get_bool(b, "flush_cache", &o.flush_cache, &e)) ||
        (rc = api_in_flight(x, b, &o, &e))) {
        reply_err(x, &e);
        return;
    }
    if (!path) {
        reply_error(x, 400, "model_path: missing; must be a string");
        return;
    }
    int64_t t = clock_ns();
    rc = engine_update(x->s->engine, path, &o, &res, &e);
    if (rc) snprintf(message, sizeof message, "Failed to update weights: %s", e.msg);
    else if (o.weight_version)
        snprintf(message, sizeof message, "Succeeded to update model weights. Weight version updated to %s.", o.weight_version);
    else snprintf(message, sizeof message, "Succeeded to update model weights.");
    x->status = rc ? 400 : 200;
    buf_printf(&x->out, "{\"success\":%s,\"message\":", rc ? "false" : "true");
    put_str(&x->out, message, strlen(message));
    buf_printf(&x->out, ",\"num_paused_requests\":%d,\"stage_s\":%.6f,\"drain_s\":%.6f,\"swap_s\":%.6f,"
               "\"total_s\":%.6f,\"bytes\":%llu,\"epoch\":%llu", res.num_paused, res.stage_s, res.drain_s, res.swap_s,
               (double)(clock_ns() - t) * 1e-9, (unsigned long long)res.bytes, (unsigned long long)res.epoch);
    if (*res.warning) {
        buf_puts(&x->out, ",\"warning\":");
        put_str(&x->out, res.warning, strlen(res.warning));
    }
    buf_putc(&x->out, '}');
}

