/*
 * load_device.h - the parts of load.c that differ on a GPU: opening it, where weights live, the
 * memory plan, the model.
 */
#ifndef CLI_LOAD_DEVICE_H
#define CLI_LOAD_DEVICE_H

#include "cli/load.h"

/* `name`: NULL or "auto" (a GPU that cannot be used is no error: the CPU serves), "cpu", "cuda". */
err_t load_device_open(struct loaded *l, const char *name, struct err *e) MUST_USE;
struct memory load_device_memory(const struct loaded *l);
/* KV pages: what is left beside two generations of weights and a step's buffers, or as told. */
err_t load_device_plan(struct loaded *l, const struct load_options *o, struct err *e) MUST_USE;
err_t load_device_model(struct loaded *l, const struct load_options *o, struct err *e) MUST_USE;
void load_device_tell(const struct loaded *l, struct buf *out);
void load_device_release(struct loaded *l); /* after model and store */

#endif
