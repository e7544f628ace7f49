/*
 * roots.h - where control routes may look in the file system.
 *
 *     if (roots_check(options.roots, n, body, e) != OK) ...
 *
 * Every field of a body, or argument in a path, that names a place (roots.c's table: model_path, local_checkpoint_dir, ...) must lie in
 * one of the folders of --allowed-path once links are followed; none given: anywhere.  A repository id is looked
 * up in the Hub's cache first; of a path that does not exist yet its nearest existing parent counts.
 * It guards against a caller that names another folder, not against one who can change links meanwhile.
 */
#ifndef SERVER_ROOTS_H
#define SERVER_ROOTS_H

#include "base/err.h"
#include <jansson.h>

err_t roots_check(const char *const *roots, size_t n, const json_t *body, struct err *e) MUST_USE;

#endif
