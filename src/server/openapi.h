/*
 * openapi.h - GET /openapi.json: OpenAPI 3.1 description of every route.
 *
 * Paths and methods come from the table of routes itself (routes.c), what a route is for and its fields from the table
 * in openapi.c: a route without a row there shows as one without a summary, which the test refuses
 * (test/server/test_openapi.py).  Types are those that handlers check; a field that is not described is ignored by them.
 */
#ifndef SERVER_OPENAPI_H
#define SERVER_OPENAPI_H

#include "base/buf.h"

void openapi_put(struct buf *out);

#endif
