/*
 * chat_parse.h - the text of an assistant's turn, taken apart as it grows: reasoning, content, tool
 * calls.
 *
 *     struct chat_parser *p = chat_parser_new(tools, think, inside);
 *     chat_parse(p, text, n, last);           // what is new since the last call; `last`: nothing
 * comes after use p->reasoning, p->content, p->call[0 .. n_calls); chat_taken(p);
 *
 * Whatever the pieces, what is given out is the same in all.  Held back is what may be the
 * beginning of a marker, white space that may be at an end, and a call until its name is known.  A
 * call that is not one (no object with a name) becomes content, as it was written.  Arguments are
 * given out as they were written.
 */
#ifndef SERVER_CHAT_PARSE_H
#define SERVER_CHAT_PARSE_H

#include "base/buf.h"
#include <stdint.h>

/* How a family of models writes calls. */
struct tool_format {
    const char *name;  /* of --tool-call-parser */
    const char *sign;  /* in a chat template: this is the family's */
    const char *open;  /* before the first call */
    const char *begin; /* before each call */
    const char *sep;   /* between the type and the name, or NULL: the call is one JSON object */
    const char *fence; /* after the name; then the arguments */
    const char *end;   /* after each call */
    const char *between, *close;
};
extern const struct tool_format tool_formats[];
extern const size_t n_tool_formats;
/* "auto" looks at the template's source.  NULL: none. */
const struct tool_format *tool_format_find(const char *name, const char *chat_template);

struct reasoning_format {
    const char *name; /* of --reasoning-parser */
    const char *begin, *end;
    bool always; /* a turn begins inside, unless its prompt ended the reasoning */
};
const struct reasoning_format *reasoning_format_find(const char *name, const char *chat_template);

struct call_piece {
    bool begins; /* the first piece of call `index`, with its name */
    int32_t index;
    struct buf name, arguments;
};

struct chat_parser {
    const struct tool_format *tools;      /* NULL: no calls are looked for */
    const struct reasoning_format *think; /* NULL: no reasoning */
    int state;
    struct buf held;               /* not yet decided */
    struct buf space;              /* white space in front of what may be a call */
    struct buf reasoning, content; /* new since chat_taken */
    struct call_piece *call;
    size_t n_calls, cap_calls;
    int32_t n_begun;        /* calls so far */
    bool begun, failed;     /* some of the part at hand was given out; no memory */
    size_t seen;            /* bytes of the text so far */
    size_t reasoning_bytes; /* of the text, up to the end of the reasoning */
    size_t scanned;         /* of `held`, for the end of a call */
    int depth;              /* of the arguments */
    bool in_string, escaped;
};

/* inside: the prompt has begun the reasoning already.  NULL: no memory. */
struct chat_parser *chat_parser_new(const struct tool_format *tools,
                                    const struct reasoning_format *think, bool inside);
void chat_parser_free(struct chat_parser *p);
void chat_parse(struct chat_parser *p, const char *text, size_t n, bool last);
void chat_taken(struct chat_parser *p);

#endif
