/*
 * random_checkpoint.c - a checkpoint of any size with random weights, for measuring.
 *
 *     random_checkpoint CONFIG_DIR OUT_DIR [--format nvfp4] [--spelling NAME] [--seed 1] [--shard-gb 5]
 *                       [--threads N]
 *
 * Shapes are those of CONFIG_DIR/config.json, values those of weight/dummy.h; names, types and configs are what
 * `moult quantize` writes (tokenizer and so on are copied along).  Memory: a few MiB a thread, whatever the size.
 * The same arguments give the same bytes, with any number of threads (as many as cores, if not told).
 *
 * To know what quantize would write of it, it is given a BF16 model of those shapes that has headers only: files
 * with holes, which take no room.
 */
#include "base/clock.h"
#include "base/file.h"
#include "base/mem.h"
#include "cli/quantize_folder.h"
#include "model/model.h"
#include "weight/dummy.h"
#include <fcntl.h>
#include <getopt.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PIECE       ((size_t)4 << 20)
#define MAX_THREADS 64

struct args {
    const char *config_dir, *out, *format, *spelling;
    uint64_t seed;
    double shard_gb;
    int threads;
};

/* ---- the hollow source ---- */

static bool is_stored(const struct config *c, const struct slot_spec *specs, size_t i)
{
    return specs[i].shape.kind != RESIDENT_F32 &&
           !(c->tie_word_embeddings && strcmp(specs[i].name, "lm_head.weight") == 0) &&
           (i == 0 || strcmp(specs[i].name, specs[0].name) != 0);
}

static void header_of(struct buf *b, uint64_t *bytes, const struct config *c,
                      const struct slot_spec *specs, size_t n)
{
    buf_putc(b, '{');
    for (size_t i = 0; i < n; i++) {
        const struct slot_spec *s = &specs[i];
        if (!is_stored(c, specs, i)) continue;
        uint64_t size = s->shape.rows * s->shape.cols * 2;
        buf_printf(b, "%s\"%s\":{\"dtype\":\"BF16\",\"shape\":[", b->len > 1 ? "," : "", s->name);
        if (s->n_dims == 2) buf_printf(b, "%" PRIu64 ",", s->shape.rows);
        buf_printf(b, "%" PRIu64 "],\"data_offsets\":[%" PRIu64 ",%" PRIu64 "]}", s->shape.cols,
                   *bytes, *bytes + size);
        *bytes += size;
    }
    buf_putc(b, '}');
}

static err_t write_hollow(const char *path, const struct config *c, const struct slot_spec *specs,
                          size_t n, struct err *e)
{
    struct buf b = {0};
    uint64_t bytes = 0;
    header_of(&b, &bytes, c, specs, n);
    uint64_t len = b.len;
    int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    bool ok = !b.failed && fd >= 0 && write(fd, &len, 8) == 8 &&
              write(fd, b.data, b.len) == (ssize_t)b.len &&
              ftruncate(fd, (off_t)(8 + len + bytes)) == 0;
    if (fd >= 0) close(fd);
    buf_release(&b);
    return ok ? OK : err_set(e, ERR_IO, "%s: cannot be written", path);
}

static err_t copy_config(const char *from, const char *to, struct err *e)
{
    char path[600];
    struct buf text = {0};
    snprintf(path, sizeof path, "%s/config.json", from);
    err_t rc = file_read(&text, path, (size_t)16 << 20, e);
    if (rc != OK) return rc;
    snprintf(path, sizeof path, "%s/config.json", to);
    FILE *f = fopen(path, "w");
    bool ok = f && fwrite(text.data, 1, text.len, f) == text.len;
    if (f && fclose(f) != 0) ok = false;
    buf_release(&text);
    return ok ? OK : err_set(e, ERR_IO, "%s: cannot be written", path);
}

static err_t plan_it(struct quantize_plan *p, const struct args *a, const char *hollow,
                     struct err *e)
{
    struct config c;
    struct slot_spec *specs = NULL;
    size_t n = 0;
    char path[600];
    snprintf(path, sizeof path, "%s/model.safetensors", hollow);
    const struct quantize_request r = {.src = hollow, .format = a->format, .spelling = a->spelling};
    err_t rc = config_load(&c, a->config_dir, e);
    if (rc == OK) rc = model_specs(&c, &specs, &n, e);
    if (rc == OK) rc = write_hollow(path, &c, specs, n, e);
    if (rc == OK) rc = copy_config(a->config_dir, hollow, e);
    if (rc == OK) rc = quantize_plan_make(p, &r, e);
    mem_free(specs);
    return rc;
}

/* ---- the weights ---- */

typedef void fill_fn(uint8_t *to, format_t f, size_t n, size_t cols, uint64_t *s);

static void fill_ones(uint8_t *to, format_t f, size_t n, size_t cols, uint64_t *s)
{
    (void)f, (void)cols, (void)s;
    for (size_t i = 0; i + 1 < n; i += 2) {
        to[i] = 0x80;
        to[i + 1] = 0x3f;
    }
}

static uint64_t out_bytes(const struct st_out *o)
{
    uint64_t n = (uint64_t)st_dtype_bits(o->dtype) / 8;
    for (int i = 0; i < o->n_dims; i++)
        n *= o->shape[i];
    return n;
}

static err_t put_filled(struct st_writer *w, const struct quantize_plan *p, size_t out,
                        fill_fn *fill, const struct quantize_weight *q, uint8_t *piece, uint64_t *s,
                        struct err *e)
{
    uint64_t bytes = out_bytes(&p->outs[out]);
    err_t rc = OK;
    for (uint64_t at = 0; rc == OK && at < bytes; at += PIECE) {
        size_t n = bytes - at < PIECE ? (size_t)(bytes - at) : PIECE;
        fill(piece, q->to, n, q->cols, s);
        rc = st_writer_put(w, out, at, piece, n, e);
    }
    return rc;
}

static err_t put_weight(struct st_writer *w, const struct quantize_plan *p, size_t i,
                        uint8_t *piece, uint64_t seed, struct err *e)
{
    const struct quantize_weight *q = &p->weights[i];
    uint64_t s = seed ^ (i + 1) * 0xd1b54a32d192ed03u;
    float tensor = dummy_scale(q->to, q->cols), input = 1.0f;
    if (p->spell->inverse) tensor = 1.0f / tensor;
    err_t rc = put_filled(w, p, q->out[PART_DATA], q->n_dims == 1 ? fill_ones : dummy_fill_data, q,
                          piece, &s, e);
    if (rc == OK && q->out[PART_SCALE] != SIZE_MAX)
        rc = put_filled(w, p, q->out[PART_SCALE], dummy_fill_scale, q, piece, &s, e);
    if (rc == OK && q->out[PART_TENSOR] != SIZE_MAX)
        rc = st_writer_put(w, q->out[PART_TENSOR], 0, &tensor, sizeof tensor, e);
    if (rc == OK && q->out[PART_INPUT] != SIZE_MAX)
        rc = st_writer_put(w, q->out[PART_INPUT], 0, &input, sizeof input, e);
    return rc;
}

/* Threads take one weight after another; each weight has random numbers of its own. */
struct work {
    struct st_writer *w;
    const struct quantize_plan *p;
    uint64_t seed;
    atomic_size_t next;
    pthread_mutex_t lock; /* of rc and error */
    err_t rc;
    struct err error;
};

static void *worker(void *arg)
{
    struct work *k = arg;
    struct err e = {0};
    err_t rc = OK;
    uint8_t *piece = mem_alloc(PIECE + 8);
    for (size_t i; rc == OK && (i = atomic_fetch_add(&k->next, 1)) < k->p->n_weights;)
        rc = put_weight(k->w, k->p, i, piece, k->seed, &e);
    if (rc != OK) {
        atomic_store(&k->next, k->p->n_weights);
        pthread_mutex_lock(&k->lock);
        k->rc = rc;
        k->error = e;
        pthread_mutex_unlock(&k->lock);
    }
    mem_free(piece);
    return NULL;
}

static err_t put_all(struct st_writer *w, const struct quantize_plan *p, const struct args *a,
                     struct err *e)
{
    struct work k = {.w = w, .p = p, .seed = a->seed, .lock = PTHREAD_MUTEX_INITIALIZER};
    pthread_t threads[MAX_THREADS];
    int n = 0;
    while (n < a->threads - 1 && pthread_create(&threads[n], NULL, worker, &k) == 0)
        n++;
    worker(&k);
    for (int i = 0; i < n; i++)
        pthread_join(threads[i], NULL);
    return k.rc == OK ? OK : err_set(e, k.rc, "%s", k.error.msg);
}

static err_t write_all(const struct quantize_plan *p, const struct args *a, struct err *e)
{
    struct newdir d = {0};
    struct st_writer *w = NULL;
    double t0 = clock_s();
    err_t rc = newdir_begin(&d, a->out, e);
    if (rc == OK)
        rc = st_writer_open(&w, d.temp, p->outs, p->n_outs, (uint64_t)(a->shard_gb * 1e9), e);
    if (rc == OK) rc = put_all(w, p, a, e);
    if (rc == OK) rc = st_writer_finish(w, e);
    if (rc == OK) rc = quantize_write_configs(&d, p, e);
    if (rc == OK) rc = quantize_copy_companions(&d, a->config_dir, e);
    if (rc == OK) rc = newdir_commit(&d, e);
    newdir_abort(&d);
    if (rc == OK)
        printf("%s: %zu weights, %zu of them in %s (%s), %.3f GB in %.1f s, seed %" PRIu64 "\n",
               a->out, p->n_weights, p->n_quantized, formats[p->format].name, p->spell->spelling,
               (double)st_writer_bytes(w) * 1e-9, clock_s() - t0, a->seed);
    st_writer_free(w);
    return rc;
}

static err_t make(const struct args *a, struct err *e)
{
    char hollow[] = "/tmp/random-checkpoint-XXXXXX", path[64];
    struct quantize_plan p;
    if (mkdtemp(hollow) == NULL) return err_set(e, ERR_IO, "%s: cannot be made", hollow);
    err_t rc = plan_it(&p, a, hollow, e);
    if (rc == OK) {
        rc = write_all(&p, a, e);
        quantize_plan_free(&p);
    }
    static const char *const names[] = {"model.safetensors", "config.json"};
    for (int i = 0; i < 2; i++) {
        snprintf(path, sizeof path, "%s/%s", hollow, names[i]);
        unlink(path);
    }
    rmdir(hollow);
    return rc;
}

int main(int argc, char **argv)
{
    static const struct option options[] = {{"format", 1, NULL, 'f'},   {"seed", 1, NULL, 's'},
                                            {"shard-gb", 1, NULL, 'g'}, {"spelling", 1, NULL, 'p'},
                                            {"threads", 1, NULL, 't'},  {NULL, 0, NULL, 0}};
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    struct args a = {.format = "bf16",
                     .seed = 1,
                     .shard_gb = 5,
                     .threads = cores < 1             ? 1
                                : cores > MAX_THREADS ? MAX_THREADS
                                                      : (int)cores};
    struct err e = {0};
    for (int c; (c = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        if (c == 'f')
            a.format = optarg;
        else if (c == 'p')
            a.spelling = optarg;
        else if (c == 's')
            a.seed = strtoull(optarg, NULL, 10);
        else if (c == 'g')
            a.shard_gb = strtod(optarg, NULL);
        else if (c == 't')
            a.threads = (int)strtol(optarg, NULL, 10);
        else
            return 2;
    }
    if (argc - optind != 2 || !(a.shard_gb > 0) || a.threads < 1 || a.threads > MAX_THREADS) {
        fprintf(stderr,
                "random_checkpoint CONFIG_DIR OUT_DIR [--format F] [--spelling NAME] [--seed S] "
                "[--shard-gb G] [--threads 1 .. %d]\n",
                MAX_THREADS);
        return 2;
    }
    a.config_dir = argv[optind];
    a.out = argv[optind + 1];
    if (make(&a, &e) == OK) return 0;
    fprintf(stderr, "random_checkpoint: %s\n", e.msg);
    return 1;
}
