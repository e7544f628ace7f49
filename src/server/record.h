/*
 * record.h - --record DIR: the requests that came and what they got, for `moult replay`.
 *
 * One file a run, DIR/requests-TIME.jsonl, a JSON object a line:
 *     {"in": ID, "at": seconds since the start, "path": "/generate", "body": the request's text}
 *     {"out": ID, "index": i, "rid": ..., "seed": n, "prompt_tokens": n, "ids": [...], "text": "...", "finish": "...",
 *      "weight_version": "..."}    when sample i has ended
 * ID is the exchange's x-request-id.  A request that was refused has no "out".  With the seeds each line can be run
 * again and must give the same ids.  The file holds prompts and answers: its mode is 0600.
 * A line that cannot be written is told once in the log; serving goes on.
 */
#ifndef SERVER_RECORD_H
#define SERVER_RECORD_H

#include "base/buf.h"
#include "base/err.h"
#include "engine/request.h"

struct record;

err_t record_open(struct record **out, const char *dir, struct err *e) MUST_USE;
void record_close(struct record *r); /* NULL: nothing */
void record_in(struct record *r, const char *id, const char *path, const struct buf *body);
void record_out(struct record *r, const char *id, int32_t index, const struct request *q,
                const char *finish);

#endif
