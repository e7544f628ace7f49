#include "cli/numerics.h"
#include <stdlib.h>
#include <string.h>

#define ROUTED_ELSEWHERE "flashinfer_trtllm_routed"

static const struct runner {
    const char *name;
    bool routed, auto_only; /* auto_only: SGLang's, for other hardware */
} runners[] = {
    {"auto", false, false},
    {"fused", false, false},
    {"routed", true, false},
    {"flashinfer_trtllm", false, false},
    {ROUTED_ELSEWHERE, true, false},
    {"triton", false, true},
    {"triton_kernel", false, true},
    {"deep_gemm", false, true},
    {"cutlass", false, true},
    {"flashinfer_cutlass", false, true},
    {"flashinfer_mxfp4", false, true},
    {"flashinfer_cutedsl", false, true},
    {"experimental_sgl_trtllm", false, true},
    {"experimental_sgl_marlin", false, true},
    {"marlin", false, true},
    {"humming", false, true},
    {"aiter", false, true},
};

static err_t parse_runner(struct numerics *o, const char *name, struct buf *ignored, struct err *e)
{
    for (size_t i = 0; i < sizeof runners / sizeof runners[0]; i++) {
        if (strcmp(name, runners[i].name) != 0) continue;
        o->routed = runners[i].routed;
        o->runner = runners[i].name;
        if (runners[i].auto_only) (void)buf_printf(ignored, " --moe-runner-backend %s", name);
        return OK;
    }
    return err_set(
        e, ERR_INPUT,
        "--moe-runner-backend: \"%s\" is not one of auto, fused, routed or SGLang's runners", name);
}

static bool per_token_asked(void)
{
    const char *v = getenv("SGLANG_FLASHINFER_NVFP4_PER_TOKEN_ACTIVATION");
    return v && (strcmp(v, "1") == 0 || strcmp(v, "true") == 0 || strcmp(v, "True") == 0);
}

static err_t parse_act(struct numerics *o, const char *name, struct err *e)
{
    o->act = name ? act_find(name) : ACT_BF16;
    if (o->act == ACT_COUNT)
        return err_set(e, ERR_INPUT,
                       "--activation-format: \"%s\" is not one of bf16, fp8_block, mxfp8, nvfp4, "
                       "nvfp4-per-token",
                       name);
    if ((!name || o->act == ACT_NVFP4) && per_token_asked()) o->act = ACT_NVFP4_PER_TOKEN;
    return OK;
}

err_t numerics_parse(struct numerics *o, const char *moe_backend, const char *act_format,
                     struct buf *ignored, struct err *e)
{
    err_t rc = parse_runner(o, moe_backend, ignored, e);
    return rc == OK ? parse_act(o, act_format, e) : rc;
}

err_t numerics_check(const struct loaded *l, const struct numerics *n, struct err *e)
{
    if (strcmp(n->runner, ROUTED_ELSEWHERE) != 0) return OK;
    for (size_t i = 0; i < store_slots(l->store); i++) {
        const struct slot_spec *s = store_spec(l->store, i);
        format_t f = s->shape.format;
        if (strstr(s->name, ".experts.") && (f == FORMAT_MXFP4 || f == FORMAT_FP8_CHANNEL))
            return err_set(e, ERR_UNSUPPORTED,
                           "--moe-runner-backend " ROUTED_ELSEWHERE ": %s is %s, which that runner "
                           "does not take (fp8, mxfp8, nvfp4 and bf16 it does); routed takes all",
                           s->name, formats[f].name);
    }
    return OK;
}

void numerics_tell(const struct loaded *l, const struct numerics *n, struct buf *out)
{
    (void)buf_printf(out, "moe: %s; activations: %s (the checkpoint's recipe implies %s)",
                     n->routed ? "routed" : "fused", acts[n->act].name, model_recipe(l->store));
}
