#include "cli/textconf.h"
#include "base/file.h"
#include "base/mem.h"
#include <string.h>

#define CONFIG_BYTES   ((size_t)64 << 20) /* some list every added token */
#define TEMPLATE_BYTES ((size_t)4 << 20)

/* A token field: "x" or {"content": "x", ...}; anything else is no token. */
static char *token_text(const json_t *root, const char *key)
{
    const json_t *v = json_object_get(root, key);
    if (json_is_object(v)) v = json_object_get(v, "content");
    return json_is_string(v) ? mem_dup_n(json_string_value(v), json_string_length(v)) : NULL;
}

static const json_t *template_value(const json_t *root)
{
    const json_t *v = json_object_get(root, "chat_template"), *row;
    size_t i;
    if (!json_is_array(v)) return v;
    json_array_foreach((json_t *)v, i, row)
    {
        const char *name = json_string_value(json_object_get(row, "name"));
        if (name && strcmp(name, "default") == 0) return json_object_get(row, "template");
    }
    return NULL;
}

static err_t parse_template(struct textconf *t, const char *text, size_t n, struct err *e)
{
    digest_of(DIGEST_XXH3_128, text, n, t->chat_sum);
    return tmpl_parse(&t->chat, text, n, e);
}

static err_t parse_config(struct textconf *t, const char *path, bool with_template, struct err *e)
{
    struct buf text = {0};
    err_t rc = file_read(&text, path, CONFIG_BYTES, e);
    if (rc == ERR_NOTFOUND) return OK;
    if (rc != OK) return rc;
    json_error_t at;
    json_t *root = json_loadb(text.data, text.len, 0, &at);
    buf_release(&text);
    if (!json_is_object(root)) {
        json_decref(root);
        return err_set(e, ERR_INPUT, "%s: not a JSON object (line %d: %s)", path, at.line, at.text);
    }
    t->bos = token_text(root, "bos_token");
    t->eos = token_text(root, "eos_token");
    t->add_bos = json_is_true(json_object_get(root, "add_bos_token"));
    const json_t *v = with_template ? template_value(root) : NULL;
    if (json_is_string(v)) {
        rc = parse_template(t, json_string_value(v), json_string_length(v), e);
        if (rc != OK) rc = err_wrap(e, rc, "%s: chat_template", path);
    }
    json_decref(root);
    return rc;
}

err_t textconf_load(struct textconf *t, const char *dir, struct err *e)
{
    struct textconf got = {0};
    struct buf path = {0}, source = {0};
    err_t rc;
    if (!buf_printf(&path, "%s/chat_template.jinja", dir))
        return err_set(e, ERR_NOMEM, "out of memory for a path");
    bool own_file = file_exists(path.data);
    rc = own_file ? file_read(&source, path.data, TEMPLATE_BYTES, e) : OK;
    if (rc == OK && own_file) {
        rc = parse_template(&got, source.data, source.len, e);
        if (rc != OK) rc = err_wrap(e, rc, "%s", path.data);
    }
    buf_release(&source);
    buf_clear(&path);
    if (rc == OK && !buf_printf(&path, "%s/tokenizer_config.json", dir))
        rc = err_set(e, ERR_NOMEM, "out of memory for a path");
    if (rc == OK) rc = parse_config(&got, path.data, !own_file, e);
    buf_release(&path);
    if (rc != OK) {
        textconf_release(&got);
        return rc;
    }
    *t = got;
    return OK;
}

void textconf_release(struct textconf *t)
{
    if (t->chat) tmpl_free(t->chat);
    mem_free(t->bos);
    mem_free(t->eos);
    *t = (struct textconf){0};
}
