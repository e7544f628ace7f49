/* api_tensor.c - weights as tensors: one call, or the buckets of a session (engine.h, engine_session_begin). */
#include "base/clock.h"
#include "base/file.h"
#include "base/mem.h"
#include "engine/updates.h"
#include "server/internal.h"
#include "weight/safetensors.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static void reply_success(struct xchg *x, int status, const char *message)
{
    x->status = status;
    buf_printf(&x->out, "{\"success\":%s,\"message\":", status == 200 ? "true" : "false");
    put_str(&x->out, message, strlen(message));
    buf_putc(&x->out, '}');
}

/* ---- options ---- */

static err_t read_selector(const json_t *b, struct err *e)
{
    const json_t *v = json_field(b, "selector");
    const char *s = NULL;
    err_t rc = json_get_str(b, "selector", &s, e);
    if (rc != OK || !s || !strcmp(s, "target") || !strcmp(s, "all")) return rc;
    return json_bad(e, "selector", v, "\"target\" or \"all\": there is no draft model");
}

static err_t read_options(struct xchg *x, const json_t *b, struct update_options *o, struct err *e)
{
    err_t rc = read_selector(b, e);
    if (rc == OK) rc = json_get_str(b, "weight_version", &o->weight_version, e);
    if (rc == OK) rc = json_get_bool(b, "flush_cache", &o->flush_cache, e);
    if (rc == OK) rc = api_in_flight(x, b, o, e);
    const struct update_record *r = NULL;
    if (rc == OK && o->weight_version && strlen(o->weight_version) >= sizeof r->version)
        rc = err_set(e, ERR_INPUT, "weight_version: %zu bytes; at most %zu are allowed",
                     strlen(o->weight_version), sizeof r->version - 1);
    return rc;
}

/* What the file says of itself, under what the call says. */
static err_t add_metadata(json_t *options, const void *data, size_t n, struct err *e)
{
    static const char *const names[] = {"weight_version", "flush_cache", "abort_all_requests"};
    struct st_file f;
    err_t rc = st_open_memory(&f, "body", data, n, e);
    if (rc != OK) return rc;
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        const char *v = st_metadata(&f, names[i]);
        if (v && !json_object_get(options, names[i])) query_put(options, names[i], v);
    }
    st_close(&f);
    return OK;
}

/* ---- a hand-over on this host ---- */

struct handed {
    const char *name, *field;
    bool shm;
    int64_t offset, size; /* size -1: to the end */
};

static err_t read_handed(struct handed *h, const json_t *b, struct err *e)
{
    const char *shm = NULL, *path = NULL;
    h->size = -1;
    err_t rc = json_get_str(b, "shm_name", &shm, e);
    if (rc == OK) rc = json_get_str(b, "file_path", &path, e);
    if (rc == OK) rc = json_get_int(b, "offset", 0, INT64_MAX, &h->offset, e);
    if (rc == OK) rc = json_get_int(b, "size", 0, INT64_MAX, &h->size, e);
    if (rc != OK) return rc;
    if (!shm == !path)
        return err_set(e, ERR_INPUT,
                       "%s; must be a safetensors file: as the body (Content-Type "
                       "application/octet-stream), or by one of shm_name and file_path",
                       shm ? "shm_name and file_path are both given" : "the tensors are missing");
    if (shm && (shm[0] != '/' || strchr(shm + 1, '/') || !shm[1]))
        return json_bad(e, "shm_name", json_field(b, "shm_name"),
                        "\"/\" and a name, as for shm_open");
    h->shm = shm != NULL;
    h->name = shm ? shm : path;
    h->field = shm ? "shm_name" : "file_path";
    return OK;
}

/* Copied, never mapped: whoever truncates it must not end this process. */
static err_t copy_handed(struct bytes *out, int fd, const struct handed *h, uint64_t max,
                         struct err *e)
{
    struct stat st;
    if (fstat(fd, &st) != 0)
        return err_set(e, ERR_IO, "%s: %s: %s", h->field, h->name, strerror(errno));
    if (!S_ISREG(st.st_mode))
        return err_set(e, ERR_INPUT, "%s: %s: not a regular file", h->field, h->name);
    int64_t all = st.st_size, size = h->size < 0 ? all - h->offset : h->size;
    if (h->offset > all || size > all - h->offset)
        return err_set(e, ERR_INPUT,
                       "%s: %s has %lld bytes; offset %lld and size %lld are not within it",
                       h->field, h->name, (long long)all, (long long)h->offset, (long long)size);
    if ((uint64_t)size > max)
        return err_set(e, ERR_TOOBIG, "size: %lld is not allowed; at most %llu (--max-weight-body)",
                       (long long)size, (unsigned long long)max);
    out->data = mem_retry(NULL, 0, (size_t)size + 1);
    if (!out->data)
        return err_set(e, ERR_NOMEM, "%s: %s: no memory for %lld bytes", h->field, h->name,
                       (long long)size);
    out->len = (size_t)size;
    return file_pread(fd, out->data, out->len, (uint64_t)h->offset, h->name, e);
}

static err_t fetch_handed(struct bytes *out, const json_t *b, uint64_t max, struct err *e)
{
    struct handed h = {0};
    err_t rc = read_handed(&h, b, e);
    if (rc != OK) return rc;
    /* O_NONBLOCK: a FIFO under this name must not hang us. */
    int fd =
        h.shm ? shm_open(h.name, O_RDONLY, 0) : open(h.name, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) return err_set(e, ERR_INPUT, "%s: %s: %s", h.field, h.name, strerror(errno));
    rc = copy_handed(out, fd, &h, max, e);
    close(fd);
    if (rc != OK) {
        mem_free(out->data);
        *out = (struct bytes){0};
    }
    return rc;
}

static err_t check_pickles(const json_t *b, struct err *e)
{
    const char *format = NULL;
    if (json_field(b, "serialized_named_tensors"))
        return err_set(e, ERR_UNSUPPORTED,
                       "serialized_named_tensors: pickled tensors are not read here; send a "
                       "safetensors file: as the body "
                       "with Content-Type application/octet-stream, or with shm_name or file_path "
                       "on the same host");
    err_t rc = json_get_str(b, "load_format", &format, e);
    if (rc != OK || !format || !strcmp(format, "safetensors")) return rc;
    return json_bad(e, "load_format", json_field(b, "load_format"), "\"safetensors\" or null");
}

/* ---- routes ---- */

/* A bucket of the open session, or an update of its own; takes `bytes`. */
static err_t take(struct xchg *x, struct bytes bytes, const struct update_options *o, bool *session,
                  struct update_result *res, struct err *e)
{
    struct engine *engine = x->s->engine;
    *session = engine_session_open(engine);
    return *session ? engine_session_add(engine, bytes.data, bytes.len, o, e)
                    : engine_update_tensors(engine, bytes.data, bytes.len, o, res, e);
}

void api_update_from_tensor(struct xchg *x, const json_t *b)
{
    struct err e = {0};
    struct update_options o = {.flush_cache = true, .caller = x->caller};
    struct update_result res = {0};
    struct bytes bytes = x->bytes;
    json_t *options = x->query ? x->query : json_object();
    int64_t t = clock_ns();
    bool session = false;
    x->bytes = (struct bytes){0};
    x->query = NULL;
    if (b) json_object_update(options, (json_t *)(uintptr_t)b);
    err_t rc = check_pickles(options, &e);
    if (rc == OK && !x->is_bytes) rc = fetch_handed(&bytes, options, x->s->o.max_weight_body, &e);
    if (rc == OK) rc = add_metadata(options, bytes.data, bytes.len, &e);
    if (rc == OK) rc = read_options(x, options, &o, &e);
    if (rc == OK)
        rc = take(x, bytes, &o, &session, &res, &e);
    else
        mem_free(bytes.data);
    if (rc == OK && session)
        reply_success(x, 200, "Kept until /end_weight_update.");
    else
        reply_updated(x, rc, &e, &o, &res, t);
    json_decref(options);
}

void api_begin_update(struct xchg *x, const json_t *b)
{
    struct err e = {0};
    bool restart = false;
    err_t rc = read_selector(b, &e);
    if (rc == OK) rc = json_get_bool(b, "restart", &restart, &e);
    if (rc == OK) rc = engine_session_begin(x->s->engine, restart, &e);
    reply_success(x, rc == OK ? 200 : 400,
                  rc == OK ? "A session of weight updates is open." : e.msg);
}

void api_end_update(struct xchg *x, const json_t *b)
{
    struct err e = {0};
    struct update_options o = {.flush_cache = true, .caller = x->caller};
    struct update_result res = {0};
    int64_t t = clock_ns();
    err_t rc = read_options(x, b, &o, &e);
    if (rc == OK) rc = engine_session_end(x->s->engine, &o, &res, &e);
    reply_updated(x, rc, &e, &o, &res, t);
}

void api_post_process(struct xchg *x, const json_t *b)
{
    (void)b;
    reply_success(x, 200, "Nothing to do: weights are always stored as they are served.");
}

void api_multi_gpu(struct xchg *x, const json_t *b)
{
    char message[256];
    (void)b;
    snprintf(
        message, sizeof message,
        "%s needs the multi-GPU build (NCCL), which this is not; use /update_weights_from_disk or "
        "/update_weights_from_tensor",
        x->route->path);
    reply_success(x, 400, message);
}
