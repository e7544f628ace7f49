/*
 * quant_config.h - what a checkpoint says about its quantization, to be held against what it stores.
 *
 *     struct quant_config *q = NULL;                     // stays NULL: nothing is said
 *     if (quant_config_load(&q, dir, e) != OK) ...
 *     if (quant_config_check(q, "model.layers.0.self_attn.q_proj", stored, format, e) != OK) ...
 *     quant_config_free(q);
 *
 * The tensors decide (spelling.h); the config validates.  Read are config.json's
 * quantization_config, or without one hf_quant_config.json.  quant_method:
 *
 *     fp8, mxfp8, mxfp4, fbgemm_fp8    excluded: modules_to_not_convert, ignored_layers
 *     modelopt (also modelopt_*)       quant_algo flat or under "quantization"; excluded: ignore,
 *                                      exclude_modules; MIXED_PRECISION: quantized_layers
 *     compressed-tensors               config_groups with targets, format and strategy; ignore
 *
 * A contradiction is a module that is stored quantized although it is excluded, or in a format that
 * the config does not give it.  BF16 weights are never one: a BF16 weight without a scale is BF16.
 * A method, algorithm, format or block size that is not implemented is ERR_UNSUPPORTED with its
 * name and value.
 */
#ifndef WEIGHT_QUANT_CONFIG_H
#define WEIGHT_QUANT_CONFIG_H

#include "base/err.h"
#include "format/format.h"
#include "weight/pattern.h"

struct quant_config;

err_t quant_config_load(struct quant_config **out, const char *dir, struct err *e) MUST_USE;
/* From the JSON of either file (tests); `name` is for messages. */
err_t quant_config_parse(struct quant_config **out, const char *json, size_t n, const char *name,
                         struct err *e) MUST_USE;
void quant_config_free(struct quant_config *q); /* NULL is fine */

/* ERR_INPUT naming the module.  `module` is Hugging Face's name without ".weight", `stored` the
 * checkpoint's; q may be NULL. */
err_t quant_config_check(const struct quant_config *q, const char *module, const char *stored,
                         format_t format, struct err *e) MUST_USE;
/* The modules that it leaves unquantized; NULL for NULL. */
const struct patterns *quant_config_excluded(const struct quant_config *q);
/* "modelopt NVFP4"; "none" for NULL. */
const char *quant_config_about(const struct quant_config *q);

#endif
