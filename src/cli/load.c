#include "cli/load.h"
#include "base/clock.h"
#include "base/file.h"
#include "base/mem.h"
#include "base/pages.h"
#include "base/pool.h"
#include "cli/formats.h"
#include "cli/load_device.h"
#include "engine/routing.h"
#include "weight/dummy.h"
#include "weight/plan.h"
#include "weight/update.h"
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define KV_DEFAULT_MAX  ((size_t)8 << 30)
#define STEP_TOKENS_MAX 8192
#define LOADERS_MOST    16 /* threads that read weights: more are not faster */

static size_t min_size(size_t a, size_t b)
{
    return a < b ? a : b;
}

#define COUNT(a) (sizeof(a) / sizeof(a)[0])
#define BIT(f)   (1u << (f))
#define FP8      (BIT(FORMAT_FP8_BLOCK) | BIT(FORMAT_FP8_TENSOR) | BIT(FORMAT_FP8_CHANNEL))
#define ANY      (BIT(FORMAT_COUNT) - 1)

/* SGLang's words. */
static const struct {
    const char *name;
    format_t format;
    unsigned accept;
} quantizations[] = {
    {"unquant", FORMAT_BF16, ANY},
    {"fp8", FORMAT_FP8_BLOCK, FP8},
    {"modelopt", FORMAT_BF16, ANY},
    {"modelopt_fp8", FORMAT_FP8_TENSOR, FP8},
    {"modelopt_fp4", FORMAT_NVFP4, BIT(FORMAT_NVFP4)},
    {"compressed-tensors", FORMAT_BF16, ANY},
};

err_t load_quantization(format_t *format, unsigned *accept, const char *name, struct err *e)
{
    format_t f = format_find(name);
    unsigned bits = f == FORMAT_COUNT ? 0 : BIT(f);
    for (size_t i = 0; f == FORMAT_COUNT && i < COUNT(quantizations); i++) {
        if (strcmp(name, quantizations[i].name) != 0) continue;
        f = quantizations[i].format;
        bits = quantizations[i].accept;
    }
    if (f != FORMAT_COUNT) {
        *format = f;
        *accept = bits;
        return OK;
    }
    struct buf b = {0};
    for (int i = 0; i < FORMAT_COUNT; i++)
        buf_printf(&b, "%s%s", i ? ", " : "", formats[i].name);
    err_t rc = err_set(e, ERR_INPUT, "--quantization: \"%.60s\" is not one of %s", name,
                       b.data ? b.data : "");
    buf_release(&b);
    return rc;
}

static bool is(const char *what, const char *name)
{
    return strcmp(what, name) == 0;
}

/* On the CPU: a second generation of weights must fit beside the first and KV; without being told, KV comes first. */
static err_t plan_staging(struct loaded *l, const struct load_options *o, struct err *e)
{
    const char *want = o->update_staging ? o->update_staging : "auto";
    if (is(want, "device"))
        return err_set(e, ERR_INPUT, "--update-staging device: there is no GPU; host or off");
    size_t need = 2 * l->weight_bytes + (size_t)l->n_pages * l->page_bytes;
    bool fits = need <= l->available;
    if (is(want, "host") && !fits)
        return err_set(
            e, ERR_INPUT,
            "--update-staging host: two generations of weights and KV take %.1f GB, %.1f "
            "GB are available (--max-total-tokens, --update-staging off)",
            (double)need * 1e-9, (double)l->available * 1e-9);
    l->staging = fits && !is(want, "off") ? STAGING_HOST : STAGING_OFF;
    return OK;
}

/* KV pages: as told in tokens, else what the memory rule gives. */
static err_t plan_kv(struct loaded *l, const struct load_options *o, struct err *e)
{
    size_t total, per_seq, all, page;
    pages_left(&l->available, &total);
    l->page_bytes = model_kv_page_bytes(&l->config, o->kv);
    page = l->page_bytes + l->expert_bytes;
    per_seq = ((size_t)l->context_len + KV_PAGE - 1) / KV_PAGE + 1;
    if (!mul_size(&all, per_seq, (size_t)o->max_running)) all = INT32_MAX;
    size_t pages;
    if (o->max_total_tokens > 0) {
        pages = ((size_t)o->max_total_tokens + KV_PAGE - 1) / KV_PAGE;
    } else if (o->mem_fraction > 0) {
        size_t budget = (size_t)(o->mem_fraction * (double)total);
        if (budget <= l->weight_bytes)
            return err_set(
                e, ERR_INPUT,
                "--mem-fraction-static %g: %.1f GB of %.1f GB, but the weights alone take "
                "%.1f GB",
                o->mem_fraction, (double)budget * 1e-9, (double)total * 1e-9,
                (double)l->weight_bytes * 1e-9);
        pages = (budget - l->weight_bytes) / page;
    } else {
        size_t rest = l->available > l->weight_bytes ? l->available - l->weight_bytes : 0;
        pages = min_size(min_size(l->available / 4, rest), KV_DEFAULT_MAX) / page;
    }
    if (o->max_total_tokens <= 0) pages = min_size(pages, all);
    size_t bytes;
    if (pages < 2 || pages > INT32_MAX || !mul_size(&bytes, pages, page))
        return err_set(
            e, ERR_INPUT,
            "KV pool of %zu pages of %d tokens: 2 .. %d are possible (--max-total-tokens, "
            "--mem-fraction-static)",
            pages, KV_PAGE, INT32_MAX);
    l->n_pages = (int32_t)pages;
    return OK;
}

/* The tokenizer's end token ends a text too, whatever the config files say. */
static void add_eos(struct loaded *l)
{
    struct config *c = &l->config;
    int32_t id = l->text.eos ? tokenizer_id(l->tokenizer, l->text.eos) : -1;
    for (int i = 0; i < c->n_eos; i++)
        if (c->eos[i] == id) return;
    if (id >= 0 && id < c->vocab_size && c->n_eos < CONFIG_MAX_EOS) c->eos[c->n_eos++] = id;
}

static err_t load_text(struct loaded *l, const struct load_options *o, struct err *e)
{
    char *dir = NULL;
    err_t rc = checkpoint_find(&dir, o->tokenizer_path ? o->tokenizer_path : o->model, e);
    if (rc != OK) return rc;
    struct buf path = {0};
    if (!buf_printf(&path, "%s/tokenizer.json", dir)) rc = err_set(e, ERR_NOMEM, "out of memory");
    if (rc == OK) rc = tokenizer_load(&l->tokenizer, path.data, e);
    if (rc == OK) rc = textconf_load(&l->text, dir, e);
    if (rc == OK) unloaded_note(&l->unloaded, dir, &l->text, &l->config);
    buf_release(&path);
    mem_free(dir);
    if (rc != OK) return rc;
    add_eos(l);
    l->bos_id = l->text.bos ? tokenizer_id(l->tokenizer, l->text.bos) : -1;
    if (l->bos_id < 0) l->text.add_bos = false;
    return OK;
}

/* Which slots there are and in which formats: as the checkpoint has them, or as they will be
 * encoded.  A missing, broken or contradictory file is named here, before anything is allocated. */
static err_t plan_weights(struct loaded *l, const struct load_options *o, struct slot_spec *specs,
                          size_t n, struct err *e)
{
    struct plan p;
    format_t to = FORMAT_BF16;
    unsigned accept = 0;
    err_t rc = o->quantization ? load_quantization(&to, &accept, o->quantization, e) : OK;
    if (rc == OK) rc = plan_open(&p, l->dir, specs, n, e);
    if (rc != OK) return rc;
    rc = plan_formats(&p, specs, e);
    if (rc == OK && o->quantization) {
        rc = plan_encode(&p, specs, to, accept, e);
        if (rc != OK) rc = err_wrap(e, rc, "--quantization %s", o->quantization);
    }
    l->stored_bytes = p.bytes;
    if (rc == OK) formats_report(&l->formats, specs, n, p.config);
    plan_close(&p);
    return rc;
}

/* Without a checkpoint: BF16, or what --quantization says. */
static err_t plan_dummy(struct loaded *l, const struct load_options *o, struct slot_spec *specs,
                        size_t n, struct err *e)
{
    format_t to = FORMAT_BF16;
    unsigned accept;
    err_t rc = o->quantization ? load_quantization(&to, &accept, o->quantization, e) : OK;
    if (rc != OK) return rc;
    for (size_t i = 0; i < n; i++)
        if (specs[i].linear) specs[i].shape.format = to;
    l->stored_bytes = dummy_bytes(specs, n);
    formats_report(&l->formats, specs, n, NULL);
    return OK;
}

/* The store has all sizes; nothing is read into it yet. */
static err_t make_store(struct loaded *l, const struct load_options *o, struct err *e)
{
    struct slot_spec *specs = NULL;
    size_t n = 0;
    err_t rc = model_specs(&l->config, &specs, &n, e);
    if (rc != OK) return rc;
    rc = o->dummy ? plan_dummy(l, o, specs, n, e) : plan_weights(l, o, specs, n, e);
    if (rc == OK) rc = load_device_choose(l, o, specs, e);
    if (rc == OK) rc = store_new(&l->store, specs, n, load_device_memory(l), e);
    mem_free(specs);
    if (rc == OK) l->weight_bytes = store_bytes(l->store);
    return rc;
}

err_t load_headers(struct loaded *l, const struct load_options *o, struct err *e)
{
    if (o->progress) o->progress(o->ctx, 0, "reading config and tokenizer");
    err_t rc = checkpoint_find(&l->dir, o->model, e);
    if (rc == OK) rc = config_load(&l->config, l->dir, e);
    if (rc == OK) rc = make_store(l, o, e);
    if (rc == OK) rc = load_text(l, o, e);
    if (rc != OK) return rc;
    if (o->context_len > l->config.max_positions)
        return err_set(e, ERR_INPUT,
                       "--context-length %" PRId64 ": the model has %d positions "
                       "(max_position_embeddings)",
                       o->context_len, l->config.max_positions);
    l->context_len = o->context_len > 0 ? (int32_t)o->context_len : l->config.max_positions;
    l->n_threads = o->threads > 0 ? (int)o->threads : pool_cpus();
    int64_t step = o->chunk > 0 ? o->chunk : STEP_TOKENS_MAX;
    if (step < o->max_running)
        step = o->max_running; /* every running request decodes in one step */
    l->max_step_tokens = (int32_t)step;
    if (o->keep_experts) l->expert_bytes = routing_row_bytes(&l->config) * KV_PAGE;
    if (l->device) return load_device_plan(l, o, e);
    rc = plan_kv(l, o, e);
    return rc == OK ? plan_staging(l, o, e) : rc;
}

/* A second thread tells how far the first has read. */
struct watch {
    const struct load_options *o;
    struct update_progress progress;
    pthread_mutex_t lock;
    pthread_cond_t cond;
    bool over;
};

static void *watch_main(void *arg)
{
    struct watch *w = arg;
    pthread_mutex_lock(&w->lock);
    while (!w->over) {
        uint64_t done = atomic_load(&w->progress.bytes_done);
        uint64_t total = atomic_load(&w->progress.bytes_total);
        float part = total ? (float)((double)done / (double)total) : 0;
        w->o->progress(w->o->ctx, part, "reading weights");
        struct timespec t;
        clock_gettime(CLOCK_REALTIME, &t);
        t.tv_nsec += 100000000;
        if (t.tv_nsec >= 1000000000) {
            t.tv_nsec -= 1000000000;
            t.tv_sec++;
        }
        pthread_cond_timedwait(&w->cond, &w->lock, &t);
    }
    pthread_mutex_unlock(&w->lock);
    return NULL;
}

static int loaders(const struct loaded *l)
{
    return l->n_threads < LOADERS_MOST ? l->n_threads : LOADERS_MOST;
}

static err_t stage(struct loaded *l, const struct load_options *o, struct update *u, struct err *e)
{
    struct watch w = {.o = o, .lock = PTHREAD_MUTEX_INITIALIZER, .cond = PTHREAD_COND_INITIALIZER};
    pthread_t thread;
    bool watching = o->progress && pthread_create(&thread, NULL, watch_main, &w) == 0;
    int n = loaders(l);
    err_t rc = o->dummy ? dummy_stage(u, 1, n, &w.progress, e)
                        : update_stage_dir(u, l->dir, n, &w.progress, e);
    if (watching) {
        pthread_mutex_lock(&w.lock);
        w.over = true;
        pthread_cond_signal(&w.cond);
        pthread_mutex_unlock(&w.lock);
        pthread_join(thread, NULL);
    }
    pthread_mutex_destroy(&w.lock);
    pthread_cond_destroy(&w.cond);
    return rc;
}

err_t load_weights(struct loaded *l, const struct load_options *o, struct err *e)
{
    struct update *u = NULL;
    err_t rc = update_begin(&u, l->store, e);
    if (rc != OK) return rc;
    double t0 = clock_s();
    rc = stage(l, o, u, e);
    l->read_s = clock_s() - t0;
    if (rc == OK) rc = update_prepare(u, e);
    if (rc == OK) update_commit(u);
    update_free(u);
    if (rc != OK) return rc;
    if (o->progress) o->progress(o->ctx, 1, "reading weights");
    l->pool = pool_new(l->n_threads);
    if (l->device)
        rc = load_device_model(l, o, e);
    else
        rc = model_new(&l->model, &l->config, l->store, l->pool, l->n_pages, o->kv,
                       l->max_step_tokens, o->isa, e);
    return rc == OK ? model_set_numerics(l->model, o->numerics.act, o->numerics.routed, e) : rc;
}

/* The engine's question about an update's folder. */
static void compare_folder(void *ctx, const char *dir, char *warning, size_t n)
{
    const struct loaded *l = ctx;
    unloaded_compare(&l->unloaded, dir, warning, n);
}

err_t load_engine(struct loaded *l, const struct load_options *o, struct err *e)
{
    struct engine_options eo = {
        .config = &l->config,
        .tokenizer = l->tokenizer,
        .store = l->store,
        .model = l->model,
        .n_kv_pages = l->n_pages,
        .max_running = (int32_t)o->max_running,
        .max_queued = (int32_t)o->max_queued,
        .chunk_tokens = (int32_t)o->chunk,
        .max_step_tokens = l->max_step_tokens,
        .context_len = l->context_len,
        .no_prefix_cache = o->no_prefix_cache,
        .keep_experts = o->keep_experts,
        .overlap = o->no_overlap ? OVERLAP_OFF : OVERLAP_AUTO,
        .retract_every = (int32_t)o->retract_every,
        .weight_version = o->weight_version ? o->weight_version : "default",
        .model_path = o->model,
        .watchdog_s = o->watchdog_s,
        .memory_saver = o->memory_saver,
        .weights_backup = o->weights_backup,
        .in_place = l->staging == STAGING_OFF,
        .loader_threads = o->loader_threads > 0 ? (int)o->loader_threads
                          : l->device           ? loaders(l)
                                                : 2,
        .loaders_yield = l->device == NULL,
        .ready = l->staging == STAGING_HOST,
        .compare = compare_folder,
        .compare_ctx = l,
    };
    return engine_new(&l->engine, &eo, e);
}

static void tell_memory(const struct loaded *l, struct buf *out)
{
    double kv = (double)l->n_pages * (double)l->page_bytes;
    (void)buf_printf(out,
                     "memory: weights %.1f MB, %.3f of the %.1f MB stored, KV %.1f MB = "
                     "%" PRId64 " tokens in pages of %d; %.1f GB available; updates: ",
                     (double)l->weight_bytes * 1e-6,
                     (double)l->weight_bytes / (double)(l->stored_bytes ? l->stored_bytes : 1),
                     (double)l->stored_bytes * 1e-6, kv * 1e-6, (int64_t)l->n_pages * KV_PAGE,
                     KV_PAGE, (double)l->available * 1e-9);
    if (l->staging == STAGING_HOST)
        (void)buf_printf(out,
                         "staged in host memory, another %.1f MB, filled with pages in the "
                         "background and lent to the system while none is open; the swap is an "
                         "exchange of addresses, below 10 ms",
                         (double)l->weight_bytes * 1e-6);
    else
        (void)buf_printf(out,
                         "in place, no memory; serving stands still while the %.1f MB are read "
                         "a second time",
                         (double)l->stored_bytes * 1e-6);
}

void load_plan(const struct loaded *l, struct buf *out)
{
    if (l->device)
        load_device_tell(l, out);
    else
        tell_memory(l, out);
    if (l->expert_bytes)
        (void)buf_printf(out, "; routing of the tokens with KV %.2f MB",
                         (double)l->n_pages * (double)l->expert_bytes * 1e-6);
}

void load_release(struct loaded *l)
{
    if (l->model) model_free(l->model);
    if (l->pool) pool_free(l->pool);
    if (l->store) store_free(l->store);
    load_device_release(l);
    buf_release(&l->formats);
    textconf_release(&l->text);
    if (l->tokenizer) tokenizer_free(l->tokenizer);
    mem_free(l->dir);
    *l = (struct loaded){0};
}
