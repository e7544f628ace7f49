/* update_internal.h - what the files of an update share: update.c (the transaction), stage.c (a
 * folder into it), stage_rows.c (rows checked, encoded, put). */
#ifndef WEIGHT_UPDATE_INTERNAL_H
#define WEIGHT_UPDATE_INTERNAL_H

#include "base/digest.h"
#include "format/encode.h"
#include "weight/plan.h"
#include "weight/update.h"
#include <pthread.h>

#define SUM_BYTES 16

/* What an update in place keeps between its two readings: the open files. */
struct kept {
    struct plan plan;
    bool any_bf16;
};

struct update {
    struct store *store;
    void *next, *former;              /* in place: next is NULL while nothing may be written */
    bool *staged;                     /* per slot */
    unsigned char (*sums)[SUM_BYTES]; /* per slot: of its canonical parts */
    float *inputs, *amax; /* per slot, in place alone: its input scale; what it is encoded with */
    struct kept *kept;
    bool in_place, touched;
    bool partial; /* slots that are not staged keep their resident bytes */
    enum { OPEN, PREPARED, COMMITTED } state;
    bool broken;          /* a stage failed half-way: its slots hold anything */
    pthread_mutex_t lock; /* of bad_* */
    /* The lowest slot with a value that may not be used, and of that its first; SIZE_MAX: none. */
    size_t bad_slot, bad_at;
    part_t bad_part;
    char bad_note[512];
};

/* Rows of a part into every slot of the name whose first is `slot`. */
void update_put(struct update *u, size_t slot, part_t part, size_t row0, size_t n,
                const void *canon);
void update_mark(struct update *u, size_t slot);
/* Part of a model was staged: the rest stays as it is resident, if anything is. */
void update_keep_rest(struct update *u);
void update_fill_absent(struct update *u); /* what the update left out, if it may be */
err_t update_check_open(const struct update *u, struct err *e) MUST_USE;
/* A value that prepare will refuse: the `at`-th of a part. */
void update_note(struct update *u, size_t slot, part_t part, size_t at, const char *fmt, ...)
    __attribute__((format(printf, 5, 6)));

/* Memory of one thread that stages. */
struct stage_room {
    struct source_scratch file, data, scale, floats, codes;
    char *lent[PART_COUNT]; /* in place of data and scale, until they are put; NULL: their own */
    struct digest sum[PART_COUNT]; /* of the slot that is being read */
    bool any_bf16;
};
void stage_room_free(struct stage_room *r);
err_t stage_reserve(struct source_scratch *s, size_t bytes, const char *name,
                    struct err *e) MUST_USE;

/* Rows [row0, row0 + n) of a slot as they lie in a checkpoint, with the scale rows that belong to
 * them. */
struct rows {
    size_t slot, row0, n;
    const void *data, *scale; /* canonical, from row0 on; no scale: BF16, or one was put */
    float tensor;
    const struct spelled *names; /* where they come from; NULL: the slot's name */
    bool any_bf16;
};
/* Notes what may not be used, and puts. */
void stage_rows(struct update *u, const struct rows *r);
/* BF16 rows of a slot that holds another format.  row0 and n as encode_rows has them. */
err_t stage_encoded(struct update *u, const struct encode *en, size_t slot, size_t row0, size_t n,
                    const uint16_t *bf16, struct stage_room *room, struct err *e) MUST_USE;
/* What goes with encoded rows: tensor and input scale. */
void stage_encoded_scalars(struct update *u, const struct encode *en, size_t slot);
/* amax of rows, widened; NaN and infinity stay. */
err_t stage_amax(float *amax, const uint16_t *bf16, size_t n, struct stage_room *room,
                 const char *name, struct err *e) MUST_USE;
/* Checksums of a slot: one stream a part, folded into one sum.  Overwriting, the sum must be what it
 * was: ERR_IO. */
void stage_sum_begin(struct stage_room *room);
err_t stage_sum_end(struct update *u, size_t slot, const struct stage_room *room,
                    struct err *e) MUST_USE;
/* Scale rows that cover rows [row0, row0 + n): [*first, *first + returned). */
size_t stage_scale_rows(format_t f, size_t rows, size_t row0, size_t n, size_t *first);

#endif
