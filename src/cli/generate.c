/* generate.c - `moult generate`: one prompt, in this process, streamed to standard output. */
#include "base/clock.h"
#include "base/mem.h"
#include "cli/commands.h"
#include "cli/load.h"
#include "cli/numerics.h"
#include "cli/options.h"
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>

#define PROMPT_BYTES ((size_t)64 << 20)

struct args {
    const char *model, *tokenizer_path, *prompt, *isa, *quantization, *moe_backend, *act_format;
    struct numerics numerics; /* from the last two */
    int64_t max_new, seed, top_k, threads, context_length;
    double temperature, top_p, min_p;
    bool chat, ignore_eos, dummy;
};

#define AT(f) offsetof(struct args, f)
static const struct opt generate_opts[] = {
    {"model-path", "model", OPT_HONOURED, OPT_STRING, AT(model), NULL, 0, 0, NULL,
     "model folder, or org/name in the local Hub cache (also --model)", NULL},
    {"tokenizer-path", NULL, OPT_HONOURED, OPT_STRING, AT(tokenizer_path), NULL, 0, 0, NULL,
     "folder of the tokenizer [the model's]", NULL},
    {"prompt", NULL, OPT_HONOURED, OPT_STRING, AT(prompt), NULL, 0, 0, NULL,
     "text [standard input]", NULL},
    {"chat", NULL, OPT_HONOURED, OPT_FLAG, AT(chat), NULL, 0, 0, NULL,
     "the prompt is one user turn of a chat", NULL},
    {"max-new-tokens", NULL, OPT_HONOURED, OPT_INT, AT(max_new), "256", 1, 1 << 30, NULL, "at most",
     NULL},
    {"temperature", NULL, OPT_HONOURED, OPT_REAL, AT(temperature), "0", 0, 100, NULL, "0: greedy",
     NULL},
    {"top-k", NULL, OPT_HONOURED, OPT_INT, AT(top_k), "-1", -1, 1 << 30, NULL, "-1: all", NULL},
    {"top-p", NULL, OPT_HONOURED, OPT_REAL, AT(top_p), "1", 1e-9, 1, NULL, "nucleus", NULL},
    {"min-p", NULL, OPT_HONOURED, OPT_REAL, AT(min_p), "0", 0, 1, NULL, "least share of the best",
     NULL},
    {"seed", NULL, OPT_HONOURED, OPT_INT, AT(seed), "-1", -1, 9e15, NULL, "-1: a fresh one", NULL},
    {"ignore-eos", NULL, OPT_HONOURED, OPT_FLAG, AT(ignore_eos), NULL, 0, 0, NULL,
     "go on past the end token", NULL},
    {"context-length", NULL, OPT_HONOURED, OPT_INT, AT(context_length), NULL, 1, 1 << 30, NULL,
     "tokens [the model's]", NULL},
    {"threads", NULL, OPT_HONOURED, OPT_INT, AT(threads), NULL, 1, 1024, NULL,
     "compute threads [CPUs it may use]", NULL},
    {"quantization", NULL, OPT_HONOURED, OPT_STRING, AT(quantization), NULL, 0, 0, NULL,
     "format that BF16 projections get while they are loaded [as stored]", NULL},
    {"dummy", NULL, OPT_HONOURED, OPT_FLAG, AT(dummy), NULL, 0, 0, NULL,
     "random weights: the folder needs none", NULL},
    {"isa", NULL, OPT_HONOURED, OPT_CHOICE, AT(isa), NULL, 0, 0, "portable|avx2|avx512|neon",
     "kernels [the best]", NULL},
    NUMERICS_OPTS,
};
const struct opt_command generate_command = {
    "generate", "usage: moult generate --model DIR [--prompt TEXT] [flags]\n", generate_opts,
    sizeof generate_opts / sizeof generate_opts[0]};

/* Wakes the thread that prints. */
struct wake {
    pthread_mutex_t lock;
    pthread_cond_t cond;
    bool news;
};

static void on_news(void *ctx)
{
    struct wake *w = ctx;
    pthread_mutex_lock(&w->lock);
    w->news = true;
    pthread_cond_signal(&w->cond);
    pthread_mutex_unlock(&w->lock);
}

static err_t read_stdin(struct buf *out, struct err *e)
{
    char chunk[4096];
    size_t n;
    out->max = PROMPT_BYTES;
    while ((n = fread(chunk, 1, sizeof chunk, stdin)) > 0)
        if (!buf_put(out, chunk, n))
            return err_set(e, ERR_TOOBIG, "standard input: more than %zu bytes", PROMPT_BYTES);
    return OK;
}

static err_t apply_template(const struct loaded *l, struct buf *text, struct err *e)
{
    if (!l->text.chat) return err_set(e, ERR_INPUT, "--chat: the model has no chat template");
    json_t *vars = json_pack("{s:[{s:s, s:s%}], s:b}", "messages", "role", "user", "content",
                             text->data ? text->data : "", text->len, "add_generation_prompt", 1);
    if (!vars) return err_set(e, ERR_INPUT, "the prompt is not UTF-8");
    if (l->text.bos) json_object_set_new(vars, "bos_token", json_string(l->text.bos));
    if (l->text.eos) json_object_set_new(vars, "eos_token", json_string(l->text.eos));
    struct buf out = {0};
    err_t rc = tmpl_render(l->text.chat, &out, vars, e);
    json_decref(vars);
    if (rc == OK) {
        buf_release(text);
        *text = out;
    } else {
        buf_release(&out);
    }
    return rc;
}

static err_t make_prompt(const struct loaded *l, const struct args *a, struct ids *ids,
                         struct err *e)
{
    struct buf text = {0};
    err_t rc = OK;
    if (!a->prompt)
        rc = read_stdin(&text, e);
    else if (!buf_puts(&text, a->prompt))
        rc = err_set(e, ERR_NOMEM, "out of memory for the prompt");
    if (rc == OK && a->chat) rc = apply_template(l, &text, e);
    if (rc == OK && l->text.add_bos && !a->chat && !ids_push(ids, l->bos_id))
        rc = err_set(e, ERR_NOMEM, "out of memory for the prompt");
    if (rc == OK) rc = tokenizer_encode(l->tokenizer, ids, text.data ? text.data : "", text.len, e);
    buf_release(&text);
    if (rc == OK && ids->n == 0) rc = err_set(e, ERR_INPUT, "the prompt is empty");
    if (rc == OK && ids->n >= (size_t)l->context_len)
        rc = err_set(e, ERR_INPUT, "the prompt has %zu tokens, the context %d", ids->n,
                     l->context_len);
    return rc;
}

static void fill(struct request *r, const struct args *a, const struct loaded *l, struct ids *ids)
{
    snprintf(r->rid, sizeof r->rid, "generate");
    r->prompt = ids->v; /* the request's from now on */
    r->n_prompt = (int32_t)ids->n;
    *ids = (struct ids){0};
    int64_t room = l->context_len - r->n_prompt;
    r->max_new_tokens = (int32_t)(a->max_new < room ? a->max_new : room);
    r->sp.temperature = a->temperature < 1e-6 ? 0.0f : (float)a->temperature;
    r->sp.top_k = (int32_t)a->top_k;
    r->sp.top_p = (float)a->top_p;
    r->sp.min_p = (float)a->min_p;
    r->sp.seed = (uint64_t)a->seed;
    if (a->seed < 0 && getrandom(&r->sp.seed, sizeof r->sp.seed, 0) < 0)
        r->sp.seed = (uint64_t)clock_ns();
    r->ignore_eos = a->ignore_eos;
    r->skip_special = true;
    r->logprob_start = -1;
}

/* Print what comes until the request is done. */
static void follow(struct request *r, struct wake *w)
{
    size_t printed = 0;
    for (bool done = false; !done;) {
        pthread_mutex_lock(&w->lock);
        while (!w->news)
            pthread_cond_wait(&w->cond, &w->lock);
        w->news = false;
        pthread_mutex_unlock(&w->lock);
        pthread_mutex_lock(&r->lock);
        if (r->text_sent > printed)
            fwrite(r->text.data + printed, 1, r->text_sent - printed, stdout);
        printed = r->text_sent > printed ? r->text_sent : printed;
        done = r->done;
        pthread_mutex_unlock(&r->lock);
        fflush(stdout);
    }
    putchar('\n');
}

static err_t generate(struct loaded *l, const struct args *a, struct err *e)
{
    struct ids ids = {0};
    err_t rc = make_prompt(l, a, &ids, e);
    if (rc != OK) {
        ids_release(&ids);
        return rc;
    }
    struct wake w = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, false};
    struct request *r = request_new();
    if (!r) {
        ids_release(&ids);
        return err_set(e, ERR_NOMEM, "out of memory");
    }
    fill(r, a, l, &ids);
    r->notify = on_news;
    r->ctx = &w;
    rc = engine_submit(l->engine, r, e);
    if (rc == OK) {
        follow(r, &w);
        double prefill = (double)(r->t_first - r->t_submit) * 1e-9;
        double decode = (double)(r->t_end - r->t_first) * 1e-9;
        fprintf(stderr, "prompt %d tokens in %.3f s; output %d tokens, %.1f tok/s\n", r->n_prompt,
                prefill, r->n_output, decode > 0 ? (r->n_output - 1) / decode : 0.0);
        if (r->finish == FINISH_ABORT) rc = err_set(e, ERR_SYSTEM, "%s", r->finish_message);
    }
    engine_stop(l->engine, 0); /* no notify after this: w may go */
    l->engine = NULL;
    request_unref(r);
    return rc;
}

static err_t run(const struct args *a, struct err *e)
{
    struct loaded l = {.bos_id = -1};
    struct load_options o = {.model = a->model,
                             .tokenizer_path = a->tokenizer_path,
                             .context_len = a->context_length,
                             .max_running = 1,
                             .chunk = 2048,
                             .threads = a->threads,
                             .isa = a->isa,
                             .dummy = a->dummy,
                             .quantization = a->quantization,
                             .numerics = a->numerics,
                             .weight_version = "default"};
    err_t rc = load_headers(&l, &o, e);
    if (rc == OK) rc = numerics_check(&l, &o.numerics, e);
    if (rc == OK) rc = load_weights(&l, &o, e);
    if (rc == OK) rc = load_engine(&l, &o, e);
    if (rc == OK) rc = generate(&l, a, e);
    if (l.engine) engine_stop(l.engine, 0);
    load_release(&l);
    return rc;
}

int cmd_generate(int argc, char **argv)
{
    struct args a = {0};
    struct buf text = {0};
    struct err e = {0};
    options_t got = options_parse(&generate_command, argc, argv, &a, &text, &e);
    if (got == OPTIONS_HELP) {
        options_help(&generate_command, &text);
        fputs(text.data ? text.data : "", stdout);
    } else if (got == OPTIONS_RUN && !a.model) {
        (void)err_set(&e, ERR_INPUT, "--model is required; see moult generate --help");
        got = OPTIONS_ERROR;
    }
    if (got == OPTIONS_RUN &&
        numerics_parse(&a.numerics, a.moe_backend, a.act_format, &text, &e) != OK)
        got = OPTIONS_ERROR;
    if (got == OPTIONS_RUN && text.len)
        fprintf(stderr, "warning: accepted, without effect here:%s\n", text.data);
    buf_release(&text);
    if (got == OPTIONS_RUN && run(&a, &e) != OK) {
        fprintf(stderr, "moult generate: %s\n", e.msg);
        return 1;
    }
    if (got == OPTIONS_ERROR) fprintf(stderr, "moult generate: %s\n", e.msg);
    return got == OPTIONS_ERROR ? 2 : 0;
}
