/* inspect.c - `moult inspect`: formats by module, sizes, and what is odd; headers alone are read.
 */
#include "base/buf.h"
#include "base/mem.h"
#include "cli/commands.h"
#include "cli/inspect_model.h"
#include "cli/options.h"
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>

struct args {
    bool json;
};

static const struct opt inspect_opts[] = {
    {"json", NULL, OPT_HONOURED, OPT_FLAG, offsetof(struct args, json), NULL, 0, 0, NULL, "as JSON",
     NULL},
};
const struct opt_command inspect_command = {
    "inspect",
    "usage: moult inspect DIR [--json]\n\n"
    "Says which weights of a model folder (or org/name in the local Hub cache) have which format,\n"
    "and what is odd about it.  No weights are read.  Exit status: 0, or 1 if something is odd.\n",
    inspect_opts, sizeof inspect_opts / sizeof inspect_opts[0]};

static void human_bytes(struct buf *b, uint64_t bytes)
{
    static const char *const units[] = {"B", "kB", "MB", "GB", "TB"};
    double x = (double)bytes;
    size_t u = 0;
    for (; x >= 1000 && u < 4; u++)
        x /= 1000;
    buf_printf(b, u ? "%.1f %s" : "%.0f %s", x, units[u]);
}

/* "0-46 48" */
static void layer_ranges(struct buf *b, const struct inspected_row *r)
{
    for (int i = 0; i < CONFIG_MAX_LAYERS; i++) {
        if (!r->layers[i]) continue;
        int end = i;
        while (end + 1 < CONFIG_MAX_LAYERS && r->layers[end + 1])
            end++;
        buf_printf(b, "%s%d", b->len ? " " : "", i);
        if (end > i) buf_printf(b, "-%d", end);
        i = end;
    }
}

/* Rows by class, in the order of the classes. */
typedef void row_fn(void *ctx, const struct inspected_row *r);
static void for_rows(const struct inspected *m, row_fn *fn, void *ctx)
{
    for (int c = 0; c < MODULE_CLASSES; c++)
        for (size_t i = 0; i < m->n_rows; i++)
            if ((int)m->rows[i].class == c) fn(ctx, &m->rows[i]);
}

/* ---- text ---- */

static void text_row(void *ctx, const struct inspected_row *r)
{
    struct buf *out = ctx, bytes = {0}, layers = {0};
    human_bytes(&bytes, r->bytes);
    layer_ranges(&layers, r);
    buf_printf(out, "  %-10s %-12s %7zu %10s  %-12s %s\n", module_class_names[r->class],
               formats[r->format].name, r->weights, bytes.data ? bytes.data : "",
               layers.data ? layers.data : "-", r->arrangement);
    buf_release(&bytes);
    buf_release(&layers);
}

static void text(struct buf *out, const struct inspected *m)
{
    struct buf bytes = {0};
    size_t inputs = 0;
    human_bytes(&bytes, m->bytes);
    buf_printf(out, "%s: %s, %d layers, %d experts (top %d), hidden %d\n", m->dir,
               m->config.architecture, m->config.n_layers, m->config.n_experts, m->config.top_k,
               m->config.hidden_size);
    buf_printf(out, "%zu tensors in %zu file%s, %s; quantization config: %s\n\n", m->n_tensors,
               m->n_files, m->n_files == 1 ? "" : "s", bytes.data ? bytes.data : "",
               m->quantization);
    buf_printf(out, "  %-10s %-12s %7s %10s  %-12s %s\n", "module", "format", "weights", "bytes",
               "layers", "stored");
    for_rows(m, text_row, out);
    for (size_t i = 0; i < m->n_rows; i++)
        inputs += m->rows[i].inputs;
    buf_printf(out, "\nscales of activations: %zu; scales of K and V: %zu layers\n", inputs,
               m->n_kv);
    for (size_t i = 0; i < m->n_odd && i < INSPECT_ODD; i++)
        buf_printf(out, "odd: %s\n", m->odd[i]);
    if (m->n_odd > INSPECT_ODD) buf_printf(out, "odd: %zu more\n", m->n_odd - INSPECT_ODD);
    buf_release(&bytes);
}

/* ---- JSON ---- */

static void json_row(void *ctx, const struct inspected_row *r)
{
    json_t *layers = json_array();
    for (int i = 0; i < CONFIG_MAX_LAYERS; i++)
        if (r->layers[i]) json_array_append_new(layers, json_integer(i));
    json_array_append_new(
        ctx, json_pack("{s:s, s:s, s:s, s:I, s:I, s:I, s:o}", "module",
                       module_class_names[r->class], "format", formats[r->format].name, "stored",
                       r->arrangement, "weights", (json_int_t)r->weights, "input_scales",
                       (json_int_t)r->inputs, "bytes", (json_int_t)r->bytes, "layers", layers));
}

static void json(struct buf *out, const struct inspected *m)
{
    json_t *rows = json_array(), *odd = json_array();
    for_rows(m, json_row, rows);
    for (size_t i = 0; i < m->n_odd && i < INSPECT_ODD; i++)
        json_array_append_new(odd, json_string(m->odd[i]));
    json_t *root = json_pack(
        "{s:s, s:s, s:i, s:i, s:s, s:I, s:I, s:I, s:o, s:I, s:o, s:I}", "path", m->dir,
        "architecture", m->config.architecture, "layers", m->config.n_layers, "experts",
        m->config.n_experts, "quantization", m->quantization, "files", (json_int_t)m->n_files,
        "tensors", (json_int_t)m->n_tensors, "bytes", (json_int_t)m->bytes, "modules", rows,
        "kv_scale_layers", (json_int_t)m->n_kv, "odd", odd, "n_odd", (json_int_t)m->n_odd);
    char *dump = root ? json_dumps(root, JSON_INDENT(2)) : NULL;
    buf_printf(out, "%s\n", dump ? dump : "");
    free(dump);
    json_decref(root);
}

int cmd_inspect(int argc, char **argv)
{
    struct args a = {0};
    struct err e = {0};
    struct buf out = {0};
    int words = argc > 0 && argv[0][0] != '-'; /* DIR comes first */
    options_t o = options_parse(&inspect_command, argc - words, argv + words, &a, NULL, &e);
    if (o == OPTIONS_HELP) {
        options_help(&inspect_command, &out);
        fputs(out.data ? out.data : "", stdout);
        buf_release(&out);
        return 0;
    }
    if (o == OPTIONS_RUN && words == 0)
        (void)err_set(&e, ERR_INPUT, "a folder is needed first: moult inspect DIR");
    if (e.code != OK) {
        fprintf(stderr, "moult inspect: %s\n", e.msg);
        return 2;
    }
    struct inspected *m = mem_alloc(sizeof *m);
    err_t rc = inspect_model(m, argv[0], &e);
    if (rc == OK) {
        (a.json ? json : text)(&out, m);
        fputs(out.data ? out.data : "", stdout);
    } else {
        fprintf(stderr, "moult inspect: %s\n", e.msg);
    }
    bool fine = rc == OK && m->n_odd == 0;
    if (rc == OK) inspect_free(m);
    mem_free(m);
    buf_release(&out);
    return fine ? 0 : 1;
}
