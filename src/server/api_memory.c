/* api_memory.c - memory that a trainer on the same machine borrows. */
#include "server/internal.h"
#include <string.h>

static err_t read_tags(const json_t *b, unsigned *tags, struct err *e)
{
    static const char allowed[] = "a list of \"weights\", \"kv_cache\" and \"cuda_graph\"";
    const json_t *list = json_field(b, "tags"), *v;
    size_t i;
    *tags = list ? 0 : MEMORY_ALL;
    if (!list) return OK;
    if (!json_is_array(list)) return json_bad(e, "tags", list, allowed);
    json_array_foreach((json_t *)(uintptr_t)list, i, v)
    {
        unsigned tag = MEMORY_ALL + 1;
        char name[48];
        while (tag >>= 1) {
            memory_tags_name(name, tag);
            if (json_is_string(v) && !strcmp(json_string_value(v), name)) break;
        }
        if (!tag) return json_bad(e, "tags", v, allowed);
        *tags |= tag;
    }
    return OK;
}

static void change(struct xchg *x, const json_t *b,
                   err_t (*to)(struct engine *e, unsigned tags, struct err *err))
{
    struct err e = {0};
    unsigned tags;
    err_t rc = read_tags(b, &tags, &e);
    if (rc == OK) rc = to(x->s->engine, tags, &e);
    if (rc == OK)
        buf_puts(&x->out, "null");
    else
        reply_err(x, &e);
}

void api_release_memory(struct xchg *x, const json_t *b)
{
    change(x, b, engine_release);
}

void api_resume_memory(struct xchg *x, const json_t *b)
{
    change(x, b, engine_resume);
}

bool memory_health(struct xchg *x, const struct engine_stats *st)
{
    char names[48];
    if (!st->released && !st->no_weights) return false;
    x->status = 503;
    memory_tags_name(names, st->released);
    if (*names)
        buf_printf(&x->out, "{\"status\":\"released\",\"released\":\"%s\"}", names);
    else
        buf_puts(&x->out, "{\"status\":\"no valid weights\"}");
    return true;
}
