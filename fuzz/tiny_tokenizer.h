/*
 * tiny_tokenizer.h - a byte-level tokenizer small enough to be built in every fuzzer.
 *
 * Ids 0..255 are the bytes, 256..260 merges of them, 261.. the added tokens: one of each flag with
 * STRIP, else two plain ones, so that decode(encode(text)) is the text itself (its NFC form with
 * NFC).
 */
#ifndef FUZZ_TINY_TOKENIZER_H
#define FUZZ_TINY_TOKENIZER_H

#include "text/tokenizer.h"

enum { TINY_NFC = 1, TINY_STRIP = 2 };

static inline void tiny_tokenizer_json(struct buf *b, int flags)
{
    static const char *const merged[] = {"he", "ll", "hell", "hello", "\\u0120hello"};
    int next = 0x100;
    buf_printf(b,
               "{\"normalizer\":%s,\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[{"
               "\"type\":\"Split\","
               "\"pattern\":{\"Regex\":\"[^\\\\r\\\\n\\\\p{L}\\\\p{N}]?\\\\p{L}+|\\\\p{N}| "
               "?[^\\\\s\\\\p{L}\\\\p{N}]+[\\\\r\\\\n]*"
               "|\\\\s*[\\\\r\\\\n]+|\\\\s+(?!\\\\S)|\\\\s+\"},\"behavior\":\"Isolated\"},{"
               "\"type\":\"ByteLevel\","
               "\"add_prefix_space\":false,\"use_regex\":false}]},\"decoder\":{\"type\":"
               "\"ByteLevel\"},\"added_tokens\":[",
               flags & TINY_NFC ? "{\"type\":\"NFC\"}" : "null");
    if (flags & TINY_STRIP)
        buf_puts(b, "{\"id\":261,\"content\":\"<l>\",\"lstrip\":true},{\"id\":262,\"content\":\"<r>"
                    "\",\"rstrip\":true},"
                    "{\"id\":263,\"content\":\"abc\",\"single_word\":true},{\"id\":264,\"content\":"
                    "\"Foo\",\"normalized\":true},");
    buf_puts(b, "{\"id\":265,\"content\":\"<|end|>\",\"special\":true,\"normalized\":false},"
                "{\"id\":266,\"content\":\"<|end|><\",\"normalized\":false}],\"model\":{\"type\":"
                "\"BPE\",\"vocab\":{");
    for (int i = 0; i < 256; i++) {
        bool plain = (i >= 0x21 && i <= 0x7E) || (i >= 0xA1 && i <= 0xAC) || i >= 0xAE;
        buf_printf(b, "\"\\u%04x\":%d,", plain ? i : next, i);
        next += !plain;
    }
    for (int i = 0; i < 5; i++)
        buf_printf(b, "%s\"%s\":%d", i ? "," : "", merged[i], 256 + i);
    buf_puts(b, "},\"merges\":[\"h e\",\"l l\",\"he ll\",\"hell o\",\"\\u0120 hello\"]}}");
}

static inline struct tokenizer *tiny_tokenizer(int flags)
{
    struct buf b = {0};
    struct tokenizer *t = NULL;
    struct err e = {0};
    tiny_tokenizer_json(&b, flags);
    CHECK(tokenizer_parse(&t, b.data, b.len, &e) == OK);
    buf_release(&b);
    return t;
}

#endif
