/*
 * manifest.h - a checkpoint's files and tensors held against checksums that somebody else took.
 *
 *     {"files":   {"model-00001-of-00002.safetensors": {"sha256": "9f86...", "xxh3-128": "..."}},
 *      "tensors": {"model.norm.weight": {"xxh3-128": "..."}}}
 *
 * Either part may be left out, not both.  A part that is there covers every weight file that is
 * read (every tensor in them): what it lacks, and what it names in vain, is refused by name, as is
 * a sum that is not met.  Files that hold no weights (config.json) may be listed too.  Names of
 * algorithms are those of base/digest.h; a tensor's sum is of its bytes as they lie in the file.
 *
 * Every byte is read once, however many sums are asked for, from the descriptors that are staged
 * from afterwards: a file that changes in between is refused there.
 */
#ifndef WEIGHT_MANIFEST_H
#define WEIGHT_MANIFEST_H

#include "weight/checkpoint.h"
#include "weight/update.h"

/* `path`: with a '/' as it is, else a file of the checkpoint's folder.  `progress` may be NULL; its
 * `cancel` ends the check with ERR_STATE.  ERR_INPUT: a manifest that is not one, or not met. */
err_t manifest_check(const char *path, const struct checkpoint *c, struct update_progress *progress,
                     struct err *e) MUST_USE;

#endif
