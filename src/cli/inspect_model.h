/*
 * inspect_model.h - what a model folder holds, from its headers and configs alone.
 *
 *     struct inspected m;
 *     if (inspect_model(&m, "folder or org/name", e) != OK) ...   // not a model that can be read
 *     inspect_free(&m)
 *
 * Weights are counted by class of module and format.  What is odd - a reader could take it
 * otherwise than its writer meant it, or must refuse it - is listed as sentences:
 *
 *     a weight that is missing, without its scale, or of another shape or grid
 *     tensors that the model does not know
 *     a module that is stored as the quantization config does not have it
 *     BF16 weights of projections that the config does not exclude
 *     a config that quantizes, and weights that are not; quantized weights, and no config
 *     exclusions that mean no module
 *     parts of one fused matrix in different formats
 *     scales of activations, or of the KV cache, for some modules and not for others
 */
#ifndef CLI_INSPECT_MODEL_H
#define CLI_INSPECT_MODEL_H

#include "base/err.h"
#include "format/format.h"
#include "model/config.h"
#include <stdbool.h>

typedef enum {
    MODULE_EMBEDDING,
    MODULE_ATTENTION,
    MODULE_MLP,
    MODULE_EXPERTS,
    MODULE_ROUTER,
    MODULE_NORM,
    MODULE_HEAD,
    MODULE_CLASSES
} module_class_t;

extern const char *const module_class_names[MODULE_CLASSES];
module_class_t module_class(const char *name); /* of a weight, by Hugging Face's name */

struct inspected_row { /* one class in one format and arrangement */
    module_class_t class;
    format_t format;
    const char *arrangement; /* "fused", ...; "" a tensor each */
    size_t weights, inputs;  /* inputs: with a scale of activations */
    uint64_t bytes;          /* in the file, all parts */
    bool layers[CONFIG_MAX_LAYERS];
};

#define INSPECT_ROWS 64
#define INSPECT_ODD  200 /* sentences kept; more are counted */

struct inspected {
    char *dir;
    struct config config;
    char quantization[96];                          /* "modelopt NVFP4" or "none" */
    size_t n_files, n_tensors, n_rows, n_odd, n_kv; /* n_kv: layers with scales of K and V */
    uint64_t bytes;                                 /* of the files */
    struct inspected_row rows[INSPECT_ROWS];
    char *odd[INSPECT_ODD];
};

err_t inspect_model(struct inspected *m, const char *model, struct err *e) MUST_USE;
void inspect_free(struct inspected *m);

#endif
