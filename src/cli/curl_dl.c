#include "cli/curl_dl.h"
#include <dlfcn.h>
#include <string.h>

err_t curl_dl_open(struct curl_dl *c, struct err *e)
{
    static const char *const names[] = {"libcurl.so.4", "libcurl-gnutls.so.4"};
    struct curl_dl got = {0};
    for (size_t i = 0; i < sizeof names / sizeof names[0] && !got.handle; i++)
        got.handle = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
    if (!got.handle)
        return err_set(e, ERR_NOTFOUND, "libcurl.so.4 was not found (Debian package libcurl4)");
    const char *missing = NULL;
    void *p;
#define X(member, symbol)           \
    p = dlsym(got.handle, #symbol); \
    if (!p) missing = #symbol;      \
    memcpy(&got.member, &p, sizeof p);
    CURL_DL_LIST(X)
#undef X
    if (missing) {
        dlclose(got.handle);
        return err_set(e, ERR_UNSUPPORTED, "libcurl has no %s: 7.66 or later is needed", missing);
    }
    if (got.global_init(CURL_GLOBAL_DEFAULT) != CURLE_OK) {
        dlclose(got.handle);
        return err_set(e, ERR_SYSTEM, "libcurl does not start");
    }
    *c = got;
    return OK;
}

void curl_dl_close(struct curl_dl *c)
{
    if (c->handle) dlclose(c->handle);
    *c = (struct curl_dl){0};
}
