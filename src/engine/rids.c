/* rids.c - the requests in flight by rid: an open hash table, guarded by the engine's lock. */
#include "engine/internal.h"

#include "base/mem.h"
#include <string.h>

static unsigned rid_bucket(const char *rid)
{
    uint32_t h = 2166136261u;
    for (; *rid; rid++)
        h = (h ^ (unsigned char)*rid) * 16777619u;
    return h % RID_BUCKETS;
}

bool rid_known(const struct engine *e, const char *rid)
{
    if (!rid[0]) return false;
    for (const struct rid_entry *x = e->rids[rid_bucket(rid)]; x; x = x->next)
        if (strcmp(x->r->rid, rid) == 0) return true;
    return false;
}

void rid_add(struct engine *e, struct rid_entry *x)
{
    struct rid_entry **at = &e->rids[rid_bucket(x->r->rid)];
    x->next = *at;
    *at = x;
}

void rid_remove(struct engine *e, const struct request *r)
{
    struct rid_entry **at = &e->rids[rid_bucket(r->rid)];
    while (*at && (*at)->r != r)
        at = &(*at)->next;
    struct rid_entry *x = *at;
    if (!x) return;
    *at = x->next;
    mem_free(x);
}
