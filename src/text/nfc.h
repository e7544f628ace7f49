/* nfc.h - Unicode normalisation form C in linear-logarithmic time. */
#ifndef TEXT_NFC_H
#define TEXT_NFC_H

#include "base/buf.h"

/* True when `text` (valid UTF-8) is sure to be in NFC already, so that no copy is needed. */
bool nfc_is_trivial(const char *text, size_t n);
/* Append the NFC of `text` (valid UTF-8).  False: out of memory. */
bool nfc_put(struct buf *out, const char *text, size_t n);

#endif
