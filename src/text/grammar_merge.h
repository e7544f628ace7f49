/*
 * grammar_merge.h - for grammar_schema.c: one schema out of two that both hold, and whether two can
 * both hold.
 *
 * Only what can be combined without changing meaning is: properties and required are united, types
 * intersected, any other keyword may stand on one side or be equal on both.
 */
#ifndef TEXT_GRAMMAR_MERGE_H
#define TEXT_GRAMMAR_MERGE_H

#include "text/grammar_build.h"

enum {
    T_NULL = 1,
    T_BOOLEAN = 2,
    T_INTEGER = 4,
    T_FRACTION = 8,
    T_NUMBER = 12,
    T_STRING = 16,
    T_ARRAY = 32,
    T_OBJECT = 64,
    T_ALL = 127
};

/* The types that `type` allows, or those that the other keywords speak of; T_ALL if they do not
 * say. */
int schema_types(struct gbuild *b, const json_t *schema);
/* A keyword that bounds values of one type, if there is one. */
const char *schema_bound(const json_t *schema);
bool schema_requires(const json_t *schema, const char *name);
/* Says nothing about validity: title, description, default, ... */
bool schema_is_note(const char *key);
/* A new object; NULL: failed, b->rc is set.  `skip`: a keyword of `one` that is left out. */
json_t *schema_merge(struct gbuild *b, const json_t *one, const char *skip, const json_t *other,
                     const char *where);
/* No value is of both: other types, other constants, or a required property with other constants.
 */
bool schemas_differ(struct gbuild *b, const json_t *one, const json_t *other, int depth);
/* Follows $ref of `root`; NULL: failed. */
const json_t *schema_target(struct gbuild *b, const json_t *root, const char *ref);

#endif
