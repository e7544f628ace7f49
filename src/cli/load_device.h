/*
 * load_device.h - the parts of load.c that differ on a GPU: opening it, where weights live, the
 * memory plan, the model.
 */
#ifndef CLI_LOAD_DEVICE_H
#define CLI_LOAD_DEVICE_H

#include "cli/load.h"

/* By o->device: a GPU that is not there is no error, nor one whose kernels do not take this model
 * (`specs`, with their formats), unless it was asked for by name ("cuda"): the CPU serves. */
err_t load_device_choose(struct loaded *l, const struct load_options *o,
                         const struct slot_spec *specs, struct err *e) MUST_USE;
struct memory load_device_memory(const struct loaded *l);
/* Where updates are staged, and KV pages: what is left beside weights and a step's needs, or as
 * told. */
err_t load_device_plan(struct loaded *l, const struct load_options *o, struct err *e) MUST_USE;
err_t load_device_model(struct loaded *l, const struct load_options *o, struct err *e) MUST_USE;
void load_device_tell(const struct loaded *l, struct buf *out);
void load_device_release(struct loaded *l); /* after model and store */

#endif
