/* grammar_json.c - the parts of JSON texts. */
#include "text/grammar_build.h"

#include "base/mem.h"
#include "text/utf8.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int32_t patch(struct gbuild *b, int32_t loop, int32_t body)
{
    if (b->rc == OK) b->node[loop].a = body;
    return loop;
}

static int32_t put_hex(struct gbuild *b, unsigned lo, unsigned hi,
                       int32_t next) /* a digit in lo..hi */
{
    int32_t r = -1;
    if (hi > 9) {
        unsigned from = lo > 10 ? lo - 10 : 0;
        r = gb_split(b, gb_range(b, 'a' + from, 'a' + hi - 10, next),
                     gb_range(b, 'A' + from, 'A' + hi - 10, next));
    }
    if (lo > 9) return r;
    int32_t d = gb_range(b, '0' + lo, '0' + (hi > 9 ? 9 : hi), next);
    return r < 0 ? d : gb_split(b, d, r);
}

/* \uXXXX of a scalar value: no lone surrogates. */
static int32_t put_unicode(struct gbuild *b, int32_t next)
{
    int32_t two = put_hex(b, 0, 15, put_hex(b, 0, 15, next));
    int32_t low = gb_bytes(b, "\\u", 2, put_hex(b, 13, 13, put_hex(b, 12, 15, two)));
    low = put_hex(b, 0, 15, put_hex(b, 0, 15, low)); /* the end of the first half */
    int32_t high = put_hex(b, 8, 11, low), plain = put_hex(b, 0, 7, two),
            any = put_hex(b, 0, 15, two);
    int32_t d = put_hex(b, 13, 13, gb_split(b, plain, high));
    int32_t r = gb_split(b, put_hex(b, 0, 12, any), gb_split(b, put_hex(b, 14, 15, any), d));
    return gb_bytes(b, "\\u", 2, r);
}

static int32_t rule_char(struct gbuild *b)
{
    static const char escaped[] = "\"\\/bfnrt";
    struct crange plain[] = {{0x20, 0x21}, {0x23, 0x5b}, {0x5d, 0x10ffff}};
    struct cset set = {.v = plain, .n = 3};
    int32_t end = gb_end(b), r = gb_split(b, gb_chars(b, &set, end), put_unicode(b, end));
    for (const char *p = escaped; *p; p++) {
        char two[2] = {'\\', *p};
        r = gb_split(b, gb_bytes(b, two, 2, end), r);
    }
    return r;
}

static int32_t rule_ws(struct gbuild *b)
{
    int32_t end = gb_end(b), r = end;
    for (int i = 0; i < 32; i++)
        r = gb_split(b, gb_split(b, gb_range(b, ' ', ' ', r), gb_range(b, '\t', '\t', r)), end);
    return gb_split(b, gb_split(b, gb_range(b, ' ', ' ', end), gb_range(b, '\n', '\n', r)), end);
}

static int32_t rule_string(struct gbuild *b)
{
    int32_t close = gb_range(b, '"', '"', gb_end(b)), loop = gb_split(b, close, close);
    return gb_range(b, '"', '"', patch(b, loop, gb_json(b, RULE_CHAR, loop)));
}

static int32_t rule_value(struct gbuild *b)
{
    static const char *const words[] = {"true", "false", "null"};
    int32_t end = gb_end(b), r = gb_json(b, RULE_STRING, end);
    for (int rule = RULE_NUMBER; rule <= RULE_ARRAY; rule++)
        if (rule != RULE_VALUE && rule != RULE_INTEGER) r = gb_split(b, gb_json(b, rule, end), r);
    for (int i = 0; i < 3; i++)
        r = gb_split(b, gb_bytes(b, words[i], strlen(words[i]), end), r);
    return r;
}

/* `open` ws (item (ws , ws item)*)? ws `close` */
static int32_t rule_list(struct gbuild *b, char open, char close, bool keys)
{
    int32_t last = gb_range(b, (unsigned char)close, (unsigned char)close, gb_end(b));
    int32_t done = gb_json(b, RULE_WS, last), loop = gb_split(b, done, done),
            item = gb_json(b, RULE_VALUE, loop);
    if (keys)
        item = gb_json(b, RULE_STRING,
                       gb_json(b, RULE_WS, gb_range(b, ':', ':', gb_json(b, RULE_WS, item))));
    (void)patch(b, loop, gb_json(b, RULE_WS, gb_range(b, ',', ',', gb_json(b, RULE_WS, item))));
    int32_t first = gb_json(b, RULE_WS, gb_split(b, item, last));
    return gb_range(b, (unsigned char)open, (unsigned char)open, first);
}

static void make_rules(struct gbuild *b)
{
    struct gnumber any = {0}, whole = {.integer = true};
    b->json = b->n_rules;
    for (int i = 0; i < N_JSON_RULES; i++)
        (void)gb_rule(b);
    if (b->rc) return;
    int32_t start[N_JSON_RULES] = {
        [RULE_WS] = rule_ws(b),
        [RULE_CHAR] = rule_char(b),
        [RULE_STRING] = rule_string(b),
        [RULE_NUMBER] = gb_number(b, &any, gb_end(b)),
        [RULE_INTEGER] = gb_number(b, &whole, gb_end(b)),
        [RULE_VALUE] = rule_value(b),
        [RULE_OBJECT] = rule_list(b, '{', '}', true),
        [RULE_ARRAY] = rule_list(b, '[', ']', false),
    };
    for (int i = 0; i < N_JSON_RULES; i++)
        b->rule[b->json + i] = start[i];
}

int32_t gb_json(struct gbuild *b, int rule, int32_t next)
{
    if (b->rc) return 0;
    if (b->json < 0) make_rules(b);
    return gb_call(b, b->json + rule, next);
}

/* How a character is written inside of a string: itself, or the one escape that it needs. */
static int32_t put_escaped(struct gbuild *b, uint32_t c, int32_t next)
{
    static const char from[] = "\b\f\n\r\t\"\\", to[] = "bfnrt\"\\";
    char text[8];
    const char *known = c ? strchr(from, (int)c) : NULL;
    if (known)
        snprintf(text, sizeof text, "\\%c", to[known - from]);
    else
        snprintf(text, sizeof text, "\\u%04x", c);
    return gb_bytes(b, text, strlen(text), next);
}

int32_t gb_json_chars(struct gbuild *b, const struct cset *s, int32_t next)
{
    struct cset plain = {0};
    int32_t r = -1;
    for (int32_t i = 0; i < s->n && b->rc == OK; i++) {
        uint32_t from = s->v[i].lo;
        for (uint32_t c = from; c <= s->v[i].hi && c <= '\\'; c++) {
            if (c >= 0x20 && c != '"' && c != '\\') continue;
            int32_t one = put_escaped(b, c, next);
            r = r < 0 ? one : gb_split(b, one, r);
            if (c > from) (void)cset_add(b, &plain, from, c - 1);
            from = c + 1;
        }
        if (from <= s->v[i].hi) (void)cset_add(b, &plain, from, s->v[i].hi);
    }
    if (plain.n > 0 || r < 0) {
        int32_t p = gb_chars(b, &plain, next);
        r = r < 0 ? p : gb_split(b, p, r);
    }
    cset_release(&plain);
    return r;
}

int32_t gb_json_text(struct gbuild *b, const char *s, size_t n, int32_t next)
{
    for (size_t i = n; i-- > 0 && b->rc == OK;) {
        unsigned char c = (unsigned char)s[i];
        next =
            c < 0x20 || c == '"' || c == '\\' ? put_escaped(b, c, next) : gb_range(b, c, c, next);
    }
    return next;
}

int32_t gb_literal(struct gbuild *b, const json_t *v, int32_t next)
{
    if (json_is_string(v)) {
        next = gb_range(b, '"', '"', next);
        next = gb_json_text(b, json_string_value(v), json_string_length(v), next);
        return gb_range(b, '"', '"', next);
    }
    char *text = json_dumps(v, JSON_ENCODE_ANY);
    if (!text) {
        gb_fail(b, ERR_NOMEM, "no memory for the grammar");
        return 0;
    }
    next = gb_bytes(b, text, strlen(text), next);
    free(text);
    return next;
}

int32_t gb_string(struct gbuild *b, int64_t min, int64_t max, int32_t next)
{
    if (min == 0 && max < 0) return gb_json(b, RULE_STRING, next);
    int32_t close = gb_range(b, '"', '"', next), r = close;
    if (max < 0) {
        int32_t loop = gb_split(b, close, close);
        r = patch(b, loop, gb_json(b, RULE_CHAR, loop));
    }
    for (int64_t i = min; i < max && gb_work(b); i++)
        r = gb_split(b, gb_json(b, RULE_CHAR, r), close);
    for (int64_t i = 0; i < min && gb_work(b); i++)
        r = gb_json(b, RULE_CHAR, r);
    return gb_range(b, '"', '"', r);
}

/* ---- keys other than some: a trie over their characters, which are written plainly ---- */

struct keys {
    const char *const *v; /* sorted */
    int32_t n;
};

static int32_t put_plain(struct gbuild *b, const struct cset * not, int32_t next)
{
    struct cset set = {0};
    (void)cset_add(b, &set, 0, 0x1f);
    (void)cset_add(b, &set, '"', '"');
    (void)cset_add(b, &set, '\\', '\\');
    for (int32_t i = 0; not &&i < not ->n; i++)
        (void)cset_add(b, &set, not ->v[i].lo, not ->v[i].hi);
    (void)cset_negate(b, &set);
    int32_t r = gb_chars(b, &set, next);
    cset_release(&set);
    return r;
}

/* The keys from..to share their first `at` bytes, which were written.  `rest`: any more characters.
 */
static int32_t put_others(struct gbuild *b, const struct keys *k, int32_t from, int32_t to,
                          size_t at, int32_t rest, int32_t close)
{
    struct cset seen = {0};
    int32_t r = -1;
    bool ends = false;
    for (int32_t i = from, j; i < to && gb_work(b); i = j) {
        const char *s = k->v[i] + at;
        int bytes = 1;
        j = i + 1;
        if (!*s) {
            ends = true;
            continue;
        }
        uint32_t c = utf8_get(s, &bytes);
        while (j < to && !strncmp(k->v[j] + at, s, (size_t)bytes))
            j++;
        (void)cset_add(b, &seen, c, c);
        if (c < 0x20 || c == '"' || c == '\\') continue; /* never written plainly */
        int32_t one =
            gb_bytes(b, s, (size_t)bytes, put_others(b, k, i, j, at + (size_t)bytes, rest, close));
        r = r < 0 ? one : gb_split(b, one, r);
    }
    int32_t other = put_plain(b, &seen, rest);
    cset_release(&seen);
    r = r < 0 ? other : gb_split(b, other, r);
    return ends ? r : gb_split(b, close, r);
}

static int by_text(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

int32_t gb_other_key(struct gbuild *b, const json_t * not, int32_t next)
{
    size_t n = json_object_size(not );
    const char **v = mem_try_array(n + 1, sizeof *v), *key;
    json_t *unused;
    struct keys k = {v, 0};
    if (!v) {
        gb_fail(b, ERR_NOMEM, "no memory for the grammar");
        return 0;
    }
    json_object_foreach((json_t *)(uintptr_t) not, key, unused)
    {
        if (strlen(key) > 256)
            gb_fail(b, ERR_INPUT, "json_schema: a property name of more than 256 bytes");
        (void)unused;
        v[k.n++] = key;
    }
    qsort(v, (size_t)k.n, sizeof *v, by_text);
    int32_t close = gb_range(b, '"', '"', next), rest = gb_split(b, close, close);
    (void)patch(b, rest, put_plain(b, NULL, rest));
    int32_t r = gb_range(b, '"', '"', b->rc ? 0 : put_others(b, &k, 0, k.n, 0, rest, close));
    mem_free(v);
    return r;
}
