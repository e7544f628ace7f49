#!/usr/bin/env python3
"""Compare the chat-template interpreter with jinja2, set up as transformers does.

usage: oracle_template.py TMPLRENDER [SHARED]    (jinja2 needed; TMPLRENDER is test/tools/tmplrender.c)
Both must give the same text, or both must fail.
"""
import itertools
import json
import subprocess
import sys

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Generation(Extension):
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                      sort_keys=sort_keys)


def raise_exception(m):
    raise jinja2.exceptions.TemplateError(m)


env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                    extensions=[Generation, loopcontrols])
env.filters["tojson"] = tojson
env.globals["raise_exception"] = raise_exception


def expect(src, vars_):
    try:
        return {"ok": env.from_string(src).render(**vars_)}
    except Exception as e:  # any failure is one outcome
        return {"error": f"{type(e).__name__}: {e}"}


EXPR = r"""
1+2*3|7//2|-7//2|-7%3|7%-3|7/2|2**10|2**-1|2**3**2|-2**2|1.0|1e20|1e16|1e-5|0.1+0.2|123456789.125|5.5//2|-5.5%3
1 < 2 < 3|1 < 3 < 2|1 == 1.0|'a' ~ 1 ~ none ~ true|'a' in 'abc'|'x' not in 'abc'|1 in [1,2]|'k' in d|not 1 == 2|1 if false
'a' if x is defined else 'b'|s[0]|s[-1]|s[::-1]|s[1:3]|u[1]|u[::-1]|u[2:]|l[::-1]|l[1:]|l[:-1]|l[5:1:-2]|l[::2]|l[-100:100]|l[100]|l[-9]
d.a|d['a']|list(d)|d.get('zz')|d.get('zz', 4)|d.missing|d.missing.x|missing|missing.x|missing + 1|missing|length
[1, 'a', none, true, 1.5, {'a': 'b'}]|(1,)|()|(1, 2)|{}|{'a': [1, (2, 3)]}|"it's"|['it\'s', "q\"q", "b'\"", '\n\t\\', 'é\x01\u200b']
s.upper()|u.upper()|u.lower()|u.title()|s.capitalize()|'hello world-foo they\'re'.title()|'  a b '.strip()|'xxaxx'.strip('x')|'abc'.lstrip('ab')|'a,b,c'.split(',')|' a  b '.split()|'a,b,c'.split(',', 1)|' a b  c '.split(none, 1)|'a,b,c'.rsplit(',', 1)|'abc'.startswith('ab')|'abc'.endswith(('x', 'bc'))|'abab'.replace('a', 'x')|'abab'.replace('a', 'x', 1)|'abc'.replace('', '-')|'abc'.find('c')|u.find('ö')|','.join(['a','b'])|'{} {}'.format(1, 'a')|'{a}-{0}'.format(3, a=2)|'a\nb\r\nc'.splitlines()|'aXbX'.count('X')|'abc'.isdigit()|'12'.isdigit()|'Ab'.islower()
""".strip("\n")

FILTERED = """
d | tojson;d | tojson(indent=2);[1,[],{},[2]] | tojson(indent=4);u | tojson;'\\x7f\\x01"\\n\\t/<>&' | tojson;1.5 | tojson;1e20|tojson;none | tojson;(1,2) | tojson;{1: 2} | tojson;missing | tojson;u|tojson(ensure_ascii=true);{'b':1,'a':2}|tojson(sort_keys=true);[1,2]|tojson(separators=(',',':'))
l | length;s | count;u|length;missing|length;d|length;5|length;'  x ' | trim;'xax'|trim('x');missing | default('q');'' | default('q');'' | d('q', true);none|default('q', boolean=true)
l | join(',');l|join;[{'a':1},{'a':2}]|join('-', attribute='a');s|replace('l','L');s|upper;s|title;'foo-bar (baz) qUx'|title;s|capitalize;5|upper;u|list;d|list;d|items|list;d.items()|list
l | map('string') | list;[{'a':1},{'b':2}]|map(attribute='a')|list;[{'a':1},{'b':2}]|map(attribute='a', default=9)|list;[{'a':{'b':3}}]|map(attribute='a.b')|list;['a','b']|map('upper')|join;['a','b']|map('replace','a','z')|list
ms | selectattr('role','equalto','user')|list|length;ms|selectattr('content')|list|length;ms|rejectattr('role','equalto','user')|map(attribute='content')|list;l|select('odd')|list;l|reject('odd')|list;[0,1,'']|select|list;ms|selectattr('zz','defined')|list;l|select('>', 2)|list;l|select('in',[1,3])|list
l|first;l|last;[]|first;[]|last;s|first;'42'|int;'4.7'|int;'x'|int;'x'|int(5);3.9|int;-3.9|int;'0x1f'|int(base=16);none|int;'1.5'|float;'x'|float;3|float;-3|abs;-2.5|abs;2.5|round;3.5|round;2.675|round(2);2.1|round(method='ceil');2.9|round(0,'floor');7|round
[3,1,2]|sort;[3,1,2]|sort(reverse=true);['b','A','a']|sort;['b','A','a']|sort(case_sensitive=true);ms|sort(attribute='role')|map(attribute='role')|list;[1,2,1]|unique|list;['a','A']|unique|list;'a\\nb\\n\\nc'|indent;'a\\nb'|indent(2, true);'a\\n\\nb'|indent(2,blank=true);s|safe;{'b':1,'A':2}|dictsort;{'b':1,'a':2}|dictsort(by='value');{'b':1,'a':2}|dictsort(reverse=true);l|min;l|max;[]|min;l|sum;ms|map(attribute='content')|select|map('length')|sum;[1,2]|reverse|list;'abc'|reverse
-1|abs;-1|string;1+1|string~'x';not none|d;(1,2,3)|list;range(5)|list;range(2,10,3)|list;range(5,0,-2)|list;range(3)|length;dict(a=1)|tojson;dict(d, a=5)|tojson;namespace(a=1).a;[1,2]+[3];'ab'*3;[0]*3;2*'x';'a'+1;1/0;1%0;'a'<'b';'a'<1;[1,2]<[1,3];1<none;{'a':1}=={'a':1.0};true+true;-true;'a' 'b';1_000;0x1F;0b11;'%d'|safe
x is defined;missing is undefined;missing is not defined;none is none;s is string;d is mapping;l is iterable;l is sequence;5 is number;true is number;5 is integer;true is integer;5.0 is float;true is boolean;true is true;1 is true;0 is false;1 is eq 1;1 is ne(2);1 is in [1];2 is odd;2 is even;4 is divisibleby 2;5 is iterable;d.a is defined and d.a is not none;d.zz is defined;s is string and l is not string;l[0] is defined;l[9] is defined;range is callable;'a' is lower;'A' is upper;none is sameas none;d.a is number;1 is gt 0;'a' is in 'abc';missing is string;missing is iterable;missing == none;missing == missing2;'a' in missing;none in [none];true in [1]
s is nosuch;s|nosuch;nosuch();s.nosuch();none.x;none['x'];5[0];d|first;s|int|string;l.index(2);l.append(1);raise_exception('no');s.split('');[1,2,3][1:]|join('+');(l|length - 1);l|length > 2;not l|length;ms[0].content;ms[-1]['role'];ms[0]['content'][0:2]
"""

STMT = [
    "{% for x in l %}{{ loop.index }}/{{ loop.length }}{{ loop.first }}{{ loop.last }}{{loop.revindex}}{{loop.revindex0}} {% endfor %}",
    "{% for x in l %}{{ loop.previtem }}<{{ x }}>{{ loop.nextitem }}{{ loop.previtem is defined }};{% endfor %}",
    "{% for x in l if x is odd %}{{ x }}{{loop.length}}{% else %}none{% endfor %}",
    "{% for x in [] %}a{% else %}b{% endfor %}", "{% for x in missing %}a{% else %}b{% endfor %}",
    "{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}", "{% for k, v in d|items %}{{k}}{% endfor %}",
    "{% for k in d %}{{ k }}{% endfor %}", "{% for a, (b, c) in [(1, (2, 3))] %}{{ a }}{{ b }}{{ c }}{% endfor %}",
    "{% for c in u %}[{{ c }}]{% endfor %}", "{% for x in 5 %}{% endfor %}", "{% for a, b in l %}{% endfor %}",
    "{% for x in l %}{% if x == 2 %}{% continue %}{% endif %}{% if x == 4 %}{% break %}{% endif %}{{ x }}{% endfor %}",
    "{% for x in l %}{{ loop.cycle('a', 'b') }}{% if loop.changed(x // 2) %}!{% endif %}{% endfor %}",
    "{% for x in l %}{% for y in l %}{{ loop.index * x }} {% endfor %}{{ loop.index }}{% endfor %}",
    "{% set x = 1 %}{% for i in l %}{% set x = x + i %}{{ x }} {% endfor %}{{ x }}",
    "{% set ns = namespace(a=0) %}{% for i in l %}{% set ns.a = ns.a + i %}{% endfor %}{{ ns.a }}",
    "{% set q.a = 1 %}", "{% set d.a = 1 %}", "{% set a, b = 1, 2 %}{{ a }}{{ b }}", "{% set a = 1, 2 %}{{ a }}",
    "{% set a %}x{{ s }}{% endset %}[{{ a }}]", "{% set a | upper | trim %} x{{ s }} {% endset %}[{{ a }}]",
    "{% filter upper %}abc{{ s }}{% endfilter %}", "{% with a = 1, b = 2 %}{{ a + b }}{% endwith %}{{ a }}",
    "{% macro m(a, b=2, c='z') %}<{{ a }}{{ b }}{{ c }}>{% endmacro %}{{ m(1) }}{{ m(1, c=3) }}{{ m(a=4, b=5) }}{{ m() }}",
    "{% macro m(a) %}{{ a }}{% endmacro %}{{ m(1, 2) }}", "{% macro m(a) %}{{ a }}{% endmacro %}{{ m(z=2) }}",
    "{% macro f(n) %}{{ n }}{% if n > 0 %}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(5) }}",
    "{% macro f(n) %}{{ g }}{% endmacro %}{% set g = 7 %}{{ f(5) }}",
    "{% macro w(t) %}<{{ t }}>{{ caller() }}</{{ t }}>{% endmacro %}{% call w('b') %}in{{ s }}{% endcall %}",
    "{% macro w() %}{{ caller(3) }}{% endmacro %}{% call(n) w() %}n{{ n }}{% endcall %}",
    "{% macro r(x) -%}\n  {{ x }}\n{%- endmacro %}\n[{{ r(1)|upper }}]",
    "{% if a %}1{% elif l %}2{% else %}3{% endif %}", "{% if missing %}1{% else %}3{% endif %}",
    "{% generation %}x{{ s }}{% endgeneration %}", "{% raw %}{{ x }}{% if %}{% endraw %}y", "a\n  {% raw %}\n x {% endraw %}\n b",
    "a {# c #} b", "a\n  {# c #}\n b", "a\n  {#- c -#}\n b", "x{#", "{{", "{% if", "{{ 'a }}", "{% if x %}", "{% endif %}", "{{ 1 + }}", "{{ (1 }}",
    "a\n", "a\n\n", "a\r\nb\r\n", "\n  {% if true %}\n  x\n  {% endif %}\n y\n", "  {%+ if true %}x{% endif +%}\n y",
    "a  {%- if true -%}  b  {%- endif -%}  c", "a \n {{- 1 -}} \n b", "a\n  {{ 1 }}\n b", "\t{% set x = 1 %} y", "x {% set x = 1 %} y", "x\n \t {% set x = 1 %}\n\n y",
    "{{ 1 }}  {% if true %}a{% endif %}", "{% if true %}\n  {% if true %}\nq{% endif %}{% endif %}", "{% if true -%}\n\n  a{% endif %}\n  {% if 1 %}b{% endif %}",
    "{%- set x -%}  a  {%- endset -%} [{{ x }}]", "{{ {'a': {'b': 1}}['a']['b'] }}", "{{ {'a':{}} }}", "{{'%}'}}{{ '}}' }}",
    "{{ 'a\\\n b' }}|{{ 'x\\u00e9\\x41\\101\\q' }}", "{{ \"a\nb\" }}", "{{ 1, 2 }}", "{% break %}", "{% nosuch %}", "{% for x in l recursiv %}{% endfor %}",
    "{{ loop }}", "{{ range(10**7) }}", "{{ x.y.z }}", "{{ ms[0].get('role') }}{{ ms[0].keys()|list }}", "{{ not x }}", "{{ l.0 }}{{ l.1 }}", "a{{ '' }}\n",
]

VARS = {"s": "hello", "u": "aéöß日😀", "l": [1, 2, 3, 4, 5], "x": 3, "d": {"a": 1, "b": "two", "c": [1, None]},
        "ms": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None}, {"role": "user", "content": "é"}]}


def small():
    for line in EXPR.splitlines():
        for e in line.split("|"):
            yield "{{ " + e + " }}", VARS
    for line in FILTERED.strip().splitlines():
        for e in line.split(";"):
            yield "{{ " + e + " }}", VARS
    atoms = ["x", "s", "l", "none", "missing", "2.5", "-1", "'hello'", "d.a", "true"]
    for a, b in itertools.product(atoms, atoms):
        for op in ["+", "==", "<", "in", "~", "and", "or", "*", "//", "-"]:
            yield "{{ " + f"{a} {op} {b}" + " }}", VARS
    for s in STMT:
        yield s, VARS


TOOLS = [{"type": "function", "function": {"name": "w", "description": "Wetter <é> & 'q'",
          "parameters": {"type": "object", "properties": {"c": {"type": "string", "n": 1.5, "b": True, "z": None}}, "required": ["c"]}}}]


def conversations():
    sys_ = [[], [{"role": "system", "content": "Sei höflich 😀\n"}], [{"role": "system", "content": "a"}, {"role": "system", "content": "b"}]]
    call = lambda a: {"role": "assistant", "content": a[0], "tool_calls": [
        {"type": "function", "function": {"name": "w", "arguments": a[1]}}] * a[2]}
    tail = [
        [{"role": "user", "content": "hi"}], [],
        [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyo"}, {"role": "user", "content": "2"}],
        [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo", "reasoning_content": "\nlong\n"}],
        [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None}],
        [{"role": "user", "content": None}], [{"role": "user"}], [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
        [{"role": "user", "content": "<tool_response>x</tool_response>"}],
    ]
    for a in itertools.product([None, "", "txt"], [{"c": "Köln", "n": [1, 2.0, None, True]}, '{"c": "x"}'], [1, 2]):
        tail.append([{"role": "user", "content": "q"}, call(a), {"role": "tool", "content": "r1"}])
        tail.append([{"role": "user", "content": "q"}, call(a), {"role": "tool", "content": "r1"}, {"role": "tool", "content": "r2"},
                     {"role": "assistant", "content": "done", "reasoning_content": "why"}, {"role": "user", "content": "ok"}])
    for s, t, tools, gen, think in itertools.product(sys_, tail, [None, TOOLS, TOOLS * 2, "absent"], [True, False, "absent"], [True, False, "absent"]):
        v = {"messages": s + t, "bos_token": "<bos>", "eos_token": "<eos>"}
        for k, val in (("tools", tools), ("add_generation_prompt", gen), ("enable_thinking", think)):
            if val != "absent":
                v[k] = val
        yield v


def main():
    shared = sys.argv[2] if len(sys.argv) > 2 else "../shared"
    cases = list(small())
    for f in ("tokenizers/Qwen3", "tokenizers/DeepSeek-V3", "models/tiny-moe/final"):
        with open(f"{shared}/{f}/tokenizer_config.json", encoding="utf-8") as fh:
            src = json.load(fh)["chat_template"]
        cases += [(src, v) for v in conversations()]
    got = json.loads(subprocess.run([sys.argv[1], "--batch"], input=json.dumps(cases).encode(),
                                    stdout=subprocess.PIPE, check=True).stdout)
    cache, bad, errors = {}, 0, 0
    from_string = env.from_string
    env.from_string = lambda s: cache[s] if s in cache else cache.setdefault(s, from_string(s))
    for (src, v), g in zip(cases, got):
        w = expect(src, v)
        errors += "error" in w
        if w.get("ok") != g.get("ok"):
            bad += 1
            if bad <= 60:
                print(f"{src[:90]!r}\n  want {str(w)[:200]}\n  got  {str(g)[:200]}")
    print(f"{len(cases)} cases ({errors} fail in both), {bad} differences")
    return bad != 0


sys.exit(main())
