/*
 * request.h - one generation request (one sample), shared by a server thread and the engine.
 *
 * The server fills the `in` part, submits (engine.h), and from then on only reads the `out` part
 * under `lock`.  The engine thread appends to `out` under `lock` and then calls notify(ctx) without
 * it: at every step that added tokens and once at the end (`done`).  notify must not block.
 *
 * Ownership: reference-counted; the creator holds one reference, the engine one while it knows the
 * request.  Everything `in` points to belongs to the request and is freed with it.
 *
 * Text: the engine detokenizes as it goes.  text.data[0 .. text_sent) can be given to a client: it ends at
 * a whole character and holds nothing that could be the beginning of a stop string (case C43).  When done,
 * text_sent == text.len and the matched stop is cut off (unless no_stop_trim).  A pattern stops the request at
 * the first token with which the text has a match.
 *
 * Logprob lists: output_logprobs[i] belongs to output_ids[i], always of equal length.  prompt_logprobs
 * covers prompt positions logprob_start .. n_prompt-1; the entry of position 0 of the prompt is
 * meaningless (nothing precedes it) and so is the first one returned (SGLang gives null there).
 */
#ifndef ENGINE_REQUEST_H
#define ENGINE_REQUEST_H

#include "base/buf.h"
#include "model/sample.h"
#include "text/detok.h"
#include "text/grammar.h"
#include "text/stop_regex.h"
#include <pthread.h>
#include <stdatomic.h>

typedef enum {
    FINISH_NONE,
    FINISH_STOP_ID,
    FINISH_STOP_STRING,
    FINISH_LENGTH,
    FINISH_ABORT
} finish_t;

struct top_row { /* the top logprobs of one position */
    int32_t n;
    int32_t *ids; /* [n] */
    float *logprobs;
};

/* Output tokens in a row that one generation of weights drew, under one label.  Neighbours may have the same label:
 * an update that gave none. */
struct version_span {
    uint64_t id; /* grows with every commit and every change of the label */
    int32_t n;   /* tokens */
    char version[128];
};

struct request {
    /* in */
    char rid[128];
    int32_t *prompt;
    int32_t n_prompt;
    struct sample_params sp; /* seed already drawn if the client gave none */
    int32_t *bias_ids;       /* owned; sp.bias_ids points here */
    float *bias;
    int32_t max_new_tokens; /* already capped to the context; 0: prefill only */
    int32_t min_new_tokens;
    int32_t *stop_ids; /* explicit stop_token_ids */
    int32_t n_stop_ids;
    char **stops; /* stop strings, not empty */
    size_t *stop_bytes;
    int32_t n_stops;
    /* [n_regexes]; their patterns follow the stop strings in `stops` */
    struct stop_regex **regexes;
    int32_t n_regexes;
    bool ignore_eos, skip_special, no_stop_trim;
    bool want_logprobs;
    int32_t logprob_start; /* -1: no prompt logprobs; else first prompt position */
    int32_t n_top;
    int32_t *of; /* [n_of] ids whose logprobs are wanted at every position */
    int32_t n_of;
    bool want_kept; /* ids that the filters left at each output position (sample.h) */
    int32_t priority;
    int32_t stream_interval; /* the server's: tokens from one frame of a stream to the next */
    char *extra_key;         /* namespaces the prefix cache; NULL: none */
    /* owned reference; what the output must be; NULL: anything.  Then ignore_eos is false: where
       the grammar is whole the output may end */
    struct grammar *grammar;
    bool want_experts;
    int32_t experts_start; /* position of the first row wanted */
    int16_t *forced;       /* [n_forced][layers][top_k]: experts of the prompt's first tokens */
    int32_t n_forced;
    void (*notify)(void *ctx);
    void *ctx;

    /* out, guarded by lock */
    pthread_mutex_t lock;
    int32_t *output_ids;
    float *output_logprobs;
    struct top_row *output_top; /* if n_top */
    float *output_of;           /* [n_output][n_of] */
    /* int32: ids of all positions, and where each position's end in them */
    struct buf kept, kept_ends;
    int32_t n_output;
    float *prompt_logprobs; /* [n_prompt - logprob_start], complete when prompt_done */
    struct top_row *prompt_top;
    float *prompt_of; /* [n_prompt - logprob_start][n_of] */
    bool prompt_done;
    struct buf text;
    size_t text_sent;
    bool has_experts;      /* when done: asked for, and all rows were there */
    int32_t n_expert_rows; /* n_prompt + n_output - 1 - experts_start, at least 0 */
    uint8_t *experts;      /* rows of routing.h */
    bool done;
    finish_t finish;
    int32_t matched_id;   /* FINISH_STOP_ID */
    int32_t matched_stop; /* FINISH_STOP_STRING: index into stops (a pattern: n_stops and above) */
    char finish_message[256]; /* FINISH_ABORT */
    int finish_status;        /* FINISH_ABORT: 0, or an HTTP status the request failed with */
    int32_t cached_tokens, num_retractions, n_chunks; /* n_chunks: prefill pieces */
    char weight_version[128];                         /* at completion */
    struct version_span *spans; /* of output_ids, in order; the n add up to n_output */
    int32_t n_spans;
    int64_t t_submit, t_admit, t_first, t_end; /* clock_ns; t_admit: first admission, 0: never */

    /* engine's own */
    _Atomic int refs;
    struct seq *seq;
    struct detok detok;
    struct request *next; /* inbox */
};

struct request *request_new(void); /* zeroed but: lock, refs 1, neutral sp; NULL: no memory */
void request_ref(struct request *r);
void request_unref(struct request *r);

#endif
