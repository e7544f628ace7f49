/* Any bytes as a chat template, rendered over fixed messages. */
#include "text/template.h"
#include <stdint.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static const char vars[] = "{\"messages\":[{\"role\":\"system\",\"content\":\"Be "
                           "brief.\"},{\"role\":\"user\",\"content\":\"2 < 3?\\n\"},"
                           "{\"role\":\"assistant\",\"content\":null,\"tool_calls\":[{\"type\":"
                           "\"function\",\"function\":{\"name\":\"f\","
                           "\"arguments\":{\"x\":1.5,\"y\":[true,null]}}}]}],\"tools\":[{\"type\":"
                           "\"function\",\"function\":{\"name\":\"f\"}}],"
                           "\"add_generation_prompt\":true,\"bos_token\":\"<s>\",\"eos_token\":\"</"
                           "s>\",\"n\":-9223372036854775807}";

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    static json_t *v;
    struct tmpl *t = NULL;
    struct err e;
    if (!v) v = json_loads(vars, 0, NULL);
    CHECK(v);
    if (tmpl_parse(&t, (const char *)data, n, &e) != OK) return 0;
    struct buf out = {0};
    if (tmpl_render(t, &out, v, &e) == OK) CHECK(!out.failed);
    buf_release(&out);
    tmpl_free(t);
    return 0;
}
