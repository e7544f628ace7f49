/*
 * template.h - chat templates: an interpreter of the Jinja that Hugging Face chat templates use.
 *
 *     struct tmpl *t = NULL;
 *     if (tmpl_parse(&t, source, n, e) != OK) ...            // names line and construct
 *     if (tmpl_render(t, &out, vars, e) != OK) ...           // vars: a JSON object
 *
 * Environment as transformers sets it: trim_blocks, lstrip_blocks, loop controls, `tojson` with
 * Python's separators (", " and ": "), no ASCII escaping, key order kept; raise_exception(msg)
 * fails the render with ERR_INPUT.  Undefined variables print nothing and are false, as jinja2's
 * default Undefined (an attribute of undefined is an error).  A template's work is bounded (loop
 * steps, output bytes, depth) so that a hostile template ends with an error.  Immutable after
 * parse; any thread may render.
 */
#ifndef TEXT_TEMPLATE_H
#define TEXT_TEMPLATE_H

#include "base/buf.h"
#include "base/err.h"
#include <jansson.h>

struct tmpl;

err_t tmpl_parse(struct tmpl **out, const char *source, size_t n, struct err *e) MUST_USE;
err_t tmpl_render(const struct tmpl *t, struct buf *out, const json_t *vars,
                  struct err *e) MUST_USE;
void tmpl_free(struct tmpl *t);

#endif
