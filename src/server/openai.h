/*
 * openai.h - what the OpenAI routes share: api_chat.c, api_completions.c and their helpers.
 */
#ifndef SERVER_OPENAI_H
#define SERVER_OPENAI_H

#include "server/chat_parse.h"
#include "server/internal.h"

/* openai.c: the parts of a reply that chat and completions have alike */
err_t openai_begin(struct xchg *x, const json_t *b,
                   struct err *e) MUST_USE; /* fields of the whole call */
err_t openai_add(struct xchg *x, const json_t *b, const json_t *prompt, const struct buf *text,
                 struct err *e) MUST_USE; /* all samples of a prompt: ids or text */
void openai_head(struct xchg *x);         /* {"id": ... "model": */
void openai_finish(struct xchg *x, const struct request *r, bool calls);
/* Of all choices, whose requests have ended; or of one, whose lock is held. */
void openai_usage(struct xchg *x, const struct slot *one);
/* What a choice was asked for beside its text; `first`: of its frames, or its only one. */
void openai_extras(struct xchg *x, struct slot *sl, bool first);
void openai_build(struct xchg *x, void (*choice)(struct xchg *x, struct slot *sl));
void openai_frame(struct xchg *x, struct slot *sl, void (*choice)(struct xchg *x, struct slot *sl));
void openai_last(struct xchg *x);

/* openai_logprobs.c; positions of the output from `from` on */
void chat_logprobs(struct xchg *x, const struct request *r, int32_t from);
void text_logprobs(struct xchg *x, struct slot *sl, int32_t from);

/* chat_render.c: the messages through the template */
err_t chat_render(struct xchg *x, const json_t *b, const json_t *tools, struct buf *text,
                  struct err *e) MUST_USE;

/* chat_tools.c: tools, tool_choice and reasoning into x; *tools is what the template is to see,
 * NULL: none */
err_t chat_tools(struct xchg *x, const json_t *b, const json_t **tools, struct err *e) MUST_USE;
err_t chat_reasoning(struct xchg *x, const json_t *b, const char *prompt, size_t n,
                     struct err *e) MUST_USE;
err_t chat_choice(struct xchg *x, const json_t *b, const json_t *tools, struct err *e) MUST_USE;

/* The bodies of the two routes, into slots. */
err_t chat_body(struct xchg *x, const json_t *b, struct err *e) MUST_USE;
err_t completions_body(struct xchg *x, const json_t *b, struct err *e) MUST_USE;

#endif
