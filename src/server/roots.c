#include "server/roots.h"
#include "base/mem.h"
#include "weight/checkpoint.h"
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const fields[] = {
    "model_path", "local_checkpoint_dir", "source_dir", "file_path", "manifest", "output_dir"};

/* The real path of `path`, or of its nearest existing parent followed by what is missing. */
static bool resolve(const char *path, char out[PATH_MAX])
{
    char head[PATH_MAX];
    if (snprintf(head, sizeof head, "%s", path) >= (int)sizeof head || strstr(path, ".."))
        return realpath(path, out);
    while (!realpath(head, out)) {
        char *cut = strrchr(head, '/');
        if (errno != ENOENT || !cut || cut == head) return false;
        *cut = 0;
    }
    return true;
}

static bool inside(const char *real, const char *root)
{
    char at[PATH_MAX];
    if (!realpath(root, at)) return false;
    size_t n = strlen(at);
    if (n == 1) return true;
    return !strncmp(real, at, n) && (real[n] == 0 || real[n] == '/');
}

static err_t check(const char *const *roots, size_t n, const char *field, const char *path,
                   struct err *e)
{
    char real[PATH_MAX], *found = NULL;
    bool known = resolve(path, real);
    if (!strcmp(field, "model_path") && checkpoint_find(&found, path, NULL) == OK) {
        known = realpath(found, real) != NULL;
        mem_free(found);
    }
    for (size_t i = 0; known && i < n; i++)
        if (inside(real, roots[i])) return OK;
    return err_set(e, ERR_INPUT, "%s: %s is not in a folder that --allowed-path names", field,
                   path);
}

err_t roots_check(const char *const *roots, size_t n, const json_t *body, struct err *e)
{
    for (size_t i = 0; n && i < sizeof fields / sizeof fields[0]; i++) {
        const char *path = json_string_value(json_object_get(body, fields[i]));
        err_t rc = path ? check(roots, n, fields[i], path, e) : OK;
        if (rc) return rc;
    }
    return OK;
}
