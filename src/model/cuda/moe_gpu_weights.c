/* Weights of moe_gpu.h's handle: a slot of backend/cuda/slot.h for each matrix. */
#include "backend/cuda/slot.h"
#include "base/mem.h"
#include "model/cuda/moe_gpu_state.h"
#include <math.h>

static struct resident shape_of(const struct moe_gpu *g, int which, format_t f)
{
    bool down = which == MOE_GPU_DOWN;
    return (struct resident){.kind = RESIDENT_MATRIX,
                             .format = f,
                             .rows = (uint64_t)(down ? g->s.hidden : g->s.inner),
                             .cols = (uint64_t)(down ? g->s.inner : g->s.hidden)};
}

err_t moe_gpu_resident_bytes(size_t *out, format_t f, uint64_t rows, uint64_t cols, struct err *e)
{
    struct resident r = {RESIDENT_MATRIX, f, rows, cols};
    return slot_bytes(out, &r) ? OK : err_set(e, ERR_INPUT, "a matrix of that size overflows");
}

void moe_gpu_stream(struct moe_gpu *g, void *stream)
{
    queue_set_stream(g->q, stream);
}

err_t moe_gpu_read(struct moe_gpu *g, void *to, const void *from, size_t bytes, struct err *e)
{
    void *former = device_enter(g->d);
    queue_copy(g->q, host_addr(to), host_addr(from), bytes);
    err_t rc = queue_sync(g->q, e);
    device_leave(g->d, former);
    return rc;
}

/* What the GEMMs take; the rule of model/cuda/cuda_act.c. */
static err_t check_formats(const struct moe_gpu *g, const format_t f[MOE_GPU_MATRICES],
                           struct err *e)
{
    static const char *const names[] = {"gate", "up", "down"};
    uint32_t group = acts[g->s.act].scale_group;
    for (int i = 0; i < MOE_GPU_MATRICES; i++)
        if (group && f[i] != FORMAT_BF16 && gemm_x_scales(f[i]) != group)
            return err_set(e, ERR_UNSUPPORTED,
                           "%s.format: %s; allowed on a GPU with activation_format %s: %s, bf16",
                           names[i], formats[f[i]].name, acts[g->s.act].name,
                           formats[group == ACT_ROW ? FORMAT_NVFP4 : FORMAT_FP8_BLOCK].name);
    return OK;
}

static err_t open_formats(struct moe_gpu *g, const format_t f[MOE_GPU_MATRICES], struct err *e)
{
    err_t rc = check_formats(g, f, e);
    uint32_t bits = 0;
    for (int i = 0; i < MOE_GPU_MATRICES; i++)
        bits |= 1u << f[i];
    return rc == OK ? gemm_open(&g->gemm, g->d, bits, e) : rc;
}

/* Places in an arena of all matrices from `base`; its size, 0 if that overflows. */
static size_t place(struct moe_gpu *g, devptr_t base, const format_t f[MOE_GPU_MATRICES])
{
    size_t at = 0, bytes;
    for (size_t i = 0; i < (size_t)g->s.n_local * MOE_GPU_MATRICES; i++) {
        int which = (int)(i % MOE_GPU_MATRICES);
        struct resident r = shape_of(g, which, f[which]);
        if (base) g->at[i] = (void *)(uintptr_t)(base + at);
        if (!slot_bytes(&bytes, &r) || !add_size(&at, at, bytes)) return 0;
    }
    return at;
}

static void keep_formats(struct moe_gpu *g, const format_t f[MOE_GPU_MATRICES], bool adopted)
{
    for (int i = 0; i < MOE_GPU_MATRICES; i++)
        g->f[i] = f[i];
    g->has_formats = true;
    g->adopted = adopted;
}

err_t moe_gpu_formats(struct moe_gpu *g, const format_t f[MOE_GPU_MATRICES], struct err *e)
{
    bool same = g->has_formats && !g->adopted;
    for (int i = 0; i < MOE_GPU_MATRICES; i++)
        same = same && f[i] == g->f[i];
    if (same) return OK;
    size_t bytes = place(g, 0, f);
    devptr_t arena = 0;
    if (bytes == 0) return err_set(e, ERR_NOMEM, "weights of %d experts overflow", g->s.n_local);
    void *former = device_enter(g->d);
    err_t rc = open_formats(g, f, e);
    if (rc == OK) rc = device_alloc(&arena, g->d, bytes, e);
    if (rc == OK) {
        device_free(g->d, g->arena); /* waits for what reads it */
        g->arena = arena;
        (void)place(g, arena, f);
        keep_formats(g, f, false);
    }
    device_leave(g->d, former);
    return rc;
}

/* --- canonical to resident and back */

static bool reserve_stage(struct moe_gpu *g, size_t bytes)
{
    struct err e;
    if (bytes <= g->stage_bytes) return true;
    device_free(g->d, g->stage);
    g->stage = 0;
    g->stage_bytes = 0;
    if (device_alloc(&g->stage, g->d, bytes, &e) != OK) return false;
    g->stage_bytes = bytes;
    return true;
}

/* Canonical bytes in the stage: data, then the scales from a multiple of 16. */
struct stage {
    struct layout_args args;
    size_t data, scale; /* bytes */
    bool f32_scales;    /* they stay apart: args.scale NULL */
    devptr_t scale_at;
    bool ok;
};

static struct stage stage_of(struct moe_gpu *g, const struct resident *r, void *resident)
{
    struct stage s = {0};
    if (!format_bytes(r->format, r->rows, r->cols, &s.data, &s.scale)) return s;
    size_t data = (s.data + 15) / 16 * 16;
    s.ok = reserve_stage(g, data + s.scale);
    s.f32_scales = formats[r->format].scale == SCALE_F32;
    s.scale_at = s.f32_scales ? host_addr(slot_matrix(r, resident).scale) : g->stage + data;
    s.args = (struct layout_args){.tiles = resident,
                                  .data = (void *)(uintptr_t)g->stage,
                                  .rows = (uint32_t)r->rows,
                                  .cols = (uint32_t)r->cols};
    if (!s.f32_scales && s.scale) s.args.scale = (void *)(uintptr_t)s.scale_at;
    return s;
}

static void put(struct moe_gpu *g, const struct resident *r, void *resident,
                const struct format_parts *p, float input)
{
    struct stage s = stage_of(g, r, resident);
    if (!s.ok) {
        g->failed = ERR_NOMEM;
        return;
    }
    queue_copy(g->q, g->stage, host_addr(p->data), s.data);
    queue_copy(g->q, s.scale_at, host_addr(p->scale), s.scale);
    repack_to_tiles(&g->repack, g->q, r->format, &s.args);
    if (formats[r->format].tensor)
        queue_copy(g->q, host_addr(slot_matrix(r, resident).scale), host_addr(&p->tensor),
                   sizeof p->tensor);
    if (r->format != FORMAT_BF16)
        queue_copy(g->q, host_addr(slot_input(r, resident)), host_addr(&input), sizeof input);
}

void moe_gpu_put(struct moe_gpu *g, size_t i, const struct format_parts *p, float input)
{
    int which = (int)(i % MOE_GPU_MATRICES);
    struct resident r = shape_of(g, which, g->f[which]);
    void *former = device_enter(g->d);
    put(g, &r, g->at[i], p, input);
    device_leave(g->d, former);
}

void *moe_gpu_resident(const struct moe_gpu *g, size_t i)
{
    return g->has_formats ? g->at[i] : NULL;
}

/* The first failure of what was put, after waiting for it. */
static err_t finish(struct moe_gpu *g, struct err *e)
{
    err_t rc = queue_sync(g->q, e);
    if (rc == OK && g->failed != OK)
        rc = err_set(e, g->failed, "no device memory to pack a matrix in");
    g->failed = OK;
    return rc;
}

err_t moe_gpu_pack(struct moe_gpu *g, void *resident, const struct format_parts *p, float input,
                   struct err *e)
{
    struct resident r = {RESIDENT_MATRIX, p->format, p->rows, p->cols};
    void *former = device_enter(g->d);
    put(g, &r, resident, p, input);
    err_t rc = finish(g, e);
    device_leave(g->d, former);
    return rc;
}

err_t moe_gpu_unpack(struct moe_gpu *g, void *data, void *scale, float *tensor, float *input,
                     format_t f, uint64_t rows, uint64_t cols, const void *resident, struct err *e)
{
    struct resident r = {RESIDENT_MATRIX, f, rows, cols};
    void *former = device_enter(g->d);
    struct stage s = stage_of(g, &r, (void *)(uintptr_t)resident);
    if (s.ok) {
        repack_from_tiles(&g->repack, g->q, f, &s.args);
        if (data) queue_copy(g->q, host_addr(data), g->stage, s.data);
        if (scale) queue_copy(g->q, host_addr(scale), s.scale_at, s.scale);
        if (tensor && formats[f].tensor)
            queue_copy(g->q, host_addr(tensor), host_addr(slot_matrix(&r, resident).scale),
                       sizeof *tensor);
        if (input && f != FORMAT_BF16)
            queue_copy(g->q, host_addr(input), host_addr(slot_input(&r, resident)), sizeof *input);
    } else {
        g->failed = ERR_NOMEM;
    }
    err_t rc = finish(g, e);
    device_leave(g->d, former);
    return rc;
}

err_t moe_gpu_adopt(struct moe_gpu *g, const format_t f[MOE_GPU_MATRICES], const void *const *at,
                    struct err *e)
{
    void *former = device_enter(g->d);
    err_t rc = open_formats(g, f, e);
    if (rc == OK) {
        device_free(g->d, g->arena);
        g->arena = 0;
        for (size_t i = 0; i < (size_t)g->s.n_local * MOE_GPU_MATRICES; i++)
            g->at[i] = (void *)(uintptr_t)at[i];
        keep_formats(g, f, true);
    }
    device_leave(g->d, former);
    return rc;
}

err_t moe_gpu_input(struct moe_gpu *g, float *out, int which, format_t f, const void *resident,
                    struct err *e)
{
    struct resident r = shape_of(g, which, f);
    *out = NAN;
    return f == FORMAT_BF16 ? OK : moe_gpu_read(g, out, slot_input(&r, resident), sizeof *out, e);
}

/* --- tables */

size_t moe_gpu_vector_floats(const struct moe_gpu_shape *s)
{
    return (size_t)s->n_local * (2 * (size_t)s->inner + (size_t)s->hidden + 3);
}

/* n floats to the next place, or nothing. */
static const float *upload(struct moe_gpu *g, float **at, const float *from, size_t n)
{
    float *here = *at;
    *at += n;
    if (from == NULL) return NULL;
    queue_copy(g->q, host_addr(here), host_addr(from), n * sizeof *from);
    return here;
}

static void upload_vectors(struct moe_gpu *g, const struct moe_gpu_vectors *v)
{
    size_t ne = (size_t)g->s.n_local, inner = ne * (size_t)g->s.inner;
    const float inputs[2] = {v->input_in, v->input_down};
    float *at = g->vectors;
    g->v = (struct moe_gpu_vectors){0};
    g->v.gate_bias = upload(g, &at, v->gate_bias, inner);
    g->v.up_bias = upload(g, &at, v->up_bias, inner);
    g->v.down_bias = upload(g, &at, v->down_bias, ne * (size_t)g->s.hidden);
    g->v.alpha = upload(g, &at, v->alpha, ne);
    g->v.beta = upload(g, &at, v->beta, ne);
    g->v.limit = upload(g, &at, v->limit, ne);
    queue_copy(g->q, host_addr(g->inputs), host_addr(inputs), sizeof inputs);
    /* `inputs` is pageable: its bytes were taken before queue_copy returned. */
}

err_t moe_gpu_ready(struct moe_gpu *g, const struct moe_gpu_vectors *v, struct err *e)
{
    size_t ne = (size_t)g->s.n_local, n = ne * MOE_GPU_MATRICES;
    struct gemm_weight *table = mem_try_array(n, sizeof *table);
    if (table == NULL) return err_set(e, ERR_NOMEM, "no memory for a table of %zu matrices", n);
    for (size_t i = 0; i < n; i++) {
        int which = (int)(i % MOE_GPU_MATRICES);
        struct resident r = shape_of(g, which, g->f[which]);
        table[(size_t)which * ne + i / MOE_GPU_MATRICES] = slot_matrix(&r, g->at[i]);
    }
    void *former = device_enter(g->d);
    queue_copy(g->q, host_addr(g->table), host_addr(table), n * sizeof *table);
    upload_vectors(g, v);
    err_t rc = finish(g, e);
    device_free(g->d, g->stage);
    g->stage = 0;
    g->stage_bytes = 0;
    device_leave(g->d, former);
    mem_free(table);
    return rc;
}

void moe_gpu_weights_free(struct moe_gpu *g)
{
    device_free(g->d, g->arena);
    device_free(g->d, g->stage);
}
