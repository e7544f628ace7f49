/* openai_logprobs.c - logprobs as the OpenAI routes write them. */
#include "server/openai.h"
#include <string.h>

static void put_token(struct xchg *x, int32_t id)
{
    struct buf t = {0};
    if (x->s->o.tokenizer) tokenizer_decode(x->s->o.tokenizer, &t, &id, 1, false);
    put_str(&x->out, t.data ? t.data : "", t.len);
    buf_release(&t);
}

static void put_entry(struct xchg *x, int32_t id, double lp)
{
    struct buf *b = &x->out;
    size_t n = 0;
    const char *p = x->s->o.tokenizer ? tokenizer_bytes(x->s->o.tokenizer, id, &n) : NULL;
    buf_puts(b, "\"token\":");
    put_token(x, id);
    buf_puts(b, ",\"logprob\":");
    put_real(b, lp);
    buf_puts(b, ",\"bytes\":[");
    for (size_t i = 0; p && i < n; i++)
        buf_printf(b, i ? ",%u" : "%u", (unsigned char)p[i]);
    buf_putc(b, ']');
}

void chat_logprobs(struct xchg *x, const struct request *r, int32_t from)
{
    struct buf *b = &x->out;
    buf_puts(b, "{\"content\":[");
    for (int32_t i = from; i < r->n_output; i++) {
        buf_puts(b, i > from ? ",{" : "{");
        put_entry(x, r->output_ids[i], (double)r->output_logprobs[i]);
        buf_puts(b, ",\"top_logprobs\":[");
        for (int32_t k = 0; r->n_top && r->output_top && k < r->output_top[i].n; k++) {
            buf_puts(b, k ? ",{" : "{");
            put_entry(x, r->output_top[i].ids[k], (double)r->output_top[i].logprobs[k]);
            buf_putc(b, '}');
        }
        buf_puts(b, "]}");
    }
    buf_puts(b, "]}");
}

/* {"text of a token": logprob}.  Tokens of the same text (parts of characters) are one key: the
 * likeliest. */
static void put_top_map(struct xchg *x, const struct top_row *t)
{
    struct buf texts = {0};
    size_t end[SAMPLE_MAX_TOP + 1] = {0};
    buf_putc(&x->out, '{');
    for (int32_t k = 0; t && k < t->n; k++) {
        bool seen = false;
        if (x->s->o.tokenizer) tokenizer_decode(x->s->o.tokenizer, &texts, &t->ids[k], 1, false);
        end[k + 1] = texts.len;
        size_t n = end[k + 1] - end[k];
        for (int32_t i = 0; i < k && !seen; i++)
            seen = end[i + 1] - end[i] == n &&
                   (!n || !memcmp(texts.data + end[i], texts.data + end[k], n));
        if (seen) continue;
        if (k) buf_putc(&x->out, ',');
        put_str(&x->out, n ? texts.data + end[k] : "", n);
        buf_putc(&x->out, ':');
        put_real(&x->out, (double)t->logprobs[k]);
    }
    buf_putc(&x->out, '}');
    buf_release(&texts);
}

static long long characters(const struct buf *b)
{
    long long n = 0;
    for (size_t i = 0; i < b->len; i++)
        n += ((unsigned char)b->data[i] & 0xc0) != 0x80;
    return n;
}

/* Where each token begins in the choice's text; a token inside of a character begins where that one
 * does. */
static void put_offsets(struct xchg *x, struct slot *sl, int32_t from, int32_t pre)
{
    const struct request *r = sl->r;
    const struct tokenizer *t = x->s->o.tokenizer;
    struct buf text = {0};
    if (!from) {
        sl->n_chars = 0;
        detok_init(&sl->offsets, t, !pre && r->skip_special);
    }
    for (int32_t i = from; i < pre + r->n_output; i++) {
        if (pre && i == pre) { /* the prompt ends: its text stands by itself */
            detok_end(&sl->offsets, &text);
            sl->n_chars += characters(&text);
            detok_init(&sl->offsets, t, r->skip_special);
        }
        buf_printf(&x->out, i > from ? ",%lld" : "%lld", sl->n_chars);
        buf_clear(&text);
        if (t) detok_push(&sl->offsets, i < pre ? r->prompt[i] : r->output_ids[i - pre], &text);
        sl->n_chars += characters(&text);
        buf_clear(&text);
    }
    buf_release(&text);
}

/* Positions of the prompt (echo) come first, then those of the output. */
void text_logprobs(struct xchg *x, struct slot *sl, int32_t from)
{
    struct buf *b = &x->out;
    const struct request *r = sl->r;
    int32_t pre = x->echo && !from && r->prompt_logprobs && r->logprob_start == 0 ? r->n_prompt : 0;
    for (int part = 0; part < 3; part++) {
        buf_puts(b, part == 0   ? "{\"tokens\":["
                    : part == 1 ? "],\"token_logprobs\":["
                                : "],\"top_logprobs\":[");
        for (int32_t i = from; i < pre + r->n_output; i++) {
            int32_t id = i < pre ? r->prompt[i] : r->output_ids[i - pre];
            const struct top_row *t = !r->n_top       ? NULL
                                      : i < pre       ? (r->prompt_top ? &r->prompt_top[i] : NULL)
                                      : r->output_top ? &r->output_top[i - pre]
                                                      : NULL;
            if (i > from) buf_putc(b, ',');
            if (part == 0)
                put_token(x, id);
            else if (i < pre && !i)
                buf_puts(b, "null");
            else if (part == 1)
                put_real(b,
                         (double)(i < pre ? r->prompt_logprobs[i] : r->output_logprobs[i - pre]));
            else {
                put_top_map(x, t);
            }
        }
    }
    buf_puts(b, "],\"text_offset\":[");
    put_offsets(x, sl, from, pre);
    buf_puts(b, "]}");
}
