#include "model/tensors.h"
#include "base/mem.h"
#include "model/model.h"
#include <stdio.h>

static size_t mlp_slots(const struct config *c, int layer)
{
    if (c->dense[layer]) return MLP_SLOTS;
    return 1 + (size_t)MLP_SLOTS * (size_t)c->n_experts;
}

static size_t layer_first(const struct config *c, int layer)
{
    size_t at = SLOT_LAYERS;
    for (int i = 0; i < layer; i++)
        at += LAYER_MLP + mlp_slots(c, i);
    return at;
}

size_t tensors_count(const struct config *c)
{
    return layer_first(c, c->n_layers);
}

void tensors_layer(struct layer_slots *out, const struct config *c, int layer)
{
    CHECK(layer >= 0 && layer < c->n_layers);
    size_t at = layer_first(c, layer), mlp = at + LAYER_MLP;
    bool dense = c->dense[layer];
    *out = (struct layer_slots){
        .in_norm = at + LAYER_IN_NORM,
        .q = at + LAYER_Q,
        .k = at + LAYER_K,
        .v = at + LAYER_V,
        .o = at + LAYER_O,
        .q_norm = at + LAYER_Q_NORM,
        .k_norm = at + LAYER_K_NORM,
        .post_norm = at + LAYER_POST_NORM,
        .kv_scale = at + LAYER_KV_SCALE,
        .router = dense ? SIZE_MAX : mlp,
        .expert0 = dense ? SIZE_MAX : mlp + 1,
        .gate = dense ? mlp + MLP_GATE : SIZE_MAX,
        .up = dense ? mlp + MLP_UP : SIZE_MAX,
        .down = dense ? mlp + MLP_DOWN : SIZE_MAX,
    };
}

static void vec(struct slot_spec *s, int32_t cols)
{
    s->n_dims = 1;
    s->shape = (struct resident){.kind = RESIDENT_PLAIN, .rows = 1, .cols = (uint64_t)cols};
}

static void mat(struct slot_spec *s, int64_t rows, int64_t cols, resident_t kind)
{
    s->n_dims = 2;
    s->shape = (struct resident){.kind = kind, .rows = (uint64_t)rows, .cols = (uint64_t)cols};
}

/* A projection, the at-th of n neighbours that share an amax. */
static void linear(struct slot_spec *s, int64_t rows, int64_t cols, int at, int n)
{
    mat(s, rows, cols, RESIDENT_MATRIX);
    s->linear = true;
    s->amax_at = (uint8_t)at;
    s->amax_n = (uint8_t)n;
}

/* Names are at most "model.layers.NNN.mlp.experts.NNNNNNNNNN.down_proj.weight": they fit. */
#define NAME(s, ...) ((void)snprintf((s)->name, sizeof(s)->name, __VA_ARGS__))

static void attn_specs(struct slot_spec *s, const struct config *c, int layer)
{
    int64_t q = (int64_t)c->n_heads * c->head_dim, kv = (int64_t)c->n_kv_heads * c->head_dim;
    static const struct {
        int slot;
        const char *name;
    } names[] = {
        {LAYER_IN_NORM, "input_layernorm"}, {LAYER_Q, "self_attn.q_proj"},
        {LAYER_K, "self_attn.k_proj"},      {LAYER_V, "self_attn.v_proj"},
        {LAYER_O, "self_attn.o_proj"},      {LAYER_Q_NORM, "self_attn.q_norm"},
        {LAYER_K_NORM, "self_attn.k_norm"}, {LAYER_POST_NORM, "post_attention_layernorm"},
    };
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        NAME(&s[names[i].slot], "model.layers.%d.%s.weight", layer, names[i].name);
    vec(&s[LAYER_IN_NORM], c->hidden_size);
    linear(&s[LAYER_Q], q, c->hidden_size, 0, 3);
    linear(&s[LAYER_K], kv, c->hidden_size, 1, 3);
    linear(&s[LAYER_V], kv, c->hidden_size, 2, 3);
    linear(&s[LAYER_O], c->hidden_size, q, 0, 1);
    vec(&s[LAYER_Q_NORM], c->head_dim);
    vec(&s[LAYER_K_NORM], c->head_dim);
    vec(&s[LAYER_POST_NORM], c->hidden_size);
    NAME(&s[LAYER_KV_SCALE], "model.layers.%d.self_attn.kv_scale", layer);
    s[LAYER_KV_SCALE].n_dims = 1;
    s[LAYER_KV_SCALE].shape = (struct resident){.kind = RESIDENT_F32, .rows = 1, .cols = 2};
    s[LAYER_KV_SCALE].optional = true;
    s[LAYER_KV_SCALE].absent = 1.0f;
}

static void mlp_specs(struct slot_spec *s, const struct config *c, int inner, const char *prefix)
{
    NAME(&s[MLP_GATE], "%s.gate_proj.weight", prefix);
    NAME(&s[MLP_UP], "%s.up_proj.weight", prefix);
    NAME(&s[MLP_DOWN], "%s.down_proj.weight", prefix);
    linear(&s[MLP_GATE], inner, c->hidden_size, 0, 2);
    linear(&s[MLP_UP], inner, c->hidden_size, 1, 2);
    linear(&s[MLP_DOWN], c->hidden_size, inner, 0, 1);
}

static void layer_specs(struct slot_spec *s, const struct config *c, int layer)
{
    char prefix[64];
    attn_specs(s, c, layer);
    s += LAYER_MLP;
    if (c->dense[layer]) {
        snprintf(prefix, sizeof prefix, "model.layers.%d.mlp", layer);
        mlp_specs(s, c, c->intermediate_size, prefix);
        return;
    }
    NAME(s, "model.layers.%d.mlp.gate.weight", layer);
    mat(s, c->n_experts, c->hidden_size, RESIDENT_MATRIX);
    s++;
    for (int e = 0; e < c->n_experts; e++, s += MLP_SLOTS) {
        snprintf(prefix, sizeof prefix, "model.layers.%d.mlp.experts.%d", layer, e);
        mlp_specs(s, c, c->moe_intermediate_size, prefix);
    }
}

err_t model_specs(const struct config *c, struct slot_spec **specs, size_t *n, struct err *e)
{
    size_t count = tensors_count(c);
    struct slot_spec *s = mem_try_array(count, sizeof *s);
    if (s == NULL) return err_set(e, ERR_NOMEM, "no memory for the specs of %zu tensors", count);
    NAME(&s[SLOT_EMBED], "model.embed_tokens.weight");
    NAME(&s[SLOT_NORM], "model.norm.weight");
    NAME(&s[SLOT_HEAD], "%s",
         c->tie_word_embeddings ? "model.embed_tokens.weight" : "lm_head.weight");
    mat(&s[SLOT_EMBED], c->vocab_size, c->hidden_size, RESIDENT_PLAIN);
    vec(&s[SLOT_NORM], c->hidden_size);
    mat(&s[SLOT_HEAD], c->vocab_size, c->hidden_size, RESIDENT_MATRIX);
    size_t at = SLOT_LAYERS;
    for (int i = 0; i < c->n_layers; i++) {
        layer_specs(s + at, c, i);
        at += LAYER_MLP + mlp_slots(c, i);
    }
    *specs = s;
    *n = count;
    return OK;
}
