/*
 * bench_gsm8k.c - `moult bench gsm8k`: SGLang's benchmark/gsm8k/bench_sglang.py, its arguments and lines.
 *
 * The first k rows of the file are the shots.  SGLang asks them too; --skip-shots asks only what follows.
 * An answer is the last run of digits of the text without commas; a number that Python would not read
 * (a leading zero) or none counts as invalid.
 */
#include "base/clock.h"
#include "base/file.h"
#include "base/mem.h"
#include "cli/commands.h"
#include "cli/http_many.h"
#include "cli/options.h"
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>
#include <stdlib.h>
#include <sys/resource.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#define INVALID    "-9999999"
#define DATA_BYTES ((size_t)256 << 20)

struct args {
    const char *data_path, *host, *backend, *result_file, *api_key, *model;
    int64_t shots, questions, max_new, parallel, port;
    double temperature, top_p;
    bool platinum, chat, skip_shots, thinking;
};

#define AT(f) offsetof(struct args, f)
static const struct opt gsm8k_opts[] = {
    {"num-shots", NULL, OPT_HONOURED, OPT_INT, AT(shots), "5", 0, 1000, NULL, "worked examples",
     NULL},
    {"data-path", NULL, OPT_HONOURED, OPT_STRING, AT(data_path), "test.jsonl", 0, 0, NULL,
     "JSON lines of question and answer", NULL},
    {"num-questions", NULL, OPT_HONOURED, OPT_INT, AT(questions), "200", 1, 1e9, NULL,
     "questions; at most those of the file", NULL},
    {"max-new-tokens", NULL, OPT_HONOURED, OPT_INT, AT(max_new), "512", 1, 1e9, NULL, "per answer",
     NULL},
    {"temperature", NULL, OPT_HONOURED, OPT_REAL, AT(temperature), "0", 0, 100, NULL, "0: greedy",
     NULL},
    {"top-p", NULL, OPT_HONOURED, OPT_REAL, AT(top_p), "1", 1e-9, 1, NULL, "nucleus", NULL},
    {"platinum", NULL, OPT_HONOURED, OPT_FLAG, AT(platinum), NULL, 0, 0, NULL,
     "the file is GSM8K-Platinum (names the task; nothing is downloaded)", NULL},
    {"parallel", NULL, OPT_HONOURED, OPT_INT, AT(parallel), "64", 1, 65536, NULL,
     "requests in flight", NULL},
    {"host", NULL, OPT_HONOURED, OPT_STRING, AT(host), "127.0.0.1", 0, 0, NULL, "or http://NAME",
     NULL},
    {"port", NULL, OPT_HONOURED, OPT_INT, AT(port), "30000", 1, 65535, NULL, "of the server", NULL},
    {"backend", NULL, OPT_HONOURED, OPT_CHOICE, AT(backend), "srt", 0, 0, "srt|moult|openai",
     "/generate, or /v1/completions", NULL},
    {"model", NULL, OPT_HONOURED, OPT_STRING, AT(model), "default", 0, 0, NULL, "for OpenAI routes",
     NULL},
    {"chat", NULL, OPT_HONOURED, OPT_FLAG, AT(chat), NULL, 0, 0, NULL,
     "zero-shot through /v1/chat/completions: the question is the one user turn", NULL},
    {"skip-shots", NULL, OPT_HONOURED, OPT_FLAG, AT(skip_shots), NULL, 0, 0, NULL,
     "leave the shots out of the questions", NULL},
    {"enable-thinking", NULL, OPT_HONOURED, OPT_FLAG, AT(thinking), NULL, 0, 0, NULL,
     "with --chat: enable_thinking for the template", NULL},
    {"api-key", NULL, OPT_HONOURED, OPT_STRING, AT(api_key), NULL, 0, 0, NULL, "bearer token",
     NULL},
    {"result-file", NULL, OPT_HONOURED, OPT_STRING, AT(result_file), NULL, 0, 0, NULL,
     "append a JSON line; without the flag nothing is written", NULL},
    {"raw-result-file", NULL, OPT_IGNORED, OPT_STRING, 0, NULL, 0, 0, NULL, NULL, NULL},
    {"device", NULL, OPT_IGNORED, OPT_STRING, 0, NULL, 0, 0, NULL, NULL, NULL},
    {"tokenizer-path", NULL, OPT_IGNORED, OPT_STRING, 0, NULL, 0, 0, NULL, NULL, NULL},
};
const struct opt_command gsm8k_command = {"bench gsm8k", "usage: moult bench gsm8k [flags]\n",
                                          gsm8k_opts, sizeof gsm8k_opts / sizeof gsm8k_opts[0]};

struct bench {
    const struct args *a;
    json_t *rows; /* of the file */
    int first, n; /* questions: rows[first .. first + n) */
    uint64_t hash;
    char **bodies;
    int right, invalid, failed;
    int64_t tokens;
    char first_error[512];
};

/* The last number of a text, as described above, without sign; INVALID if none. */
static void last_number(const char *text, struct buf *out)
{
    struct buf run = {0};
    bool open = false;
    for (const char *p = text; *p; p++) {
        if (*p == ',') continue;
        bool digit = *p >= '0' && *p <= '9';
        if (digit && !open) buf_clear(&run);
        if (digit) (void)buf_putc(&run, *p);
        open = digit;
    }
    buf_clear(out);
    bool zeros = run.len > 1 && run.data[0] == '0' && strspn(run.data, "0") != run.len;
    (void)buf_puts(out, run.len == 0 || zeros ? INVALID : run.data);
    /* Python reads 00 as 0. */
    if (run.len > 1 && strspn(run.data, "0") == run.len) {
        buf_clear(out);
        (void)buf_putc(out, '0');
    }
    buf_release(&run);
}

static const char *field(const json_t *rows, int i, const char *key)
{
    return json_string_value(json_object_get(json_array_get(rows, (size_t)i), key));
}

static err_t read_rows(struct bench *b, struct err *e)
{
    struct buf text = {0};
    const char *path = b->a->data_path;
    err_t rc = file_read(&text, path, DATA_BYTES, e);
    if (rc != OK) return rc;
    b->hash = XXH3_64bits(text.data, text.len);
    b->rows = json_array();
    int line = 0;
    for (char *p = text.data; rc == OK && *p;) {
        char *end = strchrnul(p, '\n');
        line++;
        if (end > p && *p != '#') {
            json_t *row = json_loadb(p, (size_t)(end - p), 0, NULL);
            if (!json_is_string(json_object_get(row, "question")) ||
                !json_is_string(json_object_get(row, "answer")))
                rc = err_set(e, ERR_INPUT, "%s line %d: no question and answer", path, line);
            json_array_append_new(b->rows, row ? row : json_null());
        }
        p = *end ? end + 1 : end;
    }
    buf_release(&text);
    return rc;
}

static json_t *body_of(const struct args *a, const char *prompt)
{
    json_t *stop = json_pack("[s,s,s]", "Question", "Assistant:", "<|separator|>");
    if (a->chat) {
        json_t *o =
            json_pack("{s:s, s:[{s:s, s:s}], s:I, s:f, s:f}", "model", a->model, "messages", "role",
                      "user", "content", prompt, "max_tokens", (json_int_t)a->max_new,
                      "temperature", a->temperature, "top_p", a->top_p);
        json_object_set_new(o, "chat_template_kwargs",
                            json_pack("{s:b}", "enable_thinking", (int)a->thinking));
        json_decref(stop);
        return o;
    }
    if (strcmp(a->backend, "openai") == 0)
        return json_pack("{s:s, s:s, s:I, s:f, s:f, s:o}", "model", a->model, "prompt", prompt,
                         "max_tokens", (json_int_t)a->max_new, "temperature", a->temperature,
                         "top_p", a->top_p, "stop", stop);
    return json_pack("{s:s, s:{s:I, s:f, s:f, s:o}}", "text", prompt, "sampling_params",
                     "max_new_tokens", (json_int_t)a->max_new, "temperature", a->temperature,
                     "top_p", a->top_p, "stop", stop);
}

static err_t make_bodies(struct bench *b, struct err *e)
{
    const struct args *a = b->a;
    struct buf shots = {0}, prompt = {0};
    int k = (int)a->shots, total = (int)json_array_size(b->rows);
    if (k > total)
        return err_set(e, ERR_INPUT, "--num-shots %d: %s has %d rows", k, a->data_path, total);
    b->first = a->skip_shots ? k : 0;
    b->n = a->questions < total - b->first ? (int)a->questions : total - b->first;
    if (b->n < 1) return err_set(e, ERR_INPUT, "%s: no question is left", a->data_path);
    b->bodies = mem_try_array((size_t)b->n, sizeof *b->bodies);
    if (!b->bodies) return err_set(e, ERR_NOMEM, "no memory for %d questions", b->n);
    bool bare =
        a->chat; /* zero-shot: the model's own form of asking; the shots only say which rows to skip */
    for (int i = 0; i < k; i++)
        (void)buf_printf(&shots, "Question: %s\nAnswer: %s\n\n", field(b->rows, i, "question"),
                         field(b->rows, i, "answer"));
    for (int i = 0; i < b->n; i++) {
        const char *q = field(b->rows, b->first + i, "question");
        buf_clear(&prompt);
        if (bare)
            (void)buf_puts(&prompt, q);
        else
            (void)buf_printf(&prompt, "%sQuestion: %s\nAnswer:", shots.len ? shots.data : "", q);
        json_t *o = prompt.failed ? NULL : body_of(a, prompt.data);
        char *text = o ? json_dumps(o, JSON_COMPACT) : NULL;
        json_decref(o);
        if (text) b->bodies[i] = mem_dup_n(text, strlen(text));
        free(text);
        if (!b->bodies[i]) break;
    }
    bool complete = b->bodies[b->n - 1] != NULL;
    buf_release(&shots);
    buf_release(&prompt);
    return complete ? OK : err_set(e, ERR_NOMEM, "no memory for %d questions", b->n);
}

static void answered(void *ctx, int i, long status, const char *body, size_t bytes)
{
    struct bench *b = ctx;
    json_t *o = json_loadb(body, bytes, 0, NULL);
    json_t *choice = json_array_get(json_object_get(o, "choices"), 0);
    const char *text = json_string_value(json_object_get(o, "text"));
    if (!text) text = json_string_value(json_object_get(choice, "text"));
    if (!text)
        text = json_string_value(json_object_get(json_object_get(choice, "message"), "content"));
    json_t *count = json_object_get(json_object_get(o, "meta_info"), "completion_tokens");
    if (!count) count = json_object_get(json_object_get(o, "usage"), "completion_tokens");
    b->tokens += json_integer_value(count);
    if (status != 200 || !text) {
        if (b->failed++ == 0)
            snprintf(b->first_error, sizeof b->first_error, "status %ld: %.400s", status, body);
        text = "";
    }
    struct buf got = {0}, want = {0};
    last_number(text, &got);
    last_number(field(b->rows, b->first + i, "answer"), &want);
    if (!got.data || strcmp(got.data, INVALID) == 0)
        b->invalid++;
    else if (want.data && strcmp(got.data, want.data) == 0)
        b->right++;
    buf_release(&got);
    buf_release(&want);
    json_decref(o);
}

static void report(const struct bench *b, double seconds)
{
    const struct args *a = b->a;
    double accuracy = (double)b->right / b->n, invalid = (double)b->invalid / b->n;
    printf("Accuracy: %.3f\nInvalid: %.3f\nLatency: %.3f s\nOutput throughput: %.3f token/s\n",
           accuracy, invalid, seconds, (double)b->tokens / seconds);
    if (!a->result_file) return;
    json_t *o =
        json_pack("{s:s, s:s, s:i, s:f, s:f, s:i, s:{s:I, s:I}}", "task",
                  a->platinum ? "gsm8k-platinum" : "gsm8k", "backend", a->backend, "num_gpus", 1,
                  "latency", seconds, "accuracy", accuracy, "num_requests", b->n, "other",
                  "num_questions", (json_int_t)b->n, "parallel", (json_int_t)a->parallel);
    FILE *f = fopen(a->result_file, "a");
    if (!f || json_dumpf(o, f, JSON_COMPACT) != 0 || fputc('\n', f) == EOF)
        fprintf(stderr, "moult bench: cannot write %s\n", a->result_file);
    if (f) fclose(f);
    json_decref(o);
}

/* As many descriptors as the system lets us have. */
static void raise_files(void)
{
    struct rlimit r;
    if (getrlimit(RLIMIT_NOFILE, &r) != 0) return;
    r.rlim_cur = r.rlim_max;
    (void)setrlimit(RLIMIT_NOFILE, &r);
}

static err_t run(struct bench *b, struct err *e)
{
    const struct args *a = b->a;
    err_t rc = read_rows(b, e);
    if (rc == OK) rc = make_bodies(b, e);
    if (rc != OK) return rc;
    struct curl_dl c = {0};
    rc = curl_dl_open(&c, e);
    if (rc != OK) return rc;
    const char *slash = strrchr(a->data_path, '/');
    printf("Dataset: %s, %zu rows, xxh3 %016" PRIx64 "; %d questions, %d shots\n",
           slash ? slash + 1 : a->data_path, json_array_size(b->rows), b->hash, b->n,
           (int)a->shots);
    fflush(stdout);
    raise_files();
    struct buf url = {0};
    bool scheme = strncmp(a->host, "http://", 7) == 0 || strncmp(a->host, "https://", 8) == 0;
    (void)buf_printf(&url, "%s%s:%d%s", scheme ? "" : "http://", a->host, (int)a->port,
                     a->chat                             ? "/v1/chat/completions"
                     : strcmp(a->backend, "openai") == 0 ? "/v1/completions"
                                                         : "/generate");
    struct http_jobs j = {.url = url.data ? url.data : "",
                          .bearer = a->api_key,
                          .bodies = b->bodies,
                          .n = b->n,
                          .parallel = (int)a->parallel,
                          .done = answered,
                          .ctx = b};
    double t0 = clock_s();
    rc = http_many(&c, &j, e);
    double seconds = clock_s() - t0;
    if (rc == OK) report(b, seconds);
    if (rc == OK && b->failed)
        rc = err_set(e, ERR_IO, "%d of %d requests failed; the first: %s", b->failed, b->n,
                     b->first_error);
    buf_release(&url);
    curl_dl_close(&c);
    return rc;
}

int cmd_bench_gsm8k(int argc, char **argv)
{
    struct args a = {0};
    struct buf text = {0};
    struct err e = {0};
    options_t got = options_parse(&gsm8k_command, argc, argv, &a, &text, &e);
    if (got == OPTIONS_HELP) {
        buf_clear(&text);
        options_help(&gsm8k_command, &text);
        fputs(text.data ? text.data : "", stdout);
    } else if (got == OPTIONS_ERROR) {
        fprintf(stderr, "moult bench gsm8k: %s\n", e.msg);
    }
    buf_release(&text);
    if (got != OPTIONS_RUN) return got == OPTIONS_HELP ? 0 : 2;
    struct bench b = {.a = &a};
    err_t rc = run(&b, &e);
    if (rc != OK) fprintf(stderr, "moult bench gsm8k: %s\n", e.msg);
    for (int i = 0; b.bodies && i < b.n; i++)
        mem_free(b.bodies[i]);
    mem_free(b.bodies);
    json_decref(b.rows);
    return rc == OK ? 0 : 1;
}
