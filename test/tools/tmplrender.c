/* tmplrender TEMPLATE VARS.json: the rendered text, or "error: ..." and status 1.
 * With one argument, a JSON array of [template, vars] pairs on standard input gives a JSON array of
 * {"ok": text} and {"error": message}. */
#include "text/template.h"
#include <stdio.h>
#include <string.h>

static err_t one(const char *src, size_t n, const json_t *vars, struct buf *out, struct err *e)
{
    struct tmpl *t = NULL;
    err_t r = tmpl_parse(&t, src, n, e);
    if (r == OK) r = tmpl_render(t, out, vars, e);
    tmpl_free(t);
    return r;
}

static int batch(void)
{
    json_t *in = json_loadf(stdin, JSON_ALLOW_NUL, NULL), *out = json_array();
    size_t i;
    json_t *pair;
    json_array_foreach(in, i, pair)
    {
        const json_t *src = json_array_get(pair, 0);
        struct buf b = {0};
        struct err e = {0};
        json_t *r;
        if (one(json_string_value(src), json_string_length(src), json_array_get(pair, 1), &b, &e))
            r = json_pack("{s:s}", "error", e.msg);
        else
            r = json_pack("{s:s%}", "ok", b.data ? b.data : "", b.len);
        json_array_append_new(out, r ? r : json_pack("{s:s}", "error", "output is not UTF-8"));
        buf_release(&b);
    }
    json_dumpf(out, stdout, 0);
    json_decref(in);
    json_decref(out);
    return 0;
}

int main(int argc, char **argv)
{
    struct buf src = {0}, out = {0};
    struct err e = {0};
    char t[4096];
    size_t n;
    if (argc == 2 && strcmp(argv[1], "--batch") == 0) return batch();
    FILE *f = argc == 3 ? fopen(argv[1], "rb") : NULL;
    json_t *vars = f ? json_load_file(argv[2], JSON_ALLOW_NUL, NULL) : NULL;
    if (!vars) {
        fprintf(stderr, "usage: tmplrender TEMPLATE VARS.json | tmplrender --batch < PAIRS.json\n");
        if (f) fclose(f);
        return 2;
    }
    while ((n = fread(t, 1, sizeof t, f)) > 0)
        buf_put(&src, t, n);
    fclose(f);
    err_t r = one(src.data ? src.data : "", src.len, vars, &out, &e);
    if (r == OK)
        fwrite(out.data, 1, out.len, stdout);
    else
        printf("error: %s\n", e.msg);
    buf_release(&src);
    buf_release(&out);
    json_decref(vars);
    return r != OK;
}
