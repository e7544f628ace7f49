/*
 * checkpoint.h - a Hugging Face model folder: which files, which tensors.
 *
 * checkpoint_find turns what the user gave (a folder, or a repository id `org/name`) into a folder:
 * a repository id is looked up in the local Hub cache ($HF_HUB_CACHE, $HF_HOME/hub,
 * ~/.cache/huggingface/hub; refs/main -> snapshots/<commit>).  Absent: ERR_NOTFOUND naming the
 * places searched.  Nothing is downloaded.
 *
 * checkpoint_open reads headers only.  With model.safetensors.index.json only the files that it
 * names are opened, and each name must be found in the file that the index gives (a file absent:
 * named; C01). Without one: every *.safetensors of the folder; a tensor defined twice is refused
 * with both files (C05).
 */
#ifndef WEIGHT_CHECKPOINT_H
#define WEIGHT_CHECKPOINT_H

#include "base/digest.h"
#include "weight/safetensors.h"

#define CHECKPOINT_INDEX     "model.safetensors.index.json"
#define CHECKPOINT_INDEX_MAX ((size_t)256 << 20)

struct checkpoint {
    char *dir;
    size_t n_files;
    struct st_file *files;
    size_t n_tensors;
    struct checkpoint_entry {
        const struct st_file *file;
        const struct st_tensor *tensor;
    } * entries; /* sorted by name */
};

err_t checkpoint_find(char **dir, const char *model, struct err *e) MUST_USE; /* caller frees */
err_t checkpoint_open(struct checkpoint *c, const char *dir, struct err *e) MUST_USE;
void checkpoint_close(struct checkpoint *c);
/* Of the names, sizes, times and inodes of a folder's files: while it is the same, nothing there has changed. */
err_t checkpoint_stamp(char stamp[DIGEST_HEX], const char *dir, struct err *e) MUST_USE;
const struct checkpoint_entry *checkpoint_get(const struct checkpoint *c, const char *name);

#endif
