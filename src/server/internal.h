/*
 * internal.h - what the files of the server share.
 *
 * An exchange (struct xchg) is one HTTP request.  The I/O thread collects its body, suspends the
 * connection and gives it to a worker; the worker's handler either fills the reply at once or starts a
 * generation.  Notifies of the engine then make a worker build the reply (not streamed), or wake the content
 * reader (streamed).  References: the connection, each submitted request, each queue entry.
 * `m` guards the flags; it is never held while a request's lock is taken.
 */
#ifndef SERVER_INTERNAL_H
#define SERVER_INTERNAL_H

#include "base/buf.h"
#include "server/json.h"
#include "server/metrics.h"
#include "server/sampling.h"
#include "server/server.h"
#include "server/watch.h"
#include <microhttpd.h>
#include <pthread.h>
#include <stdatomic.h>

struct xchg;
struct chat_parser;
struct grammar;
struct grammar_spec;
struct token_trie;
enum { M_GET = 1, M_POST = 2, M_PUT = 4 };
/* Who may call: anybody; who has api_key; who has admin_key, if there is one, and such calls name paths below the roots
 * alone.  A row of the table of routes that says nothing does not compile. */
enum who { FOR_ALL, FOR_USERS, FOR_CONTROL };
enum where { RUN_INLINE, RUN_WORKER, RUN_THREAD }; /* THREAD: may block for long */

enum route_flags {
    ROUTE_LOADING = 1, /* answered while the model loads, too */
    ROUTE_OPENAI = 2,  /* Content-Type is checked */
    ROUTE_LATER =
        4, /* the handler calls xchg_ready, or a generation does; else its return ends the reply */
    ROUTE_GENERATES = 8, /* refused while --ready-after-update waits */
    ROUTE_BYTES = 16     /* the body may be bytes that are no JSON, up to max_weight_body: body.c */
};

struct route {
    const char *path; /* one that ends with / (but the root) stands for all longer ones */
    int methods;
    enum who who;
    enum where where;
    int flags; /* enum route_flags */
    void (*handle)(struct xchg *x, const json_t *body);
};
const struct route *route_find(const char *path);
const struct route *route_at(size_t i); /* NULL after the last */

/* What /generate has written of a request, in pieces that only grow: a cumulative stream sends them whole with
 * every frame, but each token is put into JSON once. */
struct slot_json {
    struct buf text, ids, logprobs, top; /* inside of the string or list */
    struct buf of, input, input_top, input_of;
};

/* One request of an exchange and how much of it was streamed. */
struct slot {
    struct xchg *x;
    struct request *r;
    int32_t index, sent_ids;
    size_t sent_text;
    bool counted, role_sent, finished;
    struct slot_json json;
    struct chat_parser *parser; /* /v1/chat/completions; made when first needed */
    /* of a stream's ended request, in base64: made by a worker, since it may be large */
    struct buf experts;
    bool to_encode; /* guarded by x->m */
    _Atomic bool encoded;
    /* /v1/completions: where the next token begins in the text, in characters */
    struct detok offsets;
    long long n_chars;
};

struct xchg {
    struct server *s;
    struct MHD_Connection *c;
    const struct route *route;
    _Atomic int refs;
    struct buf body;
    char id[64];
    char caller[64]; /* address of the client; RUN_THREAD */
    char path[1100]; /* /v1/models/{id} has a model's path in it */
    struct bytes {   /* the body of a ROUTE_BYTES, if it is no JSON: mem_* */
        uint8_t *data;
        size_t len, cap;
    } bytes;
    json_t *query; /* arguments in the path, NULL: none */
    bool too_big, no_memory, discard, is_bytes, started, big;
    int fd;
    struct xchg *next_work, *prev_live, *next_live;

    pthread_mutex_t m;
    /* cut: answered by the stop */
    bool suspended, wake, replied, gone, building, encoding, submitted, cut;
    int n_done;

    int status;
    const char *type;
    struct buf out; /* reply, or stream bytes not yet taken */
    size_t out_at;

    /* generation */
    struct slot *slots;
    int32_t n_slots;
    bool list, stream, incremental, return_text, return_prompt, include_usage, echo, chat, failed;
    bool stream_end;
    /* OpenAI routes */
    bool return_meta, return_prompt_ids, each_usage, separate, think_inside;
    const struct tool_format *tools;      /* calls that are looked for; NULL: none */
    const struct reasoning_format *think; /* NULL: none is expected */
    const char *think_end;                /* a grammar begins after it; NULL: at once */
    const char *think_begin;              /* NULL: it has begun */
    struct grammar *tool_grammar;         /* owned; tool_choice demands a call */
    int n_prompts, n_samples;
    char *model;
    int64_t created;
    void (*build)(struct xchg *x);                  /* the whole reply */
    void (*frame)(struct xchg *x, struct slot *sl); /* what is new, as SSE, into x->out */
    void (*last)(struct xchg *x);                   /* before [DONE] */
};

/* Compiled grammars, the last used (constraint.c). */
#define GRAMMARS_KEPT 16
struct grammars {
    pthread_mutex_t m;
    struct token_trie *trie; /* when first needed */
    struct kept_grammar {
        char *key;
        struct grammar *g;
        uint64_t used;
    } kept[GRAMMARS_KEPT];
    uint64_t clock;
};

/* A queue of exchanges and who works on it. */
struct lane {
    struct server *s;
    struct xchg *head, *tail;
    pthread_cond_t cond;
    pthread_t workers[2];
};

struct server {
    struct server_options o;
    struct engine *engine;
    _Atomic bool ready, draining, stopping;
    _Atomic bool woken, daemon_ends; /* http.c */
    _Atomic int n_xchg;              /* not freed; server_stop waits for the last */
    pthread_mutex_t m;               /* lanes, live list, progress */
    struct lane lanes[2];            /* small bodies, big ones */
    struct xchg *live;
    float progress;
    char stage[128];
    bool quit;     /* workers end when their lane is empty */
    int n_threads; /* of RUN_THREAD, running */
    struct watch watch;
    pthread_t thread; /* the daemon's */
    int wake_fd, port;
    unsigned max_connections;
    json_t *preferred; /* options' preferred_sampling; NULL: none */
    struct MHD_Daemon *daemon;
    struct metrics metrics;
    char profile_dir[1024]; /* of the running profile; guarded by m */
    int64_t started;
    struct grammars grammars;
    json_t *snapshot; /* of /weights_checker; NULL: none */
};

/* reply.c */
void put_str(struct buf *b, const char *s, size_t n);   /* quoted JSON */
void put_chars(struct buf *b, const char *s, size_t n); /* the same without the quotes */
void put_real(struct buf *b, double d);                 /* never NaN or inf */
void reply_text(struct xchg *x, int status, const char *type, const char *text);
void put_spans(struct buf *b, const struct request *r); /* [[version, tokens], ...] */
void put_id(char *out, size_t n, const char *prefix);

/* error.c: how a failure is told */
enum error_form {
    ERROR_REPLY, /* the whole reply */
    ERROR_FRAME, /* what a stream says of one of its requests */
    ERROR_KEY,   /* a key is missing or wrong */
    ERROR_MODEL  /* 404: no such model */
};
void error_put(struct buf *b, enum error_form form, int status, const char *message);
/* They drop what the reply had so far. */
void reply_failure(struct xchg *x, enum error_form form, int status, const char *message);
void reply_error(struct xchg *x, int status, const char *message); /* ERROR_REPLY */
void reply_err(struct xchg *x, const struct err *e); /* the same, by the code's status */

/* access.c */
bool access_allowed(const struct xchg *x);              /* it has the key that its route takes */
bool access_refuse(struct xchg *x, const char *method); /* replied */
/* http.c: the daemon and its thread */
err_t http_start(struct server *s, struct err *e) MUST_USE;
void daemon_wake(struct server *s);

/* xchg.c */
struct xchg *xchg_new(struct server *s, struct MHD_Connection *c,
                      const char *url); /* NULL: no memory */
void xchg_wake(struct xchg *x);         /* x->m is held: its connection goes on */
void xchg_unref(struct xchg *x);
void xchg_left(struct xchg *x);     /* its client has */
void xchg_ready(struct xchg *x);    /* the reply is complete: send it */
void xchg_notify(void *slot);       /* a request's notify */
void xchg_encoded(struct slot *sl); /* its last frame may be written now */

/* body.c: a request's body, collected by the I/O thread */
void body_begin(struct xchg *x, const char *method);
void body_add(struct xchg *x, const char *data, size_t n);
bool body_refuse(struct xchg *x); /* replied: it was too large, ... */
void body_release(struct xchg *x);
/* query.c: a field that came as text (in the path, in a file's metadata), as JSON of the type it has in a body */
void query_put(json_t *to, const char *name, const char *value);
void query_read(struct xchg *x); /* into x->query; I/O thread */

/* work.c */
void work_start(struct server *s);
void work_stop(struct server *s); /* when the lanes are empty */
void xchg_queue(struct xchg *x);  /* a worker is to look at it */
void xchg_thread(struct xchg *x); /* a thread of its own is */
void xchg_run(struct xchg *x);    /* the handler, now */

/* gen.c */
#define GEN_MAX_REQUESTS 65536 /* prompts times samples of one call */
/* The exchange's next request, with its sampling parameters, in its next slot: sample `sample` of a prompt, which
 * shares the seed of sample 0.  x->n_prompts is set; the first call sets x->n_samples.  NULL: refused. */
struct request *gen_add(struct xchg *x, const json_t *params, enum sampling_api api, int sample,
                        struct err *e);
err_t gen_prompt(struct xchg *x, struct request *r, const json_t *v, const char *name,
                 struct err *e);
err_t gen_text(struct xchg *x, struct request *r, const char *text, size_t n, bool bos,
               struct err *e);
err_t gen_finish(struct xchg *x, struct request *r, struct err *e); /* length checks and caps */
/* The client's id, "rid_number" where the call has several requests (number < 0: one).  Too long: refused. */
err_t gen_rid(struct request *r, const char *rid, int number, struct err *e) MUST_USE;
void gen_submit(struct xchg *x);
bool gen_failed(struct xchg *x); /* an abort with a status: replied */
void gen_pull(struct xchg *x);   /* new frames of a stream into x->out */
void slot_release(struct slot *sl);
const char *gen_reason(const struct request *r);

/* constraint.c: what the output must be */
/* regex, json_schema and response_format of a request's parameters; a sample after the first has what the first
 * has.  x->tool_grammar, when set, is the one that counts. */
err_t constraint_parse(struct xchg *x, const json_t *params, enum sampling_api api, int sample,
                       struct request *r, struct err *e) MUST_USE;
/* A compiled grammar with a reference for the caller; `key` names the spec and is taken. */
err_t constraint_grammar(struct server *s, char *key, const struct grammar_spec *spec,
                         struct grammar **out, struct err *e) MUST_USE;
void constraint_release(struct server *s);
/* reqlog.c */
void request_log(const struct xchg *x, const struct request *r);

/* api_*.c */
/* The body into x->slots, not yet submitted; x->chat tells the OpenAI routes apart. */
err_t native_parse(struct xchg *x, const json_t *b, struct err *e) MUST_USE;
err_t openai_parse(struct xchg *x, const json_t *b, struct err *e) MUST_USE;
void api_generate(struct xchg *x, const json_t *b);
void api_completions(struct xchg *x, const json_t *b);
void api_chat(struct xchg *x, const json_t *b);
void api_models(struct xchg *x, const json_t *b);
void api_model(struct xchg *x, const json_t *b);
/* native_reply.c */
void native_build(struct xchg *x);
void native_frame(struct xchg *x, struct slot *sl);
void native_encode(struct xchg *x); /* the experts of slots that wait for it */
/* The meta_info of an ended request, as /generate would give it, into x->out. */
void native_meta(struct xchg *x, struct slot *sl);
/* api_tokens.c */
void api_tokenize(struct xchg *x, const json_t *b);
void api_detokenize(struct xchg *x, const json_t *b);
/* chat_render.c: messages through the chat template, with their tools. */
err_t openai_messages(struct xchg *x, const json_t *b, struct buf *text, struct err *e) MUST_USE;
/* api_info.c */
bool waiting_for_update(struct server *s); /* --ready-after-update, and none has succeeded */
void api_health(struct xchg *x, const json_t *b);
void api_model_info(struct xchg *x, const json_t *b);
void api_server_info(struct xchg *x, const json_t *b);
void api_weight_version(struct xchg *x, const json_t *b);
void api_expert_load(struct xchg *x, const json_t *b);
void api_metrics(struct xchg *x, const json_t *b);
void api_loads(struct xchg *x, const json_t *b);
void api_get_load(struct xchg *x, const json_t *b);
/* api_control.c */
/* Fields of every update that say what it does with requests in flight, and refuse_older_version. */
err_t api_in_flight(struct xchg *x, const json_t *b, struct update_options *o,
                    struct err *e) MUST_USE;
const char *api_pause_name(enum pause_mode m); /* NULL: not paused */
void api_pause(struct xchg *x, const json_t *b);
void api_continue(struct xchg *x, const json_t *b);
void api_update_weight_version(struct xchg *x, const json_t *b);
void api_flush(struct xchg *x, const json_t *b);
void api_abort_request(struct xchg *x, const json_t *b);
/* api_profile.c */
void api_start_profile(struct xchg *x, const json_t *b);
void api_stop_profile(struct xchg *x, const json_t *b);
/* api_tensor.c */
void api_update_from_tensor(struct xchg *x, const json_t *b);
void api_begin_update(struct xchg *x, const json_t *b);
void api_end_update(struct xchg *x, const json_t *b);
void api_post_process(struct xchg *x, const json_t *b);
void api_multi_gpu(struct xchg *x, const json_t *b); /* what needs it: refused */
/* api_memory.c */
void api_release_memory(struct xchg *x, const json_t *b);
void api_resume_memory(struct xchg *x, const json_t *b);
bool memory_health(struct xchg *x,
                   const struct engine_stats *st); /* replied: no generation is possible now */
/* api_weights.c */
void api_get_weights(struct xchg *x, const json_t *b);
void api_check_weights(struct xchg *x, const json_t *b);
/* api_update.c */
/* What came of an update that began at t0 (clock_ns); without `success` a 400 (or 503 in a stop). */
void reply_updated(struct xchg *x, err_t rc, const struct err *e, const struct update_options *o,
                   const struct update_result *r, int64_t t0);
void api_update_from_disk(struct xchg *x, const json_t *b);
/* api_pull.c */
void api_pull_weights(struct xchg *x, const json_t *b);
void api_stage_from_disk(struct xchg *x, const json_t *b);
void api_commit_weights(struct xchg *x, const json_t *b);
void api_discard_weights(struct xchg *x, const json_t *b);
void api_update_status(struct xchg *x, const json_t *b);

#endif
