/* quantize_folder.h - what lies beside the weights of a quantized checkpoint. */
#ifndef CLI_QUANTIZE_FOLDER_H
#define CLI_QUANTIZE_FOLDER_H

#include "base/newdir.h"
#include "cli/quantize_plan.h"

/* Tokenizer, template and so on, as they are. */
err_t quantize_copy_companions(struct newdir *d, const char *src, struct err *e) MUST_USE;
/* config.json with its quantization_config, and hf_quant_config.json where the spelling has it. */
err_t quantize_write_configs(struct newdir *d, const struct quantize_plan *p,
                             struct err *e) MUST_USE;

#endif
