/*
 * grammar_schema.c - JSON schemas: one rule a schema, so that recursion and repetition cost a call.
 *
 * A schema that is seen for the first time gets a rule and waits in a list; rules are filled one
 * after the other, hence no recursion here.
 */
#include "text/grammar_merge.h"

#include "base/mem.h"
#include <math.h>
#include <string.h>

#define MAX_SCHEMAS 20000

struct entry {
    const json_t *schema;
    int32_t rule;
};

struct work {
    struct gbuild *b;
    const json_t *root;
    struct entry *v; /* all schemas that have a rule; the first `done` are filled */
    int32_t n, cap, done;
    int32_t *slot; /* [MAX_SCHEMAS * 2 rounded up] hash of v by address; -1 empty */
    json_t *made;  /* merged schemas live as long as the work */
};

#define SLOTS 65536

static int32_t rule_of(struct work *w, const json_t *schema)
{
    struct gbuild *b = w->b;
    uint32_t h = (uint32_t)(((uintptr_t)schema >> 4) * 2654435761u) & (SLOTS - 1);
    for (; w->slot[h] >= 0; h = (h + 1) & (SLOTS - 1))
        if (w->v[w->slot[h]].schema == schema) return w->v[w->slot[h]].rule;
    if (w->n == MAX_SCHEMAS)
        gb_fail(b, ERR_INPUT, "json_schema: more than %d schemas in one", MAX_SCHEMAS);
    if (w->n == w->cap && b->rc == OK) {
        size_t cap = w->cap ? (size_t)w->cap * 2 : 64;
        struct entry *p = mem_retry(w->v, (size_t)w->cap * sizeof *p, cap * sizeof *p);
        if (!p)
            gb_fail(b, ERR_NOMEM, "no memory for the grammar");
        else
            w->v = p, w->cap = (int32_t)cap;
    }
    int32_t rule = gb_rule(b);
    if (b->rc) return 0;
    w->slot[h] = w->n;
    w->v[w->n++] = (struct entry){schema, rule};
    return rule;
}

static int32_t call(struct work *w, const json_t *schema, int32_t next)
{
    return gb_call(w->b, rule_of(w, schema), next);
}

static const json_t *keep(struct work *w, json_t *made)
{
    if (made) json_array_append_new(w->made, made);
    return made;
}

/* A count: an integer >= 0.  Absent: `none`. */
static int64_t count(struct work *w, const json_t *s, const char *key, int64_t none)
{
    const json_t *v = json_object_get(s, key);
    if (!v) return none;
    double d = json_number_value(v);
    if (!json_is_number(v) || d < 0 || d > 1e6 || d != floor(d))
        gb_fail(w->b, ERR_INPUT, "json_schema: %s must be an integer in 0..1000000", key);
    return w->b->rc ? none : (int64_t)d;
}

/* ---- strings ---- */

static int32_t put_format(struct work *w, const char *format, int32_t next)
{
    static const struct {
        const char *name, *pattern;
    } known[] = {
        {"date", "\\d{4}-(0[1-9]|1[0-2])-(0[1-9]|1\\d|2[0-8])"},
        {"time",
         "([01]\\d|2[0-3]):[0-5]\\d:[0-5]\\d(\\.\\d{1,6})?(Z|[+-]([01]\\d|2[0-3]):[0-5]\\d)"},
        {"date-time", "\\d{4}-(0[1-9]|1[0-2])-(0[1-9]|1\\d|2[0-8])T([01]\\d|2[0-3]):[0-5]\\d:[0-5]"
                      "\\d(\\.\\d{1,6})?"
                      "(Z|[+-]([01]\\d|2[0-3]):[0-5]\\d)"},
        {"uuid", "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"},
        {"ipv4",
         "((25[0-5]|2[0-4]\\d|1\\d\\d|[1-9]?\\d)\\.){3}(25[0-5]|2[0-4]\\d|1\\d\\d|[1-9]?\\d)"},
        {"email", "[A-Za-z0-9]{1,32}([._+-][A-Za-z0-9]{1,16}){0,3}@([a-z0-9]{1,30}(-[a-z0-9]{1,16})"
                  "?\\.){1,3}[a-z]{2,8}"},
    };
    for (size_t i = 0; format && i < sizeof known / sizeof known[0]; i++)
        if (!strcmp(format, known[i].name))
            return gb_regex(w->b, known[i].pattern, strlen(known[i].pattern), false, true, next);
    return -1;
}

static int32_t put_string(struct work *w, const json_t *s, int32_t next)
{
    struct gbuild *b = w->b;
    const json_t *pattern = json_object_get(s, "pattern");
    int64_t min = count(w, s, "minLength", 0), max = count(w, s, "maxLength", -1);
    bool sized = min > 0 || max >= 0;
    if (max >= 0 && max < min) gb_fail(b, ERR_INPUT, "json_schema: minLength is above maxLength");
    if (pattern && sized)
        gb_fail(b, ERR_INPUT,
                "json_schema: pattern together with minLength or maxLength is not supported");
    if (pattern && !json_is_string(pattern))
        gb_fail(b, ERR_INPUT, "json_schema: pattern must be a string");
    if (b->rc) return 0;
    int32_t close = gb_range(b, '"', '"', next);
    if (pattern)
        return gb_range(b, '"', '"',
                        gb_regex(b, json_string_value(pattern), json_string_length(pattern), true,
                                 true, close));
    int32_t f = sized ? -1 : put_format(w, json_string_value(json_object_get(s, "format")), close);
    return f >= 0 ? gb_range(b, '"', '"', f) : gb_string(b, min, max, next);
}

/* ---- numbers ---- */

/* One limit; integers round it inwards, for numbers it must be whole. */
static void put_limit(struct work *w, const json_t *s, const char *key, bool upper, bool open,
                      struct gnumber *n)
{
    const json_t *v = json_object_get(s, key);
    bool *has = upper ? &n->has_hi : &n->has_lo, *is_open = upper ? &n->open_hi : &n->open_lo;
    int64_t *at = upper ? &n->hi : &n->lo;
    if (!v) return;
    double d = json_number_value(v);
    if (!json_is_number(v) || fabs(d) > 9e17) {
        gb_fail(w->b, ERR_INPUT, "json_schema: %s must be a number of at most 9e17", key);
        return;
    }
    int64_t i = json_is_integer(v) ? json_integer_value(v) : (int64_t)(upper ? floor(d) : ceil(d));
    if (!json_is_integer(v) && d != floor(d)) {
        if (!n->integer)
            gb_fail(w->b, ERR_INPUT, "json_schema: %s of a number must be a whole number here",
                    key);
        open = false;
    }
    bool tighter = !*has || (upper ? i < *at : i > *at) || (i == *at && open);
    if (!tighter) return;
    *has = true;
    *at = i;
    *is_open = open;
}

static int32_t put_number(struct work *w, const json_t *s, bool integer, int32_t next)
{
    struct gnumber n = {.integer = integer};
    put_limit(w, s, "minimum", false, false, &n);
    put_limit(w, s, "exclusiveMinimum", false, true, &n);
    put_limit(w, s, "maximum", true, false, &n);
    put_limit(w, s, "exclusiveMaximum", true, true, &n);
    if (w->b->rc) return 0;
    if (!n.has_lo && !n.has_hi) return gb_json(w->b, integer ? RULE_INTEGER : RULE_NUMBER, next);
    return gb_number(w->b, &n, next);
}

/* ---- arrays ---- */

static int32_t put_item(struct work *w, const json_t *schema, int32_t next)
{
    return schema ? call(w, schema, next) : gb_json(w->b, RULE_VALUE, next);
}

static int32_t put_comma(struct work *w, int32_t next)
{
    struct gbuild *b = w->b;
    return gb_json(b, RULE_WS, gb_range(b, ',', ',', gb_json(b, RULE_WS, next)));
}

static int32_t put_array(struct work *w, const json_t *s, int32_t next)
{
    struct gbuild *b = w->b;
    const json_t *items = json_object_get(s, "items"), *prefix = json_object_get(s, "prefixItems");
    if (json_is_array(items)) { /* the older spelling of prefixItems */
        prefix = items;
        items = json_object_get(s, "additionalItems");
    }
    bool more = !json_is_false(items);
    int64_t n_prefix = (int64_t)json_array_size(prefix);
    int64_t min = count(w, s, "minItems", 0), max = count(w, s, "maxItems", -1);
    if (!more && (max < 0 || max > n_prefix)) max = n_prefix;
    if (max >= 0 && max < min)
        gb_fail(b, ERR_INPUT, "json_schema: minItems is above the most items there can be");
    int32_t last = gb_range(b, ']', ']', next), done = gb_json(b, RULE_WS, last), r = done;
    if (max == 0) return gb_range(b, '[', '[', gb_json(b, RULE_WS, last));
    int64_t copies = max >= 0 ? max : (min > n_prefix ? min : n_prefix);
    if (max < 0) { /* a comma and an item, again and again */
        int32_t loop = gb_split(b, done, done), body = put_comma(w, put_item(w, items, loop));
        if (b->rc == OK) b->node[loop].a = body;
        r = loop;
    }
    int32_t first = -1;
    for (int64_t i = copies; i-- > 0 && gb_work(b);) {
        const json_t *schema = i < n_prefix ? json_array_get(prefix, (size_t)i) : items;
        int32_t item = put_item(w, schema, r);
        if (i == 0)
            first = item;
        else
            r = i < min ? put_comma(w, item) : gb_split(b, put_comma(w, item), done);
    }
    if (first < 0) first = put_item(w, items, r); /* no limit says how many */
    return gb_range(b, '[', '[', gb_json(b, RULE_WS, min > 0 ? first : gb_split(b, first, last)));
}

/* ---- objects ---- */

static int32_t put_pair(struct work *w, const char *name, const json_t *schema, int32_t next)
{
    struct gbuild *b = w->b;
    int32_t r =
        gb_json(b, RULE_WS, gb_range(b, ':', ':', gb_json(b, RULE_WS, put_item(w, schema, next))));
    r = gb_range(b, '"', '"', r);
    return gb_range(b, '"', '"', gb_json_text(b, name, strlen(name), r));
}

/* Pairs beyond those with a name: ("key": value (, "key": value)*)?, in the middle of an object or
 * at its start. */
static void put_extra(struct work *w, const json_t *props, const json_t *schema, int32_t done,
                      int32_t last, int32_t *begin, int32_t *middle)
{
    struct gbuild *b = w->b;
    int32_t loop = gb_split(b, done, done);
    int32_t value =
        gb_json(b, RULE_WS, gb_range(b, ':', ':', gb_json(b, RULE_WS, put_item(w, schema, loop))));
    int32_t pair =
        json_object_size(props) ? gb_other_key(b, props, value) : gb_json(b, RULE_STRING, value);
    int32_t again = put_comma(w, pair);
    if (b->rc == OK) b->node[loop].a = again;
    *begin = gb_split(b, pair, last);
    *middle = loop;
}

static void check_required(struct work *w, const json_t *s, const json_t *props)
{
    const json_t *list = json_object_get(s, "required");
    if (list && !json_is_array(list))
        gb_fail(w->b, ERR_INPUT, "json_schema: required must be a list of names");
    for (size_t i = 0; i < json_array_size(list); i++) {
        const char *name = json_string_value(json_array_get(list, i));
        if (!name)
            gb_fail(w->b, ERR_INPUT, "json_schema: required must be a list of names");
        else if (!json_object_get(props, name))
            gb_fail(w->b, ERR_INPUT, "json_schema: required \"%.60s\" is not among the properties",
                    name);
    }
}

static int32_t put_object(struct work *w, const json_t *s, int32_t next)
{
    struct gbuild *b = w->b;
    const json_t *props = json_object_get(s, "properties"),
                 *extra = json_object_get(s, "additionalProperties");
    check_required(w, s, props);
    if (props && !json_is_object(props))
        gb_fail(b, ERR_INPUT, "json_schema: properties must be an object");
    if (!json_object_size(props) && (!extra || json_is_true(extra)))
        return gb_json(b, RULE_OBJECT, next);
    if (b->rc) return 0;
    int32_t last = gb_range(b, '}', '}', next), done = gb_json(b, RULE_WS, last);
    /* what may come after the pairs so far: none of them was written, or some were */
    int32_t none = last, some = done;
    if (extra && !json_is_false(extra))
        put_extra(w, props, json_is_true(extra) ? NULL : extra, done, last, &none, &some);
    size_t n = json_object_size(props), i = 0;
    const char **name = mem_try_array(n + 1, sizeof *name), *key;
    json_t *v;
    if (!name) gb_fail(b, ERR_NOMEM, "no memory for the grammar");
    json_object_foreach((json_t *)(uintptr_t)props, key, v)
    {
        (void)v;
        if (name) name[i++] = key;
    }
    while (i-- > 0 && b->rc == OK) {
        int32_t pair = put_pair(w, name[i], json_object_get(props, name[i]), some),
                more = put_comma(w, pair);
        bool must = schema_requires(s, name[i]);
        none = must ? pair : gb_split(b, pair, none);
        some = must ? more : gb_split(b, more, some);
    }
    mem_free(name);
    return gb_range(b, '{', '{', gb_json(b, RULE_WS, none));
}

/* ---- any schema ---- */

static int32_t put_types(struct work *w, const json_t *s, int32_t next)
{
    struct gbuild *b = w->b;
    int bits = schema_types(b, s);
    int32_t r = -1;
    static const int order[] = {T_NULL,   T_BOOLEAN, T_INTEGER, T_FRACTION,
                                T_STRING, T_ARRAY,   T_OBJECT};
    for (size_t i = 0; i < sizeof order / sizeof order[0] && b->rc == OK; i++) {
        int32_t one = -1;
        if (!(bits & order[i])) continue;
        switch (order[i]) {
        case T_NULL: one = gb_bytes(b, "null", 4, next); break;
        case T_BOOLEAN:
            one = gb_split(b, gb_bytes(b, "true", 4, next), gb_bytes(b, "false", 5, next));
            break;
        case T_INTEGER:
            if (!(bits & T_FRACTION)) one = put_number(w, s, true, next);
            break;
        case T_FRACTION: one = put_number(w, s, false, next); break;
        case T_STRING: one = put_string(w, s, next); break;
        case T_ARRAY: one = put_array(w, s, next); break;
        default: one = put_object(w, s, next);
        }
        if (one >= 0) r = r < 0 ? one : gb_split(b, one, r);
    }
    return r < 0 ? 0 : r;
}

static int32_t put_enum(struct work *w, const json_t *s, const json_t *list, int32_t next)
{
    struct gbuild *b = w->b;
    json_t *type = json_object_get(s, "type");
    int32_t r = -1;
    for (size_t i = json_array_size(list); i-- > 0 && gb_work(b);) {
        json_t *one = json_pack("{s:O}", "const", json_array_get(list, i)),
               *t = type ? json_pack("{s:O}", "type", type) : NULL;
        bool fits = !t || (schema_types(b, one) & schema_types(b, t));
        json_decref(one);
        json_decref(t);
        if (!fits || b->rc) continue;
        int32_t lit = gb_literal(b, json_array_get(list, i), next);
        r = r < 0 ? lit : gb_split(b, lit, r);
    }
    if (r < 0) gb_fail(b, ERR_INPUT, "json_schema: an enum without a value of its type");
    return r < 0 ? 0 : r;
}

/* anyOf and oneOf: each with what stands beside it. */
static int32_t put_choice(struct work *w, const json_t *s, const char *key, int32_t next)
{
    struct gbuild *b = w->b;
    const json_t *list = json_object_get(s, key);
    size_t n = json_array_size(list);
    int32_t r = -1;
    if (!n) gb_fail(b, ERR_INPUT, "json_schema: %s must be a list of schemas, not empty", key);
    for (size_t i = n; i-- > 0 && gb_work(b);) {
        const json_t *one = json_array_get(list, i);
        for (size_t j = 0; key[0] == 'o' && j < i && b->rc == OK; j++) {
            const json_t *x = one, *y = json_array_get(list, j);
            const char *rx = json_string_value(json_object_get(x, "$ref")),
                       *ry = json_string_value(json_object_get(y, "$ref"));
            if (rx) x = schema_target(b, w->root, rx);
            if (ry) y = schema_target(b, w->root, ry);
            if (b->rc == OK && !schemas_differ(b, x, y, 0))
                gb_fail(
                    b, ERR_INPUT,
                    "json_schema: oneOf whose schemas may both hold is not supported (anyOf is)");
        }
        if (b->rc == OK && json_is_object(one)) one = keep(w, schema_merge(b, s, key, one, key));
        if (b->rc) return 0;
        int32_t c = call(w, one, next);
        r = r < 0 ? c : gb_split(b, c, r);
    }
    return r < 0 ? 0 : r;
}

static int32_t put_all(struct work *w, const json_t *s, int32_t next)
{
    struct gbuild *b = w->b;
    const json_t *list = json_object_get(s, "allOf"), *sum = NULL;
    if (!json_array_size(list))
        gb_fail(b, ERR_INPUT, "json_schema: allOf must be a list of schemas, not empty");
    for (size_t i = 0; i < json_array_size(list) && b->rc == OK; i++) {
        const json_t *one = json_array_get(list, i);
        for (int hops = 0; b->rc == OK && json_is_string(json_object_get(one, "$ref")); hops++) {
            const json_t *to =
                schema_target(b, w->root, json_string_value(json_object_get(one, "$ref")));
            if (hops > 32) gb_fail(b, ERR_INPUT, "json_schema: $ref leads in a circle");
            if (b->rc == OK) one = keep(w, schema_merge(b, one, "$ref", to, "$ref"));
        }
        if (b->rc == OK) sum = keep(w, schema_merge(b, sum ? sum : s, "allOf", one, "allOf"));
    }
    return b->rc ? 0 : call(w, sum, next);
}

static int32_t put_ref(struct work *w, const json_t *s, int32_t next)
{
    struct gbuild *b = w->b;
    const json_t *ref = json_object_get(s, "$ref");
    if (!json_is_string(ref)) gb_fail(b, ERR_INPUT, "json_schema: $ref must be a string");
    const json_t *to = b->rc ? NULL : schema_target(b, w->root, json_string_value(ref));
    bool alone = true;
    const char *key;
    json_t *v;
    json_object_foreach((json_t *)(uintptr_t)s, key, v)
    {
        (void)v;
        if (strcmp(key, "$ref") != 0 && !schema_is_note(key)) alone = false;
    }
    if (!alone && b->rc == OK) to = keep(w, schema_merge(b, s, "$ref", to, "$ref"));
    return b->rc ? 0 : call(w, to, next);
}

static void check_keys(struct work *w, const json_t *s)
{
    static const char *const refused[] = {"not",
                                          "if",
                                          "then",
                                          "else",
                                          "dependentSchemas",
                                          "dependentRequired",
                                          "dependencies",
                                          "unevaluatedProperties",
                                          "unevaluatedItems",
                                          "contains",
                                          "minContains",
                                          "maxContains",
                                          "patternProperties",
                                          "propertyNames",
                                          "minProperties",
                                          "maxProperties",
                                          "multipleOf",
                                          "uniqueItems",
                                          "$dynamicRef",
                                          "$recursiveRef"};
    for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++) {
        const json_t *v = json_object_get(s, refused[i]);
        bool nothing =
            json_is_false(v) || (!strcmp(refused[i], "minProperties") && json_number_value(v) == 0);
        if (v && !(nothing && strcmp(refused[i], "unevaluatedItems") != 0))
            gb_fail(w->b, ERR_INPUT, "json_schema: keyword \"%s\" is not supported", refused[i]);
    }
}

static int32_t put_schema(struct work *w, const json_t *s, int32_t next)
{
    struct gbuild *b = w->b;
    json_t *list;
    if (json_is_true(s)) return gb_json(b, RULE_VALUE, next);
    if (!json_is_object(s))
        gb_fail(b, ERR_INPUT, "json_schema: a schema must be an object or true");
    check_keys(w, s);
    if (b->rc) return 0;
    if (json_object_get(s, "$ref")) return put_ref(w, s, next);
    if (json_object_get(s, "allOf")) return put_all(w, s, next);
    if (json_object_get(s, "anyOf")) return put_choice(w, s, "anyOf", next);
    if (json_object_get(s, "oneOf")) return put_choice(w, s, "oneOf", next);
    list = json_object_get(s, "enum");
    bool fixed = list || json_object_get(s, "const");
    const char *bound = list && json_object_get(s, "const") ? "const" : schema_bound(s);
    if (fixed && bound)
        gb_fail(b, ERR_INPUT, "json_schema: enum or const together with %s is not supported",
                bound);
    if (list && !json_is_array(list)) gb_fail(b, ERR_INPUT, "json_schema: enum must be a list");
    if (b->rc) return 0;
    if (json_object_get(s, "const")) {
        list = json_pack("[O]", json_object_get(s, "const"));
        int32_t r = put_enum(w, s, list, next);
        json_decref(list);
        return r;
    }
    if (list) return put_enum(w, s, list, next);
    if (schema_types(b, s) == T_ALL && !json_object_get(s, "type"))
        return gb_json(b, RULE_VALUE, next);
    return put_types(w, s, next);
}

int32_t gb_schema(struct gbuild *b, const json_t *schema, int32_t next)
{
    struct work w = {.b = b, .root = schema, .made = json_array()};
    w.slot = mem_try_array(SLOTS, sizeof *w.slot);
    if (!w.slot || !w.made) gb_fail(b, ERR_NOMEM, "no memory for the grammar");
    for (int i = 0; w.slot && i < SLOTS; i++)
        w.slot[i] = -1;
    int32_t r = b->rc ? 0 : call(&w, schema, next);
    for (; w.done < w.n && b->rc == OK; w.done++) {
        struct entry x = w.v[w.done];
        int32_t start = put_schema(&w, x.schema, gb_end(b));
        if (b->rc == OK) b->rule[x.rule] = start;
    }
    mem_free(w.v);
    mem_free(w.slot);
    json_decref(w.made);
    return r;
}
