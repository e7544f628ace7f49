/* formats.h - which modules of a model have which format, in lines for people. */
#ifndef CLI_FORMATS_H
#define CLI_FORMATS_H

#include "base/buf.h"
#include "weight/quant_config.h"
#include "weight/store.h"

/* One line a class of modules and format: "experts: 96 nvfp4, 28.3 MB (layers 0-1)"; the first line
 * says what the checkpoint's quantization config is. */
void formats_report(struct buf *out, const struct slot_spec *specs, size_t n,
                    const struct quant_config *config);

#endif
