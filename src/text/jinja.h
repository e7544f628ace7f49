/*
 * jinja.h - the inside of template.h: arena, values, syntax tree, evaluator.  Not for other
 * modules.
 *
 * Everything lives in an arena: the tree in the template's, values in the render's.  A failure
 * longjmps to the entry point (jn_fail), which frees the arena; nothing here owns anything else.
 * Values are immutable but for namespaces, so they are shared freely.
 */
#ifndef TEXT_JINJA_H
#define TEXT_JINJA_H

#include "base/buf.h"
#include "base/err.h"
#include <jansson.h>
#include <setjmp.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define JN_MEM_MAX   ((size_t)512 << 20) /* arena bytes of one render */
#define JN_OUT_MAX   ((size_t)64 << 20)  /* bytes of output */
#define JN_STEP_MAX  20000000            /* evaluated nodes plus bytes searched / 64 */
#define JN_NEST_MAX  100                 /* syntax nesting */
#define JN_DEPTH_MAX 700                 /* evaluation depth, macros included */
#define JN_DATA_MAX  500                 /* nesting of values */

struct jchunk;

/* One parse or one render. */
struct jctx {
    struct jchunk *chunks;
    size_t used;
    jmp_buf jump;
    struct err *e;
    err_t code;
    int line;
    long steps;
    int depth;
    const struct jscope *globals;
};

enum jkind {
    J_UNDEF, /* s: name; aux: 0 a variable, else 1 + kind of the object that lacks it */
    J_NONE,
    J_BOOL,
    J_INT,
    J_FLOAT,
    J_STR,
    J_LIST,
    J_TUPLE,
    J_DICT,
    J_NS,
    J_FUNC, /* aux: index of a built-in function */
    J_MACRO,
    J_LOOP,
    J_BOUND /* a method of a value */
};

struct jv {
    enum jkind k;
    int aux;
    union {
        bool b;
        int64_t i;
        double f;
        const char *s;
        struct jlist *l;
        struct jdict *d;
        struct jloop *loop;
        struct jmacro *macro;
        struct jbound *bound;
    };
    size_t n; /* bytes of s */
};

struct jlist {
    size_t n, cap;
    struct jv *v;
};
struct jpair {
    struct jv k, v;
};
struct jdict {
    size_t n, cap;
    struct jpair *p;
};
struct jbound {
    struct jv self;
    const char *name;
    size_t n;
};
struct jloop {
    struct jlist *items;
    size_t i;
    struct jv last_changed;
    bool has_changed;
};
struct jargs {
    struct jv *v;
    size_t n;
    struct jpair *kw;
    size_t nkw;
};
/* A growing string in the arena. */
struct jbuf {
    char *p;
    size_t n, cap;
};

/* --- arena, failure (jinja_value.c) --- */
void *jn_alloc(struct jctx *c, size_t bytes);
void jn_release(struct jctx *c);
void jn_fail(struct jctx *c, err_t code, const char *fmt, ...)
    __attribute__((noreturn, format(printf, 3, 4)));
void jn_charge(struct jctx *c, size_t bytes);
void jb_put(struct jctx *c, struct jbuf *b, const char *s, size_t n);
void jb_puts(struct jctx *c, struct jbuf *b, const char *s);
struct jv jb_str(const struct jbuf *b);

/* --- values --- */
struct jv jv_none(void);
struct jv jv_bool(bool b);
struct jv jv_int(int64_t i);
struct jv jv_float(double f);
struct jv jv_str(const char *s, size_t n);
struct jv jv_cstr(const char *s);
struct jv jv_copy_str(struct jctx *c, const char *s, size_t n);
struct jv jv_undef(const char *name, size_t n, int owner);
struct jv jv_list(struct jctx *c, enum jkind k);
struct jv jv_dict(struct jctx *c, enum jkind k);
void jv_push(struct jctx *c, struct jlist *l, struct jv v);
void jv_put(struct jctx *c, struct jdict *d, struct jv k, struct jv v);
struct jv *jv_find(struct jctx *c, const struct jdict *d, struct jv k);
struct jv jv_from_json(struct jctx *c, const json_t *j, int depth);
bool jv_is(struct jv v, const char *s);
bool jv_truth(struct jv v);
bool jv_eq(struct jctx *c, struct jv a, struct jv b);
int jv_cmp(struct jctx *c, struct jv a, struct jv b); /* orderable or failure */
bool jv_in(struct jctx *c, struct jv item, struct jv box);
bool jv_num(struct jv v, double *out); /* bool, int, float */
bool jv_isint(struct jv v, int64_t *out);
const char *jv_type(struct jv v); /* Python's name */
void jn_undefined(struct jctx *c, struct jv v) __attribute__((noreturn));
void jv_print(struct jctx *c, struct jbuf *b, struct jv v); /* Python's str() */
struct jv jv_tostr(struct jctx *c, struct jv v);
void jv_float_repr(double f, char out[40]);
struct jlist *jv_iter(struct jctx *c, struct jv v);
size_t jv_len(struct jctx *c, struct jv v);
void jv_json(struct jctx *c, struct jbuf *b, struct jv v, const struct jargs *opt);
struct jv jv_attr(struct jctx *c, struct jv o, const char *name, size_t n);
struct jv jv_item(struct jctx *c, struct jv o, struct jv key);
struct jv jv_slice(struct jctx *c, struct jv o, struct jv a, struct jv b, struct jv step);
struct jv jv_arith(struct jctx *c, int op, struct jv a, struct jv b);

/* --- Unicode text (jinja_str.c) --- */
bool jn_space(int32_t cp);
int32_t jn_cp(const char *s, size_t n, size_t *used); /* one code point of valid UTF-8 */
size_t jn_cp_len(const char *s, size_t n);
size_t jn_cp_off(const char *s, size_t n, size_t cp); /* byte offset of code point */
void jb_cp(struct jctx *c, struct jbuf *b, int32_t cp);
struct jv js_strip(struct jctx *c, struct jv s, struct jv chars, bool left, bool right);
struct jv js_case(struct jctx *c, struct jv s, char mode); /* u l c t(str.title) j(jinja title) */
struct jv js_replace(struct jctx *c, struct jv s, struct jv a, struct jv b, int64_t count);
struct jv js_method(struct jctx *c, struct jv self, const char *name, size_t n, struct jargs *a);
bool js_has_method(struct jv self, const char *name, size_t n);

/* --- filters, tests, functions (jinja_filters.c, jinja_tests.c) --- */
int jn_filter_id(const char *name, size_t n); /* -1: unknown */
int jn_test_id(const char *name, size_t n);
struct jv jn_filter(struct jctx *c, int id, struct jv v, struct jargs *a);
bool jn_test(struct jctx *c, int id, struct jv v, struct jargs *a);
struct jv jn_function(struct jctx *c, int id, struct jargs *a);
int jn_function_id(const char *name, size_t n);
/* Argument `i` or keyword `name`; `dflt` when absent. */
struct jv jn_arg(const struct jargs *a, size_t i, const char *name, struct jv dflt);
struct jv jn_call(struct jctx *c, struct jv f, struct jargs *a);

/* --- tokens (jinja_lex.c) --- */
enum jtok {
    T_EOF,
    T_DATA,
    T_VBEGIN,
    T_VEND,
    T_BBEGIN,
    T_BEND,
    T_NAME,
    T_STR,
    T_INT,
    T_FLOAT,
    T_OP
};
enum jop { /* two-byte operators; one-byte ones are their character */
           O_EQ = 256,
           O_NE,
           O_LE,
           O_GE,
           O_IDIV,
           O_POW,
           O_IN,
           O_NOTIN
};
struct jtoken {
    enum jtok t;
    int op, line;
    struct jv v; /* text of data, name, string; the number */
};
struct jtokens {
    struct jtoken *v;
    size_t n, cap;
};
void jn_lex(struct jctx *c, struct jtokens *out, const char *s, size_t n);

/* --- syntax tree (jinja_parse.c, jinja_stmt.c) --- */
enum jnode_kind {
    N_CONST,
    N_NAME,
    N_LIST,
    N_TUPLE,
    N_DICT,
    N_ATTR,
    N_ITEM,
    N_SLICE,
    N_CALL,
    N_FILTER,
    N_TEST,
    N_NOT,
    N_NEG,
    N_POS,
    N_AND,
    N_OR,
    N_BIN,
    N_CONCAT,
    N_CMP,
    N_COND,
    N_DATA,
    N_PRINT,
    N_IF,
    N_FOR,
    N_SET,
    N_SETBLOCK,
    N_MACRO,
    N_BREAK,
    N_CONTINUE,
    N_BLOCK,
    N_FILTERBLOCK,
    N_WITH,
    N_CALLBLOCK,
    N_NSREF
};
/*
 * kid[]: operands in source order.  kw[] with kwname[]: keyword arguments, macro defaults.
 * N_COND: then, test, else or NULL.  N_IF: test, body, else or NULL.  N_FOR: target, iterable,
 * filter or NULL, body, else or NULL.  N_SLICE: object, start, stop, step (NULL where absent).
 */
struct jnode {
    enum jnode_kind k;
    int line, op;
    struct jv v;
    struct jnode **kid;
    size_t n, cap;
    struct jnode **kw;
    struct jv *kwname;
    size_t nkw, kwcap;
    int *ops; /* N_CMP */
};
struct jmacro {
    const struct jnode *node;
    struct jscope *scope;
    struct jv caller; /* J_UNDEF when none */
};
struct jparser {
    struct jctx *c;
    struct jtoken *t;
    int nest, loops;
};
struct jnode *jp_node(struct jparser *p, enum jnode_kind k);
void jp_add(struct jparser *p, struct jnode *n, struct jnode *kid);
void jp_addkw(struct jparser *p, struct jnode *n, struct jv name, struct jnode *kid);
bool jp_is_op(const struct jparser *p, int op);
bool jp_is_name(const struct jparser *p, const char *s);
bool jp_skip_op(struct jparser *p, int op);
bool jp_skip_name(struct jparser *p, const char *s);
void jp_want_op(struct jparser *p, int op);
void jp_want(struct jparser *p, enum jtok t, const char *what);
void jp_unexpected(struct jparser *p, const char *wanted) __attribute__((noreturn));
void jp_enter(struct jparser *p);
struct jnode *jp_expr(struct jparser *p, bool with_cond);
struct jnode *jp_tuple(struct jparser *p, bool with_cond, bool stop_at_in);
struct jnode *jp_primary(struct jparser *p);
struct jnode *jp_filters(struct jparser *p, struct jnode *x);
struct jnode *jn_parse(struct jctx *c, struct jtokens *toks);

/* --- evaluation (jinja_eval.c, jinja_exec.c) --- */
struct jscope {
    struct jscope *up;
    struct jdict vars;
};
struct jv je_eval(struct jctx *c, struct jscope *s, const struct jnode *n);
void je_args(struct jctx *c, struct jscope *s, const struct jnode *n, size_t first,
             struct jargs *a);
struct jv jx_macro(struct jctx *c, struct jmacro *m, struct jargs *a);
enum jflow { F_NEXT, F_BREAK, F_CONTINUE };
enum jflow jx_exec(struct jctx *c, struct jscope *s, const struct jnode *n, struct jbuf *out);
void jn_enter(struct jctx *c);

#endif
