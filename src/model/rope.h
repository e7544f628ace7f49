/*
 * rope.h - the angles of rotary embeddings, in f32 as transformers computes them
 * (modeling_rope_utils: inverse frequencies 1 / theta^(2i / head_dim), angle = position *
 * frequency, then cos and sin).
 */
#ifndef MODEL_ROPE_H
#define MODEL_ROPE_H

#include "model/config.h"

/* cos, sin: [positions][head_dim / 2]. */
void rope_angles(float *cos_out, float *sin_out, const struct config *c, int32_t positions);

#endif
