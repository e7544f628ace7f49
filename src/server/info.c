#include "server/info.h"

#include "base/mem.h"
#include "server/internal.h"
#include <jansson.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

struct told {
    char *name, *json;
};

struct server_info {
    size_t n;
    struct told *v; /* no name twice */
};

enum kind { JSON, TEXT, INT, BOOL, PORT, ELSEWHERE };
#define AT(field) offsetof(struct server_options, field)

static const struct row {
    const char *name;
    bool told; /* only told */
    enum kind kind;
    const char *json; /* JSON: the value */
    size_t offset;    /* TEXT: const char *, INT: int or int32_t, BOOL: bool */
} rows[] = {
    {"host", true, TEXT, NULL, AT(host)},
    {"port", true, PORT, NULL, 0},
    {"nnodes", true, JSON, "1", 0},
    {"node_rank", true, JSON, "0", 0},
    {"dist_init_addr", true, JSON, "null", 0},
    {"nccl_port", true, JSON, "null", 0},
    {"base_gpu_id", true, JSON, "0", 0},
    {"gpu_id_step", true, JSON, "1", 0},
    {"tp_size", true, JSON, "1", 0},
    {"dp_size", true, JSON, "1", 0},
    {"pp_size", true, JSON, "1", 0},
    {"ep_size", true, JSON, "1", 0},
    {"moe_dp_size", true, JSON, "1", 0},

    {"context_length", false, INT, NULL, AT(context_len)},
    {"max_running_requests", false, INT, NULL, AT(max_running)},
    {"dtype", false, TEXT, NULL, AT(dtype)},
    {"load_format", false, TEXT, NULL, AT(load_format)},
    {"quantization", false, TEXT, NULL, AT(quantization)},
    {"kv_cache_dtype", false, TEXT, NULL, AT(kv_cache_dtype)},
    {"disaggregation_mode", false, JSON, "\"null\"", 0},
    {"encoder_only", false, JSON, "false", 0},
    {"enable_memory_saver", false, BOOL, NULL, AT(memory_saver)},
    {"enable_return_routed_experts", false, BOOL, NULL, AT(keep_experts)},
    {"enable_return_indexer_topk", false, JSON, "false", 0},
    {"enable_lora", false, JSON, "false", 0},

    /* Facts that api_server_info writes, since they change. */
    {"model_path", false, ELSEWHERE, NULL, 0},
    {"tokenizer_path", false, ELSEWHERE, NULL, 0},
    {"served_model_name", false, ELSEWHERE, NULL, 0},
    {"weight_version", false, ELSEWHERE, NULL, 0},
    {"max_req_input_len", false, ELSEWHERE, NULL, 0},
    {"max_total_num_tokens", false, ELSEWHERE, NULL, 0},
    {"status", false, ELSEWHERE, NULL, 0},
    {"version", false, ELSEWHERE, NULL, 0},
    {"kv_pages_total", false, ELSEWHERE, NULL, 0},
    {"kv_pages_free", false, ELSEWHERE, NULL, 0},
    {"kv_pages_cached", false, ELSEWHERE, NULL, 0},
    {"steps", false, ELSEWHERE, NULL, 0},
    {"epoch", false, ELSEWHERE, NULL, 0},
    {"internal_states", false, ELSEWHERE, NULL, 0},
};

#define N_ROWS (sizeof rows / sizeof rows[0])

static bool name_ok(const char *s, size_t n)
{
    return n > 0 && n < 64 && strspn(s, "abcdefghijklmnopqrstuvwxyz0123456789_") >= n;
}

static err_t check_key(const char *pair, size_t n, struct err *e)
{
    if (pair[n] != '=' || !name_ok(pair, n))
        return err_set(e, ERR_INPUT,
                       "--server-info %.100s: must be KEY=VALUE, KEY of a-z, 0-9 and _", pair);
    for (size_t i = 0; i < N_ROWS; i++)
        if (!rows[i].told && strlen(rows[i].name) == n && strncmp(rows[i].name, pair, n) == 0)
            return err_set(e, ERR_INPUT,
                           "--server-info %.100s: %s is a fact of this server, not only told", pair,
                           rows[i].name);
    return OK;
}

/* JSON if it is that, else a string. */
static char *value_json(const char *text)
{
    json_t *v = json_loads(text, JSON_DECODE_ANY | JSON_REJECT_DUPLICATES, NULL);
    if (v == NULL) v = json_string(text);
    char *dump = v ? json_dumps(v, JSON_ENCODE_ANY | JSON_COMPACT) : NULL;
    char *out = dump ? mem_dup(dump) : NULL;
    free(dump);
    json_decref(v);
    return out;
}

static const struct told *find(const struct server_info *s, const char *name)
{
    for (size_t i = 0; s && i < s->n; i++)
        if (strcmp(s->v[i].name, name) == 0) return &s->v[i];
    return NULL;
}

err_t server_info_new(struct server_info **out, const char *const *pairs, size_t n, struct err *e)
{
    struct server_info *s = mem_alloc(sizeof *s);
    s->v = mem_alloc((n + 1) * sizeof s->v[0]);
    err_t rc = OK;
    for (size_t i = 0; rc == OK && i < n; i++) {
        size_t k = strcspn(pairs[i], "=");
        if ((rc = check_key(pairs[i], k, e)) != OK) break;
        char *json = value_json(pairs[i] + k + 1);
        if (json == NULL) {
            rc = err_set(e, ERR_INPUT, "--server-info %.*s: the value is not UTF-8", (int)k,
                         pairs[i]);
            break;
        }
        struct told t = {mem_dup(pairs[i]), json};
        t.name[k] = 0;
        if (find(s, t.name)) rc = err_set(e, ERR_INPUT, "--server-info %s: given twice", t.name);
        s->v[s->n++] = t;
    }
    if (rc != OK) {
        server_info_free(s);
        return rc;
    }
    *out = s;
    return OK;
}

void server_info_free(struct server_info *s)
{
    if (s == NULL) return;
    for (size_t i = 0; i < s->n; i++) {
        mem_free(s->v[i].name);
        mem_free(s->v[i].json);
    }
    mem_free(s->v);
    mem_free(s);
}

static void put_row(struct buf *b, const struct row *r, const struct server_options *o, int port)
{
    const struct told *t = find(o->info, r->name);
    const void *at = (const char *)o + r->offset;
    const char *text = r->kind == TEXT ? *(const char *const *)at : NULL;
    buf_printf(b, "\"%s\":", r->name);
    if (t)
        buf_puts(b, t->json);
    else if (r->kind == JSON)
        buf_puts(b, r->json);
    else if (r->kind == INT)
        buf_printf(b, "%d", *(const int *)at);
    else if (r->kind == BOOL)
        buf_puts(b, *(const bool *)at ? "true" : "false");
    else if (r->kind == PORT)
        buf_printf(b, "%d", port);
    else if (text)
        put_str(b, text, strlen(text));
    else
        buf_puts(b, "null");
}

static bool is_row(const char *name)
{
    for (size_t i = 0; i < N_ROWS; i++)
        if (strcmp(rows[i].name, name) == 0) return true;
    return false;
}

void info_put(struct buf *b, const struct server_options *o, int port)
{
    const char *comma = "";
    for (size_t i = 0; i < N_ROWS; i++) {
        if (rows[i].kind == ELSEWHERE) continue;
        buf_puts(b, comma);
        put_row(b, &rows[i], o, port);
        comma = ",";
    }
    for (size_t i = 0; o->info && i < o->info->n; i++)
        if (!is_row(o->info->v[i].name))
            buf_printf(b, ",\"%s\":%s", o->info->v[i].name, o->info->v[i].json);
}
