/* cuda_check.c - which models the kernels take, before anything is allocated for one. */
#include "base/mem.h"
#include "model/cuda/cuda.h"
#include "model/cuda/cuda_model.h"

/* Rows of a matrix go to the device in whole panels of tiles: those of BF16 must fit a batch
 * (feed.h). */
#define WIDEST 40960

struct kernels_shape cuda_shape(const struct config *c, kv_type_t kv)
{
    return (struct kernels_shape){.hidden = c->hidden_size,
                                  .head_dim = c->head_dim,
                                  .n_heads = c->n_heads,
                                  .n_kv_heads = c->n_kv_heads,
                                  .n_experts = c->n_experts,
                                  .top_k = c->top_k,
                                  .vocab = c->vocab_size,
                                  .kv = kv};
}

/* What the GEMMs need besides the limits of kernels_check. */
static err_t check_sizes(const struct config *c, struct err *e)
{
    const struct {
        const char *name;
        int32_t value;
    } sizes[] = {{"hidden_size", c->hidden_size},
                 {"moe_intermediate_size", c->moe_intermediate_size},
                 {"intermediate_size", c->intermediate_size}};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
        if (sizes[i].value % 8 || sizes[i].value > WIDEST)
            return err_set(e, ERR_UNSUPPORTED, "%s: %d; allowed on a GPU: multiples of 8 up to %d",
                           sizes[i].name, sizes[i].value, WIDEST);
    return OK;
}

/* Slots first, first + step, ... are one launch. */
static err_t check_format(const struct slot_spec *specs, size_t first, size_t step, int32_t n,
                          struct err *e)
{
    format_t f = specs[first].shape.format;
    for (int32_t i = 1; i < n; i++) {
        const struct slot_spec *p = &specs[first + (size_t)i * step];
        if (p->shape.format != f)
            return err_set(
                e, ERR_UNSUPPORTED,
                "%s is %s, the experts before it are %s: on a GPU the experts of a layer "
                "must have one format",
                p->name, formats[p->shape.format].name, formats[f].name);
    }
    return OK;
}

static err_t check_layer(const struct config *c, const struct slot_spec *specs, int32_t layer,
                         struct err *e)
{
    struct layer_slots l;
    tensors_layer(&l, c, layer);
    size_t mlp = c->dense[layer] ? l.gate : l.expert0;
    int32_t n = c->dense[layer] ? 1 : c->n_experts;
    format_t gate = specs[mlp + MLP_GATE].shape.format, up = specs[mlp + MLP_UP].shape.format;
    err_t rc = OK;
    for (size_t part = 0; rc == OK && part < MLP_SLOTS; part++)
        rc = check_format(specs, mlp + part, MLP_SLOTS, n, e);
    if (rc == OK && gate != up)
        rc = err_set(e, ERR_UNSUPPORTED, "layer %d: gate is %s, up is %s: on a GPU they must agree",
                     layer, formats[gate].name, formats[up].name);
    return rc;
}

err_t cuda_model_check(const struct config *c, const struct slot_spec *specs, kv_type_t kv,
                       struct err *e)
{
    const struct kernels_shape shape = cuda_shape(c, kv);
    err_t rc = check_sizes(c, e);
    if (rc == OK) rc = kernels_check(&shape, e);
    for (int32_t i = 0; rc == OK && i < c->n_layers; i++)
        rc = check_layer(c, specs, i, e);
    return rc;
}
