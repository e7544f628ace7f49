/* formatdoc.c - prints docs/formats.md; `make docs` writes it. */
#include "format_doc.h"
#include <stdio.h>

int main(void)
{
    struct buf b = {0};
    format_doc(&b);
    if (b.failed) return 1;
    fwrite(b.data, 1, b.len, stdout);
    buf_release(&b);
    return 0;
}
