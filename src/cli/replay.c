/*
 * replay.c - `moult replay FILE`: the requests of a record (server/record.h) once more, at their times, and whether
 * each gives what it gave.
 *
 * Seeds that the server had drawn are sent along, streams are asked for whole.  An answer is compared by ids
 * (/generate) or by text; requests that ended by an abort, or that were recorded under several weight versions, may
 * differ, and are counted apart.
 */
#include "base/clock.h"
#include "base/file.h"
#include "base/mem.h"
#include "cli/commands.h"
#include "cli/http_many.h"
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define RECORD_MAX ((size_t)4 << 30)

struct args {
    const char *file, *url, *api_key;
    double speed;
    int64_t parallel;
};

#define AT(field) offsetof(struct args, field)
static const struct opt opts[] = {
    {"file", NULL, OPT_HONOURED, OPT_STRING, AT(file), NULL, 0, 0, NULL,
     "what moult serve --record wrote", NULL},
    {"url", NULL, OPT_HONOURED, OPT_STRING, AT(url), "http://127.0.0.1:30000", 0, 0, NULL,
     "server to ask", NULL},
    {"api-key", NULL, OPT_HONOURED, OPT_STRING, AT(api_key), NULL, 0, 0, NULL, "its key", NULL},
    {"speed", NULL, OPT_HONOURED, OPT_REAL, AT(speed), "1", 0, 1e6, NULL,
     "times as fast as recorded; 0: all at once", NULL},
    {"parallel", NULL, OPT_HONOURED, OPT_INT, AT(parallel), "4096", 1, 65536, NULL,
     "requests in flight at most", NULL},
};
const struct opt_command replay_command = {
    .name = "replay",
    .about = "usage: moult replay --file FILE [flags]\n\nSends the requests of a record again and "
             "compares the answers.\n",
    .opts = opts,
    .n_opts = sizeof opts / sizeof opts[0],
};

struct job {
    const char *path;
    json_t *body; /* owned */
    json_t *outs; /* recorded samples, in order of their index; owned */
    double at, took;
};

struct replay {
    const struct args *a;
    json_t *lines; /* the record */
    struct job *jobs;
    char **bodies, **urls;
    double *at;
    int n;
    int same, different, aborted, failed;
    char first[512]; /* what differed or failed first */
    double t0;
};

static err_t read_record(struct replay *r, struct err *e)
{
    struct buf text = {0};
    err_t rc = file_read(&text, r->a->file, RECORD_MAX, e);
    if (rc != OK) return rc;
    r->lines = json_array();
    int number = 1;
    for (char *p = text.data, *next; p && *p; p = next, number++) {
        next = strchr(p, '\n');
        if (!next) break; /* the last line may have been cut */
        *next++ = 0;
        json_t *o = json_loads(p, JSON_ALLOW_NUL, NULL);
        if (!json_is_object(o)) {
            json_decref(o);
            rc = err_set(e, ERR_INPUT, "%s:%d: not a line of a record", r->a->file, number);
            break;
        }
        json_array_append_new(r->lines, o);
    }
    buf_release(&text);
    return rc;
}

/* The sample's place, filled up with null. */
static void put_out(struct job *j, json_t *out)
{
    size_t index = (size_t)json_integer_value(json_object_get(out, "index"));
    if (index > 65536) return;
    while (json_array_size(j->outs) <= index)
        json_array_append_new(j->outs, json_null());
    json_array_set(j->outs, index, out);
}

/* Every sample of a prompt has the seed of its first one. */
static void give_seeds(struct job *j)
{
    bool native = !strcmp(j->path, "/generate");
    json_t *seed = json_object_get(json_array_get(j->outs, 0), "seed");
    json_object_set_new(j->body, "stream", json_false());
    if (!seed) return;
    if (!native) {
        if (!json_object_get(j->body, "seed")) json_object_set(j->body, "seed", seed);
        return;
    }
    json_t *params = json_object_get(j->body, "sampling_params");
    json_t *ids = json_object_get(j->body, "input_ids"), *text = json_object_get(j->body, "text");
    size_t prompts = json_is_array(json_array_get(ids, 0)) ? json_array_size(ids)
                     : json_is_array(text)                 ? json_array_size(text)
                                                           : 0;
    size_t samples = prompts ? json_array_size(j->outs) / prompts : 1;
    json_t *list = json_array();
    for (size_t i = 0; i < (prompts ? prompts : 1); i++) {
        json_t *p = json_deep_copy(json_is_array(params) ? json_array_get(params, i) : params);
        if (!p) p = json_object();
        json_t *s = json_object_get(json_array_get(j->outs, i * (samples ? samples : 1)), "seed");
        if (s && !json_is_integer(json_object_get(p, "sampling_seed")))
            json_object_set(p, "sampling_seed", s);
        json_array_append_new(list, p);
    }
    json_object_set(j->body, "sampling_params", prompts ? list : json_array_get(list, 0));
    json_decref(list);
}

static err_t make_jobs(struct replay *r, struct err *e)
{
    size_t i, n = json_array_size(r->lines);
    json_t *line, *by_id = json_object();
    r->jobs = mem_try_array(n + 1, sizeof *r->jobs);
    if (!r->jobs) return err_set(e, ERR_NOMEM, "no memory for %zu lines", n);
    json_array_foreach(r->lines, i, line)
    {
        const char *in = json_string_value(json_object_get(line, "in")),
                   *out = json_string_value(json_object_get(line, "out"));
        if (in) {
            json_t *text = json_object_get(line, "body");
            struct job j = {.path = json_string_value(json_object_get(line, "path")),
                            .body = json_loadb(json_string_value(text), json_string_length(text),
                                               JSON_ALLOW_NUL, NULL),
                            .at = json_number_value(json_object_get(line, "at")),
                            .outs = json_array()};
            bool good = j.path &&
                        json_is_object(j.body); /* what could not be parsed was refused then, too */
            if (good) json_object_set_new(by_id, in, json_integer(r->n));
            if (good)
                r->jobs[r->n++] = j;
            else
                json_decref(j.body), json_decref(j.outs);
        }
        json_t *k = out ? json_object_get(by_id, out) : NULL;
        if (k) put_out(&r->jobs[json_integer_value(k)], line);
    }
    json_decref(by_id);
    return OK;
}

static err_t make_requests(struct replay *r, struct err *e)
{
    r->bodies = mem_try_array((size_t)r->n + 1, sizeof *r->bodies);
    r->urls = mem_try_array((size_t)r->n + 1, sizeof *r->urls);
    r->at = mem_try_array((size_t)r->n + 1, sizeof *r->at);
    if (!r->bodies || !r->urls || !r->at)
        return err_set(e, ERR_NOMEM, "no memory for %d requests", r->n);
    for (int i = 0; i < r->n; i++) {
        struct job *j = &r->jobs[i];
        struct buf url = {0};
        give_seeds(j);
        char *text = json_dumps(j->body, JSON_COMPACT);
        buf_printf(&url, "%s%s", r->a->url, j->path);
        r->bodies[i] = mem_dup(text ? text : "{}");
        r->urls[i] = mem_dup(url.data);
        r->at[i] = r->a->speed > 0 ? (j->at - r->jobs[0].at) / r->a->speed : 0;
        free(text);
        buf_release(&url);
    }
    return OK;
}

/* One recorded sample against the answer's. */
static bool equal(const struct job *j, const json_t *answer, size_t index, const json_t *out)
{
    if (!strcmp(j->path, "/generate")) {
        const json_t *a = json_is_array(answer) ? json_array_get(answer, index) : answer;
        return json_equal(json_object_get(a, "output_ids"), json_object_get(out, "ids"));
    }
    const json_t *c = json_array_get(json_object_get(answer, "choices"), index);
    const json_t *text = json_object_get(c, "text");
    if (!text) text = json_object_get(json_object_get(c, "message"), "content");
    return json_equal(text, json_object_get(out, "text"));
}

static void note(struct replay *r, int i, const char *what, const char *body)
{
    if (!*r->first)
        snprintf(r->first, sizeof r->first, "request %d (%s): %s %.300s", i + 1, r->jobs[i].path,
                 what, body);
}

static void answered(void *ctx, int i, long status, const char *body, size_t bytes)
{
    struct replay *r = ctx;
    struct job *j = &r->jobs[i];
    json_t *answer = json_loadb(body, bytes, JSON_ALLOW_NUL, NULL);
    size_t k, n = json_array_size(j->outs);
    json_t *out;
    bool same = true, aborted = false;
    j->took = clock_s() - r->t0 - r->at[i];
    json_array_foreach(j->outs, k, out)
    {
        const char *finish = json_string_value(json_object_get(out, "finish"));
        aborted = aborted || !finish || !strcmp(finish, "abort");
        same = same && equal(j, answer, k, out);
    }
    json_decref(answer);
    if ((status == 200) != (n > 0))
        r->failed++, note(r, i, "another status:", body);
    else if (aborted)
        r->aborted++;
    else if (same)
        r->same++;
    else
        r->different++, note(r, i, "another answer:", body);
}

static int by_time(const void *a, const void *b)
{
    double x = ((const struct job *)a)->took, y = ((const struct job *)b)->took;
    return x < y ? -1 : x > y;
}

static err_t run(struct replay *r, struct err *e)
{
    struct curl_dl c = {0};
    err_t rc = read_record(r, e);
    if (rc == OK) rc = make_jobs(r, e);
    if (rc == OK) rc = make_requests(r, e);
    if (rc == OK && !r->n) rc = err_set(e, ERR_INPUT, "%s: holds no requests", r->a->file);
    if (rc == OK) rc = curl_dl_open(&c, e);
    if (rc != OK) return rc;
    struct http_jobs j = {.urls = r->urls,
                          .url = r->a->url,
                          .bearer = r->a->api_key,
                          .bodies = r->bodies,
                          .at = r->at,
                          .n = r->n,
                          .parallel = (int)r->a->parallel,
                          .done = answered,
                          .ctx = r};
    r->t0 = clock_s();
    rc = http_many(&c, &j, e);
    curl_dl_close(&c);
    if (rc != OK) return rc;
    double seconds = clock_s() - r->t0;
    qsort(r->jobs, (size_t)r->n, sizeof *r->jobs, by_time);
    printf("Requests: %d in %.3f s\nSame: %d\nDifferent: %d\nAborted when recorded: %d\nAnother "
           "status: %d\n"
           "Latency: median %.3f s, 99%% %.3f s, longest %.3f s\n",
           r->n, seconds, r->same, r->different, r->aborted, r->failed, r->jobs[r->n / 2].took,
           r->jobs[(int)(0.99 * (r->n - 1))].took, r->jobs[r->n - 1].took);
    if (!r->different && !r->failed) return OK;
    return err_set(e, ERR_STATE, "%d answers differ; the first is %s", r->different + r->failed,
                   r->first);
}

static void release(struct replay *r)
{
    for (int i = 0; i < r->n; i++) {
        json_decref(r->jobs[i].body);
        json_decref(r->jobs[i].outs);
        if (r->bodies) mem_free(r->bodies[i]);
        if (r->urls) mem_free(r->urls[i]);
    }
    mem_free(r->jobs);
    mem_free(r->bodies);
    mem_free(r->urls);
    mem_free(r->at);
    json_decref(r->lines);
}

int cmd_replay(int argc, char **argv)
{
    struct args a = {0};
    struct buf text = {0};
    struct err e = {0};
    options_t got = options_parse(&replay_command, argc, argv, &a, &text, &e);
    if (got == OPTIONS_RUN && !a.file) {
        (void)err_set(&e, ERR_INPUT, "--file is required; see moult replay --help");
        got = OPTIONS_ERROR;
    }
    if (got == OPTIONS_HELP) {
        options_help(&replay_command, &text);
        fputs(text.data ? text.data : "", stdout);
    }
    if (got == OPTIONS_ERROR) fprintf(stderr, "moult replay: %s\n", e.msg);
    buf_release(&text);
    if (got != OPTIONS_RUN) return got == OPTIONS_HELP ? 0 : 2;
    struct replay r = {.a = &a};
    err_t rc = run(&r, &e);
    if (rc != OK) fprintf(stderr, "moult replay: %s\n", e.msg);
    release(&r);
    return rc == OK ? 0 : 1;
}
