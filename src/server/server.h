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
    size_t max_body_bytes;      /* 0: 64 MiB */
    uint64_t max_weight_body;   /* of /update_weights_from_tensor; 0: 4 GiB */
    const char *api_key;        /* NULL: none asked */
    bool incremental_streaming; /* /generate streams deltas rather than everything so far */
    int max_running;            /* told in /server_info only */
    enum in_flight update_in_flight; /* of updates that do not say */
    double update_drain_s;      /* the same; 0: no limit */
    bool ready_after_update;    /* generation and health answer 503 until an update has succeeded */
};

err_t server_start(struct server **out, const struct server_options *o, struct err *e) MUST_USE;
int server_port(const struct server *s);
/* While loading: what / how far (0..1).  Any thread. */
void server_progress(struct server *s, float progress, const char *stage);
/* Replaces the model part of the options (tokenizer .. context_len); only before server_ready. */
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
