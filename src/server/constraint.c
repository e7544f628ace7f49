/* constraint.c - regex, json_schema and response_format: grammars, compiled once while they are in
 * use. */
#include "base/mem.h"
#include "server/internal.h"
#include "text/grammar.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static err_t get_trie(struct server *s, struct err *e) /* lock held */
{
    if (!s->o.tokenizer)
        return err_set(e, ERR_INPUT, "regex, json_schema and tools need a tokenizer");
    return s->grammars.trie ? OK : token_trie_new(&s->grammars.trie, s->o.tokenizer, e);
}

static struct grammar *find(struct grammars *k, const char *key) /* lock held */
{
    for (int i = 0; i < GRAMMARS_KEPT; i++) {
        if (!k->kept[i].key || strcmp(k->kept[i].key, key) != 0) continue;
        k->kept[i].used = ++k->clock;
        grammar_ref(k->kept[i].g);
        return k->kept[i].g;
    }
    return NULL;
}

static void keep(struct grammars *k, char *key, struct grammar *g) /* lock held */
{
    struct kept_grammar *old = &k->kept[0];
    for (int i = 1; i < GRAMMARS_KEPT; i++)
        if (k->kept[i].used < old->used) old = &k->kept[i];
    free(old->key);
    grammar_unref(old->g);
    grammar_ref(g);
    *old = (struct kept_grammar){key, g, ++k->clock};
}

err_t constraint_grammar(struct server *s, char *key, const struct grammar_spec *spec,
                         struct grammar **out, struct err *e)
{
    struct grammars *k = &s->grammars;
    if (!key) return err_set(e, ERR_NOMEM, "out of memory");
    pthread_mutex_lock(&k->m);
    err_t rc = get_trie(s, e);
    *out = rc ? NULL : find(k, key);
    pthread_mutex_unlock(&k->m);
    if (rc || *out) {
        free(key);
        return rc;
    }
    rc = grammar_compile(out, k->trie, spec, e);
    if (rc) {
        free(key);
        return rc;
    }
    pthread_mutex_lock(&k->m);
    keep(k, key, *out);
    pthread_mutex_unlock(&k->m);
    return OK;
}

void constraint_release(struct server *s)
{
    struct grammars *k = &s->grammars;
    for (int i = 0; i < GRAMMARS_KEPT; i++) {
        free(k->kept[i].key);
        grammar_unref(k->kept[i].g);
    }
    token_trie_unref(k->trie);
    pthread_mutex_destroy(&k->m);
}

/* What was asked for, as one value that names it: {"regex": P}, {"schema": S} or {"object": true};
 * new. */
static err_t read_fields(const json_t *p, enum sampling_api api, json_t **out, struct err *e)
{
    const char *pattern = NULL;
    const json_t *schema = json_field(p, "json_schema"), *format = json_field(p, "response_format");
    err_t rc = json_get_str(p, "regex", &pattern, e);
    if (rc) return rc;
    if (api == SAMPLING_NATIVE) format = NULL;
    const char *type = json_string_value(json_object_get(format, "type"));
    if (format && !type) return json_bad(e, "response_format", format, "an object with a type");
    if (format && !strcmp(type, "text")) format = NULL;
    if ((pattern != NULL) + (schema != NULL) + (format != NULL) > 1)
        return err_set(e, ERR_INPUT,
                       "regex, json_schema and response_format: only one of them may be given");
    if (pattern) *out = json_pack("{s:s}", "regex", pattern);
    if (format && !strcmp(type, "json_object")) {
        *out = json_pack("{s:b}", "object", 1);
    } else if (format && !strcmp(type, "json_schema")) {
        schema = json_object_get(json_object_get(format, "json_schema"), "schema");
        if (!schema) return err_set(e, ERR_INPUT, "response_format.json_schema.schema: missing");
    } else if (format) {
        return json_bad(e, "response_format.type", json_object_get(format, "type"),
                        "text, json_object or json_schema");
    }
    if (json_is_string(schema)) { /* the native spelling is the schema's text */
        json_error_t je;
        json_t *s =
            json_loadb(json_string_value(schema), json_string_length(schema), JSON_DECODE_ANY, &je);
        if (!s) return err_set(e, ERR_INPUT, "json_schema: not valid JSON: %s", je.text);
        *out = json_pack("{s:o}", "schema", s);
    } else if (schema) {
        *out = json_pack("{s:O}", "schema", schema);
    }
    return OK;
}

err_t constraint_parse(struct xchg *x, const json_t *params, enum sampling_api api, int sample,
                       struct request *r, struct err *e)
{
    json_t *what = NULL;
    if (sample) {
        r->grammar = x->slots[x->n_slots - 1].r->grammar;
        if (r->grammar) grammar_ref(r->grammar);
        return OK;
    }
    err_t rc = read_fields(params, api, &what, e);
    if (rc) return rc;
    if (x->tool_grammar) {
        if (what)
            rc = err_set(
                e, ERR_INPUT,
                "tool_choice: a call that must come and a format of the answer exclude each other");
        grammar_ref(r->grammar = x->tool_grammar);
    } else if (what) {
        const json_t *p = json_object_get(what, "regex");
        struct grammar_spec spec = {.until = x->think_end,
                                    .if_begins = x->think_begin,
                                    .pattern = json_string_value(p),
                                    .n_pattern = json_string_length(p),
                                    .schema = json_object_get(what, "schema"),
                                    .any_object = json_is_true(json_object_get(what, "object"))};
        if (x->think_end) json_object_set_new(what, "after", json_string(x->think_end));
        if (x->think_begin) json_object_set_new(what, "if", json_string(x->think_begin));
        rc = constraint_grammar(x->s, json_dumps(what, JSON_COMPACT), &spec, &r->grammar, e);
    }
    if (r->grammar) r->ignore_eos = false;
    json_decref(what);
    return rc;
}
