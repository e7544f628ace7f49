/*
 * grammar_build.h - for the files grammar*.c: the automaton while it is built.
 *
 * It is built from the end: every gb_ function takes the node that comes after and returns the one
 * to begin with.  Failures latch in `rc` (and *e); from then on nodes are 0 and nothing is added,
 * so callers look once. A rule is a part that others call; a node END ends it.  `work` bounds what
 * a small text may ask for.
 */
#ifndef TEXT_GRAMMAR_BUILD_H
#define TEXT_GRAMMAR_BUILD_H

#include "text/grammar.h"

enum { G_END, G_RANGE, G_SPLIT, G_CALL };

struct gnode {
    uint8_t kind, lo, hi; /* RANGE: a byte in lo..hi, then a */
    int32_t a, b;         /* SPLIT: a or b.  CALL: rule a, then b */
};

/* Code points, ranges that rise and do not touch. */
struct crange {
    uint32_t lo, hi;
};
struct cset {
    struct crange *v;
    int32_t n, cap;
};

enum {
    RULE_WS,
    RULE_CHAR,
    RULE_STRING,
    RULE_NUMBER,
    RULE_INTEGER,
    RULE_VALUE,
    RULE_OBJECT,
    RULE_ARRAY,
    N_JSON_RULES
};

struct gbuild {
    struct gnode *node;
    int32_t n, cap;
    int32_t *rule; /* where each rule begins */
    int32_t n_rules, cap_rules;
    int64_t work;
    int32_t json; /* first of the JSON rules; -1: not there yet */
    err_t rc;
    struct err *e;
};

/* grammar_build.c */
void gb_fail(struct gbuild *b, err_t rc, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
bool gb_work(struct gbuild *b); /* one more step of building; false: no more */
int32_t gb_rule(struct gbuild *b);
int32_t gb_range(struct gbuild *b, unsigned lo, unsigned hi, int32_t next);
int32_t gb_split(struct gbuild *b, int32_t one, int32_t other);
int32_t gb_call(struct gbuild *b, int32_t rule, int32_t next);
int32_t gb_end(struct gbuild *b);
int32_t gb_bytes(struct gbuild *b, const char *s, size_t n, int32_t next);
int32_t gb_chars(struct gbuild *b, const struct cset *s, int32_t next); /* one of them, as UTF-8 */
int32_t gb_until(struct gbuild *b, const char *s,
                 int32_t next); /* any text that ends with s, once */
bool cset_add(struct gbuild *b, struct cset *s, uint32_t lo, uint32_t hi);
bool cset_sort(struct gbuild *b, struct cset *s);   /* after adding */
bool cset_negate(struct gbuild *b, struct cset *s); /* within the scalar values */
void cset_release(struct cset *s);

/* grammar_regex.c: `search` finds the pattern anywhere (JSON schema's pattern), and `json` writes
 * its characters as inside of a JSON string. */
int32_t gb_regex(struct gbuild *b, const char *p, size_t n, bool search, bool json, int32_t next);

/* grammar_json.c */
int32_t gb_json(struct gbuild *b, int rule, int32_t next); /* RULE_... */
int32_t gb_json_chars(struct gbuild *b, const struct cset *s, int32_t next);
int32_t gb_json_text(struct gbuild *b, const char *s, size_t n,
                     int32_t next);                                  /* inside of the quotes */
int32_t gb_literal(struct gbuild *b, const json_t *v, int32_t next); /* this value alone */
int32_t gb_string(struct gbuild *b, int64_t min, int64_t max,
                  int32_t next); /* max < 0: any length */
/* A key that is none of `not` (an object's keys), with its quotes. */
int32_t gb_other_key(struct gbuild *b, const json_t * not, int32_t next);

/* grammar_number.c: limits as decimal integers; NULL: none.  `open`: the limit itself is out. */
struct gnumber {
    bool integer, has_lo, has_hi, open_lo, open_hi;
    int64_t lo, hi;
};
int32_t gb_number(struct gbuild *b, const struct gnumber *s, int32_t next);

/* grammar_schema.c */
int32_t gb_schema(struct gbuild *b, const json_t *schema, int32_t next);

#endif
