/* encode_rules.h - the arithmetic of encode.h's rules; encode.c has the table of them. */
#ifndef FORMAT_ENCODE_RULES_H
#define FORMAT_ENCODE_RULES_H

#include "format/encode.h"

#define ENCODE_GROUP_MAX 32 /* elements of a group within a row */

encode_tensor_fn tensor_modelopt, tensor_te, tensor_ct, tensor_4over6;
encode_group_fn group_modelopt, group_te, group_ct, group_4over6;
encode_group_fn group_round_up, group_floor, group_even, group_mxfp4_modelopt;

/* The E8M0 code of the least power of two >= x, as the hardware's conversion has it. */
uint8_t encode_e8m0_up(float x);
/* One NVFP4 group relative to the encode scale g, Transformer Engine's arithmetic; returns its
 * scale. */
uint8_t encode_te_group(const float *x, size_t n, float g, uint8_t *codes);

#endif
