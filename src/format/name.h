/* name.h - names in tables: any case, '_' as '-'. */
#ifndef FORMAT_NAME_H
#define FORMAT_NAME_H

#include <ctype.h>
#include <stdbool.h>

/* `row` is the table's spelling: lower case, with '-'. */
static inline bool format_same_name(const char *row, const char *name)
{
    for (;; row++, name++) {
        char c = *name == '_' ? '-' : (char)tolower((unsigned char)*name);
        if (*row != c) return false;
        if (c == 0) return true;
    }
}

#endif
