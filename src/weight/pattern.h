/*
 * pattern.h - names of modules in quantization configs: does one of these lists mean this module?
 *
 *     struct patterns p = {0};
 *     if (patterns_add(&p, SYNTAX_WILDCARD, "*.mlp.gate", e) != OK) ...
 *     patterns_match(&p, "model.layers.0.mlp.gate", NULL);     // true
 *     patterns_free(&p);
 *
 * Syntaxes (moe-formats' side by side; SGLang, Model-Optimizer, compressed-tensors):
 *
 *   SYNTAX_PREFIX    modules_to_not_convert, ignored_layers: whole components of the name, at its
 *                    start or inside: "lm_head", "mlp.gate", "model.layers.47."; "layers.4" is not
 *                    layer 40.  With '*', which stands for any run: a whole name, or a prefix of
 *                    one that ends before a dot.
 *   SYNTAX_WILDCARD  exclude_modules, ModelOpt's ignore: '*' stands for any run, '.' for itself;
 *                    the whole name or one whole component.  So "model.layers.4*" is also layer 40, and
 *                    "layers.1.*" is not.  Without '*' also as SYNTAX_PREFIX (Miles).
 *   SYNTAX_EXACT     compressed-tensors: the whole name; "re:R" is Python's re.match, anchored at
 *                    the start alone.
 *
 * A regular expression that takes too long matches nothing.  One thread at a time.
 *
 * A module is asked for by Hugging Face's name.  It also answers to its name without "model.", with
 * "language_model." in the usual places, as part of qkv_proj or gate_up_proj, and as `stored`.
 */
#ifndef WEIGHT_PATTERN_H
#define WEIGHT_PATTERN_H

#include "base/err.h"
#include <stdbool.h>
#include <stddef.h>

typedef enum { SYNTAX_PREFIX, SYNTAX_WILDCARD, SYNTAX_EXACT } syntax_t;

struct pattern;
struct patterns {
    struct pattern *v;
    size_t n, cap;
};

err_t patterns_add(struct patterns *p, syntax_t syntax, const char *text, struct err *e) MUST_USE;
/* `stored`: the module's name in the checkpoint if that is another one, or NULL. */
bool patterns_match(const struct patterns *p, const char *module, const char *stored);
/* One of the list, [0, n). */
bool patterns_match_one(const struct patterns *p, size_t i, const char *module, const char *stored);
const char *patterns_text(const struct patterns *p, size_t i);
void patterns_free(struct patterns *p);

#endif
