/*
 * Any bytes as the body of a generating call; the first byte chooses the route.  What is accepted
 * is given tokens as the engine gives them (engine/output.h) and is answered both ways: the plain
 * reply and every frame of the stream must be strict JSON, and the stream must say the same text.
 */
#include "base/mem.h"
#include "engine/output.h"
#include "server/internal.h"
#include "tiny_tokenizer.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

enum { VOCAB = 267, MAX_SLOTS = 6, MAX_TOKENS = 12 };
static const char chat[] =
    "{% for m in messages %}<|end|>{{ m.role }}\n{{ m.content }}{% endfor %}";

static struct config config = {.vocab_size = VOCAB, .n_eos = 1, .eos = {265}};
static struct server server = {
    .o = {.model_path = "m", .config = &config, .context_len = 64, .bos_id = 1}};

static void setup(void)
{
    struct tmpl *t = NULL;
    struct err e;
    CHECK(tmpl_parse(&t, chat, sizeof chat - 1, &e) == OK);
    server.o.chat_template = t;
    server.o.tokenizer = tiny_tokenizer(0);
    config.gen_temperature = config.gen_top_p = config.gen_min_p = config.gen_repetition_penalty =
        NAN;
}

static uint32_t next_random(uint32_t *seed)
{
    return *seed = *seed * 1664525u + 1013904223u;
}

static void score_prompt(struct seq *q, struct request *r)
{
    struct sample_output o = {
        .logprob = -1.5f, .n_top = r->n_top < 2 ? r->n_top : 2, .top_ids = {7, 265}};
    if (r->logprob_start < 0) return;
    size_t n = (size_t)(r->n_prompt - r->logprob_start);
    r->prompt_logprobs = mem_alloc((n + 1) * sizeof(float));
    if (r->n_of > 0) {
        r->prompt_of = mem_alloc((n + 1) * (size_t)r->n_of * sizeof(float));
        o.of = mem_alloc((size_t)r->n_of * sizeof(float));
    }
    if (r->n_top > 0) r->prompt_top = mem_alloc((n + 1) * sizeof *r->prompt_top);
    for (int32_t p = r->logprob_start + 1; p < r->n_prompt; p++)
        CHECK(output_score(q, p, &o));
    mem_free(o.of);
    r->prompt_done = true;
}

/* One more token for the slot, or the end. */
static void advance(struct slot *sl, struct seq *q, uint32_t *seed)
{
    struct request *r = sl->r;
    if (r->done) return;
    struct sample_output o = {
        .id = (int32_t)(next_random(seed) >> 8) % VOCAB, .logprob = SAMPLE_FLOOR, .finite = true};
    o.n_top = r->n_top < 3 ? r->n_top : 3;
    for (int32_t k = 0; k < o.n_top; k++)
        o.top_ids[k] = 1 + (int32_t)(next_random(seed) >> 8) %
                               (VOCAB - 1); /* a key with U+0000 is beyond jansson */
    int32_t kept[] = {o.id, 7};
    if (r->n_of > 0) o.of = mem_alloc((size_t)r->n_of * sizeof(float));
    o.kept = kept;
    o.n_kept = 1 + (int32_t)(next_random(seed) >> 31);
    finish_t f = r->max_new_tokens ? output_token(q, &o, &config) : FINISH_LENGTH;
    mem_free(o.of);
    if (f == FINISH_NONE) return;
    pthread_mutex_lock(&r->lock);
    r->finish = f;
    output_end(q);
    r->done = true;
    pthread_mutex_unlock(&r->lock);
}

static json_t *strict(const char *p, size_t n)
{
    json_error_t je;
    json_t *v = json_loadb(p, n, JSON_ALLOW_NUL | JSON_REJECT_DUPLICATES, &je);
    if (!v) fprintf(stderr, "%s at byte %d of %.*s\n", je.text, je.position, (int)n, p);
    CHECK(v);
    return v;
}

static const json_t *text_of(const json_t *choice)
{
    static const char *const at[] = {"message", "delta"};
    const json_t *t = json_object_get(choice, "text");
    for (int i = 0; !t && i < 2; i++)
        t = json_object_get(json_object_get(choice, at[i]), "content");
    return t; /* not a string in a frame of no text */
}

/* Appends what the frames in x->out say to said[]; an incremental or OpenAI stream adds, a
 * cumulative one replaces. */
static void read_frames(struct xchg *x, struct buf *said, bool native)
{
    char *p = x->out.data, *end;
    for (; p && *p; p = end + 2) {
        end = strstr(p, "\n\n");
        CHECK(end && !strncmp(p, "data: ", 6));
        if (!strncmp(p, "data: [DONE]", 12)) continue;
        json_t *v = strict(p + 6, (size_t)(end - p) - 6);
        const json_t *list = json_object_get(v, "choices"),
                     *c = native ? v : json_array_get(list, 0);
        size_t i = (size_t)json_integer_value(json_object_get(c, "index"));
        if (c) {
            CHECK(i < MAX_SLOTS);
            if (native && !x->incremental) buf_clear(&said[i]);
            if (json_is_string(text_of(c)))
                buf_put(&said[i], json_string_value(text_of(c)), json_string_length(text_of(c)));
        }
        json_decref(v);
    }
    buf_clear(&x->out);
}

static void answer(struct xchg *x, bool native, uint32_t seed)
{
    struct seq q[MAX_SLOTS] = {0};
    struct buf said[MAX_SLOTS] = {0};
    bool stream = x->stream;
    x->stream = true;
    for (int32_t i = 0; i < x->n_slots; i++) {
        struct request *r = x->slots[i].r;
        q[i] = (struct seq){.r = r,
                            .n_prompt = r->n_prompt,
                            .max_new =
                                r->max_new_tokens < MAX_TOKENS ? r->max_new_tokens : MAX_TOKENS};
        memcpy(r->weight_version, "v", 2);
        CHECK(output_init(&q[i], server.o.tokenizer));
        score_prompt(&q[i], r);
    }
    while (!x->stream_end) {
        for (int32_t i = 0; i < x->n_slots; i++)
            if (next_random(&seed) >> 30) advance(&x->slots[i], &q[i], &seed);
        gen_pull(x);
        CHECK(!x->out.failed);
        read_frames(x, said, native);
    }
    for (int32_t i = 0; i < x->n_slots; i++) {
        struct slot *sl = &x->slots[i], fresh = {.x = x, .r = sl->r, .index = i};
        sl->r = NULL;
        slot_release(sl);
        *sl = fresh;
        output_release(&q[i]);
        mem_free(q[i].ids);
    }
    x->stream = false;
    x->build(x);
    json_t *v = strict(x->out.data, x->out.len);
    for (int32_t i = 0; i < x->n_slots; i++) {
        const json_t *list = native ? v : json_object_get(v, "choices");
        const json_t *c = json_is_array(list) ? json_array_get(list, (size_t)i) : list;
        CHECK(json_is_string(text_of(c)) && json_string_length(text_of(c)) == said[i].len);
        CHECK(!said[i].len || !memcmp(json_string_value(text_of(c)), said[i].data, said[i].len));
        buf_release(&said[i]);
    }
    json_decref(v);
    x->stream = stream;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    struct err e;
    if (!server.o.tokenizer) setup();
    if (n < 1) return 0;
    json_t *b = json_parse_object((const char *)data + 1, n - 1, &e);
    if (!b) return 0;
    struct xchg x = {.s = &server, .chat = data[0] & 2};
    bool native = !(data[0] & 3);
    server.o.incremental_streaming = data[0] & 4;
    uint32_t seed = 1;
    for (size_t i = 0; i < n; i++)
        seed = seed * 31 + data[i];
    err_t rc = native ? native_parse(&x, b, &e) : openai_parse(&x, b, &e);
    if (rc == OK && x.n_slots <= MAX_SLOTS) answer(&x, native, seed);
    for (int32_t i = 0; i < x.n_slots; i++)
        slot_release(&x.slots[i]);
    mem_free(x.slots);
    mem_free(x.model);
    buf_release(&x.out);
    json_decref(b);
    return 0;
}
