/*
 * server.h - the HTTP server: native (/generate), OpenAI and admin routes over one engine.
 *
 *     server_start(&s, &options, err);   // listens at once; state loading
 *     server_progress(s, 0.4f, "reading weights");
 *     server_ready(s, engine);           // from here on it serves
 *     server_stop(s);                    // before engine_stop: answers or aborts what is in flight
 *
 * Until server_ready every route but / and /ping answers 503 {"status":"loading",...}.  Tokenizer,
 * template and config may be given late: they are read only after server_ready, so set them with
 * server_set_model before it.  Everything given is borrowed and must outlive server_stop.
 */
#ifndef SERVER_SERVER_H
#define SERVER_SERVER_H

#include "engine/engine.h"
#include "model/config.h"
#include "text/template.h"
#include "text/tokenizer.h"

struct server;
struct tool_format;
struct reasoning_format;
struct server_info;
struct record;

struct server_options {
    const char *host;              /* address or name to bind; NULL: 127.0.0.1 */
    int port;                      /* 0: any free one (server_port tells) */
    const char *served_model_name; /* NULL: model_path */
    const char *model_path, *tokenizer_path;
    const struct tokenizer *tokenizer; /* NULL: ids only */
    const struct tmpl *chat_template;  /* NULL: no chat route */
    const struct config *config;
    const char *bos_token, *eos_token; /* for the template; NULL: undefined there */
    int32_t bos_id;                    /* in front of text prompts if add_bos */
    bool add_bos;
    int32_t context_len;
    struct {
        size_t weights, kv, graphs; /* bytes of memory, of the device where there is one */
        double seconds;             /* that reading the weights took */
    } loaded;
    size_t max_body_bytes; /* 0: 64 MiB */
    int keep_alive_s; /* without a byte, and no request at work: a connection is closed; 0: never */
    uint64_t max_weight_body; /* of /update_weights_from_tensor; 0: 4 GiB */
    const char *api_key;      /* NULL: none asked */
    /* JSON object under each sampling_params of /generate; NULL: none */
    const char *preferred_sampling;
    int stream_interval;      /* tokens from one frame of a stream to the next; below 1: 1 */
    const char *admin_key;    /* the one that control routes take; NULL: api_key */
    const char *const *roots; /* [n_roots] folders where control routes may look (roots.h) */
    size_t n_roots;
    /* Access-Control-Allow-Origin; NULL: other origins' pages may not call */
    const char *cors_origin;
    const char *metrics_prefix;      /* NULL: moult_ */
    bool log_requests;               /* a line for each that ends */
    struct record *record;           /* record.h; NULL: none */
    bool incremental_streaming;      /* /generate streams deltas rather than everything so far */
    enum in_flight update_in_flight; /* of updates that do not say */
    double update_drain_s;           /* the same; 0: no limit */
    bool ready_after_update; /* generation and health answer 503 until an update has succeeded */
    bool cache_report;       /* usage tells cached tokens */
    const struct tool_format *tool_format;           /* chat_parse.h; NULL: tool calls stay text */
    const struct reasoning_format *reasoning_format; /* NULL: reasoning stays text */
    int max_running; /* this and what follows: told in /server_info only */
    bool keep_experts, memory_saver;
    const char *dtype, *load_format, *kv_cache_dtype, *quantization; /* as asked for; NULL: null */
    const struct server_info *info; /* NULL: nothing is told otherwise */
};

/* KEY=VALUE pairs that /server_info tells: in place of what it would say of ranks and addresses, or besides.  VALUE is
 * JSON, or else a string.  ERR_INPUT: no such pair, a key twice, or one that is a fact of the server. */
err_t server_info_new(struct server_info **out, const char *const *pairs, size_t n,
                      struct err *e) MUST_USE;
void server_info_free(struct server_info *s);

err_t server_start(struct server **out, const struct server_options *o, struct err *e) MUST_USE;
int server_port(const struct server *s);
/* While loading: what / how far (0..1).  Any thread. */
void server_progress(struct server *s, float progress, const char *stage);
/* Replaces the model part of the options (tokenizer .. loaded); only before server_ready. */
void server_set_model(struct server *s, const struct server_options *o);
void server_ready(struct server *s, struct engine *engine);
/* From here on new work (every POST and PUT but /abort_request) and health answer 503, so that a router turns
 * away; what is in flight goes on.  Any thread. */
void server_drain(struct server *s);
/* Takes no new work, aborts and answers what is in flight, joins its threads, frees.  An update that is being
 * staged is cancelled.  False: some call (a read that hangs) did not end in a few seconds; it was answered 503, but
 * its thread still uses server and engine, so nothing was freed and all that is left to do is to end the process. */
bool server_stop(struct server *s);

#endif
