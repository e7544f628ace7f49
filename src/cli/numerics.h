/*
 * numerics.h - the flags that choose the MoE form and the activation format.
 *
 * --moe-runner-backend  auto and fused; routed; SGLang's flashinfer_trtllm is fused,
 *                       flashinfer_trtllm_routed routed, its other runners auto, named in the joint
 *                       warning.  All give the same bits.
 * --activation-format   a name of format/act.h, "_" as "-".  SGLang's environment variable
 *                       SGLANG_FLASHINFER_NVFP4_PER_TOKEN_ACTIVATION=1 selects nvfp4-per-token
 *                       where the flag is absent or nvfp4.
 */
#ifndef CLI_NUMERICS_H
#define CLI_NUMERICS_H

#include "cli/load.h"

/* The rows of both flags for a table whose struct has the members `moe_backend` and `act_format`.
 */
#define NUMERICS_OPTS                                                                          \
    {"moe-runner-backend",                                                                     \
     NULL,                                                                                     \
     OPT_HONOURED,                                                                             \
     OPT_STRING,                                                                               \
     AT(moe_backend),                                                                          \
     "auto",                                                                                   \
     0,                                                                                        \
     0,                                                                                        \
     NULL,                                                                                     \
     "auto, fused or routed, or a name of SGLang's; same bits",                                \
     NULL},                                                                                    \
    {                                                                                          \
        "activation-format", NULL, OPT_HONOURED, OPT_STRING, AT(act_format), NULL, 0, 0, NULL, \
            "bf16, fp8_block, mxfp8, nvfp4 or nvfp4-per-token: what quantized matrices read "  \
            "[bf16]",                                                                          \
            NULL                                                                               \
    }

/* A runner that has no meaning here is appended to `ignored`. */
err_t numerics_parse(struct numerics *out, const char *moe_backend, const char *act_format,
                     struct buf *ignored, struct err *e) MUST_USE;
/* Refuses the experts' formats that SGLang's runner of this name refuses; our names take all. */
err_t numerics_check(const struct loaded *l, const struct numerics *n, struct err *e) MUST_USE;
/* "moe: fused; activations: bf16 (...)", once weights are there. */
void numerics_tell(const struct loaded *l, const struct numerics *n, struct buf *out);

#endif
