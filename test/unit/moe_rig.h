/*
 * moe_rig.h - experts of any format with random weights, resident and as float64, and the layer's
 * definition in float64, for tests of the MoE operator and of its C API.
 *
 * The float64 weights are decoded from the canonical bytes by format_decode_row, whose own tests
 * are exhaustive; everything after that is float64 arithmetic of the definition in moe_op.h.
 */
#ifndef TEST_UNIT_MOE_RIG_H
#define TEST_UNIT_MOE_RIG_H

#include "backend/cpu/cpu.h"
#include "backend/layout.h"
#include "base/mem.h"
#include "format/encode.h"
#include "model/moe_op.h"
#include <math.h>
#include <string.h>

struct canon { /* one matrix as a checkpoint has it */
    size_t rows, cols;
    void *data, *scale;
    float tensor, input;
    double *value; /* [rows][cols] */
};

struct moe_rig {
    format_t format;
    int32_t hidden, inner, n_experts;
    struct canon *canon;   /* [n_experts][MOE_MATRICES] */
    struct matrix *matrix; /* the same */
    void **resident;       /* the same */
    float *bias[3]; /* gate, up [n_experts][inner], down [n_experts][hidden]; in use or not */
    float *alpha, *beta, *limit;
};

static uint64_t rig_seed = 1;

static inline double rig_uniform(void)
{
    rig_seed = rig_seed * 6364136223846793005u + 1442695040888963407u;
    return (double)(rig_seed >> 11) * 0x1p-53;
}

static inline float rig_normal(void)
{
    double u = rig_uniform() + 0x1p-60, v = rig_uniform();
    return (float)(sqrt(-2.0 * log(u)) * cos(6.283185307179586 * v));
}

static inline void rig_canon(struct canon *c, format_t f, size_t rows, size_t cols, float spread,
                             float input)
{
    size_t data, scale;
    float *x = mem_alloc(rows * cols * 4), amax = 0, *row = mem_alloc(cols * 4);
    for (size_t i = 0; i < rows * cols; i++)
        x[i] = rig_normal() * spread / sqrtf((float)cols);
    if (!format_bytes(f, rows, cols, &data, &scale)) abort();
    *c = (struct canon){.rows = rows, .cols = cols, .input = input};
    c->data = mem_alloc(data);
    c->scale = mem_alloc(scale ? scale : 1);
    c->value = mem_alloc(rows * cols * sizeof(double));
    struct encode e;
    amax = encode_amax(amax, x, rows * cols);
    encode_init(&e, f, encode_rule_find(f, NULL), rows, cols, amax);
    encode_rows(&e, x, 0, rows, c->data, c->scale);
    c->tensor = formats[f].tensor ? e.tensor : 1.0f;
    struct format_parts p = {f, rows, cols, c->data, c->scale, c->tensor};
    for (size_t r = 0; r < rows; r++) {
        format_decode_row(row, &p, r);
        for (size_t j = 0; j < cols; j++)
            c->value[r * cols + j] = (double)row[j];
    }
    mem_free(x);
    mem_free(row);
}

static inline void *rig_resident(const struct canon *c, format_t f)
{
    size_t n;
    if (!layout_bytes(&n, f, c->rows, c->cols)) abort();
    void *at = mem_alloc(n);
    const void *parts[PART_COUNT] = {c->data, c->scale, &c->tensor, &c->input};
    for (int p = 0; p < PART_COUNT; p++) {
        size_t rows = layout_part_rows(f, (part_t)p, c->rows);
        if (rows) layout_put(at, f, c->rows, c->cols, (part_t)p, 0, rows, parts[p]);
    }
    return at;
}

static inline void rig_new(struct moe_rig *g, format_t f, int32_t hidden, int32_t inner,
                           int32_t n_experts)
{
    size_t n = (size_t)n_experts * MOE_MATRICES;
    *g = (struct moe_rig){.format = f, .hidden = hidden, .inner = inner, .n_experts = n_experts};
    g->canon = mem_alloc(n * sizeof *g->canon);
    g->matrix = mem_alloc(n * sizeof *g->matrix);
    g->resident = mem_alloc(n * sizeof *g->resident);
    for (size_t i = 0; i < n; i++) {
        bool down = i % MOE_MATRICES == MOE_DOWN;
        size_t rows = (size_t)(down ? hidden : inner), cols = (size_t)(down ? inner : hidden);
        /* Tensor scales of gate and up differ, as in third-party checkpoints. */
        rig_canon(&g->canon[i], f, rows, cols, i % 2 ? 1.7f : 1.1f, down ? 0.0009f : 0.0013f);
        g->resident[i] = rig_resident(&g->canon[i], f);
        g->matrix[i] = layout_matrix(f, rows, cols, g->resident[i]);
    }
    for (int b = 0; b < 3; b++) {
        size_t len = (size_t)n_experts * (size_t)(b == 2 ? hidden : inner);
        g->bias[b] = mem_alloc(len * 4);
        for (size_t i = 0; i < len; i++)
            g->bias[b][i] = act_round(rig_normal() * 0.3f);
    }
    g->alpha = mem_alloc((size_t)n_experts * 4);
    g->beta = mem_alloc((size_t)n_experts * 4);
    g->limit = mem_alloc((size_t)n_experts * 4);
    for (int32_t e = 0; e < n_experts; e++) {
        g->alpha[e] = 1.0f + 0.1f * (float)e;
        g->beta[e] = 0.5f;
        g->limit[e] = 0.7f + 0.05f * (float)e;
    }
}

static inline void rig_free(struct moe_rig *g)
{
    for (size_t i = 0; i < (size_t)g->n_experts * MOE_MATRICES; i++) {
        mem_free(g->canon[i].data);
        mem_free(g->canon[i].scale);
        mem_free(g->canon[i].value);
        mem_free(g->resident[i]);
    }
    for (int b = 0; b < 3; b++)
        mem_free(g->bias[b]);
    mem_free(g->alpha);
    mem_free(g->beta);
    mem_free(g->limit);
    mem_free(g->canon);
    mem_free(g->matrix);
    mem_free(g->resident);
}

static inline float *rig_rows(size_t n, size_t cols, float spread)
{
    float *x = mem_alloc(n * cols * 4);
    for (size_t i = 0; i < n * cols; i++)
        x[i] = act_round(rig_normal() * spread);
    return x;
}

/* What the activation format makes of a row, as products: filled by the test; NULL: nothing. */
typedef void rig_round(double *x, size_t n, double input);

static inline double rig_bf16(double x)
{
    return (double)act_round((float)x);
}

/* One token through one expert: y [hidden], and size [hidden] = sum of |h| |w|. */
static inline void rig_expert(const struct moe_rig *g, const struct moe_weights *w,
                              moe_activation_t act, int32_t e, const double *x, rig_round *round,
                              double *y, double *size)
{
    size_t hidden = (size_t)g->hidden, inner = (size_t)g->inner;
    const struct canon *c = &g->canon[(size_t)e * MOE_MATRICES];
    double *a = mem_alloc(hidden * sizeof *a), *h = mem_alloc(inner * sizeof *h);
    bool oai = act == MOE_SWIGLU_OAI;
    double alpha = w->alpha ? (double)w->alpha[e] : oai ? (double)1.702f : 1.0;
    double beta = w->beta ? (double)w->beta[e] : oai ? 1.0 : 0.0;
    double limit = w->limit ? (double)w->limit[e] : oai ? 7.0 : HUGE_VAL;
    memcpy(a, x, hidden * sizeof *a);
    if (round) round(a, hidden, (double)c->input);
    for (size_t i = 0; i < inner; i++) {
        double gate = w->gate_bias ? (double)w->gate_bias[(size_t)e * inner + i] : 0.0;
        double up = w->up_bias ? (double)w->up_bias[(size_t)e * inner + i] : 0.0;
        for (size_t j = 0; j < hidden; j++) {
            gate += a[j] * c[MOE_GATE].value[i * hidden + j];
            up += a[j] * c[MOE_UP].value[i * hidden + j];
        }
        gate = fmin(gate, limit);
        up = fmax(fmin(up, limit), -limit);
        h[i] = gate / (1.0 + exp(-alpha * gate)) * (up + beta);
        if (round) h[i] = rig_bf16(h[i]);
    }
    if (round) round(h, inner, (double)c[MOE_DOWN].input);
    for (size_t r = 0; r < hidden; r++) {
        y[r] = w->down_bias ? (double)w->down_bias[(size_t)e * hidden + r] : 0.0;
        size[r] = fabs(y[r]);
        for (size_t i = 0; i < inner; i++) {
            double p = h[i] * c[MOE_DOWN].value[r * inner + i];
            y[r] += p;
            size[r] += fabs(p);
        }
    }
    mem_free(a);
    mem_free(h);
}

/* The layer for n tokens: y and size [n][hidden], from choices (ids, weights) [n][k]. */
static inline void rig_define(const struct moe_rig *g, const struct moe_weights *w,
                              const struct moe_shape *s, const int32_t *ids, const float *weights,
                              const float *x, size_t n, rig_round *round, double *y, double *size)
{
    size_t hidden = (size_t)g->hidden, k = (size_t)s->top_k;
    double *in = mem_alloc(hidden * sizeof *in), *out = mem_alloc(hidden * sizeof *out);
    double *mag = mem_alloc(hidden * sizeof *mag);
    memset(y, 0, n * hidden * sizeof *y);
    memset(size, 0, n * hidden * sizeof *size);
    for (size_t i = 0; i < n * k; i++) {
        if (ids[i] < s->local_offset || ids[i] >= s->local_offset + s->n_local) continue;
        double weight = rig_bf16((double)weights[i]);
        for (size_t j = 0; j < hidden; j++) {
            in[j] = (double)x[i / k * hidden + j];
            if (s->weigh_input) in[j] = rig_bf16(in[j] * weight);
        }
        rig_expert(g, w, s->activation, ids[i], in, round, out, mag);
        for (size_t j = 0; j < hidden; j++) {
            y[i / k * hidden + j] += (s->weigh_input ? 1.0 : weight) * out[j];
            size[i / k * hidden + j] += (s->weigh_input ? 1.0 : fabs(weight)) * mag[j];
        }
    }
    mem_free(in);
    mem_free(out);
    mem_free(mag);
}

#endif
