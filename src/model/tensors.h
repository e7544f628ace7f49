/*
 * tensors.h - where each tensor of a model lies in the store.
 *
 * model_specs makes the specs in the order declared here, so that slots are found by
 * index and not by name:
 *
 *     struct layer_slots l;
 *     tensors_layer(&l, &config, layer);   // any layer in [0, n_layers)
 *     store_ptr(s, slot_expert(&l, e, MLP_UP));
 *
 * Matrices that a GEMM reads are RESIDENT_MATRIX; the embedding (read by rows) and the norms are
 * RESIDENT_PLAIN.  Names are those of Hugging Face's Qwen3-MoE in BF16, whatever spelling a
 * checkpoint has (weight/spelling.h).  model_specs makes every matrix BF16; plan_formats
 * (weight/plan.h) gives it the checkpoint's format.  With tied embeddings the head is a second slot,
 * a copy as a matrix, of the same name `model.embed_tokens.weight`.
 */
#ifndef MODEL_TENSORS_H
#define MODEL_TENSORS_H

#include "model/config.h"
#include "weight/store.h"

/* Slots that no layer owns. */
enum {
    SLOT_EMBED, /* [vocab][hidden], plain */
    SLOT_NORM,  /* [1][hidden], plain */
    SLOT_HEAD,  /* [vocab][hidden], matrix */
    SLOT_LAYERS /* the first layer's first slot */
};

/* Slots of one layer, from its first. */
enum {
    LAYER_IN_NORM,   /* [1][hidden], plain */
    LAYER_Q,         /* [n_heads * head_dim][hidden], matrix */
    LAYER_K,         /* [n_kv_heads * head_dim][hidden], matrix */
    LAYER_V,         /* as K */
    LAYER_O,         /* [hidden][n_heads * head_dim], matrix */
    LAYER_Q_NORM,    /* [1][head_dim], plain */
    LAYER_K_NORM,    /* [1][head_dim], plain */
    LAYER_POST_NORM, /* [1][hidden], plain */
    LAYER_KV_SCALE,  /* [1][2], f32: decode scales of K and V; 1 where the checkpoint has none */
    LAYER_MLP /* dense: gate, up, down.  sparse: router, then gate, up, down of each expert */
};

/* Slots of the MLP parts, from a dense MLP's or an expert's first. */
enum {
    MLP_GATE, /* [inner][hidden], matrix */
    MLP_UP,   /* [inner][hidden], matrix */
    MLP_DOWN, /* [hidden][inner], matrix */
    MLP_SLOTS
};

struct layer_slots {
    size_t in_norm, q, k, v, o, q_norm, k_norm, post_norm, kv_scale;
    size_t router;  /* [n_experts][hidden], matrix; SIZE_MAX for a dense layer */
    size_t expert0; /* gate, up, down of expert e at expert0 + 3 * e + MLP_*; else SIZE_MAX */
    size_t gate, up, down; /* of a dense layer; else SIZE_MAX */
};

static inline size_t slot_expert(const struct layer_slots *l, int expert, int part)
{
    return l->expert0 + (size_t)MLP_SLOTS * (size_t)expert + (size_t)part;
}

size_t tensors_count(const struct config *c);
void tensors_layer(struct layer_slots *out, const struct config *c, int layer);

#endif
