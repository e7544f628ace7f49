/*
 * dummy.h - random weights of any format, for benchmarks and tests of large shapes without a
 * checkpoint.
 *
 * Values have mean 0 and about the size 1 / sqrt(cols), so that activations neither vanish nor
 * overflow through the layers; norms are 1, f32 slots 1.  The same seed gives the same weights
 * whatever the number of threads. Between update_begin and update_prepare, in place of
 * update_stage_dir (update.h).
 */
#ifndef WEIGHT_DUMMY_H
#define WEIGHT_DUMMY_H

#include "weight/update.h"

err_t dummy_stage(struct update *u, uint64_t seed, int n_threads, struct update_progress *progress,
                  struct err *e) MUST_USE;
/* Pieces of it, for who writes files: n bytes of elements, or of scales, of a matrix with so many
 * columns, going on from the state *s; and its tensor scale. */
void dummy_fill_data(uint8_t *to, format_t f, size_t n, size_t cols, uint64_t *s);
void dummy_fill_scale(uint8_t *to, format_t f, size_t bytes, size_t cols, uint64_t *s);
float dummy_scale(format_t f, size_t cols);
/* Bytes of all parts of the slots, as a checkpoint would store them. */
uint64_t dummy_bytes(const struct slot_spec *specs, size_t n);

#endif
