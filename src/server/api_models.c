/* api_models.c - /v1/models. */
#include "server/internal.h"
#include <stdio.h>
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
        return;
    }
    char message[sizeof x->path + 64];
    snprintf(message, sizeof message, "The model '%s' does not exist", asked);
    reply_failure(x, ERROR_MODEL, 404, message);
}
