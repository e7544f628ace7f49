/* Any JSON object as the variables of fixed templates that use what chat templates use. */
#include "server/json.h"
#include "text/template.h"
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static const char *const sources[] = {
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m['content'] | trim + "
    "'<|im_end|>\\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    "{%- set ns = namespace(last=-1, multi=false) %}{%- for m in messages[::-1] %}{%- if m.role == "
    "'user' and not ns.multi"
    " and m.content is string and not m.content.startswith('<t>') %}{%- set ns.last = loop.index0 "
    "%}{% endif %}{% endfor %}"
    "{{ ns.last }}{%- if tools %}{%- for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}",
    "{%- macro arg(a, d=0) %}{%- if a is mapping %}{%- for k, v in a | dictsort %}{{ k }}={{ "
    "arg(v, d + 1) }};{% endfor %}"
    "{%- elif a is iterable and a is not string %}[{% for x in a %}{{ arg(x) }}{{ ',' if not "
    "loop.last }}{% endfor %}]"
    "{%- else %}{{ a | string | replace('\\n', ' ') | upper }}{% endif %}{% endmacro %}"
    "{%- for m in messages %}{{ arg(m) }}{% endfor %}{{ messages | length }}{{ "
    "messages[0].content.split('</think>')[-1] }}",
    "{{ messages | map(attribute='role') | join(',') }}{{ messages | selectattr('role', 'equalto', "
    "'user') | list | length }}"
    "{{ messages | tojson(indent=2) }}{% if messages[0].role not in ['user', 'system'] %}{{ "
    "raise_exception('no') }}{% endif %}",
};
enum { N = sizeof sources / sizeof *sources };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    static struct tmpl *t[N];
    struct err e;
    for (int i = 0; i < N; i++)
        if (!t[i]) CHECK(tmpl_parse(&t[i], sources[i], strlen(sources[i]), &e) == OK);
    json_t *v = json_parse_object((const char *)data, n, &e);
    for (int i = 0; v && i < N; i++) {
        struct buf out = {0};
        if (tmpl_render(t[i], &out, v, &e) == OK) CHECK(!out.failed);
        buf_release(&out);
    }
    json_decref(v);
    return 0;
}
