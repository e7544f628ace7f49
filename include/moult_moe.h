/*
 * moult_moe.h - the routed mixture-of-experts layer as a C library (libmoult).
 *
 *     moult_moe_config c = {.size = sizeof c, .hidden_size = 2048, .intermediate_size = 768,
 *                           .num_experts = 128, .top_k = 8,
 *                           .routing_method = MOULT_ROUTE_RENORMALIZE, .max_tokens = 512};
 *     moult_moe *moe;
 *     moult_error err;
 *     if (moult_moe_create(&moe, &c, &err)) ...     // err.message says field, value, what is
 *                                                   // allowed
 *     if (moult_moe_set_weights(moe, &weights, &err)) ...
 *     if (moult_moe_run(moe, &call, &err)) ...      // routing, both GEMMs, combine
 *     moult_moe_destroy(moe);
 *
 * Arithmetic: inputs are rounded to BF16 (nearest even), sums are f32 in a fixed order, what an
 * expert computes between its GEMMs and its output row are rounded to BF16, routing weights are
 * rounded to BF16 once, experts are combined in f32 in k order.  A token's result depends on its
 * own row, choices and the weights: not on the other tokens, the number of threads or the
 * instruction set. The fused form (logits) and the routed form (packed ids and weights) give the
 * same bits.
 *
 * Structs: `size` is sizeof the struct as the caller was compiled; fields beyond it count as zero,
 * so the structs can grow.  Zero is every field's default.  Arrays are dense and row-major;
 * pointers are borrowed during the call unless the comment says otherwise.
 *
 * Devices: a handle computes on the CPU (streams NULL) or, with device = MOULT_DEVICE_CUDA, on GPU
 * `gpu` (compute capability 9.0) in its primary context, that of the CUDA runtime and PyTorch.
 *
 *     c.device = MOULT_DEVICE_CUDA;
 *     weights.device = MOULT_DEVICE_CUDA;         // where the arrays lie: or on the CPU
 *     call.stream = stream;                       // a CUstream or cudaStream_t
 *     if (moult_moe_run(moe, &call, &err)) ...    // every pointer of the call is the GPU's
 *
 * There moult_moe_run queues kernels on the stream and returns: it allocates nothing and waits for
 * nothing, so that it can be captured into a graph.  Failures of what it queued come out of the
 * stream.  The handle's work memory is one: calls on several streams are ordered by the caller.
 * moult_moe_set_weights reads on weights->stream and waits; runs of the handle that were queued
 * there have ended by then, others must have.  It writes in place: captured graphs stay valid while
 * the formats and the set of optional arrays (biases, alpha, ...) stay the same.  What differs:
 *
 *     bits                 sums are the tensor core's: close to the CPU's, not equal.  Fused and
 *                          routed, every batch and every kernel give the same ones there too
 *     sizes                hidden_size and intermediate_size multiples of 8; at most 1,024 experts,
 *                          512 of them local, top_k 32
 *     routing, activation  all methods, biases and limits
 *     activation_format    fp8-block goes with weights in fp8-block, nvfp4 and nvfp4-per-token with
 *                          nvfp4, mxfp8 with all; BF16 weights read BF16 beside any
 *     resident form        another one: moult_gpu_resident_bytes and what follows it
 *     values of weights    are looked at on the host: arrays on the GPU are copied there and back
 *
 * Without a GPU or a driver moult_moe_create says so (MOULT_ERR_UNSUPPORTED).
 *
 * Threads: calls with different handles are independent; one call at a time a handle.
 * Results: 0 or a code; with one, *err (if not NULL) holds it and a message, and outputs are
 * unchanged (moult_moe_set_weights: the former weights stay).  Functions return; they never abort
 * on input.
 */
#ifndef MOULT_MOE_H
#define MOULT_MOE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define MOULT_API __attribute__((visibility("default")))
#else
#define MOULT_API
#endif

enum { MOULT_API_VERSION = 2 }; /* of this header; grows with it */
MOULT_API int32_t moult_version(void);

enum {
    MOULT_OK,
    MOULT_ERR_INPUT,       /* a value is not allowed */
    MOULT_ERR_STATE,       /* not now: no weights were set */
    MOULT_ERR_UNSUPPORTED, /* not in this release or on this machine */
    MOULT_ERR_NOMEM,
    MOULT_ERR_SYSTEM
};

typedef struct moult_error {
    int32_t code;
    char message[1020]; /* terminated */
} moult_error;

enum { MOULT_DEVICE_CPU, MOULT_DEVICE_CUDA };
enum { MOULT_DTYPE_F32, MOULT_DTYPE_BF16 };

/* Weight formats.  data: rows x cols elements, 4-bit ones two a byte, the even one low; scale: one
 * a group of rows x columns, partial at the edges; value = element * scale * tensor scale. */
enum {
    MOULT_FORMAT_BF16,
    MOULT_FORMAT_FP8_BLOCK,   /* E4M3; f32 a 128 x 128 block */
    MOULT_FORMAT_FP8_TENSOR,  /* E4M3; one f32 */
    MOULT_FORMAT_FP8_CHANNEL, /* E4M3; f32 a row */
    MOULT_FORMAT_MXFP8,       /* E4M3; E8M0 a 1 x 32 group */
    MOULT_FORMAT_NVFP4,       /* E2M1; E4M3 a 1 x 16 group; f32 tensor scale (decode) */
    MOULT_FORMAT_MXFP4        /* E2M1; E8M0 a 1 x 32 group */
};

/* What rows that a quantized matrix reads are rounded to. */
enum {
    MOULT_ACT_BF16,
    MOULT_ACT_FP8_BLOCK,      /* E4M3, f32 scale each 128, dynamic */
    MOULT_ACT_MXFP8,          /* E4M3, E8M0 scale each 32, dynamic */
    MOULT_ACT_NVFP4,          /* E2M1, E4M3 scale each 16, one static input scale */
    MOULT_ACT_NVFP4_PER_TOKEN /* E2M1, E4M3 scale each 16, f32 scale a row, dynamic */
};

/* Numbers of FlashInfer's RoutingMethodType. */
enum {
    MOULT_ROUTE_DEFAULT,           /* softmax, top k */
    MOULT_ROUTE_RENORMALIZE,       /* top k, softmax over them */
    MOULT_ROUTE_DEEPSEEK_V3,       /* sigmoid + bias, groups, top k, / sum, * scaling */
    MOULT_ROUTE_LLAMA4,            /* top 1, sigmoid, on the input */
    MOULT_ROUTE_RENORMALIZE_NAIVE, /* softmax, top k, / sum */
    MOULT_ROUTE_TOPK,              /* top k, as they are */
    MOULT_ROUTE_SIGMOID_RENORM,    /* sigmoid, top k, / sum with norm_topk_prob */
    MOULT_ROUTE_MINIMAX2,          /* sigmoid + bias, top k, / sum, * scaling */
    MOULT_ROUTE_SIGMOID,           /* sigmoid, top k */
    MOULT_ROUTE_TOPK_SIGMOID       /* top k, sigmoid */
};

enum {
    MOULT_SWIGLU,    /* silu(gate) * up */
    MOULT_SWIGLU_OAI /* gpt-oss: clamped; alpha 1.702, beta 1, limit 7 unless given */
};

typedef struct moult_moe_config {
    size_t size;
    int32_t hidden_size, intermediate_size; /* even, at most 2^20 */
    int32_t num_experts;                    /* global; a multiple of 4, more than top_k */
    int32_t top_k;
    int32_t local_expert_offset, local_num_experts; /* those with weights here; 0 experts: all */
    int32_t routing_method;
    int32_t n_group, topk_group; /* deepseek-v3 */
    float routed_scaling_factor; /* deepseek-v3, minimax2; 0: 1 */
    int32_t norm_topk_prob;      /* sigmoid-renorm */
    int32_t activation;
    int32_t weights_on_input; /* routed form without a method: as llama4 does; top_k 1 */
    int32_t activation_format;
    int32_t max_tokens;  /* worked on at once; a call may have more; 0: 512 */
    int32_t num_threads; /* 0: online CPUs */
    int32_t device;
    const char *isa; /* NULL: the best; "portable", "avx2", "avx512" */
    int32_t gpu;     /* of CUDA_VISIBLE_DEVICES */
    void *workspace; /* GPU memory, 256-byte aligned, for the life of the handle; NULL: its own */
    size_t workspace_bytes; /* at least moult_moe_workspace_bytes */
} moult_moe_config;

typedef struct moult_moe moult_moe;

/* GPU memory that a handle of this configuration works in, weights apart; 0 on the CPU. */
MOULT_API int32_t moult_moe_workspace_bytes(size_t *out, const moult_moe_config *config,
                                            moult_error *err);
MOULT_API int32_t moult_moe_create(moult_moe **out, const moult_moe_config *config,
                                   moult_error *err);
MOULT_API void moult_moe_destroy(moult_moe *moe); /* NULL is fine */

/* The same matrix of every local expert, as a checkpoint has it. */
typedef struct moult_matrices {
    int32_t format;
    const void *data;          /* [experts][rows][bytes of a row] */
    const void *scale;         /* [experts][scale rows][scale columns]; NULL for BF16 */
    const float *tensor_scale; /* NVFP4: [experts], of a fused pair [experts][2], gate's first */
    const float *input_scale;  /* the same shape; NULL: none.  Read by MOULT_ACT_NVFP4 */
} moult_matrices;

enum {
    MOULT_GATE_AND_UP,       /* `gate` and `up` [I][H] */
    MOULT_FUSED_GATE_UP,     /* `gate` is [2I][H], its first half gate (Hugging Face, SGLang) */
    MOULT_FUSED_UP_GATE,     /* first half up (FlashInfer) */
    MOULT_FUSED_INTERLEAVED, /* gate in even rows (gpt-oss) */
    MOULT_RESIDENT           /* `resident`: packed by moult_pack, borrowed until replaced */
};

typedef struct moult_moe_weights {
    size_t size;
    int32_t arrangement;
    int32_t device;                /* of all arrays, but for the table `resident` itself */
    void *stream;                  /* of a GPU: where the arrays are ready */
    moult_matrices gate, up, down; /* down [H][I]; copied */
    const void *const *resident;   /* [experts][3]: gate, up, down; formats from the fields above */
    const float *gate_bias; /* [experts][I], or fused [experts][2I] in the order of the rows */
    const float *up_bias;   /* [experts][I] */
    const float *down_bias; /* [experts][H]; biases and what follows are copied; NULL: none */
    const float *alpha, *beta, *limit;      /* [experts] */
    float input_scale_in, input_scale_down; /* MOULT_ACT_NVFP4: 0: the largest of the experts' */
} moult_moe_weights;

/* Refuses NaN, infinite BF16 elements, and scales that no checkpoint should have, by place. */
MOULT_API int32_t moult_moe_set_weights(moult_moe *moe, const moult_moe_weights *weights,
                                        moult_error *err);

/* Exactly one of `logits`, `packed`, `topk_ids` is given.  An id that is not of a local expert (a
 * negative one, one of another slice) adds nothing; a repeated one counts each time. */
typedef struct moult_moe_call {
    size_t size;
    int32_t num_tokens;
    int32_t input_dtype, output_dtype, logits_dtype, bias_dtype, weights_dtype;
    const void *input; /* [tokens][H] */
    void *output;      /* [tokens][H]; f32 is the sum itself, to be added over slices of experts */

    const void *logits;        /* fused: [tokens][num_experts] */
    const void *routing_bias;  /* [num_experts]; deepseek-v3, minimax2; NULL: none */
    const int16_t *replay_ids; /* [tokens][K], or NULL: choices to take, weighed by the method */

    const int32_t *packed;    /* routed: [tokens][K], id << 16 | BF16 bits of the weight */
    const int32_t *topk_ids;  /* routed: [tokens][K] */
    const void *topk_weights; /* [tokens][K], rounded to BF16 */

    int16_t *replay_out; /* [tokens][K], or NULL: the choices made */
    int32_t *packed_out; /* [tokens][K], or NULL: choices with their weights */
    void *stream;
} moult_moe_call;

MOULT_API int32_t moult_moe_run(moult_moe *moe, const moult_moe_call *call, moult_error *err);

/* Resident form of one matrix: a permutation of its canonical bytes with a few f32 behind, at an
 * address that is a multiple of 64. */
MOULT_API int32_t moult_resident_bytes(size_t *out, int32_t format, int64_t rows, int64_t cols,
                                       moult_error *err);
/* `m` describes one expert's matrix; moult_unpack writes into the arrays that are not NULL. */
typedef struct moult_matrix_out {
    void *data, *scale;
    float *tensor_scale, *input_scale; /* input scale NaN: none */
} moult_matrix_out;
MOULT_API int32_t moult_pack(void *resident, const moult_matrices *m, int64_t rows, int64_t cols,
                             moult_error *err);
MOULT_API int32_t moult_unpack(const moult_matrix_out *out, int32_t format, int64_t rows,
                               int64_t cols, const void *resident, moult_error *err);

/* The same on the GPU of a handle: tiles for its tensor cores, at a multiple of 16.  The arrays of
 * `m` and `out` may lie on either side; both calls wait.  Resident matrices go to any handle there
 * as MOULT_RESIDENT.  moult_gpu_resident tells where a handle has its own, which
 * moult_moe_set_weights replaces in place (not to be given back to it). */
MOULT_API int32_t moult_gpu_resident_bytes(size_t *out, int32_t format, int64_t rows, int64_t cols,
                                           moult_error *err);
MOULT_API int32_t moult_gpu_pack(moult_moe *moe, void *resident, const moult_matrices *m,
                                 int64_t rows, int64_t cols, void *stream, moult_error *err);
MOULT_API int32_t moult_gpu_unpack(moult_moe *moe, const moult_matrix_out *out, int32_t format,
                                   int64_t rows, int64_t cols, const void *resident, void *stream,
                                   moult_error *err);
/* matrix: 0 gate, 1 up, 2 down of a local expert. */
MOULT_API int32_t moult_gpu_resident(void **out, const moult_moe *moe, int32_t expert,
                                     int32_t matrix, moult_error *err);

/*
 * FlashInfer's trtllm layouts of one expert, exported from canonical bytes and imported back.
 *
 *     w13 rows   [up; gate], then (not FP8_BLOCK) up and gate rows alternate, then rows are
 *                shuffled in blocks of 32 (FP8_BLOCK: of 16)
 *     w2 rows    shuffled in the same blocks
 *     data       optionally block-major: [row bytes / 128][rows][128 bytes]
 *     scales     E4M3 and E8M0: rows as the data's, then 128x4 tiles (rows padded to 128, columns
 *                to 4, with zeros); FP8_BLOCK: f32 blocks as they are, halves [up; gate];
 *                FP8_TENSOR: none
 *     bias       f32, rows as the data's
 */
enum { MOULT_TRTLLM_W13, MOULT_TRTLLM_W2 };
enum { MOULT_PART_DATA, MOULT_PART_SCALE, MOULT_PART_BIAS };

typedef struct moult_trtllm {
    size_t size;
    int32_t format; /* all but FP8_CHANNEL */
    int32_t matrix, part;
    int32_t rows; /* w13: I, of gate and of up alike; w2: H.  Stored rows a multiple of the block */
    int32_t cols; /* elements: w13 H, w2 I */
    int32_t block_major; /* data only; row bytes a multiple of 128 */
} moult_trtllm;

MOULT_API int32_t moult_trtllm_bytes(size_t *out, const moult_trtllm *t, moult_error *err);
/* w13: `gate` and `up`; w2: `gate` is the matrix and `up` NULL. */
MOULT_API int32_t moult_trtllm_export(void *stored, const moult_trtllm *t, const void *gate,
                                      const void *up, moult_error *err);
MOULT_API int32_t moult_trtllm_import(void *gate, void *up, const moult_trtllm *t,
                                      const void *stored, moult_error *err);

#ifdef __cplusplus
}
#endif

#endif
