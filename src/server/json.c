#include "server/json.h"
#include "base/mem.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

/* The parser recurses, so depth is bounded before it sees the bytes. */
static bool depth_ok(const char *p, size_t n)
{
    int depth = 0;
    bool in_string = false;
    for (size_t i = 0; i < n; i++) {
        if (in_string) {
            if (p[i] == '\\')
                i++;
            else if (p[i] == '"')
                in_string = false;
        } else if (p[i] == '"') {
            in_string = true;
        } else if (p[i] == '[' || p[i] == '{') {
            if (++depth > JSON_MAX_DEPTH) return false;
        } else if (p[i] == ']' || p[i] == '}') {
            depth--;
        }
    }
    return true;
}

json_t *json_parse_object(const char *data, size_t n, struct err *e)
{
    if (!depth_ok(data, n)) {
        err_set(e, ERR_INPUT, "body: JSON nested deeper than %d", JSON_MAX_DEPTH);
        return NULL;
    }
    json_error_t je;
    json_t *v = json_loadb(data ? data : "", n, JSON_ALLOW_NUL, &je);
    if (!v) {
        err_set(e, ERR_INPUT, "body is not valid JSON: %s (line %d, byte %d)", je.text, je.line,
                je.position);
        return NULL;
    }
    if (!json_is_object(v)) {
        json_decref(v);
        err_set(e, ERR_INPUT, "body must be a JSON object");
        return NULL;
    }
    return v;
}

const json_t *json_field(const json_t *o, const char *name)
{
    const json_t *v = json_object_get(o, name);
    return v && !json_is_null(v) ? v : NULL;
}

err_t json_bad(struct err *e, const char *name, const json_t *v, const char *allowed)
{
    char text[100] = "a list";
    if (json_is_object(v)) {
        snprintf(text, sizeof text, "an object");
    } else if (!json_is_array(v)) {
        size_t n = json_dumpb(v, text, sizeof text - 1, JSON_ENCODE_ANY);
        if (n < sizeof text)
            text[n] = 0;
        else
            snprintf(text, sizeof text, "a long string");
    }
    return err_set(e, ERR_INPUT, "%s: %s is not allowed; must be %s", name, text, allowed);
}

err_t json_get_int(const json_t *o, const char *name, int64_t lo, int64_t hi, int64_t *out,
                   struct err *e)
{
    const json_t *v = json_field(o, name);
    if (!v) return OK;
    char allowed[96];
    snprintf(allowed, sizeof allowed, "an integer in %lld..%lld", (long long)lo, (long long)hi);
    if (!json_is_integer(v)) return json_bad(e, name, v, allowed);
    json_int_t i = json_integer_value(v);
    if (i < lo || i > hi) return json_bad(e, name, v, allowed);
    *out = i;
    return OK;
}

err_t json_get_real(const json_t *o, const char *name, double lo, double hi, bool open_lo,
                    double *out, struct err *e)
{
    const json_t *v = json_field(o, name);
    if (!v) return OK;
    char allowed[96];
    snprintf(allowed, sizeof allowed, "a number in %c%g, %g]", open_lo ? '(' : '[', lo, hi);
    if (!json_is_number(v)) return json_bad(e, name, v, allowed);
    double d = json_number_value(v);
    if (!isfinite(d) || d < lo || d > hi || (open_lo && d <= lo))
        return json_bad(e, name, v, allowed);
    *out = d;
    return OK;
}

err_t json_get_bool(const json_t *o, const char *name, bool *out, struct err *e)
{
    const json_t *v = json_field(o, name);
    if (!v) return OK;
    if (!json_is_boolean(v)) return json_bad(e, name, v, "true or false");
    *out = json_is_true(v);
    return OK;
}

err_t json_get_str(const json_t *o, const char *name, const char **out, struct err *e)
{
    const json_t *v = json_field(o, name);
    if (!v) return OK;
    if (!json_is_string(v)) return json_bad(e, name, v, "a string");
    if (strlen(json_string_value(v)) != json_string_length(v))
        return err_set(e, ERR_INPUT, "%s: a string with U+0000 is not allowed", name);
    *out = json_string_value(v);
    return OK;
}

err_t json_ids(const json_t *list, const char *name, int32_t vocab, int32_t **out, int32_t *n,
               struct err *e)
{
    size_t count = json_array_size(list);
    if (!json_is_array(list)) return json_bad(e, name, list, "a list of token ids");
    if (count > INT32_MAX) return err_set(e, ERR_TOOBIG, "%s: too many ids", name);
    int32_t *ids = mem_try_array(count ? count : 1, sizeof *ids);
    if (!ids) return err_set(e, ERR_NOMEM, "%s: out of memory", name);
    for (size_t i = 0; i < count; i++) {
        const json_t *v = json_array_get(list, i);
        if (!json_is_integer(v) || json_integer_value(v) < 0 || json_integer_value(v) >= vocab) {
            char where[96], allowed[64];
            snprintf(where, sizeof where, "%s[%zu]", name, i);
            snprintf(allowed, sizeof allowed, "an integer in 0..%d", vocab - 1);
            mem_free(ids);
            return json_bad(e, where, v, allowed);
        }
        ids[i] = (int32_t)json_integer_value(v);
    }
    *out = ids;
    *n = (int32_t)count;
    return OK;
}
