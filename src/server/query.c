/* query.c - fields that come as text. */
#include "server/internal.h"
#include <stdlib.h>
#include <string.h>

/* Fields whose values are no strings in JSON. */
static const struct {
    const char *name;
    enum { FLAG, NUMBER } kind;
} typed[] = {
    {"flush_cache", FLAG},       {"abort_all_requests", FLAG},
    {"allow_quant_error", FLAG}, {"truncate_size", NUMBER},
    {"restart", FLAG},           {"refuse_older_version", FLAG},
    {"drain_timeout", NUMBER},
};

static json_t *flag(const char *v)
{
    if (!strcmp(v, "true") || !strcmp(v, "True") || !strcmp(v, "1")) return json_true();
    if (!strcmp(v, "false") || !strcmp(v, "False") || !strcmp(v, "0")) return json_false();
    return NULL;
}

static json_t *number(const char *v)
{
    size_t n = strspn(v, "0123456789");
    return n > 0 && n < 18 && v[n] == 0 ? json_integer(strtoll(v, NULL, 10)) : NULL;
}

/* What is no flag or number stays text, which the field's reader refuses by name. */
void query_put(json_t *to, const char *name, const char *value)
{
    json_t *v = NULL;
    for (size_t i = 0; i < sizeof typed / sizeof typed[0]; i++)
        if (!strcmp(name, typed[i].name)) v = typed[i].kind == FLAG ? flag(value) : number(value);
    if (!v) v = json_string(value);
    if (v) json_object_set_new(to, name, v);
}

static enum MHD_Result argument(void *to, enum MHD_ValueKind kind, const char *name,
                                const char *value)
{
    (void)kind;
    if (value) query_put(to, name, value);
    return MHD_YES;
}

void query_read(struct xchg *x)
{
    const char *accept = MHD_lookup_connection_value(x->c, MHD_HEADER_KIND, "Accept");
    bool bytes = accept && !strcmp(accept, "application/octet-stream");
    if (!bytes && MHD_get_connection_values(x->c, MHD_GET_ARGUMENT_KIND, NULL, NULL) <= 0) return;
    x->query = json_object();
    if (bytes) query_put(x->query, "format", "bytes");
    MHD_get_connection_values(x->c, MHD_GET_ARGUMENT_KIND, argument, x->query);
}
