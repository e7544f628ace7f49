#include "server/chat_parse.h"

#include "base/mem.h"
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

const struct tool_format tool_formats[] = {
    {"qwen", "<tool_call>", "", "<tool_call>", NULL, NULL, "</tool_call>", "\n", ""},
    {"deepseekv3", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>",
     "<｜tool▁sep｜>", "\n```json\n", "<｜tool▁call▁end｜>", "\n", "<｜tool▁calls▁end｜>"},
};
const size_t n_tool_formats = sizeof tool_formats / sizeof tool_formats[0];

static const struct reasoning_format reasoning_formats[] = {
    {"qwen3", "<think>", "</think>", false},
    {"deepseek-r1", "<think>", "</think>", true},
};

const struct tool_format *tool_format_find(const char *name, const char *chat_template)
{
    if (!strcmp(name, "qwen25")) name = "qwen";
    for (size_t i = 0; i < n_tool_formats; i++)
        if (!strcmp(name, "auto")
                ? chat_template && strstr(chat_template, tool_formats[i].sign) != NULL
                : !strcmp(name, tool_formats[i].name))
            return &tool_formats[i];
    return NULL;
}

const struct reasoning_format *reasoning_format_find(const char *name, const char *chat_template)
{
    if (!strcmp(name, "auto"))
        name = chat_template && strstr(chat_template, "</think>") ? "qwen3" : "";
    for (size_t i = 0; i < sizeof reasoning_formats / sizeof reasoning_formats[0]; i++)
        if (!strcmp(name, reasoning_formats[i].name)) return &reasoning_formats[i];
    return NULL;
}

/* HEAD: the name is not known.  WAIT: the whole call is needed.  TAIL: after the arguments. */
enum { START, THINK, AFTER, TEXT, HEAD, WAIT, ARGUMENTS, TAIL };

struct chat_parser *chat_parser_new(const struct tool_format *tools,
                                    const struct reasoning_format *think, bool inside)
{
    struct chat_parser *p = mem_try(sizeof *p);
    if (!p) return NULL;
    p->tools = tools;
    p->think = think;
    p->state = think ? START : TEXT;
    p->depth = inside; /* until the reasoning has begun */
    return p;
}

void chat_taken(struct chat_parser *p)
{
    buf_clear(&p->reasoning);
    buf_clear(&p->content);
    for (size_t i = 0; i < p->n_calls; i++) {
        buf_release(&p->call[i].name);
        buf_release(&p->call[i].arguments);
    }
    p->n_calls = 0;
}

void chat_parser_free(struct chat_parser *p)
{
    if (!p) return;
    chat_taken(p);
    buf_release(&p->held);
    buf_release(&p->space);
    buf_release(&p->reasoning);
    buf_release(&p->content);
    mem_free(p->call);
    mem_free(p);
}

static bool is_space(char c)
{
    return c == ' ' || c == '\n' || c == '\t' || c == '\r';
}

static void drop(struct chat_parser *p, size_t n)
{
    memmove(p->held.data, p->held.data + n, p->held.len - n + 1);
    p->held.len -= n;
}

/* Give out n held bytes; white space does not begin a part. */
static void give(struct chat_parser *p, struct buf *to, size_t n, bool trim)
{
    size_t from = 0;
    while (trim && !p->begun && from < n && is_space(p->held.data[from]))
        from++;
    if (n > from) p->begun = true;
    p->failed |= !buf_put(to, p->held.data + from, n - from);
    drop(p, n);
}

/* Where `word` begins in what is held; if it does not, *safe is where its beginning may be at the
 * end. */
static bool find(const struct chat_parser *p, const char *word, size_t *at, size_t *safe)
{
    size_t n = strlen(word), len = p->held.len;
    const char *hit = len >= n ? memmem(p->held.data, len, word, n) : NULL;
    if (hit) return *at = (size_t)(hit - p->held.data), true;
    size_t k = len < n ? len : n - 1;
    while (k > 0 && memcmp(p->held.data + len - k, word, k) != 0)
        k--;
    *safe = len - k;
    return false;
}

static size_t before_space(const struct chat_parser *p, size_t n)
{
    while (n > 0 && is_space(p->held.data[n - 1]))
        n--;
    return n;
}

/* ---- reasoning ---- */

static bool do_start(struct chat_parser *p, bool last)
{
    const char *word = p->think->begin;
    size_t n = strlen(word), i = 0;
    while (i < p->held.len && is_space(p->held.data[i]))
        i++;
    size_t have = p->held.len - i < n ? p->held.len - i : n;
    bool could = !memcmp(p->held.data + i, word, have);
    if (could && have < n && !last) return false;
    bool here = could && have == n;
    if (here) drop(p, i + n);
    p->state = here || p->depth ? THINK : TEXT;
    p->depth = 0;
    return true;
}

static bool do_think(struct chat_parser *p, bool last)
{
    size_t at = 0, safe = 0;
    if (find(p, p->think->end, &at, &safe)) {
        size_t keep = before_space(p, at);
        give(p, &p->reasoning, keep, true);
        drop(p, at - keep + strlen(p->think->end));
        p->reasoning_bytes = p->seen - p->held.len;
        p->begun = false;
        p->state = AFTER;
        return true;
    }
    give(p, &p->reasoning, before_space(p, last ? p->held.len : safe), true);
    if (last) p->reasoning_bytes = p->seen;
    if (last) drop(p, p->held.len);
    return false;
}

static bool do_after(struct chat_parser *p)
{
    size_t i = 0;
    while (i < p->held.len && p->held.data[i] == '\n')
        i++;
    drop(p, i);
    if (p->held.len) p->state = TEXT;
    return p->held.len > 0;
}

/* ---- content, and where a call begins ---- */

static bool do_text(struct chat_parser *p, bool last)
{
    const struct tool_format *f = p->tools;
    size_t len = p->held.len, first = len, safe = len, at = 0, part = 0;
    if (!f) {
        give(p, &p->content, len, false);
        return false;
    }
    const char *mark[] = {f->begin, f->open, f->close}, *hit = NULL;
    for (size_t i = 0; i < sizeof mark / sizeof mark[0]; i++) {
        if (!*mark[i]) continue;
        if (!find(p, mark[i], &at, &part)) {
            if (part < safe) safe = part;
        } else if (!hit || at < first) {
            first = at;
            hit = mark[i];
        }
    }
    if (hit) { /* open and close say nothing themselves */
        size_t keep = before_space(p, first);
        give(p, &p->content, keep, p->n_begun > 0);
        buf_clear(&p->space);
        p->failed |= !buf_put(&p->space, p->held.data, first - keep);
        drop(p, first - keep + strlen(hit));
        p->scanned = 0;
        if (hit == f->begin) p->state = HEAD;
        return true;
    }
    if (last) safe = len;
    if (!last || p->n_begun > 0) safe = before_space(p, safe);
    give(p, &p->content, safe, p->n_begun > 0);
    if (last) drop(p, p->held.len);
    return false;
}

/* ---- calls ---- */

static struct call_piece *new_piece(struct chat_parser *p)
{
    if (p->n_calls == p->cap_calls) {
        size_t cap = p->cap_calls ? p->cap_calls * 2 : 4;
        struct call_piece *c = mem_retry(p->call, p->cap_calls * sizeof *c, cap * sizeof *c);
        if (!c) return p->failed = true, NULL;
        p->call = c;
        p->cap_calls = cap;
    }
    p->call[p->n_calls] = (struct call_piece){.index = p->n_begun - 1};
    return &p->call[p->n_calls++];
}

static void begin_call(struct chat_parser *p, const char *name, size_t n)
{
    p->n_begun++;
    struct call_piece *c = new_piece(p);
    if (!c) return;
    c->begins = true;
    p->failed |= !buf_put(&c->name, name, n);
}

static void put_arguments(struct chat_parser *p, const char *s, size_t n)
{
    if (!n) return;
    struct call_piece *c = p->n_calls ? &p->call[p->n_calls - 1] : NULL;
    if (!c || c->index != p->n_begun - 1) c = new_piece(p);
    if (c) p->failed |= !buf_put(&c->arguments, s, n);
}

/* It was no call: what was taken for its beginning is content. */
static bool no_call(struct chat_parser *p)
{
    p->failed |= !buf_put(&p->content, p->space.data, p->space.len) ||
                 !buf_puts(&p->content, p->tools->begin);
    p->begun = true;
    p->state = TEXT;
    return true;
}

/* Eats `word` after white space.  1: it was there; 0: it may be, when more comes; -1: no. */
static int eat(const struct chat_parser *p, size_t *at, const char *word)
{
    while (*at < p->held.len && is_space(p->held.data[*at]))
        ++*at;
    for (; *word; word++, ++*at) {
        if (*at >= p->held.len) return 0;
        if (p->held.data[*at] != *word) return -1;
    }
    return 1;
}

/* The usual order: {"name": "...", "arguments": and here the value begins.  As eat. */
static int json_head(struct chat_parser *p, size_t *value, size_t *name, size_t *name_end)
{
    size_t at = 0;
    int r;
    if ((r = eat(p, &at, "{")) != 1 || (r = eat(p, &at, "\"name\"")) != 1 ||
        (r = eat(p, &at, ":")) != 1 || (r = eat(p, &at, "\"")) != 1)
        return r;
    *name = at - 1;
    for (; at < p->held.len && p->held.data[at] != '"'; at++)
        if (p->held.data[at] == '\\') at++;
    if (at >= p->held.len) return 0;
    *name_end = ++at;
    if ((r = eat(p, &at, ",")) != 1) return r;
    size_t key = at;
    if ((r = eat(p, &key, "\"arguments\"")) < 0) {
        key = at;
        r = eat(p, &key, "\"parameters\"");
    }
    if (r != 1) return r;
    at = key;
    if ((r = eat(p, &at, ":")) != 1) return r;
    while (at < p->held.len && is_space(p->held.data[at]))
        at++;
    *value = at;
    return at < p->held.len ? 1 : 0;
}

static bool begin_named(struct chat_parser *p, const char *quoted, size_t n)
{
    json_t *s = json_loadb(quoted, n, JSON_DECODE_ANY | JSON_ALLOW_NUL, NULL);
    if (json_is_string(s)) begin_call(p, json_string_value(s), json_string_length(s));
    bool ok = json_is_string(s);
    json_decref(s);
    return ok;
}

static bool start_arguments(struct chat_parser *p, size_t value)
{
    drop(p, value);
    p->depth = 0;
    p->in_string = p->escaped = false;
    p->state = ARGUMENTS;
    return true;
}

/* A whole call in any order of its keys. */
static bool whole_call(struct chat_parser *p, size_t n)
{
    json_t *v = json_loadb(p->held.data, n, JSON_ALLOW_NUL, NULL),
           *name = json_object_get(v, "name");
    json_t *args = json_object_get(v, "arguments");
    if (!args) args = json_object_get(v, "parameters");
    bool ok = json_is_string(name);
    if (ok) {
        char *text = args ? json_dumps(args, JSON_ENCODE_ANY) : NULL;
        begin_call(p, json_string_value(name), json_string_length(name));
        put_arguments(p, text ? text : "{}", text ? strlen(text) : 2);
        free(text);
        drop(p, n);
        p->state = TAIL;
    }
    json_decref(v);
    return ok ? true : no_call(p);
}

static bool do_wait(struct chat_parser *p, bool last)
{
    const char *end = p->tools->end;
    size_t n = strlen(end), from = p->scanned;
    const char *hit =
        p->held.len >= from + n ? memmem(p->held.data + from, p->held.len - from, end, n) : NULL;
    p->scanned = p->held.len >= n ? p->held.len - n + 1 : 0;
    if (!hit && !last) return false;
    return whole_call(p, hit ? (size_t)(hit - p->held.data) : p->held.len);
}

static bool do_head(struct chat_parser *p, bool last)
{
    const struct tool_format *f = p->tools;
    size_t at = 0, safe = 0, name = 0, name_end = 0, fence = 0;
    if (f->sep) {
        bool sep = find(p, f->sep, &at, &safe),
             named = sep && find(p, f->fence, &fence, &safe) && fence > at;
        name = at + (sep ? strlen(f->sep) : 0);
        if (named) {
            begin_call(p, p->held.data + name, fence - name);
            return start_arguments(p, fence + strlen(f->fence));
        }
        return last || p->held.len > 4096 ? no_call(p) : false;
    }
    int r = json_head(p, &at, &name, &name_end);
    if (r == 1)
        return begin_named(p, p->held.data + name, name_end - name) ? start_arguments(p, at)
                                                                    : no_call(p);
    if (r == 0 && !last) return false;
    p->state = WAIT;
    return true;
}

/* The value is over where its outermost bracket closes; one without brackets, at a comma or a
 * closing bracket. */
static bool do_arguments(struct chat_parser *p)
{
    size_t i = 0;
    bool over = false;
    for (; i < p->held.len && !over; i++) {
        char c = p->held.data[i];
        if (p->escaped) {
            p->escaped = false;
        } else if (p->in_string) {
            p->escaped = c == '\\';
            p->in_string = c != '"';
            over = c == '"' && p->depth == 0;
        } else if (p->depth == 0 && (c == ',' || c == '}' || c == ']' || is_space(c))) {
            break;
        } else {
            p->in_string = c == '"';
            p->depth += (c == '{' || c == '[') - (c == '}' || c == ']');
            over = p->depth == 0 && (c == '}' || c == ']');
        }
    }
    over |= i < p->held.len;
    put_arguments(p, p->held.data, i);
    drop(p, i);
    if (over) p->state = TAIL;
    return over;
}

static bool do_tail(struct chat_parser *p, bool last)
{
    size_t at = 0, safe = 0;
    bool end = find(p, p->tools->end, &at, &safe);
    drop(p, end ? at + strlen(p->tools->end) : last ? p->held.len : safe);
    if (end) p->state = TEXT;
    if (end) p->begun = false;
    return end;
}

static bool advance(struct chat_parser *p, bool last)
{
    switch (p->state) {
    case START: return do_start(p, last);
    case THINK: return do_think(p, last);
    case AFTER: return do_after(p);
    case TEXT: return do_text(p, last);
    case HEAD: return do_head(p, last);
    case WAIT: return do_wait(p, last);
    case ARGUMENTS: return do_arguments(p);
    default: return do_tail(p, last);
    }
}

void chat_parse(struct chat_parser *p, const char *text, size_t n, bool last)
{
    p->failed |= !buf_put(&p->held, text, n);
    p->seen += n;
    while (!p->failed && advance(p, last)) {
    }
    p->failed |= p->content.failed || p->reasoning.failed;
}
