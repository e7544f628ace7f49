#include "cli/load_device.h"
#include "backend/cuda/device.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/pages.h"
#include "model/cuda/cuda.h"
#include <inttypes.h>
#include <string.h>

/* What the driver takes besides (code of kernels and their stacks, pages of small allocations,
 * parameters of sampling), and what of all KV may take by default. */
#define RESERVE  ((size_t)512 << 20)
#define KV_SHARE 0.95
/* Left to others of the host's memory. */
#define HOST_RESERVE ((size_t)1 << 30)
/* Tokens of KV that every running request should have left, twice over. */
#define TOKENS_EACH 512
/* Bytes a second of a commit: inside an H200's memory, and to it from pinned memory (feasibility.md
 * 5); for the expected pause alone. */
#define COPY_INSIDE 2.1e12
#define COPY_TO     5.5e10

static bool is(const char *what, const char *name)
{
    return what && strcmp(what, name) == 0;
}

/* The GPU was asked for by name, or else the CPU serves. */
static err_t without(struct loaded *l, const char *name, log_level_t level, err_t rc,
                     const struct err *why, struct err *e)
{
    load_device_release(l);
    if (is(name, "cuda")) return err_set(e, rc, "--device cuda: %s", why->msg);
    log_line(level, "%s; the CPU serves", why->msg);
    return OK;
}

err_t load_device_choose(struct loaded *l, const struct load_options *o,
                         const struct slot_spec *specs, struct err *e)
{
    struct err why = {0};
    if (is(o->device, "cpu")) return OK;
    err_t rc = device_open(&l->device, 0, 0, &why);
    if (rc != OK) return without(l, o->device, LOG_DEBUG, rc, &why, e);
    rc = cuda_model_check(&l->config, specs, o->kv, &why);
    if (rc != OK) return without(l, o->device, LOG_WARN, rc, &why, e);
    l->device_bytes = device_about(l->device)->total_bytes;
    return weights_new(&l->device_weights, l->device, e);
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
                                 .context_len = l->context_len,
                                 .kv = o->kv,
                                 .experts = o->keep_experts,
                                 .no_graphs = o->no_graphs};
}

/* All but KV. */
static size_t fixed_bytes(const struct loaded *l, enum staging_mode staging)
{
    const struct cuda_needs *n = &l->needs;
    return weights_device_bytes(l->weight_bytes, staging) + n->step + n->partial + n->graphs +
           RESERVE;
}

static void tell_parts(const struct loaded *l, struct buf *out)
{
    const struct cuda_needs *n = &l->needs;
    (void)buf_printf(
        out,
        "weights %.2f GB%s, a step's buffers %.2f, attention's parts %.2f, graphs %.2f, "
        "the driver %.2f",
        (double)l->weight_bytes * 1e-9,
        l->staging == STAGING_DEVICE ? " and as much for staged updates" : "",
        (double)n->step * 1e-9, (double)n->partial * 1e-9, (double)n->graphs * 1e-9,
        (double)RESERVE * 1e-9);
}

static err_t too_few(const struct loaded *l, size_t budget, size_t pages, size_t wanted,
                     struct err *e)
{
    struct buf parts = {0};
    tell_parts(l, &parts);
    err_t rc = err_set(
        e, ERR_INPUT,
        "KV of %zu tokens does not fit: of the %.2f GB that the plan may use of %s (%.2f GB, %.2f "
        "free), %s leave room for %zu tokens (--max-total-tokens, --mem-fraction-static, "
        "--context-length, --chunked-prefill-size, --update-staging, --device cpu)",
        wanted * KV_PAGE, (double)budget * 1e-9, device_about(l->device)->name,
        (double)l->device_bytes * 1e-9, (double)l->available * 1e-9, parts.data ? parts.data : "",
        pages * KV_PAGE);
    buf_release(&parts);
    return rc;
}

static size_t pages_beside(const struct loaded *l, size_t budget, enum staging_mode staging)
{
    size_t fixed = fixed_bytes(l, staging);
    return budget > fixed ? (budget - fixed) / l->needs.kv_page : 0;
}

/* `most` pages are of use; `told` of them must be. */
static err_t plan_staging(struct loaded *l, const struct load_options *o, size_t budget,
                          size_t most, bool told, struct err *e)
{
    const char *want = o->update_staging ? o->update_staging : "auto";
    size_t each = 2 * (size_t)TOKENS_EACH / KV_PAGE, least, host, total;
    if (!mul_size(&least, each, (size_t)o->max_running) || told || least > most) least = most;
    pages_left(&host, &total);
    bool host_fits = host > HOST_RESERVE && l->weight_bytes <= host - HOST_RESERVE;
    if (is(want, "host") && !host_fits)
        return err_set(e, ERR_INPUT,
                       "--update-staging host: a second generation of weights takes %.2f GB of "
                       "pinned host memory, %.2f GB are available",
                       (double)l->weight_bytes * 1e-9, (double)host * 1e-9);
    if (is(want, "off"))
        l->staging = STAGING_OFF;
    else if (is(want, "device") ||
             (is(want, "auto") && pages_beside(l, budget, STAGING_DEVICE) >= least))
        l->staging = STAGING_DEVICE;
    else
        l->staging = host_fits ? STAGING_HOST : STAGING_OFF;
    return OK;
}

err_t load_device_plan(struct loaded *l, const struct load_options *o, struct err *e)
{
    size_t per_seq = ((size_t)l->context_len + KV_PAGE - 1) / KV_PAGE + 1, most;
    err_t rc = device_free_bytes(&l->available, l->device, e);
    if (rc != OK) return rc;
    if (!mul_size(&most, per_seq, (size_t)o->max_running) || most > INT32_MAX) most = INT32_MAX;
    bool told = o->max_total_tokens > 0;
    if (told) most = ((size_t)o->max_total_tokens + KV_PAGE - 1) / KV_PAGE;
    if (most < 2 || most > INT32_MAX)
        return err_set(e, ERR_INPUT,
                       "--max-total-tokens %" PRId64 ": %d .. %" PRId64 " are possible",
                       o->max_total_tokens, 2 * KV_PAGE, (int64_t)INT32_MAX * KV_PAGE);
    l->n_pages = (int32_t)most; /* what a step needs grows a little with them */
    struct cuda_options co = options(l, o);
    rc = cuda_model_needs(&l->needs, l->device, &l->config, &co, e);
    if (rc != OK) return rc;
    l->page_bytes = l->needs.kv_page;
    size_t budget = o->mem_fraction > 0 ? (size_t)(o->mem_fraction * (double)l->device_bytes)
                                        : (size_t)(KV_SHARE * (double)l->available);
    if (budget > l->available) budget = l->available;
    rc = plan_staging(l, o, budget, most, told, e);
    if (rc != OK) return rc;
    size_t pages = pages_beside(l, budget, l->staging),
           alone = pages_beside(l, budget, STAGING_OFF);
    if (pages < 2 || (told && pages < most)) return too_few(l, budget, pages, told ? most : 2, e);
    if (pages < most) l->n_pages = (int32_t)pages;
    if (alone > most) alone = most;
    l->staging_tokens = (int64_t)(alone - (size_t)l->n_pages) * KV_PAGE;
    return OK;
}

err_t load_device_model(struct loaded *l, const struct load_options *o, struct err *e)
{
    struct cuda_options co = options(l, o);
    err_t rc = weights_error(l->device_weights, e);
    if (rc == OK && l->staging == STAGING_HOST)
        rc = weights_stage_on_host(l->device_weights, store_bytes(l->store), e);
    return rc == OK ? cuda_model_new(&l->model, &l->config, l->store, l->device, &co, e) : rc;
}

static void tell_updates(const struct loaded *l, struct buf *out)
{
    double bytes = (double)l->weight_bytes;
    if (l->staging == STAGING_DEVICE)
        (void)buf_printf(out,
                         "staged in the device's memory, which costs KV of %" PRId64
                         " tokens; expected pause %.1f ms",
                         l->staging_tokens, bytes / COPY_INSIDE * 1e3 + 1);
    else if (l->staging == STAGING_HOST)
        (void)buf_printf(
            out,
            "staged in %.2f GB of host memory, pinned in the background; expected pause %.0f ms",
            bytes * 1e-9, bytes / COPY_TO * 1e3 + 1);
    else
        (void)buf_printf(
            out, "in place, no memory; serving stands still while %.2f GB are read a second time",
            (double)l->stored_bytes * 1e-9);
}

void load_device_tell(const struct loaded *l, struct buf *out)
{
    double kv = (double)l->n_pages * (double)l->page_bytes;
    (void)buf_printf(out, "%s, %.1f GB (%.1f free): ", device_about(l->device)->name,
                     (double)l->device_bytes * 1e-9, (double)l->available * 1e-9);
    tell_parts(l, out);
    (void)buf_printf(out,
                     ", KV %.2f = %" PRId64
                     " tokens in pages of %d; weights are %.3f of the bytes stored; updates: ",
                     kv * 1e-9, (int64_t)l->n_pages * KV_PAGE, KV_PAGE,
                     (double)l->weight_bytes / (double)(l->stored_bytes ? l->stored_bytes : 1));
    tell_updates(l, out);
}

void load_device_release(struct loaded *l)
{
    if (l->device_weights) weights_free(l->device_weights);
    if (l->device) device_close(l->device);
    l->device_weights = NULL;
    l->device = NULL;
}
