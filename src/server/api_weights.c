/* api_weights.c - what is resident: one tensor as numbers or bytes, checksums of all. */
#include "base/mem.h"
#include "server/read_weights.h"
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#define MAX_FLOATS (1u << 22) /* of one reply */
#define MAX_NAMED  8

/* Arguments in the path, under those of the body; the caller frees. */
static json_t *fields(const struct xchg *x, const json_t *b)
{
    json_t *all = x->query ? json_deep_copy(x->query) : json_object();
    if (b) json_object_update(all, (json_t *)(uintptr_t)b);
    return all;
}

/* ---- one tensor ---- */

/* The tensors that a slot has now, with their bytes behind one another in `data`. */
static err_t read_slot(struct weight_reader *r, size_t slot, struct export_tensor t[EXPORT_MAX],
                       size_t *n, struct buf *data, struct err *e)
{
    const struct slot_spec *p = store_spec(engine_store(r->engine), slot);
    size_t all = export_tensors(p, t), kept = 0;
    for (size_t i = 0; i < all; i++) {
        size_t at = data->len;
        err_t rc = weight_read(r, slot, &t[i], data, e);
        if (rc != OK) return rc;
        if (export_has(p, &t[i], data->data + at))
            t[kept++] = t[i];
        else
            data->len = at;
    }
    *n = kept;
    return OK;
}

static err_t put_bytes(struct xchg *x, size_t slot, struct err *e)
{
    struct weight_reader r = {.engine = x->s->engine};
    struct export_tensor t[EXPORT_MAX];
    struct buf data = {0};
    size_t n;
    err_t rc = read_slot(&r, slot, t, &n, &data, e);
    if (rc == OK &&
        (!export_header(&x->out, t, n) || (data.len && !buf_put(&x->out, data.data, data.len))))
        rc = err_set(e, ERR_NOMEM, "no memory for the reply");
    buf_release(&data);
    x->type = "application/octet-stream";
    return rc;
}

static void put_row(struct buf *b, const float *row, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (i) buf_putc(b, ',');
        put_real(b, (double)row[i]);
    }
}

/* The first `rows` rows of a matrix, or `most` numbers of a vector, as the values that its format stands for. */
static err_t put_values(struct xchg *x, size_t slot, size_t rows, size_t most, struct err *e)
{
    struct weight_reader r = {.engine = x->s->engine};
    const struct slot_spec *p = store_spec(engine_store(r.engine), slot);
    format_t f = p->shape.format;
    struct export_tensor t[EXPORT_MAX];
    size_t n = export_tensors(p, t), cols = (size_t)p->shape.cols;
    float tensor = 1.0f;
    void *data = mem_try_array(rows, t[0].row_bytes), *scale = NULL;
    float *row = mem_try_array(cols, sizeof *row);
    err_t rc = data && row ? weight_read_rows(&r, slot, &t[0], 0, rows, data, e)
                           : err_set(e, ERR_NOMEM, "no memory for %zu rows", rows);
    for (size_t i = 1; rc == OK && i < n; i++) {
        if (t[i].part == PART_TENSOR) rc = weight_read_rows(&r, slot, &t[i], 0, 1, &tensor, e);
        if (t[i].part != PART_SCALE) continue;
        size_t m = formats[f].group_rows ? format_scale_rows(f, rows) : t[i].rows;
        scale = mem_try_array(m, t[i].row_bytes);
        rc = scale ? weight_read_rows(&r, slot, &t[i], 0, m, scale, e)
                   : err_set(e, ERR_NOMEM, "no memory for scales");
    }
    struct format_parts parts = {
        .format = f, .rows = rows, .cols = cols, .data = data, .scale = scale, .tensor = tensor};
    for (size_t i = 0; rc == OK && i < rows; i++) {
        format_decode_row(row, &parts, i);
        if (p->n_dims == 2) buf_puts(&x->out, i ? ",[" : "[");
        put_row(&x->out, row, most < cols ? most : cols);
        if (p->n_dims == 2) buf_putc(&x->out, ']');
    }
    mem_free(data);
    mem_free(scale);
    mem_free(row);
    return rc;
}

static float number(const struct export_tensor *t, const char *bytes, size_t i)
{
    float x;
    if (t->dtype == ST_U8) return format_e8m0((uint8_t)bytes[i]);
    if (t->dtype == ST_F8_E4M3) return format_e4m3((uint8_t)bytes[i]);
    memcpy(&x, bytes + i * sizeof x, sizeof x);
    return x;
}

/* A scale of its own; a single number is a list of one. */
static err_t put_scale(struct xchg *x, size_t slot, const struct export_tensor *t, size_t rows,
                       struct err *e)
{
    struct weight_reader r = {.engine = x->s->engine};
    struct buf data = {0};
    size_t cols = t->n_dims ? (size_t)t->shape[t->n_dims - 1] : 1;
    err_t rc = weight_read(&r, slot, t, &data, e);
    for (size_t i = 0; rc == OK && i < rows; i++) {
        if (t->n_dims == 2) buf_puts(&x->out, i ? ",[" : "[");
        for (size_t c = 0; c < cols; c++) {
            if (c) buf_putc(&x->out, ',');
            put_real(&x->out, (double)number(t, data.data, i * cols + c));
        }
        if (t->n_dims == 2) buf_putc(&x->out, ']');
    }
    buf_release(&data);
    return rc;
}

/* As SGLang: the first `limit` entries of the first dimension. */
static err_t put_list(struct xchg *x, size_t slot, size_t tensor, int64_t limit, struct err *e)
{
    const struct slot_spec *p = store_spec(engine_store(x->s->engine), slot);
    struct export_tensor t[EXPORT_MAX];
    export_tensors(p, t);
    bool weight = tensor == 0 && p->shape.kind != RESIDENT_F32;
    size_t rows = t[tensor].n_dims == 2 ? (size_t)t[tensor].shape[0] : 1;
    size_t width = weight ? (size_t)p->shape.cols : t[tensor].bytes / (rows ? rows : 1);
    if (t[tensor].n_dims == 2 && (uint64_t)limit < rows) rows = (size_t)limit;
    if (width && rows > MAX_FLOATS / width)
        return err_set(
            e, ERR_TOOBIG,
            "truncate_size: %lld is not allowed here; at most %u numbers are sent as text "
            "(format=bytes has no limit)",
            (long long)limit, MAX_FLOATS);
    buf_putc(&x->out, '[');
    size_t most = p->n_dims == 1 && (uint64_t)limit < SIZE_MAX ? (size_t)limit : SIZE_MAX;
    err_t rc =
        weight ? put_values(x, slot, rows, most, e) : put_scale(x, slot, &t[tensor], rows, e);
    buf_putc(&x->out, ']');
    return rc;
}

void api_get_weights(struct xchg *x, const json_t *body)
{
    struct err e = {0};
    const char *name = NULL, *format = "list";
    int64_t limit = 100;
    size_t slot, tensor;
    json_t *b = fields(x, body);
    err_t rc = json_get_str(b, "name", &name, &e);
    if (rc == OK && !name) rc = err_set(&e, ERR_INPUT, "name: missing; must be a string");
    if (rc == OK) rc = json_get_int(b, "truncate_size", 0, INT64_MAX, &limit, &e);
    if (rc == OK) rc = json_get_str(b, "format", &format, &e);
    if (rc == OK && strcmp(format, "list") && strcmp(format, "bytes"))
        rc = json_bad(&e, "format", json_field(b, "format"), "\"list\" or \"bytes\"");
    if (rc == OK) rc = export_find(engine_store(x->s->engine), name, &slot, &tensor, &e);
    if (rc == OK)
        rc =
            strcmp(format, "bytes") ? put_list(x, slot, tensor, limit, &e) : put_bytes(x, slot, &e);
    if (rc == OK && x->out.failed) rc = err_set(&e, ERR_NOMEM, "no memory for the reply");
    if (rc != OK) reply_error(x, rc == ERR_NOTFOUND ? 400 : err_http(rc), e.msg);
    json_decref(b);
}

/* ---- all of them ---- */

static void put_hash(char out[40], XXH128_hash_t h)
{
    snprintf(out, 40, "%016llx%016llx", (unsigned long long)h.high64, (unsigned long long)h.low64);
}

/* {name: xxh3-128 of its bytes}, and of all of that. */
static err_t checksums(struct xchg *x, json_t *to, char all[40], struct err *e)
{
    struct weight_reader r = {.engine = x->s->engine};
    const struct store *s = engine_store(r.engine);
    struct export_tensor t[EXPORT_MAX];
    struct buf data = {0}, sum = {0};
    char hash[40];
    err_t rc = OK;
    for (size_t i = 0; rc == OK && i < store_slots(s); i++) {
        size_t n, at = 0;
        if (store_find(s, store_spec(s, i)->name) != i) continue; /* a tied head */
        buf_clear(&data);
        rc = read_slot(&r, i, t, &n, &data, e);
        for (size_t k = 0; rc == OK && k < n; at += t[k++].bytes) {
            put_hash(hash, XXH3_128bits(data.data + at, t[k].bytes));
            json_object_set_new(to, t[k].name, json_string(hash));
            buf_printf(&sum, "%s %s\n", t[k].name, hash);
        }
    }
    if (rc == OK && sum.failed) rc = err_set(e, ERR_NOMEM, "no memory for the checksums");
    if (rc == OK) put_hash(all, XXH3_128bits(sum.data, sum.len));
    buf_release(&data);
    buf_release(&sum);
    return rc;
}

static void reply_checked(struct xchg *x, bool success, const char *message, const json_t *sums,
                          const char *all)
{
    x->status = success ? 200 : 400;
    buf_printf(&x->out, "{\"success\":%s,\"message\":", success ? "true" : "false");
    put_str(&x->out, message, strlen(message));
    if (sums) {
        char *text = json_dumps(sums, JSON_COMPACT);
        buf_printf(&x->out, ",\"ranks\":[{\"checksums\":");
        buf_puts(&x->out, text ? text : "{}");
        buf_printf(&x->out,
                   ",\"per_gpu_checksum\":\"%s\",\"parallelism_info\":{\"tp_rank\":0,\"tp_size\":1,"
                   "\"dp_rank\":0,"
                   "\"dp_size\":1,\"pp_rank\":0,\"pp_size\":1,\"ep_rank\":0,\"ep_size\":1}}],\"per_"
                   "engine_checksum\":\"%s\"",
                   all, all);
        free(text);
    } else {
        buf_puts(&x->out, ",\"ranks\":[]");
    }
    buf_putc(&x->out, '}');
}

/* Names whose checksums differ, or that one of them lacks. */
static size_t compare(struct buf *names, const json_t *was, const json_t *now)
{
    const char *name;
    json_t *v;
    size_t n = 0;
    json_object_foreach((json_t *)(uintptr_t)was, name,
                        v) if (!json_equal(v, json_object_get(now, name)) && n++ < MAX_NAMED)
        buf_printf(names, "%s%s", names->len ? ", " : "", name);
    json_object_foreach((json_t *)(uintptr_t)now, name,
                        v) if (!json_object_get(was, name) && n++ < MAX_NAMED)
        buf_printf(names, "%s%s", names->len ? ", " : "", name);
    if (n > MAX_NAMED) buf_printf(names, " and %zu more", n - MAX_NAMED);
    return n;
}

static void check_sums(struct xchg *x, const char *action, bool allow)
{
    struct err e = {0};
    struct buf message = {0}, names = {0};
    char all[40];
    json_t *sums = json_object(), *was = NULL;
    err_t rc = checksums(x, sums, all, &e);
    pthread_mutex_lock(&x->s->m);
    if (rc == OK && !strcmp(action, "snapshot")) {
        json_decref(x->s->snapshot);
        x->s->snapshot = json_incref(sums);
    }
    if (!strcmp(action, "compare")) was = json_incref(x->s->snapshot);
    pthread_mutex_unlock(&x->s->m);
    size_t differ = was && rc == OK ? compare(&names, was, sums) : 0;
    if (rc != OK) {
        reply_checked(x, false, e.msg, NULL, NULL);
    } else if (!strcmp(action, "compare") && !was) {
        reply_checked(x, false, "action: \"compare\" needs a \"snapshot\" before it", NULL, NULL);
    } else if (differ) {
        buf_printf(
            &message, "%zu tensors differ from the snapshot: %s%s", differ,
            names.data ? names.data : "",
            allow ? " (a snapshot keeps checksums: it tells equal bytes from others, and no more)"
                  : "");
        reply_checked(x, false, message.data ? message.data : "tensors differ", sums, all);
    } else {
        reply_checked(x, true, was ? "All tensors are as in the snapshot." : "Success.", sums, all);
    }
    json_decref(was);
    json_decref(sums);
    buf_release(&message);
    buf_release(&names);
}

static void reset_tensors(struct xchg *x)
{
    struct err e = {0};
    uint64_t seed = 1;
    struct update_options o = {.flush_cache = true, .caller = x->caller};
    struct update_result res = {0};
    if (getrandom(&seed, sizeof seed, 0) < 0) seed = (uint64_t)(uintptr_t)x;
    err_t rc = api_in_flight(x, NULL, &o, &e);
    if (rc == OK) rc = engine_update_random(x->s->engine, seed, &o, &res, &e);
    reply_checked(x, rc == OK, rc == OK ? "All tensors are random now." : e.msg, NULL, NULL);
}

void api_check_weights(struct xchg *x, const json_t *body)
{
    static const char *const actions[] = {"checksum", "snapshot", "compare", "reset_tensors"};
    struct err e = {0};
    const char *action = "checksum";
    bool allow = false;
    size_t known = 0;
    json_t *b = fields(x, body);
    err_t rc = json_get_str(b, "action", &action, &e);
    if (rc == OK) rc = json_get_bool(b, "allow_quant_error", &allow, &e);
    while (rc == OK && known < 4 && strcmp(action, actions[known]))
        known++;
    if (rc == OK && known == 4)
        rc = json_bad(&e, "action", json_field(b, "action"),
                      "\"checksum\", \"snapshot\", \"compare\" or \"reset_tensors\"");
    if (rc != OK)
        reply_err(x, &e);
    else if (known == 3)
        reset_tensors(x);
    else
        check_sums(x, action, allow);
    json_decref(b);
}
