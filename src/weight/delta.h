/*
 * delta.h - one published version of weights that holds differences only.
 *
 * A version folder is a Hugging Face checkpoint: model.safetensors.index.json, which is written last, and the files
 * that it names.  It is a delta if the index's `metadata` has `delta_encoding`:
 *
 *     {"metadata": {"version": "000005", "base_version": "000004", "delta_encoding": "xor" | "overwrite",
 *                   "compression_format": "zstd", "checksum_format": "xxh3-128" | "adler32"},
 *      "weight_map": {"model.norm.weight": "model-00000-of-00001.safetensors", ...}}
 *
 * Each tensor of those files is U8, one zstd frame; __metadata__ of its file gives, under the tensor's name, the
 * checksum of the tensor's bytes after the change.  What the frame holds, for a tensor of n bytes:
 *
 *     xor         n bytes, new ^ old
 *     overwrite   u32 count, count ascending u32 positions, count new bytes (little-endian)
 *
 * Sizes are bounded by n before anything is decompressed; memory does not grow with the tensor (an overwrite
 * decompresses its positions twice instead).  docs/sync.md has the sources.
 */
#ifndef WEIGHT_DELTA_H
#define WEIGHT_DELTA_H

#include "base/digest.h"
#include "weight/safetensors.h"
#include <stdbool.h>

#define DELTA_VERSION_MAX 999999999

enum delta_encoding { DELTA_XOR, DELTA_OVERWRITE };

struct delta_index {
    int64_t version, base;
    enum delta_encoding encoding;
    digest_t digest;
    size_t n;
    struct delta_entry {
        const char *file, *tensor;
    } * entries;         /* by file, then by tensor */
    struct json_t *root; /* owns the strings */
};

/* A plain name in a folder: no '/', no leading '.', at most 255 bytes. */
bool delta_plain_name(const char *s);
/* "000005" or 5. */
err_t delta_version(int64_t *out, const struct json_t *v, const char *what, struct err *e) MUST_USE;

/* Is this text of an index that of a delta?  ERR_INPUT if it is no index at all; `path` is for messages. */
err_t delta_is(bool *out, const char *text, size_t n, const char *path, struct err *e) MUST_USE;
err_t delta_parse(struct delta_index *x, const char *text, size_t n, const char *path,
                  struct err *e) MUST_USE;
void delta_free(struct delta_index *x);

/* The change of one tensor, in place in a file that nobody else reads yet; different tensors may be changed by
 * different threads.  On failure the target's bytes are undefined. */
struct delta_change {
    const struct st_file *from;
    const struct st_tensor *frame;
    int to; /* opened for reading and writing */
    uint64_t offset, bytes;
    const char *to_path;  /* for messages */
    const char *checksum; /* of the result; NULL: the file lacks it, an error */
};
err_t delta_apply(const struct delta_change *c, enum delta_encoding encoding, digest_t digest,
                  struct err *e) MUST_USE;

#endif
