#include "cli/quantize_folder.h"

#include "base/buf.h"
#include "base/file.h"
#include <stdlib.h>
#include <string.h>

#define COPY_MAX ((size_t)256 << 20)

/* Files that go along as they are, if SRC has them. */
static const char *const companions[] = {
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "LICENSE",
};

err_t quantize_copy_companions(struct newdir *d, const char *src, struct err *e)
{
    err_t rc = OK;
    for (size_t i = 0; i < sizeof companions / sizeof companions[0] && rc == OK; i++) {
        struct buf path = {0}, text = {0};
        if (!buf_printf(&path, "%s/%s", src, companions[i]))
            rc = err_set(e, ERR_NOMEM, "no memory for a path");
        else if (file_exists(path.data))
            rc = file_read(&text, path.data, COPY_MAX, e);
        if (rc == OK && text.data) rc = newdir_put(d, companions[i], text.data, text.len, e);
        buf_release(&path);
        buf_release(&text);
    }
    return rc;
}

static err_t put_json(struct newdir *d, const char *name, json_t *root, struct err *e)
{
    char *text = json_dumps(root, JSON_INDENT(2));
    err_t rc = text ? newdir_put(d, name, text, strlen(text), e)
                    : err_set(e, ERR_NOMEM, "%s: no memory", name);
    free(text);
    json_decref(root);
    return rc;
}

err_t quantize_write_configs(struct newdir *d, const struct quantize_plan *p, struct err *e)
{
    json_t *config = json_copy(p->json);
    if (p->spell->config)
        json_object_set_new(config, "quantization_config", p->spell->config(p->spell, p));
    json_t *hf = quantize_spell_hf_quant_config(p->spell, p);
    err_t rc = put_json(d, "config.json", config, e);
    if (hf == NULL) return rc;
    if (rc == OK) return put_json(d, "hf_quant_config.json", hf, e);
    json_decref(hf);
    return rc;
}
