#include "text/grammar_merge.h"

#include <stdlib.h>
#include <string.h>

static const struct type_row {
    const char *name;
    int bit;
} types[] = {
    {"null", T_NULL},     {"boolean", T_BOOLEAN}, {"integer", T_INTEGER}, {"number", T_NUMBER},
    {"string", T_STRING}, {"array", T_ARRAY},     {"object", T_OBJECT},
};

/* Keywords that speak of one type alone. */
static const struct type_row speaks[] = {
    {"properties", T_OBJECT},
    {"required", T_OBJECT},
    {"additionalProperties", T_OBJECT},
    {"items", T_ARRAY},
    {"prefixItems", T_ARRAY},
    {"minItems", T_ARRAY},
    {"maxItems", T_ARRAY},
    {"minLength", T_STRING},
    {"maxLength", T_STRING},
    {"pattern", T_STRING},
    {"minimum", T_NUMBER},
    {"maximum", T_NUMBER},
    {"exclusiveMinimum", T_NUMBER},
    {"exclusiveMaximum", T_NUMBER},
};

static int type_bit(struct gbuild *b, const json_t *v)
{
    const char *s = json_string_value(v);
    for (size_t i = 0; s && i < sizeof types / sizeof types[0]; i++)
        if (!strcmp(s, types[i].name)) return types[i].bit;
    gb_fail(b, ERR_INPUT, "json_schema: type \"%.40s\" is not known", s ? s : "(no string)");
    return 0;
}

static int value_type(const json_t *v)
{
    switch (json_typeof(v)) {
    case JSON_OBJECT: return T_OBJECT;
    case JSON_ARRAY: return T_ARRAY;
    case JSON_STRING: return T_STRING;
    case JSON_INTEGER: return T_INTEGER;
    case JSON_REAL:
        return json_real_value(v) == (double)(int64_t)json_real_value(v) ? T_INTEGER : T_FRACTION;
    case JSON_NULL: return T_NULL;
    default: return T_BOOLEAN;
    }
}

int schema_types(struct gbuild *b, const json_t *schema)
{
    const json_t *t = json_object_get(schema, "type"), *list = json_object_get(schema, "enum");
    int bits = 0;
    if (json_is_array(t)) {
        for (size_t i = 0; i < json_array_size(t); i++)
            bits |= type_bit(b, json_array_get(t, i));
    } else if (t) {
        bits = type_bit(b, t);
    } else if (json_object_get(schema, "const")) {
        bits = value_type(json_object_get(schema, "const"));
    } else if (json_is_array(list)) {
        for (size_t i = 0; i < json_array_size(list); i++)
            bits |= value_type(json_array_get(list, i));
    } else {
        for (size_t i = 0; i < sizeof speaks / sizeof speaks[0]; i++)
            if (json_object_get(schema, speaks[i].name)) bits |= speaks[i].bit;
    }
    return bits ? bits : T_ALL;
}

const char *schema_bound(const json_t *schema)
{
    for (size_t i = 0; i < sizeof speaks / sizeof speaks[0]; i++)
        if (json_object_get(schema, speaks[i].name)) return speaks[i].name;
    return NULL;
}

bool schema_is_note(const char *key)
{
    static const char *const notes[] = {
        "title", "description", "default",         "examples",         "example",  "$schema",
        "$id",   "$comment",    "$anchor",         "deprecated",       "readOnly", "writeOnly",
        "$defs", "definitions", "contentEncoding", "contentMediaType", "strict"};
    for (size_t i = 0; i < sizeof notes / sizeof notes[0]; i++)
        if (!strcmp(key, notes[i])) return true;
    return false;
}

static json_t *both_types(struct gbuild *b, const json_t *one, const json_t *other)
{
    json_t *list = json_array();
    int bits = schema_types(b, one) & schema_types(b, other);
    for (size_t i = 0; i < sizeof types / sizeof types[0]; i++)
        if ((bits & types[i].bit) == types[i].bit &&
            !(types[i].bit == T_INTEGER && (bits & T_NUMBER) == T_NUMBER))
            json_array_append_new(list, json_string(types[i].name));
    if (!json_array_size(list))
        gb_fail(b, ERR_INPUT, "json_schema: no type is left where schemas are combined");
    return list;
}

/* What one keyword becomes where both have it; NULL: it cannot. */
static json_t *both(struct gbuild *b, const char *key, const json_t *x, const json_t *y,
                    const json_t *one, const json_t *other)
{
    if (json_equal(x, y)) return json_copy((json_t *)(uintptr_t)x);
    if (!strcmp(key, "type")) return both_types(b, one, other);
    if (!strcmp(key, "required") && json_is_array(x) && json_is_array(y)) {
        json_t *list = json_copy((json_t *)(uintptr_t)x);
        json_array_extend(list, (json_t *)(uintptr_t)y);
        return list;
    }
    if (!strcmp(key, "properties") && json_is_object(x) && json_is_object(y)) {
        json_t *all = json_copy((json_t *)(uintptr_t)x), *v;
        const char *name;
        json_object_foreach((json_t *)(uintptr_t)y, name, v)
        {
            const json_t *have = json_object_get(all, name);
            if (have && !json_equal(have, v)) {
                json_decref(all);
                return NULL;
            }
            json_object_set(all, name, v);
        }
        return all;
    }
    return NULL;
}

json_t *schema_merge(struct gbuild *b, const json_t *one, const char *skip, const json_t *other,
                     const char *where)
{
    json_t *out = json_object(), *v;
    const char *key;
    const json_t *p = json_object_get(one, "properties"), *q = json_object_get(other, "properties");
    bool closed = (json_object_get(one, "additionalProperties") && q) ||
                  (json_object_get(other, "additionalProperties") && p);
    if (closed && !json_equal(p, q))
        gb_fail(b, ERR_INPUT, "json_schema: %s of schemas with properties and additionalProperties",
                where);
    json_object_foreach((json_t *)(uintptr_t)one, key,
                        v) if (!schema_is_note(key) && strcmp(key, skip) != 0)
        json_object_set(out, key, v);
    json_object_foreach((json_t *)(uintptr_t)other, key, v)
    {
        const json_t *have = json_object_get(out, key);
        if (schema_is_note(key) || b->rc) continue;
        json_t *m = have ? both(b, key, have, v, out, other) : json_incref(v);
        if (!m)
            gb_fail(b, ERR_INPUT, "json_schema: %s combines two different \"%.60s\"", where, key);
        else
            json_object_set_new(out, key, m);
    }
    if (b->rc == OK) return out;
    json_decref(out);
    return NULL;
}

const json_t *schema_target(struct gbuild *b, const json_t *root, const char *ref)
{
    const json_t *at = root;
    if (*ref != '#') {
        gb_fail(
            b, ERR_INPUT,
            "json_schema: $ref \"%.100s\": only references into the schema itself are supported",
            ref);
        return NULL;
    }
    for (const char *p = ref + 1; *p == '/' && at;) {
        char name[256];
        size_t n = 0;
        for (p++; *p && *p != '/' && n + 1 < sizeof name; p++) {
            char c = *p;
            if (c == '~' && (p[1] == '0' || p[1] == '1')) c = *++p == '0' ? '~' : '/';
            name[n++] = c;
        }
        name[n] = 0;
        at = json_is_array(at) ? json_array_get(at, (size_t)strtoul(name, NULL, 10))
                               : json_object_get(at, name);
    }
    if (!json_is_object(at) && !json_is_boolean(at)) {
        gb_fail(b, ERR_INPUT, "json_schema: $ref \"%.100s\" leads nowhere", ref);
        return NULL;
    }
    return at;
}

/* The constants of a schema as a list, borrowed or new; NULL: it has none. */
static json_t *constants(const json_t *s)
{
    json_t *one = json_object_get(s, "const"), *list = json_object_get(s, "enum");
    if (!one) return json_is_array(list) ? json_incref(list) : NULL;
    json_t *l = json_array();
    json_array_append(l, one);
    return l;
}

static bool constants_differ(const json_t *one, const json_t *other)
{
    json_t *x = constants(one), *y = constants(other);
    bool differ = x && y && json_array_size(x) * json_array_size(y) < 100000;
    for (size_t i = 0; differ && i < json_array_size(x); i++)
        for (size_t j = 0; differ && j < json_array_size(y); j++)
            differ = !json_equal(json_array_get(x, i), json_array_get(y, j));
    json_decref(x);
    json_decref(y);
    return differ;
}

bool schema_requires(const json_t *s, const char *name)
{
    const json_t *list = json_object_get(s, "required");
    for (size_t i = 0; i < json_array_size(list); i++) {
        const char *r = json_string_value(json_array_get(list, i));
        if (r && !strcmp(r, name)) return true;
    }
    return false;
}

bool schemas_differ(struct gbuild *b, const json_t *one, const json_t *other, int depth)
{
    if (!gb_work(b) || depth > 4) return false;
    if (!(schema_types(b, one) & schema_types(b, other)) || constants_differ(one, other))
        return true;
    const char *name;
    json_t *p;
    json_object_foreach(json_object_get(one, "properties"), name, p)
    {
        const json_t *q = json_object_get(json_object_get(other, "properties"), name);
        if (q && schema_requires(one, name) && schema_requires(other, name) &&
            schemas_differ(b, p, q, depth + 1))
            return true;
    }
    return false;
}
