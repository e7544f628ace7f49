#include "server/record.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "server/internal.h"
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

struct record {
    pthread_mutex_t m; /* guards file and told */
    FILE *file;
    bool told;
    double t0;
};

err_t record_open(struct record **out, const char *dir, struct err *e)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/requests-%lld-%d.jsonl", dir, (long long)time(NULL),
             (int)getpid());
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0) return err_set(e, ERR_IO, "record: cannot create %s: %s", path, strerror(errno));
    struct record *r = mem_alloc(sizeof *r);
    CHECK(pthread_mutex_init(&r->m, NULL) == 0);
    r->file = fdopen(fd, "w");
    CHECK(r->file);
    r->t0 = clock_s();
    *out = r;
    return OK;
}

void record_close(struct record *r)
{
    if (!r) return;
    (void)fclose(r->file);
    pthread_mutex_destroy(&r->m);
    mem_free(r);
}

static void line(struct record *r, struct buf *b)
{
    buf_puts(b, "}\n");
    pthread_mutex_lock(&r->m);
    bool bad = b->failed || fwrite(b->data, 1, b->len, r->file) != b->len || fflush(r->file) != 0;
    if (bad && !r->told) log_line(LOG_WARN, "record: a request could not be written");
    r->told = r->told || bad;
    pthread_mutex_unlock(&r->m);
    buf_release(b);
}

void record_in(struct record *r, const char *id, const char *path, const struct buf *body)
{
    struct buf b = {0};
    buf_puts(&b, "{\"in\":");
    put_str(&b, id, strlen(id));
    buf_printf(&b, ",\"at\":%.6f,\"path\":", clock_s() - r->t0);
    put_str(&b, path, strlen(path));
    buf_puts(&b, ",\"body\":");
    put_str(&b, body->data, body->len);
    line(r, &b);
}

void record_out(struct record *r, const char *id, int32_t index, const struct request *q,
                const char *finish)
{
    struct buf b = {0};
    buf_puts(&b, "{\"out\":");
    put_str(&b, id, strlen(id));
    buf_printf(&b, ",\"index\":%d,\"rid\":", index);
    put_str(&b, q->rid, strlen(q->rid));
    buf_printf(&b, ",\"seed\":%lld,\"prompt_tokens\":%d,\"ids\":[", (long long)q->sp.seed,
               q->n_prompt);
    for (int32_t i = 0; i < q->n_output; i++)
        buf_printf(&b, i ? ",%d" : "%d", q->output_ids[i]);
    buf_puts(&b, "],\"text\":");
    put_str(&b, q->text.data ? q->text.data : "", q->text_sent);
    buf_printf(&b, ",\"finish\":\"%s\",\"weight_version\":", finish);
    put_str(&b, q->weight_version, strlen(q->weight_version));
    line(r, &b);
}
