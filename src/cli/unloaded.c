#include "cli/unloaded.h"

#include "base/file.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

#define TOKENIZER_MAX ((size_t)256 << 20)

static void file_sum(char sum[DIGEST_HEX], const char *dir, const char *name)
{
    struct buf path = {0}, text = {0};
    sum[0] = 0;
    if (buf_printf(&path, "%s/%s", dir, name) &&
        file_read(&text, path.data, TOKENIZER_MAX, NULL) == OK)
        digest_of(DIGEST_XXH3_128, text.data, text.len, sum);
    buf_release(&path);
    buf_release(&text);
}

void unloaded_note(struct unloaded *u, const char *tokenizer_dir, const struct textconf *text,
                   const struct config *config)
{
    file_sum(u->tokenizer, tokenizer_dir, "tokenizer.json");
    snprintf(u->chat_template, sizeof u->chat_template, "%s", text->chat_sum);
    u->config = *config;
}

static bool same_eos(const struct config *a, const struct config *b)
{
    if (a->n_eos != b->n_eos) return false;
    for (int i = 0; i < a->n_eos; i++) {
        bool found = false;
        for (int k = 0; k < b->n_eos; k++)
            found = found || a->eos[i] == b->eos[k];
        if (!found) return false;
    }
    return true;
}

static bool same_number(float a, float b)
{
    return a == b || (isnan(a) && isnan(b));
}

static bool same_sampling(const struct config *a, const struct config *b)
{
    return same_number(a->gen_temperature, b->gen_temperature) &&
           same_number(a->gen_top_p, b->gen_top_p) && same_number(a->gen_min_p, b->gen_min_p) &&
           same_number(a->gen_repetition_penalty, b->gen_repetition_penalty) &&
           a->gen_top_k == b->gen_top_k && a->gen_do_sample == b->gen_do_sample;
}

void unloaded_compare(const struct unloaded *u, const char *dir, char *warning, size_t n)
{
    struct unloaded next = {0};
    struct textconf text = {0};
    struct buf b = {0};
    bool has_config = config_load(&next.config, dir, NULL) == OK;
    bool has_text = textconf_load(&text, dir, NULL) == OK;
    file_sum(next.tokenizer, dir, "tokenizer.json");
    const struct {
        const char *name;
        bool differs;
    } parts[] = {
        {"tokenizer.json", next.tokenizer[0] && strcmp(next.tokenizer, u->tokenizer) != 0},
        {"the chat template",
         !has_text || (text.chat_sum[0] && strcmp(text.chat_sum, u->chat_template) != 0)},
        {"eos_token_id", has_config && !same_eos(&u->config, &next.config)},
        {"sampling defaults", has_config && !same_sampling(&u->config, &next.config)},
    };
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++)
        if (parts[i].differs) (void)buf_printf(&b, "%s%s", b.len ? ", " : "", parts[i].name);
    snprintf(warning, n, "%s%s", b.len ? b.data : "",
             b.len ? " of this folder: not those of the start, which stay in use" : "");
    buf_release(&b);
    textconf_release(&text);
}
