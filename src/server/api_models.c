/* api_models.c - /v1/models. */
#include "server/internal.h"
#include <string.h>

static const char *model_name(const struct server_options *o)
{
    return o->served_model_name ? o->served_model_name : o->model_path ? o->model_path : "default";
}

static void put_model(struct xchg *x, const char *id)
{
    buf_puts(&x->out, "{\"id\":");
    put_str(&x->out, id, strlen(id));
    buf_printf(&x->out, ",\"object\":\"model\",\"created\":%lld,\"owned_by\":\"moult\",\"root\":",
               (long long)x->s->started);
    put_str(&x->out, id, strlen(id));
    buf_printf(&x->out, ",\"parent\":null,\"max_model_len\":%d}", x->s->o.context_len);
}

void api_models(struct xchg *x, const json_t *b)
{
    (void)b;
    buf_puts(&x->out, "{\"object\":\"list\",\"data\":[");
    put_model(x, model_name(&x->s->o));
    buf_puts(&x->out, "]}");
}

/* /v1/models/{id}; an id may hold slashes. */
void api_model(struct xchg *x, const json_t *b)
{
    const char *asked = x->path + strlen(x->route->path), *id = model_name(&x->s->o);
    (void)b;
    if (!strcmp(asked, id)) {
        put_model(x, id);
    } else {
        x->status = 404;
        buf_puts(&x->out, "{\"error\":{\"message\":\"The model '");
        put_chars(&x->out, asked, strlen(asked));
        buf_puts(&x->out, "' does not exist\",\"type\":\"invalid_request_error\",\"param\":\"model\","
                 "\"code\":\"model_not_found\"}}");
    }
}
