/*
 * matrices.h - random matrices of every format for tests, in canonical parts, and their tiles on
 * the GPU.
 */
#ifndef TEST_CUDA_MATRICES_H
#define TEST_CUDA_MATRICES_H

#include "backend/cuda/gemm.h"
#include "backend/cuda/repack.h"
#include "cuda/gpu.h"
#include <math.h>

struct test_matrix {
    struct format_parts parts;
    uint8_t *data, *scale;
    size_t data_bytes, scale_bytes;
    devptr_t tiles, dscale;
    size_t tile_bytes;
};

/* What the elements look like. */
typedef enum { DATA_NORMAL, DATA_WIDE, DATA_CANCEL, DATA_TINY, DATA_KINDS } data_kind_t;

static inline float noise_element(uint64_t *s, data_kind_t kind, size_t k)
{
    float u = noise_f32(s);
    if (kind == DATA_WIDE) return u * exp2f(noise_f32(s) * 12.0f);
    if (kind == DATA_TINY) return u * 0x1p-126f; /* bf16 subnormals, mostly */
    if (kind == DATA_CANCEL && k % 2) return -1.0f;
    return (noise_f32(s) + u) * 0.5f;
}

static inline void matrix_fill(struct test_matrix *m, data_kind_t kind, uint64_t *seed)
{
    const struct format *f = &formats[m->parts.format];
    for (size_t i = 0; i < m->data_bytes; i++)
        m->data[i] = (uint8_t)noise_u32(seed);
    if (f->elem == ELEM_BF16)
        for (size_t i = 0; i < m->data_bytes / 2; i++) {
            uint16_t h = f32_to_bf16(noise_element(seed, kind, i));
            memcpy(m->data + i * 2, &h, 2);
        }
    if (f->elem == ELEM_E4M3)
        for (size_t i = 0; i < m->data_bytes; i++)
            if ((m->data[i] & 0x7f) == 0x7f) m->data[i] ^= 1;
    for (size_t i = 0; i < m->scale_bytes / (size_t)(f->scale_bytes ? f->scale_bytes : 1); i++) {
        float v = 0.001f + fabsf(noise_f32(seed)) * 0.02f;
        if (f->scale == SCALE_E4M3) m->scale[i] = (uint8_t)(noise_u32(seed) % 0x7f);
        if (f->scale == SCALE_E8M0)
            m->scale[i] = /* CANCEL: of small weights (weight.cuh) alone */
                (uint8_t)(kind == DATA_WIDE
                              ? 10 + noise_u32(seed) % 200
                              : 117 + noise_u32(seed) % (kind == DATA_CANCEL ? 11 : 12));
        if (f->scale == SCALE_F32) memcpy(m->scale + i * 4, &v, 4);
    }
}

/* Random canonical parts; `wild`: any bytes at all. */
static inline struct test_matrix matrix_new(format_t f, size_t rows, size_t cols, data_kind_t kind,
                                            uint64_t *seed)
{
    struct test_matrix m = {.parts = {.format = f, .rows = rows, .cols = cols, .tensor = 1.0f}};
    assert_true(format_bytes(f, rows, cols, &m.data_bytes, &m.scale_bytes));
    m.data = mem_alloc(m.data_bytes);
    m.scale = mem_alloc(m.scale_bytes + 4);
    matrix_fill(&m, kind, seed);
    if (formats[f].tensor) m.parts.tensor = 0.01f + fabsf(noise_f32(seed));
    m.parts.data = m.data;
    m.parts.scale = m.scale;
    return m;
}

/* Of a test program: repack_open(&matrix_repack, ...) before the first matrix_upload. */
static struct repack matrix_repack;

/* Tiles on the GPU, by the device's own kernel. */
static inline void matrix_upload(struct gpu *g, struct test_matrix *m)
{
    const struct format_parts *p = &m->parts;
    assert_true(layout_cuda_bytes(&m->tile_bytes, p->format, p->rows, p->cols));
    m->tiles = gpu_new(g, NULL, m->tile_bytes);
    devptr_t data = gpu_new(g, m->data, m->data_bytes),
             scale = gpu_new(g, m->scale, m->scale_bytes + 4);
    struct layout_args a = {(void *)(uintptr_t)m->tiles, (void *)(uintptr_t)data,
                            (void *)(uintptr_t)scale, (uint32_t)p->rows, (uint32_t)p->cols};
    repack_to_tiles(&matrix_repack, g->q, p->format, &a);
    MUST(queue_sync(g->q, &must_e));
    gpu_free(g, data);
    if (formats[p->format].tensor) {
        gpu_free(g, scale);
        scale = gpu_new(g, &p->tensor, 4);
    }
    m->dscale = scale;
}

static inline struct gemm_weight matrix_weight(const struct test_matrix *m)
{
    return (struct gemm_weight){(const void *)(uintptr_t)m->tiles,
                                (const float *)(uintptr_t)m->dscale};
}

static inline void matrix_free(struct gpu *g, struct test_matrix *m)
{
    mem_free(m->data);
    mem_free(m->scale);
    gpu_free(g, m->tiles);
    gpu_free(g, m->dscale);
}

#endif
