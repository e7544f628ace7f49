#include "cli/load_device.h"
#include "backend/cuda/device.h"
#include "base/log.h"
#include "base/mem.h"
#include "model/cuda/cuda.h"
#include <inttypes.h>
#include <string.h>

/* Left to the driver, graphs and the update's buffers, and what of the rest KV may take by default.
 */
#define RESERVE  ((size_t)2 << 30)
#define KV_SHARE 0.95

err_t load_device_open(struct loaded *l, const char *name, struct err *e)
{
    struct err why = {0};
    if (name && strcmp(name, "cpu") == 0) return OK;
    err_t rc = device_open(&l->device, 0, 0, &why);
    if (rc == OK) {
        l->device_bytes = device_about(l->device)->total_bytes;
        rc = weights_new(&l->device_weights, l->device, &why);
    }
    if (rc == OK) return OK;
    load_device_release(l);
    if (name && strcmp(name, "cuda") == 0) return err_set(e, rc, "--device cuda: %s", why.msg);
    log_line(LOG_DEBUG, "no GPU: %s", why.msg);
    return OK;
}

struct memory load_device_memory(const struct loaded *l)
{
    return l->device ? weights_memory(l->device_weights) : memory_host;
}

static struct cuda_options options(const struct loaded *l, const struct load_options *o)
{
    return (struct cuda_options){.n_kv_pages = l->n_pages,
                                 .max_step_tokens = l->max_step_tokens,
                                 .max_seqs = (int32_t)o->max_running,
                                 .kv = o->kv,
                                 .no_graphs = o->no_graphs};
}

static err_t too_few(const struct loaded *l, size_t pages, struct err *e)
{
    return err_set(
        e, ERR_INPUT,
        "KV pool of %zu pages of %d tokens: 2 .. %d are possible; the device has %.1f GB, two "
        "generations of weights take %.1f GB, a step %.1f GB (--max-total-tokens, "
        "--mem-fraction-static, --chunked-prefill-size)",
        pages, KV_PAGE, INT32_MAX, (double)l->device_bytes * 1e-9,
        (double)weights_device_bytes(l->weight_bytes, true) * 1e-9, (double)l->work_bytes * 1e-9);
}

err_t load_device_plan(struct loaded *l, const struct load_options *o, struct err *e)
{
    size_t per_seq = ((size_t)l->context_len + KV_PAGE - 1) / KV_PAGE + 1, all, pages;
    size_t weights = weights_device_bytes(l->weight_bytes, true);
    err_t rc = device_free_bytes(&l->available, l->device, e);
    if (rc != OK) return rc;
    if (!mul_size(&all, per_seq, (size_t)o->max_running) || all > INT32_MAX) all = INT32_MAX;
    /* What a step needs grows a little with the pages: taken for the most there can be. */
    l->n_pages = o->max_total_tokens > 0 && (size_t)o->max_total_tokens / KV_PAGE < all
                     ? (int32_t)(((size_t)o->max_total_tokens + KV_PAGE - 1) / KV_PAGE)
                     : (int32_t)all;
    if (l->n_pages < 2) return too_few(l, (size_t)l->n_pages, e);
    struct cuda_options co = options(l, o);
    rc = cuda_model_bytes(&l->work_bytes, &l->page_bytes, &l->config, &co, e);
    if (rc != OK) return rc;
    size_t budget = o->mem_fraction > 0 ? (size_t)(o->mem_fraction * (double)l->device_bytes)
                                        : (size_t)(KV_SHARE * (double)l->available);
    size_t fixed = weights + l->work_bytes + RESERVE;
    pages = budget > fixed ? (budget - fixed) / l->page_bytes : 0;
    if (pages < (size_t)l->n_pages) {
        if (o->max_total_tokens > 0) return too_few(l, pages, e);
        l->n_pages = (int32_t)pages;
    }
    return l->n_pages >= 2 ? OK : too_few(l, pages, e);
}

err_t load_device_model(struct loaded *l, const struct load_options *o, struct err *e)
{
    struct cuda_options co = options(l, o);
    err_t rc = weights_error(l->device_weights, e);
    return rc == OK ? cuda_model_new(&l->model, &l->config, l->store, l->device, &co, e) : rc;
}

void load_device_tell(const struct loaded *l, struct buf *out)
{
    double kv = (double)l->n_pages * (double)l->page_bytes;
    (void)buf_printf(
        out,
        "%s, %.1f GB (%.1f free): weights %.2f GB, %.3f of the bytes stored, and as much for "
        "staged updates, which one copy in the device's memory commits; a step %.2f GB; KV %.2f GB = %" PRId64 " tokens in pages of %d",
        device_about(l->device)->name, (double)l->device_bytes * 1e-9, (double)l->available * 1e-9,
        (double)l->weight_bytes * 1e-9,
        (double)l->weight_bytes / (double)(l->stored_bytes ? l->stored_bytes : 1),
        (double)l->work_bytes * 1e-9, kv * 1e-9, (int64_t)l->n_pages * KV_PAGE, KV_PAGE);
}

void load_device_release(struct loaded *l)
{
    if (l->device_weights) weights_free(l->device_weights);
    if (l->device) device_close(l->device);
    l->device_weights = NULL;
    l->device = NULL;
}
