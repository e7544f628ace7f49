/* moe_gpu_state.h - inside of moe_gpu.h's handle, for the two files that make it up. */
#ifndef MODEL_CUDA_MOE_GPU_STATE_H
#define MODEL_CUDA_MOE_GPU_STATE_H

#include "backend/cuda/gemm.h"
#include "backend/cuda/repack.h"
#include "model/cuda/moe_gpu.h"

struct moe_gpu {
    struct moe_gpu_shape s;
    struct device *d;
    struct queue *q; /* borrowed: the caller's streams */
    struct gemm_kernels gemm;
    struct repack repack;
    struct kernels *kernels;
    struct kernel choose, take, rows, activate, finish, combine;
    devptr_t own_work; /* 0: the caller's */

    /* Work, for max_tokens tokens (t) and t * top_k rows. */
    uint16_t *x, *x_act; /* [t][hidden]: BF16, and rounded */
    uint16_t *h, *y;     /* [rows][inner], [rows][hidden] */
    float *wide;         /* [rows][2 inner or hidden]: results of GEMMs that are not done */
    float *act_scale;    /* of the rows rounded last */
    uint32_t *packed;    /* [t][top_k] */
    int32_t *row_of, *token_of, *offsets;
    struct gemm_weight *table; /* [MOE_GPU_MATRICES][n_local] */
    float *vectors;            /* as in struct moe_gpu_vectors, each in its place */
    float *inputs;             /* [2]: of x, of h */

    /* Weights. */
    format_t f[MOE_GPU_MATRICES];
    void **at; /* [n_local][MOE_GPU_MATRICES] resident addresses */
    devptr_t arena;
    bool has_formats, adopted;
    struct moe_gpu_vectors v; /* addresses on the device of those there are */
    devptr_t stage;           /* canonical bytes on their way */
    size_t stage_bytes;
    err_t failed; /* of puts: no memory for the stage */
};

/* moe_gpu_weights.c */
void moe_gpu_weights_free(struct moe_gpu *g);
size_t moe_gpu_vector_floats(const struct moe_gpu_shape *s);

#endif
