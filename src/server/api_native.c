/* api_native.c - /generate: its fields. */
#include "base/mem.h"
#include "server/experts.h"
#include "server/internal.h"
#include <string.h>

enum { MAX_OF = 4096 }; /* ids of token_ids_logprob */

/* Fields that change nothing here (their types are checked), and those that are refused unless they say nothing. */
typedef enum { TYPE_BOOL, TYPE_TEXT, TYPE_LIST, TYPE_OBJECT } json_kind_t;
static const struct {
    const char *name;
    json_kind_t kind;
} ignored[] = {
    {"log_metrics", TYPE_BOOL}, {"no_logs", TYPE_BOOL},         {"routing_key", TYPE_TEXT},
    {"modalities", TYPE_LIST},  {"conversation_id", TYPE_TEXT}, {"custom_labels", TYPE_OBJECT},
};

#define NO_IMAGES  "only text is served"
#define NO_SESSION "there are no sessions; the prefix cache finds what prompts share"
#define NO_DISAGG  "prefill and decode run in one server"
static const struct {
    const char *name, *why;
} refused[] = {
    {"input_embeds", "prompts are text or input_ids"},
    {"image_data", NO_IMAGES},
    {"video_data", NO_IMAGES},
    {"audio_data", NO_IMAGES},
    {"lora_path", "adapters are not served"},
    {"custom_logit_processor", "no Python code is run"},
    {"session_id", NO_SESSION},
    {"session_params", NO_SESSION},
    {"return_hidden_states", "hidden states are not returned"},
    {"return_indexer_topk", "the models served have no indexer"},
    {"return_sampling_mask",
     "masks are not returned; custom_params.return_top_p_token_ids tells what top_p kept"},
    {"return_entropy", "entropies are not returned"},
    {"bootstrap_host", NO_DISAGG},
    {"bootstrap_port", NO_DISAGG},
    {"bootstrap_room", NO_DISAGG},
    {"routed_dp_rank", "there is one rank, 0"},
    {"disagg_prefill_dp_rank", "there is one rank, 0"},
};
#define COUNT(a) (sizeof(a) / sizeof(a)[0])

static bool is_kind(const json_t *v, json_kind_t kind)
{
    switch (kind) {
    case TYPE_BOOL: return json_is_boolean(v);
    case TYPE_TEXT: return json_is_string(v);
    case TYPE_LIST: return json_is_array(v);
    default: return json_is_object(v);
    }
}

/* null, false, 0, "", [], {} and lists of such. */
static bool says_nothing(const json_t *v)
{
    for (size_t i = 0; json_is_array(v) && i < json_array_size(v); i++)
        if (!says_nothing(json_array_get(v, i))) return false;
    return json_is_array(v) || json_is_null(v) || json_is_false(v) ||
           (json_is_integer(v) && !json_integer_value(v)) ||
           (json_is_string(v) && !json_string_length(v)) ||
           (json_is_object(v) && !json_object_size(v));
}

static err_t check_fields(const json_t *b, struct err *e)
{
    static const char *const kinds[] = {"true or false", "a string", "a list", "an object"};
    for (size_t i = 0; i < COUNT(ignored); i++) {
        const json_t *v = json_field(b, ignored[i].name);
        if (v && !is_kind(v, ignored[i].kind))
            return json_bad(e, ignored[i].name, v, kinds[ignored[i].kind]);
    }
    for (size_t i = 0; i < COUNT(refused); i++) {
        const json_t *v = json_field(b, refused[i].name);
        if (v && !says_nothing(v))
            return err_set(e, ERR_INPUT, "%s: not supported: %s", refused[i].name, refused[i].why);
    }
    return OK;
}

/* Fields that may be a list with one value for each prompt. */
static const char *const listed[] = {"return_logprob",        "logprob_start_len",
                                     "top_logprobs_num",      "extra_key",
                                     "return_routed_experts", "routed_experts_start_len"};

/* Field `name` into *one: as it is, or the i-th of its n items. */
static err_t pick(json_t *one, const json_t *b, const char *name, bool per_prompt, int i, int n,
                  struct err *e)
{
    const json_t *v = json_field(b, name);
    if (v && per_prompt) {
        if (json_array_size(v) != (size_t)n)
            return err_set(e, ERR_INPUT, "%s: a list of %zu items for %d prompts", name,
                           json_array_size(v), n);
        v = json_array_get(v, (size_t)i);
    }
    if (v) json_object_set(one, name, (json_t *)(uintptr_t)v);
    return OK;
}

/* The fields of prompt i of n. */
static err_t fields_of(json_t **one, struct xchg *x, const json_t *b, int i, struct err *e)
{
    const json_t *of = json_field(b, "token_ids_logprob"), *first = json_array_get(of, 0);
    err_t rc = OK;
    *one = json_object();
    for (size_t k = 0; !rc && k < COUNT(listed); k++)
        rc = pick(*one, b, listed[k], json_is_array(json_field(b, listed[k])), i, x->n_prompts, e);
    if (!rc)
        rc = pick(*one, b, "token_ids_logprob",
                  first && (json_is_array(first) || json_is_null(first)), i, x->n_prompts, e);
    if (!rc) rc = pick(*one, b, "routed_experts", x->list, i, x->n_prompts, e);
    return rc;
}

static err_t read_logprobs(const json_t *one, const struct config *c, struct request *r,
                           struct err *e)
{
    int64_t start = -1, top = 0;
    const json_t *of = json_field(one, "token_ids_logprob");
    err_t rc = json_get_bool(one, "return_logprob", &r->want_logprobs, e);
    if (!rc) rc = json_get_int(one, "logprob_start_len", -1, INT32_MAX, &start, e);
    if (!rc) rc = json_get_int(one, "top_logprobs_num", 0, SAMPLE_MAX_TOP, &top, e);
    if (!rc && json_array_size(of) > MAX_OF)
        rc = err_set(e, ERR_INPUT, "token_ids_logprob: %zu ids, at most %d are allowed",
                     json_array_size(of), MAX_OF);
    if (!rc && of) rc = json_ids(of, "token_ids_logprob", c->vocab_size, &r->of, &r->n_of, e);
    r->logprob_start = r->want_logprobs ? (int32_t)start : -1;
    r->n_top = r->want_logprobs ? (int32_t)top : 0;
    if (!r->want_logprobs) r->n_of = 0;
    return rc;
}

static err_t read_rid(const json_t *b, int i, int n_total, int at, struct request *r, struct err *e)
{
    const json_t *v = json_field(b, "rid");
    if (!v) return OK;
    bool list = json_is_array(v);
    const json_t *s = list ? json_array_get(v, (size_t)i) : v;
    if (!json_is_string(s))
        return json_bad(e, "rid", s ? s : v, "a string, or a list of one string per prompt");
    if (strlen(json_string_value(s)) != json_string_length(s))
        return err_set(e, ERR_INPUT, "rid: a string with U+0000 is not allowed");
    return gen_rid(r, json_string_value(s), n_total > 1 ? at : -1, e);
}

static err_t read_extras(const json_t *b, const json_t *one, struct request *r, struct err *e)
{
    const char *key = NULL;
    int64_t prio = 0;
    err_t rc = json_get_str(one, "extra_key", &key, e);
    if (!rc && key) {
        r->extra_key = mem_dup_n(key, strlen(key));
        if (!r->extra_key) rc = err_set(e, ERR_NOMEM, "extra_key: out of memory");
    }
    if (!rc) rc = json_get_int(b, "priority", INT32_MIN, INT32_MAX, &prio, e);
    r->priority = (int32_t)prio;
    return rc;
}

/* sampling_params of prompt i over those the server prefers; a new reference. */
static err_t params_of(json_t **out, struct xchg *x, const json_t *b, int i, struct err *e)
{
    const json_t *sp = json_field(b, "sampling_params");
    if (json_is_array(sp)) {
        if (json_array_size(sp) != (size_t)x->n_prompts)
            return err_set(e, ERR_INPUT, "sampling_params: %zu items for %d prompts",
                           json_array_size(sp), x->n_prompts);
        sp = json_array_get(sp, (size_t)i);
        if (json_is_null(sp)) sp = NULL;
    }
    if (sp && !json_is_object(sp)) return json_bad(e, "sampling_params", sp, "an object");
    *out = x->s->preferred ? json_copy(x->s->preferred) : json_object();
    if (sp) json_object_update(*out, (json_t *)(uintptr_t)sp);
    return OK;
}

static err_t fill(struct xchg *x, const json_t *b, const json_t *one, const json_t *prompt,
                  const char *name, int i, int j, struct request *r, struct err *e)
{
    err_t rc;
    bool ids = json_is_array(json_field(b, "rid"));
    int total = ids ? x->n_samples : x->n_samples * x->n_prompts, at = ids ? j : x->n_slots - 1;
    if ((rc = gen_prompt(x, r, prompt, name, e)) ||
        (rc = read_logprobs(one, x->s->o.config, r, e)) || (rc = read_rid(b, i, total, at, r, e)) ||
        (rc = read_extras(b, one, r, e)) || (rc = experts_read(one, x->s->o.config, r, e)))
        return rc;
    return gen_finish(x, r, e);
}

static err_t add_prompt(struct xchg *x, const json_t *b, const json_t *prompt, const char *name,
                        int i, struct err *e)
{
    json_t *sp = NULL, *one = NULL;
    err_t rc = params_of(&sp, x, b, i, e);
    if (!rc) rc = fields_of(&one, x, b, i, e);
    for (int j = 0; !rc && j < (x->n_samples ? x->n_samples : 1); j++) {
        struct request *r = gen_add(x, sp, SAMPLING_NATIVE, j, e);
        rc = r ? fill(x, b, one, prompt, name, i, j, r, e) : e->code;
    }
    json_decref(one);
    json_decref(sp);
    return rc;
}

err_t native_parse(struct xchg *x, const json_t *b, struct err *e)
{
    const json_t *text = json_field(b, "text"), *ids = json_field(b, "input_ids");
    x->build = native_build;
    x->frame = native_frame;
    x->incremental = x->s->o.incremental_streaming;
    err_t rc = check_fields(b, e);
    if (rc) return rc;
    if (!text && !ids)
        return err_set(e, ERR_INPUT, "Either text, input_ids or input_embeds should be provided.");
    if (text && !json_is_string(text) && !json_is_array(text))
        return json_bad(e, "text", text, "a string or a list of strings");
    if (ids && !json_is_array(ids))
        return json_bad(e, "input_ids", ids, "a list of ids or a list of such lists");
    bool nested = ids && json_is_array(json_array_get(ids, 0));
    bool batch = text ? json_is_array(text) : nested;
    if (ids && batch && !nested && text) batch = false;
    const json_t *src = ids ? ids : text;
    const char *name = ids ? "input_ids" : "text";
    if (!json_is_string(src) && !json_array_size(src))
        return err_set(e, ERR_INPUT, "%s cannot be empty.", name);
    if ((rc = json_get_bool(b, "stream", &x->stream, e)) ||
        (rc = json_get_bool(b, "return_prompt_token_ids", &x->return_prompt, e)) ||
        (rc = json_get_bool(b, "return_text_in_logprobs", &x->return_text, e)))
        return rc;
    if (ids && nested && !batch) src = json_array_get(ids, 0);
    x->list = batch;
    x->n_prompts = batch ? (int)json_array_size(src) : 1;
    if (x->n_prompts > 65536)
        return err_set(e, ERR_INPUT, "%s: at most 65536 prompts are allowed", name);
    for (int i = 0; i < x->n_prompts; i++) {
        const json_t *p = batch ? json_array_get(src, (size_t)i) : src;
        if (ids ? !json_is_array(p) : !json_is_string(p))
            return json_bad(e, name, p, ids ? "a list of ids" : "a string");
        if ((rc = add_prompt(x, b, p, name, i, e))) return rc;
    }
    x->list = batch || x->n_samples > 1;
    return OK;
}

void api_generate(struct xchg *x, const json_t *b)
{
    struct err e = {0};
    if (native_parse(x, b, &e)) {
        reply_err(x, &e);
        xchg_ready(x);
        return;
    }
    gen_submit(x);
}
