/*
 * info.h - the fields of /server_info, one table.
 *
 * A trainer compares them with its own arguments before it uses an engine that it did not start (docs/sync.md).  A
 * row is a fact of this server, or it is only told: ranks, sizes of groups, addresses, which mean nothing to one
 * process and may be told otherwise (struct server_info).  A key that is in no row is added as given.
 */
#ifndef SERVER_INFO_H
#define SERVER_INFO_H

#include "base/buf.h"
#include "server/server.h"

/* "name":value, ... without braces and without a last comma: rows and added keys. */
void info_put(struct buf *b, const struct server_options *o, int port);

#endif
