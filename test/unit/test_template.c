/* Chat templates: results of jinja2 3 (set up as transformers does), failures, bounds. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include "text/template.h"
#include <string.h>

static const char VARS[] =
    "{\"s\": \"hello\", \"u\": \"a\303\251\303\266\303\237\346\227\245\360\237\230\200\", \"l\": "
    "[1, 2, 3, 4, 5], \"x\": 3, \"d\": {\"a\": 1"
    ", \"b\": \"two\", \"c\": [1, null]}, \"ms\": [{\"role\": \"user\", \"content\": \"hi\"}, "
    "{\"role\""
    ": \"assistant\", \"content\": null}, {\"role\": \"user\", \"content\": \"\303\251\"}]}";

/* want NULL: both fail */
static const struct {
    const char *src, *want;
} CASES[] = {
    {"{{ 1+2*3 }}", "7"},
    {"{{ 7//2 }}", "3"},
    {"{{ -7//2 }}", "-4"},
    {"{{ -7%3 }}", "2"},
    {"{{ 7%-3 }}", "-2"},
    {"{{ 7/2 }}", "3.5"},
    {"{{ 2**10 }}", "1024"},
    {"{{ 2**-1 }}", "0.5"},
    {"{{ 2**3**2 }}", "64"},
    {"{{ -2**2 }}", "4"},
    {"{{ 1.0 }}", "1.0"},
    {"{{ 1e20 }}", "1e+20"},
    {"{{ 1e16 }}", "1e+16"},
    {"{{ 1e-5 }}", "1e-05"},
    {"{{ 0.1+0.2 }}", "0.30000000000000004"},
    {"{{ 123456789.125 }}", "123456789.125"},
    {"{{ 5.5//2 }}", "2.0"},
    {"{{ -5.5%3 }}", "0.5"},
    {"{{ 1 < 2 < 3 }}", "True"},
    {"{{ 1 < 3 < 2 }}", "False"},
    {"{{ 'a' ~ 1 ~ none ~ true }}", "a1NoneTrue"},
    {"{{ 'x' not in 'abc' }}", "True"},
    {"{{ not 1 == 2 }}", "True"},
    {"{{ 1 if false }}", ""},
    {"{{ 'a' if x is defined else 'b' }}", "a"},
    {"{{ s[0] }}", "h"},
    {"{{ s[-1] }}", "o"},
    {"{{ s[::-1] }}", "olleh"},
    {"{{ s[1:3] }}", "el"},
    {"{{ u[1] }}", "\303\251"},
    {"{{ u[::-1] }}", "\360\237\230\200\346\227\245\303\237\303\266\303\251a"},
    {"{{ u[2:] }}", "\303\266\303\237\346\227\245\360\237\230\200"},
    {"{{ l[::-1] }}", "[5, 4, 3, 2, 1]"},
    {"{{ l[1:] }}", "[2, 3, 4, 5]"},
    {"{{ l[:-1] }}", "[1, 2, 3, 4]"},
    {"{{ l[5:1:-2] }}", "[5, 3]"},
    {"{{ l[::2] }}", "[1, 3, 5]"},
    {"{{ l[-100:100] }}", "[1, 2, 3, 4, 5]"},
    {"{{ l[100] }}", ""},
    {"{{ l[-9] }}", ""},
    {"{{ d.a }}", "1"},
    {"{{ d['a'] }}", "1"},
    {"{{ list(d) }}", NULL},
    {"{{ d.get('zz') }}", "None"},
    {"{{ d.get('zz', 4) }}", "4"},
    {"{{ d.missing }}", ""},
    {"{{ d.missing.x }}", NULL},
    {"{{ missing }}", ""},
    {"{{ missing.x }}", NULL},
    {"{{ missing }}", ""},
    {"{{ length }}", ""},
    {"{{ [1, 'a', none, true, 1.5, {'a': 'b'}] }}", "[1, 'a', None, True, 1.5, {'a': 'b'}]"},
    {"{{ (1,) }}", "(1,)"},
    {"{{ () }}", "()"},
    {"{{ (1, 2) }}", "(1, 2)"},
    {"{{ {} }}", "{}"},
    {"{{ {'a': [1, (2, 3)]} }}", "{'a': [1, (2, 3)]}"},
    {"{{ \"it's\" }}", "it's"},
    {"{{ ['it\\'s', \"q\\\"q\", \"b'\\\"\", '\\n\\t\\\\', '\303\251\\x01\\u200b'] }}",
     "[\"it's\", 'q\"q', 'b\\'\"', '\\n\\t\\\\', '\303\251\\x01\\u200b']"},
    {"{{ s.upper() }}", "HELLO"},
    {"{{ u.upper() }}", "A\303\211\303\226SS\346\227\245\360\237\230\200"},
    {"{{ u.lower() }}", "a\303\251\303\266\303\237\346\227\245\360\237\230\200"},
    {"{{ u.title() }}", "A\303\251\303\266\303\237\346\227\245\360\237\230\200"},
    {"{{ s.capitalize() }}", "Hello"},
    {"{{ 'hello world-foo they\\'re'.title() }}", "Hello World-Foo They'Re"},
    {"{{ '  a b '.strip() }}", "a b"},
    {"{{ 'xxaxx'.strip('x') }}", "a"},
    {"{{ 'abc'.lstrip('ab') }}", "c"},
    {"{{ 'a,b,c'.split(',') }}", "['a', 'b', 'c']"},
    {"{{ ' a  b '.split() }}", "['a', 'b']"},
    {"{{ 'a,b,c'.split(',', 1) }}", "['a', 'b,c']"},
    {"{{ ' a b  c '.split(none, 1) }}", "['a', 'b  c ']"},
    {"{{ 'a,b,c'.rsplit(',', 1) }}", "['a,b', 'c']"},
    {"{{ 'abc'.startswith('ab') }}", "True"},
    {"{{ 'abc'.endswith(('x', 'bc')) }}", "True"},
    {"{{ 'abab'.replace('a', 'x') }}", "xbxb"},
    {"{{ 'abab'.replace('a', 'x', 1) }}", "xbab"},
    {"{{ 'abc'.replace('', '-') }}", "-a-b-c-"},
    {"{{ 'abc'.find('c') }}", "2"},
    {"{{ u.find('\303\266') }}", "2"},
    {"{{ ','.join(['a','b']) }}", "a,b"},
    {"{{ '{} {}'.format(1, 'a') }}", "1 a"},
    {"{{ '{a}-{0}'.format(3, a=2) }}", "2-3"},
    {"{{ 'a\\nb\\r\\nc'.splitlines() }}", "['a', 'b', 'c']"},
    {"{{ 'aXbX'.count('X') }}", "2"},
    {"{{ 'abc'.isdigit() }}", "False"},
    {"{{ '12'.isdigit() }}", "True"},
    {"{{ 'Ab'.islower() }}", "False"},
    {"{{ d | tojson }}", "{\"a\": 1, \"b\": \"two\", \"c\": [1, null]}"},
    {"{{ d | tojson(indent=2) }}",
     "{\n  \"a\": 1,\n  \"b\": \"two\",\n  \"c\": [\n    1,\n    null\n  ]\n}"},
    {"{{ [1,[],{},[2]] | tojson(indent=4) }}",
     "[\n    1,\n    [],\n    {},\n    [\n        2\n    ]\n]"},
    {"{{ u | tojson }}", "\"a\303\251\303\266\303\237\346\227\245\360\237\230\200\""},
    {"{{ '\\x7f\\x01\"\\n\\t/<>&' | tojson }}", "\"\177\\u0001\\\"\\n\\t/<>&\""},
    {"{{ 1.5 | tojson }}", "1.5"},
    {"{{ 1e20|tojson }}", "1e+20"},
    {"{{ none | tojson }}", "null"},
    {"{{ (1,2) | tojson }}", "[1, 2]"},
    {"{{ {1: 2} | tojson }}", "{\"1\": 2}"},
    {"{{ missing | tojson }}", NULL},
    {"{{ u|tojson(ensure_ascii=true) }}", "\"a\\u00e9\\u00f6\\u00df\\u65e5\\ud83d\\ude00\""},
    {"{{ {'b':1,'a':2}|tojson(sort_keys=true) }}", "{\"a\": 2, \"b\": 1}"},
    {"{{ [1,2]|tojson(separators=(',',':')) }}", "[1,2]"},
    {"{{ l | length }}", "5"},
    {"{{ s | count }}", "5"},
    {"{{ u|length }}", "6"},
    {"{{ missing|length }}", "0"},
    {"{{ d|length }}", "3"},
    {"{{ 5|length }}", NULL},
    {"{{ '  x ' | trim }}", "x"},
    {"{{ 'xax'|trim('x') }}", "a"},
    {"{{ missing | default('q') }}", "q"},
    {"{{ '' | default('q') }}", ""},
    {"{{ '' | d('q', true) }}", "q"},
    {"{{ none|default('q', boolean=true) }}", "q"},
    {"{{ l | join(',') }}", "1,2,3,4,5"},
    {"{{ l|join }}", "12345"},
    {"{{ [{'a':1},{'a':2}]|join('-', attribute='a') }}", "1-2"},
    {"{{ s|replace('l','L') }}", "heLLo"},
    {"{{ s|upper }}", "HELLO"},
    {"{{ s|title }}", "Hello"},
    {"{{ 'foo-bar (baz) qUx'|title }}", "Foo-Bar (Baz) Qux"},
    {"{{ s|capitalize }}", "Hello"},
    {"{{ 5|upper }}", "5"},
    {"{{ u|list }}",
     "['a', '\303\251', '\303\266', '\303\237', '\346\227\245', '\360\237\230\200']"},
    {"{{ d|list }}", "['a', 'b', 'c']"},
    {"{{ d|items|list }}", "[('a', 1), ('b', 'two'), ('c', [1, None])]"},
    {"{{ d.items()|list }}", "[('a', 1), ('b', 'two'), ('c', [1, None])]"},
    {"{{ l | map('string') | list }}", "['1', '2', '3', '4', '5']"},
    {"{{ [{'a':1},{'b':2}]|map(attribute='a')|list }}", "[1, Undefined]"},
    {"{{ [{'a':1},{'b':2}]|map(attribute='a', default=9)|list }}", "[1, 9]"},
    {"{{ [{'a':{'b':3}}]|map(attribute='a.b')|list }}", "[3]"},
    {"{{ ['a','b']|map('upper')|join }}", "AB"},
    {"{{ ['a','b']|map('replace','a','z')|list }}", "['z', 'b']"},
    {"{{ ms | selectattr('role','equalto','user')|list|length }}", "2"},
    {"{{ ms|selectattr('content')|list|length }}", "2"},
    {"{{ ms|rejectattr('role','equalto','user')|map(attribute='content')|list }}", "[None]"},
    {"{{ l|select('odd')|list }}", "[1, 3, 5]"},
    {"{{ l|reject('odd')|list }}", "[2, 4]"},
    {"{{ [0,1,'']|select|list }}", "[1]"},
    {"{{ ms|selectattr('zz','defined')|list }}", "[]"},
    {"{{ l|select('>', 2)|list }}", "[3, 4, 5]"},
    {"{{ l|select('in',[1,3])|list }}", "[1, 3]"},
    {"{{ l|first }}", "1"},
    {"{{ l|last }}", "5"},
    {"{{ []|first }}", ""},
    {"{{ []|last }}", ""},
    {"{{ s|first }}", "h"},
    {"{{ '42'|int }}", "42"},
    {"{{ '4.7'|int }}", "4"},
    {"{{ 'x'|int }}", "0"},
    {"{{ 'x'|int(5) }}", "5"},
    {"{{ 3.9|int }}", "3"},
    {"{{ -3.9|int }}", "-3"},
    {"{{ '0x1f'|int(base=16) }}", "31"},
    {"{{ none|int }}", "0"},
    {"{{ '1.5'|float }}", "1.5"},
    {"{{ 'x'|float }}", "0.0"},
    {"{{ 3|float }}", "3.0"},
    {"{{ -3|abs }}", "3"},
    {"{{ -2.5|abs }}", "2.5"},
    {"{{ 2.5|round }}", "2.0"},
    {"{{ 3.5|round }}", "4.0"},
    {"{{ 2.675|round(2) }}", "2.67"},
    {"{{ 2.1|round(method='ceil') }}", "3.0"},
    {"{{ 2.9|round(0,'floor') }}", "2.0"},
    {"{{ 7|round }}", "7"},
    {"{{ [3,1,2]|sort }}", "[1, 2, 3]"},
    {"{{ [3,1,2]|sort(reverse=true) }}", "[3, 2, 1]"},
    {"{{ ['b','A','a']|sort }}", "['A', 'a', 'b']"},
    {"{{ ['b','A','a']|sort(case_sensitive=true) }}", "['A', 'a', 'b']"},
    {"{{ ms|sort(attribute='role')|map(attribute='role')|list }}", "['assistant', 'user', 'user']"},
    {"{{ [1,2,1]|unique|list }}", "[1, 2]"},
    {"{{ ['a','A']|unique|list }}", "['a']"},
    {"{{ 'a\\nb\\n\\nc'|indent }}", "a\n    b\n\n    c"},
    {"{{ 'a\\nb'|indent(2, true) }}", "  a\n  b"},
    {"{{ 'a\\n\\nb'|indent(2,blank=true) }}", "a\n  \n  b"},
    {"{{ s|safe }}", "hello"},
    {"{{ {'b':1,'A':2}|dictsort }}", "[('A', 2), ('b', 1)]"},
    {"{{ {'b':1,'a':2}|dictsort(by='value') }}", "[('b', 1), ('a', 2)]"},
    {"{{ {'b':1,'a':2}|dictsort(reverse=true) }}", "[('b', 1), ('a', 2)]"},
    {"{{ l|min }}", "1"},
    {"{{ l|max }}", "5"},
    {"{{ []|min }}", ""},
    {"{{ l|sum }}", "15"},
    {"{{ ms|map(attribute='content')|select|map('length')|sum }}", "3"},
    {"{{ [1,2]|reverse|list }}", "[2, 1]"},
    {"{{ 'abc'|reverse }}", "cba"},
    {"{{ -1|abs }}", "1"},
    {"{{ -1|string }}", "-1"},
    {"{{ 1+1|string~'x' }}", NULL},
    {"{{ not none|d }}", "True"},
    {"{{ (1,2,3)|list }}", "[1, 2, 3]"},
    {"{{ range(5)|list }}", "[0, 1, 2, 3, 4]"},
    {"{{ range(2,10,3)|list }}", "[2, 5, 8]"},
    {"{{ range(5,0,-2)|list }}", "[5, 3, 1]"},
    {"{{ range(3)|length }}", "3"},
    {"{{ dict(a=1)|tojson }}", "{\"a\": 1}"},
    {"{{ dict(d, a=5)|tojson }}", "{\"a\": 5, \"b\": \"two\", \"c\": [1, null]}"},
    {"{{ namespace(a=1).a }}", "1"},
    {"{{ [1,2]+[3] }}", "[1, 2, 3]"},
    {"{{ 'ab'*3 }}", "ababab"},
    {"{{ [0]*3 }}", "[0, 0, 0]"},
    {"{{ 2*'x' }}", "xx"},
    {"{{ 'a'+1 }}", NULL},
    {"{{ 1/0 }}", NULL},
    {"{{ 1%0 }}", NULL},
    {"{{ 'a'<'b' }}", "True"},
    {"{{ 'a'<1 }}", NULL},
    {"{{ [1,2]<[1,3] }}", "True"},
    {"{{ 1<none }}", NULL},
    {"{{ {'a':1}=={'a':1.0} }}", "True"},
    {"{{ true+true }}", "2"},
    {"{{ -true }}", "-1"},
    {"{{ 'a' 'b' }}", "ab"},
    {"{{ 1_000 }}", "1000"},
    {"{{ 0x1F }}", "31"},
    {"{{ 0b11 }}", "3"},
    {"{{ '%d'|safe }}", "%d"},
    {"{{ x is defined }}", "True"},
    {"{{ missing is undefined }}", "True"},
    {"{{ missing is not defined }}", "True"},
    {"{{ none is none }}", "True"},
    {"{{ s is string }}", "True"},
    {"{{ d is mapping }}", "True"},
    {"{{ l is iterable }}", "True"},
    {"{{ l is sequence }}", "True"},
    {"{{ 5 is number }}", "True"},
    {"{{ true is number }}", "True"},
    {"{{ 5 is integer }}", "True"},
    {"{{ true is integer }}", "False"},
    {"{{ 5.0 is float }}", "True"},
    {"{{ true is boolean }}", "True"},
    {"{{ true is true }}", "True"},
    {"{{ 1 is true }}", "False"},
    {"{{ 0 is false }}", "False"},
    {"{{ 1 is eq 1 }}", "True"},
    {"{{ 1 is ne(2) }}", "True"},
    {"{{ 1 is in [1] }}", "True"},
    {"{{ 2 is odd }}", "False"},
    {"{{ 2 is even }}", "True"},
    {"{{ 4 is divisibleby 2 }}", "True"},
    {"{{ 5 is iterable }}", "False"},
    {"{{ d.a is defined and d.a is not none }}", "True"},
    {"{{ d.zz is defined }}", "False"},
    {"{{ s is string and l is not string }}", "True"},
    {"{{ l[0] is defined }}", "True"},
    {"{{ l[9] is defined }}", "False"},
    {"{{ range is callable }}", "True"},
    {"{{ 'a' is lower }}", "True"},
    {"{{ 'A' is upper }}", "True"},
    {"{{ none is sameas none }}", "True"},
    {"{{ d.a is number }}", "True"},
    {"{{ 1 is gt 0 }}", "True"},
    {"{{ 'a' is in 'abc' }}", "True"},
    {"{{ missing is string }}", "False"},
    {"{{ missing is iterable }}", "True"},
    {"{{ s is nosuch }}", NULL},
    {"{{ s|nosuch }}", NULL},
    {"{{ nosuch() }}", NULL},
    {"{{ s.nosuch() }}", NULL},
    {"{{ none.x }}", ""},
    {"{{ none['x'] }}", ""},
    {"{{ 5[0] }}", ""},
    {"{{ d|first }}", "a"},
    {"{{ s|int|string }}", "0"},
    {"{{ l.index(2) }}", "1"},
    {"{{ l.append(1) }}", NULL},
    {"{{ raise_exception('no') }}", NULL},
    {"{{ s.split('') }}", NULL},
    {"{{ [1,2,3][1:]|join('+') }}", "2+3"},
    {"{{ l|length > 2 }}", "True"},
    {"{{ not l|length }}", "False"},
    {"{{ ms[0].content }}", "hi"},
    {"{{ ms[-1]['role'] }}", "user"},
    {"{{ ms[0]['content'][0:2] }}", "hi"},
    {"{% for x in l %}{{ loop.index }}/{{ loop.length }}{{ loop.first }}{{ loop.last "
     "}}{{loop.revindex}}{{loop.revindex0}} {% endfor %}",
     "1/5TrueFalse54 2/5FalseFalse43 3/5FalseFalse32 4/5FalseFalse21 5/5FalseTrue10 "},
    {"{% for x in l %}{{ loop.previtem }}<{{ x }}>{{ loop.nextitem }}{{ loop.previtem is defined "
     "}};{% endfor %}",
     "<1>2False;1<2>3True;2<3>4True;3<4>5True;4<5>True;"},
    {"{% for x in l if x is odd %}{{ x }}{{loop.length}}{% else %}none{% endfor %}", "133353"},
    {"{% for x in [] %}a{% else %}b{% endfor %}", "b"},
    {"{% for x in missing %}a{% else %}b{% endfor %}", "b"},
    {"{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}", "a=1;b=two;c=[1, None];"},
    {"{% for k, v in d|items %}{{k}}{% endfor %}", "abc"},
    {"{% for k in d %}{{ k }}{% endfor %}", "abc"},
    {"{% for a, (b, c) in [(1, (2, 3))] %}{{ a }}{{ b }}{{ c }}{% endfor %}", "123"},
    {"{% for c in u %}[{{ c }}]{% endfor %}",
     "[a][\303\251][\303\266][\303\237][\346\227\245][\360\237\230\200]"},
    {"{% for x in 5 %}{% endfor %}", NULL},
    {"{% for a, b in l %}{% endfor %}", NULL},
    {"{% for x in l %}{% if x == 2 %}{% continue %}{% endif %}{% if x == 4 %}{% break %}{% endif "
     "%}{{ x }}{% endfor %}",
     "13"},
    {"{% for x in l %}{{ loop.cycle('a', 'b') }}{% if loop.changed(x // 2) %}!{% endif %}{% endfor "
     "%}",
     "a!b!ab!a"},
    {"{% for x in l %}{% for y in l %}{{ loop.index * x }} {% endfor %}{{ loop.index }}{% endfor "
     "%}",
     "1 2 3 4 5 12 4 6 8 10 23 6 9 12 15 34 8 12 16 20 45 10 15 20 25 5"},
    {"{% set x = 1 %}{% for i in l %}{% set x = x + i %}{{ x }} {% endfor %}{{ x }}",
     "2 3 4 5 6 1"},
    {"{% set ns = namespace(a=0) %}{% for i in l %}{% set ns.a = ns.a + i %}{% endfor %}{{ ns.a }}",
     "15"},
    {"{% set q.a = 1 %}", NULL},
    {"{% set d.a = 1 %}", NULL},
    {"{% set a, b = 1, 2 %}{{ a }}{{ b }}", "12"},
    {"{% set a = 1, 2 %}{{ a }}", "(1, 2)"},
    {"{% set a %}x{{ s }}{% endset %}[{{ a }}]", "[xhello]"},
    {"{% set a | upper | trim %} x{{ s }} {% endset %}[{{ a }}]", "[XHELLO]"},
    {"{% filter upper %}abc{{ s }}{% endfilter %}", "ABCHELLO"},
    {"{% with a = 1, b = 2 %}{{ a + b }}{% endwith %}{{ a }}", "3"},
    {"{% macro m(a, b=2, c='z') %}<{{ a }}{{ b }}{{ c }}>{% endmacro %}{{ m(1) }}{{ m(1, c=3) }}{{ "
     "m(a=4, b=5) }}{{ m() }}",
     "<12z><123><45z><2z>"},
    {"{% macro m(a) %}{{ a }}{% endmacro %}{{ m(1, 2) }}", NULL},
    {"{% macro m(a) %}{{ a }}{% endmacro %}{{ m(z=2) }}", NULL},
    {"{% macro f(n) %}{{ n }}{% if n > 0 %}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(5) }}",
     "543210"},
    {"{% macro f(n) %}{{ g }}{% endmacro %}{% set g = 7 %}{{ f(5) }}", "7"},
    {"{% macro w(t) %}<{{ t }}>{{ caller() }}</{{ t }}>{% endmacro %}{% call w('b') %}in{{ s }}{% "
     "endcall %}",
     "<b>inhello</b>"},
    {"{% macro w() %}{{ caller(3) }}{% endmacro %}{% call(n) w() %}n{{ n }}{% endcall %}", "n3"},
    {"{% macro r(x) -%}\n  {{ x }}\n{%- endmacro %}\n[{{ r(1)|upper }}]", "[1]"},
    {"{% if a %}1{% elif l %}2{% else %}3{% endif %}", "2"},
    {"{% if missing %}1{% else %}3{% endif %}", "3"},
    {"{% generation %}x{{ s }}{% endgeneration %}", "xhello"},
    {"{% raw %}{{ x }}{% if %}{% endraw %}y", "{{ x }}{% if %}y"},
    {"a\n  {% raw %}\n x {% endraw %}\n b", "a\n\n x  b"},
    {"a {# c #} b", "a  b"},
    {"a\n  {# c #}\n b", "a\n b"},
    {"a\n  {#- c -#}\n b", "ab"},
    {"x{#", "x"},
    {"{{", NULL},
    {"{% if", NULL},
    {"{{ 'a }}", NULL},
    {"{% if x %}", NULL},
    {"{% endif %}", NULL},
    {"{{ 1 + }}", NULL},
    {"{{ (1 }}", NULL},
    {"a\n", "a"},
    {"a\n\n", "a\n"},
    {"a\r\nb\r\n", "a\nb"},
    {"\n  {% if true %}\n  x\n  {% endif %}\n y\n", "\n  x\n y"},
    {"  {%+ if true %}x{% endif +%}\n y", "  x\n y"},
    {"a  {%- if true -%}  b  {%- endif -%}  c", "abc"},
    {"a \n {{- 1 -}} \n b", "a1b"},
    {"a\n  {{ 1 }}\n b", "a\n  1\n b"},
    {"\t{% set x = 1 %} y", " y"},
    {"x {% set x = 1 %} y", "x  y"},
    {"x\n \t {% set x = 1 %}\n\n y", "x\n\n y"},
    {"{{ 1 }}  {% if true %}a{% endif %}", "1  a"},
    {"{% if true %}\n  {% if true %}\nq{% endif %}{% endif %}", "q"},
    {"{% if true -%}\n\n  a{% endif %}\n  {% if 1 %}b{% endif %}", "ab"},
    {"{%- set x -%}  a  {%- endset -%} [{{ x }}]", "[a]"},
    {"{{ {'a': {'b': 1}}['a']['b'] }}", "1"},
    {"{{ {'a':{}} }}", "{'a': {}}"},
    {"{{'%}'}}{{ '}}' }}", "%}}}"},
    {"{{ 'a\\\n b' }}|{{ 'x\\u00e9\\x41\\101\\q' }}", "a b|x\303\251AA\\q"},
    {"{{ \"a\nb\" }}", "a\nb"},
    {"{{ 1, 2 }}", "(1, 2)"},
    {"{% break %}", NULL},
    {"{% nosuch %}", NULL},
    {"{% for x in l recursiv %}{% endfor %}", NULL},
    {"{{ loop }}", ""},
    {"{{ range(10**7) }}", NULL},
    {"{{ x.y.z }}", NULL},
    {"{{ ms[0].get('role') }}{{ ms[0].keys()|list }}", "user['role', 'content']"},
    {"{{ not x }}", "False"},
    {"{{ l.0 }}{{ l.1 }}", "12"},
    {"a{{ '' }}\n", "a"},
};

static err_t run(const char *src, const char *vars, struct buf *out, struct err *e)
{
    struct tmpl *t = NULL;
    json_t *v = json_loads(vars, 0, NULL);
    err_t r = tmpl_parse(&t, src, strlen(src), e);
    if (r == OK) r = tmpl_render(t, out, v, e);
    tmpl_free(t);
    json_decref(v);
    return r;
}

static void test_cases(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof CASES / sizeof *CASES; i++) {
        struct buf b = {0};
        struct err e = {0};
        err_t r = run(CASES[i].src, VARS, &b, &e);
        const char *got = r == OK ? (b.data ? b.data : "") : NULL;
        if (!got != !CASES[i].want || (got && strcmp(got, CASES[i].want) != 0))
            fail_msg("%s\n gave %s\n want %s", CASES[i].src, got ? got : e.msg,
                     CASES[i].want ? CASES[i].want : "a failure");
        buf_release(&b);
    }
}

static void refuses(const char *src, err_t code, const char *part)
{
    struct buf b = {0};
    struct err e = {0};
    buf_puts(&b, "kept");
    assert_int_equal(run(src, "{}", &b, &e), code);
    assert_string_equal(b.data, "kept");
    if (!strstr(e.msg, part)) fail_msg("%s: %s", src, e.msg);
    buf_release(&b);
}

static void test_messages(void **state)
{
    (void)state;
    refuses("\n{{ 1 | zap }}", ERR_UNSUPPORTED, "line 2: no filter named 'zap'");
    refuses("{{ 1 is zap }}", ERR_UNSUPPORTED, "no test named 'zap'");
    refuses("{% zap %}", ERR_UNSUPPORTED, "no statement named 'zap'");
    refuses("\n\n{{ zap() }}", ERR_INPUT, "line 3: 'zap' is undefined");
    refuses("{{ raise_exception('only ' ~ 1) }}", ERR_INPUT, "only 1");
    refuses("{{ {}.a.b }}", ERR_INPUT, "'dict object' has no attribute 'a'");
}

static void test_bounds(void **state)
{
    (void)state;
    char deep[20001];
    memset(deep, '(', 20000);
    deep[20000] = 0;
    memcpy(deep, "{{", 2);
    refuses(deep, ERR_INPUT, "deep");
    memset(deep, '-', 20000);
    memcpy(deep, "{{ ", 3);
    memcpy(deep + 19996, "1 }}", 4);
    refuses(deep, ERR_INPUT, "deep");
    refuses("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", ERR_INPUT, "deep");
    refuses("{% set n = namespace() %}{% set n.n = n %}{{ n }}", ERR_INPUT, "deep");
    refuses("{{ 'x' * 1000000000 }}", ERR_TOOBIG, "");
    refuses("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            ERR_TOOBIG, "");
    refuses("{% set ns = namespace(s='x') %}{% for a in range(60) %}{% set ns.s = ns.s + ns.s %}"
            "{% endfor %}",
            ERR_TOOBIG, "MiB");
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_cases),
                                       cmocka_unit_test(test_messages),
                                       cmocka_unit_test(test_bounds)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
