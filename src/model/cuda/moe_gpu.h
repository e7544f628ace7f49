/*
 * moe_gpu.h - the routed MoE operator on a GPU, for include/moult_moe.h (model/moe_api_cuda.c).
 *
 *     moe_gpu_new(&g, &shape, gpu, work, work_bytes, e)
 *     moe_gpu_formats(g, formats, e)            // room for the weights, the first time
 *     moe_gpu_put(g, i, &parts, input)  ...     // every matrix, then
 *     moe_gpu_ready(g, &vectors, e)             // waits
 *     moe_gpu_run(g, &call, stream, e)          // queues; neither allocates nor waits
 *
 * A run is kernels over buffers that were taken in moe_gpu_new and tables that stay where they are,
 * so a graph captured over it stays valid when the weights are replaced in the formats they have.
 *
 *     choose or take -> plan -> rows -> [round] -> GEMM 1 -> [round] -> GEMM 2 -> combine
 *
 * GEMM 1 has SwiGLU in its epilogue, and GEMM 2 rounds, where there are no biases and limits and
 * gate and up have one format; else both write f32, and kernels of moe.h go on from there.
 *
 * Shapes   hidden and inner multiples of 8; at most 512 local experts, 1024 in all, top_k 32
 * Threads  one caller at a time a handle; every call leaves the thread's context as it was
 */
#ifndef MODEL_CUDA_MOE_GPU_H
#define MODEL_CUDA_MOE_GPU_H

#include "backend/cuda/moe.h"
#include "base/err.h"
#include "format/act.h"
#include "format/format.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { MOE_GPU_GATE, MOE_GPU_UP, MOE_GPU_DOWN, MOE_GPU_MATRICES };

struct moe_gpu_shape {
    int32_t hidden, inner, n_experts, top_k, local_offset, n_local, max_tokens;
    bool oai, weigh_input;
    act_t act;
};

/* Host arrays of the local experts; NULL: none. */
struct moe_gpu_vectors {
    const float *gate_bias, *up_bias, *down_bias, *alpha, *beta, *limit;
    float input_in, input_down; /* ACT_NVFP4: scales of x and of h */
};

/* All pointers are the device's. */
struct moe_gpu_call {
    int32_t n_tokens;
    struct moe_floats input;
    void *output;
    bool output_bf16;
    const struct moe_choose_args *choose; /* logits, and what follows them; n_tokens apart; NULL: */
    struct moe_take_args take;            /* choices from elsewhere; n apart */
    int32_t *packed_out;                  /* or NULL */
    int16_t *ids_out;                     /* or NULL */
};

struct moe_gpu;

/* ERR_UNSUPPORTED names the field, its value and what is allowed. */
err_t moe_gpu_work_bytes(size_t *out, const struct moe_gpu_shape *s, struct err *e) MUST_USE;
/* `work`: device memory of the caller's of at least moe_gpu_work_bytes, 256-byte aligned; NULL:
 * taken here. */
err_t moe_gpu_new(struct moe_gpu **out, const struct moe_gpu_shape *s, int32_t gpu, void *work,
                  size_t work_bytes, struct err *e) MUST_USE;
void moe_gpu_free(struct moe_gpu *g); /* NULL is fine */

/* --- weights.  What is queued before goes to `stream`, from which host and device bytes alike are
 * read. */
void moe_gpu_stream(struct moe_gpu *g, void *stream);
/* Bytes from the device (or the host) to the host; waits. */
err_t moe_gpu_read(struct moe_gpu *g, void *to, const void *from, size_t bytes,
                   struct err *e) MUST_USE;
/* ERR_UNSUPPORTED: gate or down in a format that the activations do not go with. */
err_t moe_gpu_formats(struct moe_gpu *g, const format_t f[MOE_GPU_MATRICES],
                      struct err *e) MUST_USE;
/* Matrix i = expert * MOE_GPU_MATRICES + which: canonical bytes, of the host or the device. */
void moe_gpu_put(struct moe_gpu *g, size_t i, const struct format_parts *p, float input);
/* Where it lies; NULL before moe_gpu_formats. */
void *moe_gpu_resident(const struct moe_gpu *g, size_t i);
/* Resident bytes of the caller's in place of the handle's own: [n_local][MOE_GPU_MATRICES]. */
err_t moe_gpu_adopt(struct moe_gpu *g, const format_t f[MOE_GPU_MATRICES], const void *const *at,
                    struct err *e) MUST_USE;
/* The scale of the activations that is stored with a resident matrix; NAN: none. */
err_t moe_gpu_input(struct moe_gpu *g, float *out, int which, format_t f, const void *resident,
                    struct err *e) MUST_USE;
err_t moe_gpu_ready(struct moe_gpu *g, const struct moe_gpu_vectors *v, struct err *e) MUST_USE;

/* Resident form of any matrix: canonical bytes to it and back, each of the host or the device. */
err_t moe_gpu_resident_bytes(size_t *out, format_t f, uint64_t rows, uint64_t cols,
                             struct err *e) MUST_USE;
err_t moe_gpu_pack(struct moe_gpu *g, void *resident, const struct format_parts *p, float input,
                   struct err *e) MUST_USE;
/* `data`, `scale`, `tensor`, `input`: NULL is not wanted. */
err_t moe_gpu_unpack(struct moe_gpu *g, void *data, void *scale, float *tensor, float *input,
                     format_t f, uint64_t rows, uint64_t cols, const void *resident,
                     struct err *e) MUST_USE;

err_t moe_gpu_run(struct moe_gpu *g, const struct moe_gpu_call *c, void *stream,
                  struct err *e) MUST_USE;

#endif
